"""Compute Engine as it is: what exists in a project, by label and by name, in all zones; deletion; labels; operations.

Independent of SkyPilot and of the ledger. Everything may be repeated: deleting what is gone is fine, a label is set against
the fingerprint that was read, creating carries a request id.
"""

import importlib
import importlib.util
import json
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from kimisession.cloud.base import Quota
from kimisession.cloud.compute_items import address_of, disk_of, firewall_of, machine_of, operation_of, quota_of
from kimisession.cloud.compute_wire import PATIENCE_S, TRIES, Wire
from kimisession.cloud.google_errors import LOGIN, Exists, Moved, NoCredentials, first_line
from kimisession.core.audit import BY_US, MARK
from kimisession.core.inventory import Disk, Firewall, Inventory, Machine, Operation, Resource, operations_of
from kimisession.core.launch import LABEL_SESSION
from kimisession.errors import INSTALL_CLOUD, EngineMissing, KimiError, QuotaExceeded, Unconfirmed

ENDPOINT = "KIMISESSION_COMPUTE_ENDPOINT"
"""Environment variable: another address of the API, such as an emulator's. On plain http, which is for loopback addresses,
the token in `KIMISESSION_COMPUTE_TOKEN` is sent and never a person's credentials."""

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
POLL_S = 2.0

#: What happened to machines, of all that Compute Engine keeps of a project. Its types of operations, as seen in lists.
_KINDS = (
    "insert",
    "bulkInsert",
    "delete",
    "stop",
    "start",
    "compute.instances.preempted",
    "compute.instances.guestTerminate",
    "compute.instances.hostError",
    "compute.instances.automaticRestart",
)


class Compute:
    """See cloud/base.py. `sleep` and `clock` (monotonic seconds) are injected so that tests need not wait."""

    def __init__(
        self,
        project: str,
        credentials: Any,
        endpoint: str = "",
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`credentials` are google.auth's. Raises EngineMissing without the library."""
        self._wire = Wire(project, credentials, endpoint, sleep, clock)

    @property
    def project(self) -> str:
        """See Cloud."""
        return self._wire.project

    # -- what exists ---------------------------------------------------------------------------------------------------

    def ours(self, session_id: str = "") -> Inventory:
        """See Cloud."""
        return self.labelled(LABEL_SESSION, session_id)

    def labelled(self, key: str, value: str = "") -> Inventory:
        """See Cloud."""
        at, silent = datetime.now(UTC), set[str]()
        wanted = f"labels.{key}={value}" if value else f"labels.{key}:*"
        found = self._wire.everywhere("Instances", "instances", silent, filter=wanted)
        machines = tuple(machine_of(item) for item in found)
        return Inventory(self._wire.by_cloud(at), self.project, machines, unreachable=tuple(sorted(silent)))

    def everything(self) -> Inventory:
        """See Cloud."""
        at, silent = datetime.now(UTC), set[str]()
        # Disks before machines: one that is attached meanwhile looks used, never left over.
        disks = tuple(disk_of(item) for item in self._wire.everywhere("Disks", "disks", silent))
        addresses = tuple(address_of(item) for item in self._wire.everywhere("Addresses", "addresses", silent))
        machines = tuple(machine_of(item) for item in self._wire.everywhere("Instances", "instances", silent))
        return Inventory(self._wire.by_cloud(at), self.project, machines, disks, addresses, tuple(sorted(silent)))

    def machine(self, zone: str, name: str) -> Machine | None:
        """See Cloud."""
        found = self._wire.call_or_none(f"read machine {name}", "Instances", "get", zone=zone, instance=name)
        return None if found is None else machine_of(found)

    def firewalls(self, prefix: str) -> tuple[Firewall, ...]:
        """See Cloud."""
        rules = self._wire.items("Firewalls", "list firewall rules")
        return tuple(firewall_of(rule) for rule in rules if rule.name.startswith(prefix))

    # -- what was done -------------------------------------------------------------------------------------------------

    def operations(self, session_id: str, since: datetime) -> tuple[Operation, ...]:
        """See Cloud."""
        silent: set[str] = set()
        wanted = " OR ".join(f'(operationType = "{kind}")' for kind in _KINDS)
        listed = self._wire.everywhere("GlobalOperations", "operations", silent, filter=wanted)
        found = [operation_of(item) for item in listed]
        if silent:
            raise Unconfirmed(
                f"Compute Engine could not list the operations of {', '.join(sorted(silent))}", "try again in a minute"
            )
        recent = sorted((o for o in found if o.kind in _KINDS and o.began >= since), key=lambda o: o.began)
        return operations_of(session_id, recent) if session_id else tuple(recent)

    def wait(self, operation: Operation, patience_s: float) -> Operation:
        """See Cloud."""
        until, room = self._wire.clock() + patience_s, _room(operation.zone)
        client = f"{next(iter(room), 'global').capitalize()}Operations"
        while not operation.done and self._wire.clock() < until:
            self._wire.sleep(POLL_S)
            words = {**room, "operation": operation.name}
            found = self._wire.call_or_none(f"read operation {operation.name}", client, "get", **words)
            operation = replace(operation, status="DONE") if found is None else operation_of(found)
        return operation

    # -- change --------------------------------------------------------------------------------------------------------

    def delete(self, resource: Resource) -> Operation | None:
        """See Cloud. The request for a session's machine is marked as ours: what it leaves behind can be told by that."""
        request, room = str(uuid.uuid4()), _room(resource.zone)
        if isinstance(resource, Machine) and resource.session:
            request = f"{MARK}-{BY_US:04x}-4{request[15:19]}8{request[20:]}"
        client, kind = "Instances", "instance"
        if isinstance(resource, Disk):
            client, kind = ("Disks" if "zone" in room else "RegionDisks"), "disk"
        elif not isinstance(resource, Machine):
            client, kind = ("Addresses" if room else "GlobalAddresses"), "address"
        words = {**room, kind: resource.name, "request_id": request}
        found = self._wire.call_or_none(f"delete {kind} {resource.name}", client, "delete_unary", **words)
        return None if found is None else operation_of(found)

    def set_labels(self, machine: Machine, changes: Mapping[str, str]) -> Machine | None:
        """See Cloud."""
        for _ in range(TRIES):
            found = self.machine(machine.zone, machine.name)
            if found is None or all(found.labels.get(key) == value for key, value in changes.items()):
                return found
            body = {"labels": {**found.labels, **changes}, "label_fingerprint": found.label_fingerprint}
            try:
                self._change(
                    found, f"set labels of {found.name}", "set_labels", instances_set_labels_request_resource=body
                )
            except Moved:
                continue  # somebody else wrote labels between our read and our write
        raise Unconfirmed(f"the labels of {machine.name} are changed all the time by somebody else", "try again")

    def no_restart(self, machine: Machine) -> None:
        """See Cloud. Of a machine that runs, only this and what happens at maintenance can be set (setScheduling)."""
        what = f"keep machine {machine.name} from restarting"
        self._change(machine, what, "set_scheduling", scheduling_resource={"automatic_restart": False})

    def _change(self, machine: Machine, what: str, method: str, **body: Any) -> None:
        """Change a machine and wait until that is done. What is gone is fine."""
        words = {"zone": machine.zone, "instance": machine.name, **body}
        asked = self._wire.call_or_none(what, "Instances", f"{method}_unary", **words)
        if asked is not None:
            _succeeded(self.wait(operation_of(asked), PATIENCE_S), what)

    def create_machine(self, zone: str, body: Mapping[str, Any]) -> None:
        """See Cloud."""
        what = f"create machine {body['name']}"
        resource = self._wire.library.Instance.from_json(json.dumps(dict(body)))
        words = {"zone": zone, "instance_resource": resource, "request_id": str(uuid.uuid4())}
        try:
            asked = self._wire.call(what, "Instances", "insert_unary", **words)
        except Exists:
            return
        operation = self.wait(operation_of(asked), 2 * PATIENCE_S)
        _succeeded(operation, what)
        if not operation.done:
            raise Unconfirmed(f"could not {what} in two minutes", "the same command again looks what became of it")

    # -- what may be done ----------------------------------------------------------------------------------------------

    def quotas(self) -> tuple[Quota, ...]:
        """See Cloud."""
        project = self._wire.call(f"read project {self.project}", "Projects", "get")
        found = [quota_of("global", quota) for quota in project.quotas]
        for region in self._wire.items("Regions", "list regions"):
            found += [quota_of(region.name, quota) for quota in region.quotas]
        return tuple(found)

    def permitted(self, permissions: Iterable[str]) -> frozenset[str]:
        """See Cloud."""
        path, body = f"v1/projects/{self.project}:testIamPermissions", {"permissions": list(permissions)}
        return frozenset(self._wire.post("test permissions", path, body).get("permissions", ()))

    def may(self, machine: Machine, permission: str) -> bool:
        """See Cloud."""
        words: dict[str, Any] = {"zone": machine.zone, "resource": machine.name}
        words["test_permissions_request_resource"] = {"permissions": [permission]}
        what = f"test permissions on {machine.name}"
        answer = self._wire.call_or_none(what, "Instances", "test_iam_permissions", **words)
        return answer is not None and permission in answer.permissions


def _room(place: str) -> dict[str, str]:
    """How a request names a zone or a region; what is global needs no such word."""
    if place == "global":
        return {}
    return {"zone" if re.fullmatch(r".*-[a-z]", place) else "region": place}


def _succeeded(operation: Operation, what: str) -> None:
    for code, message in operation.errors:
        if "QUOTA" in code.upper() or "RESOURCE_POOL_EXHAUSTED" in code.upper():
            raise QuotaExceeded(f"could not {what}: {code} {message}", "kimisession quota", (operation.zone,))
        raise Unconfirmed(f"could not {what}: {code} {message}".strip())


def open_compute(project: str = "") -> Compute:
    """Compute Engine with the credentials of this machine. Raises EngineMissing, NoCredentials, KimiError when no project is
    named anywhere."""
    endpoint = os.environ.get(ENDPOINT, "")
    try:
        found = importlib.util.find_spec("google.auth")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise EngineMissing("Compute Engine needs the package google-cloud-compute", INSTALL_CLOUD)
    auth = importlib.import_module("google.auth")
    if endpoint.startswith("http://"):
        token = os.environ.get("KIMISESSION_COMPUTE_TOKEN", "emulated")
        credentials = importlib.import_module("google.oauth2.credentials").Credentials(token=token)
        theirs = os.environ.get("GOOGLE_CLOUD_PROJECT", "")
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about quotas of a user's login
                credentials, theirs = auth.default(scopes=[SCOPE])
        except auth.exceptions.GoogleAuthError as error:
            raise NoCredentials(
                f"there are no usable Google Cloud credentials here: {first_line(error).partition('. ')[0]}", LOGIN
            ) from None
    if not (project or theirs):
        raise KimiError("no Google Cloud project is named", "gcloud config set project PROJECT, or give --project")
    return Compute(project or theirs, credentials, endpoint)
