"""Compute Engine in memory, at the boundary where the place asks it: what exists, what was done, and how it misbehaves.

The real client against the emulated wire is in test_compute.py; here it is about what is concluded from the answers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from kimisession.core.inventory import (
    Address,
    Disk,
    Firewall,
    Inventory,
    Machine,
    Operation,
    Resource,
    operations_of,
)
from kimisession.core.launch import LABEL_SESSION
from kimisession.errors import Unconfirmed

PROJECT = "a-project"


def node_of(session_id: str, attempt: int = 0) -> str:
    """A name as SkyPilot gives it."""
    return f"{session_id}-0f0f0f0f-head-{attempt:08x}-compute"


class MemoryCompute:
    """A `Cloud`. Switches are the faults; `machines` is the truth."""

    project = PROJECT

    def __init__(self, now: Callable[[], datetime]) -> None:
        self.now = now
        self.machines: dict[str, Machine] = {}
        self.disks: dict[str, Disk] = {}
        self.log: list[Operation] = []
        self.silent: tuple[str, ...] = ()  # zones that do not answer: what is there is not listed
        self.unreachable = False  # nothing answers
        self.deletes_fail = 0  # deletes that are not accepted
        self.lies = False  # deletes that say DONE while the machine stays
        self.stopping_s = 0.0  # how long a machine is STOPPING before a delete has removed it
        self.going: dict[str, datetime] = {}
        self.deleted: list[str] = []
        self.labels_set: list[Mapping[str, str]] = []
        self.lacking: frozenset[str] = frozenset()
        self.limits: tuple[Any, ...] = ()
        self.restarts_off: list[str] = []

    # -- what happens there ------------------------------------------------------------------------------------------

    def insert(self, session_id: str, labels: Mapping[str, str], zone: str = "us-central1-a", **more: Any) -> Machine:
        """A machine with its boot disk, made and running."""
        name = node_of(session_id, len(self.log))
        words: dict[str, Any] = {"machine_type": "a3-highgpu-8g", "spot": True, "external_ip": "34.1.1.2", **more}
        machine = Machine(name, zone, self.now(), dict(labels), disks=((name, True),), **words)
        self.machines[name] = machine
        self.disks[name] = Disk(name, zone, self.now(), size_gib=100, disk_type="pd-balanced", users=(name,))
        self.did("insert", name, zone)
        return machine

    def did(self, kind: str, target: str, zone: str = "us-central1-a", status: str = "DONE", **more: Any) -> Operation:
        """An operation in the log."""
        number = len(self.log)
        at = self.now()
        words: dict[str, Any] = {"ended": at if status == "DONE" else None, "user": "me@example.com", **more}
        self.log.append(Operation(f"operation-{number}", zone, kind, target, status, at, **words))
        return self.log[-1]

    def finish(self, operation: Operation, *errors: tuple[str, str]) -> None:
        """A pending operation is done."""
        at = self.log.index(operation)
        self.log[at] = replace(operation, status="DONE", ended=self.now(), errors=errors)

    def preempt(self, name: str) -> None:
        """Taken away: stopped, then deleted by the machine's own termination action."""
        self.did("compute.instances.preempted", name, self.machines[name].zone, user="system")
        self.remove(name)

    def stop(self, name: str) -> None:
        """Powered off from inside: the disk stays, and is billed."""
        self.machines[name] = replace(self.machines[name], status="TERMINATED", ended=self.now())
        self.did("compute.instances.guestTerminate", name, self.machines[name].zone, user="system")

    def remove(self, name: str, kind: str = "delete", **more: Any) -> None:
        """It and its disk are gone."""
        machine = self.machines.pop(name)
        self.disks.pop(name, None)
        self.did(kind, name, machine.zone, **more)

    def _settle(self) -> None:
        for name, at in list(self.going.items()):
            if at <= self.now():
                del self.going[name]
                self.remove(name)

    # -- Cloud -------------------------------------------------------------------------------------------------------

    def _reach(self) -> None:
        self._settle()
        if self.unreachable:
            raise Unconfirmed("could not list: Compute Engine does not answer", "try again in a minute")

    def labelled(self, key: str, value: str = "") -> Inventory:
        self._reach()
        found = (m for m in self.machines.values() if key in m.labels and value in ("", m.labels[key]))
        return Inventory(self.now(), PROJECT, tuple(self._seen(found)), unreachable=self.silent)

    def ours(self, session_id: str = "") -> Inventory:
        return self.labelled(LABEL_SESSION, session_id)

    def everything(self) -> Inventory:
        self._reach()
        machines, disks = tuple(self._seen(self.machines.values())), tuple(self._seen(self.disks.values()))
        return Inventory(self.now(), PROJECT, machines, disks, (), self.silent)

    def _seen(self, things: Iterable[Any]) -> list[Any]:
        return [thing for thing in things if thing.zone not in self.silent]

    def operations(self, session_id: str, since: datetime) -> tuple[Operation, ...]:
        self._reach()
        if self.silent:
            raise Unconfirmed(f"could not list the operations of {', '.join(self.silent)}")
        found = [op for op in self.log if op.began >= since]
        return operations_of(session_id, found) if session_id else tuple(found)

    def delete(self, resource: Resource) -> Operation | None:
        self._reach()
        if self.deletes_fail:
            self.deletes_fail -= 1
            raise Unconfirmed("could not delete: 500")
        self.deleted.append(resource.name)
        if isinstance(resource, Disk | Address):
            self.disks.pop(resource.name, None)
            return None
        if resource.name not in self.machines:
            return None
        if self.lies:
            return self.did("delete", resource.name, resource.zone)
        if self.stopping_s:
            self.machines[resource.name] = replace(self.machines[resource.name], status="STOPPING")
            self.going.setdefault(resource.name, self.now() + timedelta(seconds=self.stopping_s))
            return None
        self.remove(resource.name)
        return self.log[-1]

    def wait(self, operation: Operation, patience_s: float) -> Operation:
        return operation

    def set_labels(self, machine: Machine, changes: Mapping[str, str]) -> Machine | None:
        self._reach()
        if machine.name not in self.machines:
            return None
        self.labels_set.append(dict(changes))
        found = self.machines[machine.name]
        self.machines[machine.name] = replace(found, labels={**found.labels, **changes})
        return self.machines[machine.name]

    def machine(self, zone: str, name: str) -> Machine | None:
        return self.machines.get(name)

    def create_machine(self, zone: str, body: Mapping[str, Any]) -> None:
        raise AssertionError("a place creates nothing by itself")

    def firewalls(self, prefix: str) -> tuple[Firewall, ...]:
        return ()

    def quotas(self) -> tuple[Any, ...]:
        self._reach()
        return self.limits

    def may(self, machine: Machine, permission: str) -> bool:
        return permission not in self.lacking

    def permitted(self, permissions: Iterable[str]) -> frozenset[str]:
        self._reach()
        return frozenset(permissions) - self.lacking

    def no_restart(self, machine: Machine) -> None:
        self._reach()
        self.restarts_off.append(machine.name)
