"""What happens to instances over time: booting, stopping, deletion, preemption, and what guests do by themselves.

One act at a time per instance; the state's lock is never held while a machine is asked for something.
"""

import threading
import time
from collections import defaultdict

from . import billing, instances
from .driver import Machines
from .errors import Failed
from .operations import Operations
from .state import Json, State, last

TICK_S = 0.1


class Cloud:
    """The project and its machines. `start` begins the clockwork; `close` ends it, and leaves the machines alone."""

    def __init__(self, state: State, machines: Machines) -> None:
        self.state, self.machines = state, machines
        self._busy: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._closing = threading.Event()
        self._later = {"preempted": self._preempted, "delete": self._delete}
        self.operations = Operations(
            state,
            {
                "boot": self._boot,
                "bulk": self._bulk,
                "delete": self._delete,
                "stop": self._stop,
                "start": self._start,
                "reset": lambda args: machines.reboot(last(args["key"])),
                "patch": self._patch,
                "drop": self._drop_resource,
            },
        )

    def start(self) -> None:
        """Take up what a predecessor left, and watch the guests and the clock."""
        self.operations.resume()
        threading.Thread(target=self._watch, daemon=True, name="clockwork").start()

    def close(self) -> None:
        """Stop watching. Work that has begun ends by itself."""
        self._closing.set()
        self.operations.close()

    # What operations do. Each may find its work done already: by itself before a restart, or by another.

    def _boot(self, args: Json) -> None:
        key = args["key"]
        with self._busy[key]:
            with self.state.changing() as data:
                instance = data["instances"].get(key)
                if instance is None or instance["status"] == "RUNNING":
                    return
                half_made = instance["status"] == "STAGING"  # by an emulator that died over it
                if instance["status"] == "PROVISIONING":
                    instance["status"] = "STAGING"
                vm, wait_s = instances.spec(self.state, key), float(data["settings"]["boot_s"])
            self._pause(wait_s)
            if half_made:
                self.machines.destroy(vm.name)
            try:
                self.machines.boot(vm)
            except Exception:
                self.machines.destroy(vm.name)
                self._forget(key)
                raise
            self._is_up(key)

    def _bulk(self, args: Json) -> None:
        """Ends when its instances have; one that failed takes the others with it (`minCount` is the count)."""

        def inserts() -> list[Json]:
            operations = self.state.data["operations"].values()
            of_group = [one["wire"] for one in operations if one["wire"].get("operationGroupId") == args["group"]]
            return [wire for wire in of_group if wire["operationType"] == "insert"]

        self.state.wait_until(lambda data: all(wire["status"] == "DONE" for wire in inserts()), 3600)
        failed = [wire["error"]["errors"][0] for wire in inserts() if "error" in wire]
        for key in args["keys"] if failed else []:
            self._delete({"key": key})
        with self.state.changing() as data:
            status = {
                "targetVmCount": len(args["keys"]),
                "createdVmCount": len(args["keys"]) - len(failed),
                "failedToCreateVmCount": len(failed),
                "status": "DONE",
            }
            for one in data["operations"].values():
                if one["args"] == args and one["do"] == "bulk":
                    per_zone = {f"zones/{args['zone']}": status}
                    one["wire"]["instancesBulkInsertOperationMetadata"] = {"perLocationStatus": per_zone}
        if failed:
            raise Failed(failed[0]["code"], failed[0]["message"])

    def _delete(self, args: Json) -> None:
        key = args["key"]
        with self._busy[key]:
            with self.state.reading() as data:
                if key not in data["instances"]:
                    return
            self._pause(float(data["settings"]["stopping_s"]))
            self.machines.destroy(last(key))
            self._forget(key)

    def _stop(self, args: Json) -> None:
        key = args["key"]
        with self._busy[key]:
            with self.state.reading() as data:
                if key not in data["instances"] or data["instances"][key]["status"] == "TERMINATED":
                    return
            self._pause(float(data["settings"]["stopping_s"]))
            self.machines.power_off(last(key))
            self._is_down(key)

    def _start(self, args: Json) -> None:
        key = args["key"]
        with self._busy[key]:
            with self.state.changing() as data:
                if key not in data["instances"] or data["instances"][key]["status"] == "RUNNING":
                    return
                data["instances"][key]["status"] = "STAGING"
            self.machines.power_on(last(key))
            self._is_up(key)

    def _patch(self, args: Json) -> None:
        with self.state.changing() as data:
            resource = data[args["kind"]].get(args["key"])
            if resource is not None:
                resource |= args["patch"]

    def _drop_resource(self, args: Json) -> None:
        with self.state.changing() as data:
            data[args["kind"]].pop(args["key"], None)
            billing.end(self.state, args["key"], args["billed"])

    # What happens without anybody's asking.

    def preempt(self, name: str, notice_s: float | None = None) -> None:
        """Google takes a spot instance back: a notice at once, the end `notice_s` later. ValueError if it cannot be."""
        key = self.key_of(name)
        with self.state.changing() as data:
            instance = data["instances"][key]
            if instance["scheduling"]["provisioningModel"] != "SPOT" or instance["status"] != "RUNNING":
                raise ValueError(f"{name} is no running spot instance")
            instance["status"] = "STOPPING"
            data["inside"][key]["preempted"] = True
            wait_s = float(data["settings"]["notice_s"] if notice_s is None else notice_s)
            data["later"].append({"at": self.state.clock() + wait_s, "do": "preempted", "args": {"key": key}})
        self._event("preempted", key, "Instance was preempted.")

    def _preempted(self, args: Json) -> None:
        key = args["key"]
        with self._busy[key]:
            with self.state.reading() as data:
                instance = data["instances"].get(key)
                delete = instance and instance["scheduling"].get("instanceTerminationAction") == "DELETE"
            if instance is None:
                return
            if delete:
                self.machines.destroy(last(key))
                self._forget(key, preempted=True)
            else:
                self.machines.power_off(last(key))
                self._is_down(key, preempted=True)

    def vanish(self, name: str) -> None:
        """It is gone, with its disks, and nothing was recorded."""
        key = self.key_of(name)
        with self._busy[key]:
            self.machines.destroy(name)
            self._forget(key)

    def reboot(self, name: str) -> None:
        """The guest reboots, by itself: nothing in the API shows it."""
        self.machines.reboot(last(self.key_of(name)))

    def host_error(self, name: str) -> None:
        """The host breaks. With automaticRestart (the default on demand) the instance comes back by itself."""
        key = self.key_of(name)
        with self._busy[key]:
            self._event("hostError", key, "Instance terminated by Compute Engine.")
            self.machines.power_off(name)
            self._is_down(key)
            with self.state.reading() as data:
                again = data["instances"][key]["scheduling"]["automaticRestart"]
            if again:
                self._event("automaticRestart", key, "Instance restarted by Compute Engine.")
                self._start({"key": key})

    def key_of(self, name: str) -> str:
        """zone/name of an instance. KeyError if there is none."""
        with self.state.reading() as data:
            return next((key for key in data["instances"] if last(key) == name), None) or _no_such(name)

    def _watch(self) -> None:
        while not self._closing.wait(TICK_S):
            try:
                self._tick()
            except Exception as error:  # the clockwork goes on; the tests see what broke
                self.state.violation(f"clockwork: {error!r}")

    def _tick(self) -> None:
        with self.state.reading() as data:
            now = self.state.clock()
            due = [entry for entry in data["later"] if entry["at"] <= now]
            running = [key for key, instance in data["instances"].items() if instance["status"] == "RUNNING"]
            late = [key for key in running if data["inside"][key].get("until", now + 1) <= now]
        for entry in due:
            self._later[entry["do"]](entry["args"])
            with self.state.changing() as data:
                data["later"].remove(entry)
        for key in late:
            # What Google calls this one is not known here.
            self._event("scheduledTermination", key, "Instance reached its maximum run duration.")
            self._preempted({"key": key})
        for key in running:
            self._look_at(key)

    def _look_at(self, key: str) -> None:
        """A guest that shut itself down is TERMINATED, and its disks are billed on."""
        busy = self._busy[key]
        if not busy.acquire(blocking=False):
            return
        try:
            with self.state.reading() as data:
                running = data["instances"].get(key, {}).get("status") == "RUNNING"
            if running and not self.machines.alive(last(key)):
                self._event("guestTerminate", key, "Instance terminated by guest OS shutdown.")
                self._is_down(key)
        finally:
            busy.release()

    def _event(self, kind: str, key: str, message: str) -> None:
        zone, name = key.split("/")
        path = f"zones/{zone}/instances/{name}"
        self.operations.system(f"compute.instances.{kind}", f"zones/{zone}", path, message)

    # How an instance looks in the project afterwards.

    def _is_up(self, key: str) -> None:
        with self.state.changing() as data:
            instance, inside = data["instances"][key], data["inside"][key]
            if instance["status"] in ("PROVISIONING", "STAGING"):  # a delete may have come meanwhile
                instance["status"] = "RUNNING"
            instance["lastStartTimestamp"] = self.state.stamp()
            inside["preempted"] = False
            if "maxRunDuration" in instance["scheduling"]:
                inside["until"] = self.state.clock() + int(instance["scheduling"]["maxRunDuration"]["seconds"])
            if inside["nat"]:
                instance["networkInterfaces"][0]["accessConfigs"] = [
                    {
                        "kind": "compute#accessConfig",
                        "type": "ONE_TO_ONE_NAT",
                        "name": "External NAT",
                        "natIP": inside["nat"],
                        "networkTier": "PREMIUM",
                    }
                ]
            billing.instance_runs(self.state, key, instance)

    def _is_down(self, key: str, preempted: bool = False) -> None:
        with self.state.changing() as data:
            instance = data["instances"][key]
            instance |= {"status": "TERMINATED", "lastStopTimestamp": self.state.stamp()}
            for access in instance["networkInterfaces"][0].get("accessConfigs", []):
                access.pop("natIP", None)
            billing.instance_stops(self.state, key, preempted)

    def _forget(self, key: str, preempted: bool = False) -> None:
        """The instance is no more; nor are its disks with autoDelete. The others stay, and are billed."""
        with self.state.changing() as data:
            instance = data["instances"].pop(key)
            data["inside"].pop(key)
            billing.instance_stops(self.state, key, preempted)
            zone = key.partition("/")[0]
            for attached in instance["disks"]:
                disk_key = f"{zone}/{last(attached['source'])}"
                disk = data["disks"][disk_key]
                if attached["autoDelete"]:
                    del data["disks"][disk_key]
                    billing.end(self.state, disk_key, "disk")
                else:
                    disk["users"] = [user for user in disk["users"] if user != instance["selfLink"]]
                    disk["lastDetachTimestamp"] = self.state.stamp()

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


def _no_such(name: str) -> str:
    raise KeyError(f"no instance is called {name}")
