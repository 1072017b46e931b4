"""Compute Engine as it is: what exists in a project, by label and by name, in all zones; deletion; labels; operations.

Independent of SkyPilot and of the ledger. Through `google-cloud-compute` (REST), imported on first use. Everything may be
repeated: deleting what is gone is fine, a label is set against the fingerprint that was read, creating carries a request id.

Retried are answers 429, 500, 502, 503, 504 and broken connections, `TRIES` times and for `PATIENCE_S` at most.

Errors are translated here and nowhere else: NoCredentials and Denied (exit code 1), QuotaExceeded (3), Unconfirmed (7: it
was asked, and there is no answer to rely on).
"""

import importlib
import importlib.util
import json
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, TypeVar

from kimisession.cloud.permissions import grant_command
from kimisession.core.audit import BY_US, MARK
from kimisession.core.inventory import (
    Address,
    Disk,
    Firewall,
    Inventory,
    Machine,
    Operation,
    Resource,
    may_still_make,
    operations_of,
)
from kimisession.core.launch import LABEL_SESSION
from kimisession.errors import INSTALL_CLOUD, EngineMissing, KimiError, QuotaExceeded, Unconfirmed

T = TypeVar("T")

ENDPOINT = "KIMISESSION_COMPUTE_ENDPOINT"
"""Environment variable: another address of the API, such as an emulator's. On plain http, which is for loopback addresses,
the token in `KIMISESSION_COMPUTE_TOKEN` is sent and never a person's credentials."""

LOGIN = "gcloud auth application-default login"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"

TRIES = 6
PATIENCE_S = 60.0
CALL_S = 30.0
PAGE = 500  # the most that a list of Compute Engine returns at once (its documentation, maxResults)
POLL_S = 2.0

#: So many zones are asked at a time where they have to be asked one by one.
AT_ONCE = 8

#: With this the library begins what Google said.
_CALL = re.compile(r"^(?:GET|POST|DELETE|PATCH|PUT) https?://\S+: ")

_BUSY = frozenset({429, 500, 502, 503, 504})

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


class NoCredentials(KimiError):
    """Nobody is logged in, or the login has expired."""


class Denied(KimiError):
    """The account may not do this. `permission` is the missing one where Google named it."""

    def __init__(self, message: str, hint: str = "", permission: str = "") -> None:
        super().__init__(message, hint)
        self.permission = permission


@dataclass(frozen=True)
class Quota:
    """A limit of a region, or of the project ("global")."""

    region: str
    metric: str
    limit: float
    usage: float

    @property
    def free(self) -> float:
        """How much more may be had."""
        return max(0.0, self.limit - self.usage)


class Cloud(Protocol):
    """What a session's end, the audit and the reaper need of a project. Every method may raise NoCredentials, Denied or
    Unconfirmed (see above)."""

    @property
    def project(self) -> str:
        """The project's id."""

    def ours(self, session_id: str = "") -> Inventory:
        """The machines with our labels, of one session or of all; no disks, no addresses. Cheap: filtered by the server."""

    def labelled(self, key: str, value: str = "") -> Inventory:
        """The machines with this label, with any value if none is given. `ours` is this for a session's label."""

    def everything(self) -> Inventory:
        """Machines, disks and addresses of the whole project, each in one aggregated list per page of 500. With
        `.of(session_id)` also what has no label and is a session's by its name or its machine."""

    def operations(self, session_id: str, since: datetime) -> tuple[Operation, ...]:
        """What was done to machines of this session from `since` on, in all zones, oldest first: inserts, bulkInserts that
        may still make one, deletes, `compute.instances.preempted`, `compute.instances.guestTerminate`, stops. Of all
        sessions' and all others' machines with an empty id."""

    def insert_operations_pending(self, session_id: str, since: datetime) -> tuple[Operation, ...]:
        """Those of `operations` that may still make a machine."""

    def delete(self, resource: Resource) -> Operation | None:
        """Ask for its deletion; None: it is gone already. Returns before it is gone."""

    def wait(self, operation: Operation, patience_s: float) -> Operation:
        """The operation once it is DONE, or as it is after `patience_s`. One that is no longer known is DONE."""

    def set_labels(self, machine: Machine, changes: Mapping[str, str]) -> Machine | None:
        """Set these labels beside those it has, whoever else writes labels at the same time. None: the machine is gone."""

    def no_restart(self, machine: Machine) -> None:
        """From now on a crash of its host does not start it again. What is gone is fine."""

    def machine(self, zone: str, name: str) -> Machine | None:
        """One machine; None when there is none."""

    def firewalls(self, prefix: str) -> tuple[Firewall, ...]:
        """Firewall rules by the beginning of their names."""

    def may(self, machine: Machine, permission: str) -> bool:
        """Whether the account has a permission on one machine (instances.testIamPermissions)."""

    def create_machine(self, zone: str, body: Mapping[str, Any]) -> None:
        """Insert an instance from a body as in the REST API, and wait until it is done. What exists already is left as it
        is. Raises QuotaExceeded, Unconfirmed when it is not done in two minutes."""

    def quotas(self) -> tuple[Quota, ...]:
        """Limits and use of every region, and of the project as region "global"."""

    def permitted(self, permissions: Iterable[str]) -> frozenset[str]:
        """Which of these the account has on the project (Cloud Resource Manager, projects.testIamPermissions)."""


class Compute:
    """See Cloud. `sleep` and `clock` (monotonic seconds) are injected so that tests need not wait."""

    def __init__(
        self,
        project: str,
        credentials: Any,
        endpoint: str = "",
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`credentials` are google.auth's. Raises EngineMissing without the library."""
        try:
            self._v1: Any = importlib.import_module("google.cloud.compute_v1")
        except ImportError:
            raise EngineMissing("Compute Engine needs the package google-cloud-compute", INSTALL_CLOUD) from None
        self.project = project
        self.endpoint = endpoint.rstrip("/")
        self._credentials = credentials
        self._sleep = sleep
        self._clock = clock
        self._clients: dict[str, Any] = {}
        self._session: Any = None

    # -- what exists ---------------------------------------------------------------------------------------------------

    def ours(self, session_id: str = "") -> Inventory:
        """See Cloud."""
        return self.labelled(LABEL_SESSION, session_id)

    def labelled(self, key: str, value: str = "") -> Inventory:
        """See Cloud."""
        at, silent = datetime.now(UTC), set[str]()
        wanted = f"labels.{key}={value}" if value else f"labels.{key}:*"
        found = self._aggregated("Instances", "instances", silent, filter=wanted)
        machines = tuple(machine_of(item) for item in found)
        return Inventory(at, self.project, machines, unreachable=tuple(sorted(silent)))

    def everything(self) -> Inventory:
        """See Cloud."""
        at, silent = datetime.now(UTC), set[str]()
        # Disks before machines: one that is attached meanwhile looks used, never left over.
        disks = tuple(_disk(item) for item in self._aggregated("Disks", "disks", silent))
        addresses = tuple(_address(item) for item in self._aggregated("Addresses", "addresses", silent))
        machines = tuple(machine_of(item) for item in self._aggregated("Instances", "instances", silent))
        return Inventory(at, self.project, machines, disks, addresses, tuple(sorted(silent)))

    def machine(self, zone: str, name: str) -> Machine | None:
        """See Cloud."""
        client = self._client("Instances")
        found = self._gone_is_none(
            f"read machine {name}",
            lambda: client.get(project=self.project, zone=zone, instance=name, retry=None, timeout=CALL_S),
        )
        return None if found is None else machine_of(found)

    def firewalls(self, prefix: str) -> tuple[Firewall, ...]:
        """See Cloud."""
        pages = self._pages("Firewalls", "list", "list firewall rules", {"project": self.project})
        rules = (item for page in pages for item in page.items)
        return tuple(Firewall(r.name, _moment(r.creation_timestamp)) for r in rules if r.name.startswith(prefix))

    # -- what was done -------------------------------------------------------------------------------------------------

    def operations(self, session_id: str, since: datetime) -> tuple[Operation, ...]:
        """See Cloud."""
        silent: set[str] = set()
        wanted = " OR ".join(f'(operationType = "{kind}")' for kind in _KINDS)
        listed = self._aggregated("GlobalOperations", "operations", silent, filter=wanted)
        found = [operation_of(item) for item in listed]
        if silent:
            raise Unconfirmed(
                f"Compute Engine could not list the operations of {', '.join(sorted(silent))}", "try again in a minute"
            )
        recent = sorted((o for o in found if o.kind in _KINDS and o.began >= since), key=lambda o: o.began)
        return operations_of(session_id, recent) if session_id else tuple(recent)

    def insert_operations_pending(self, session_id: str, since: datetime) -> tuple[Operation, ...]:
        """See Cloud."""
        return may_still_make(self.operations(session_id, since))

    def wait(self, operation: Operation, patience_s: float) -> Operation:
        """See Cloud."""
        until = self._clock() + patience_s
        while not operation.done and self._clock() < until:
            self._sleep(POLL_S)
            found = self._gone_is_none(f"read operation {operation.name}", partial(self._operation, operation))
            operation = replace(operation, status="DONE") if found is None else operation_of(found)
        return operation

    def _operation(self, operation: Operation) -> Any:
        words: dict[str, Any] = {"project": self.project, "operation": operation.name}
        words |= {"retry": None, "timeout": CALL_S}
        if operation.zone == "global":
            return self._client("GlobalOperations").get(**words)
        if re.fullmatch(r".*-[a-z]", operation.zone):
            return self._client("ZoneOperations").get(zone=operation.zone, **words)
        return self._client("RegionOperations").get(region=operation.zone, **words)

    # -- change --------------------------------------------------------------------------------------------------------

    def delete(self, resource: Resource) -> Operation | None:
        """See Cloud. The request for a session's machine is marked as ours: what it leaves behind can be told by that."""
        request = str(uuid.uuid4())
        if isinstance(resource, Machine) and resource.session:
            request = f"{MARK}-{BY_US:04x}-4{request[15:19]}8{request[20:]}"
        words: dict[str, Any] = {"project": self.project, "request_id": request}
        room, kind = ("zone" if re.fullmatch(r".*-[a-z]", resource.zone) else "region"), "instance"
        client = "Instances"
        if isinstance(resource, Disk):
            client, kind = ("Disks" if room == "zone" else "RegionDisks"), "disk"
        elif not isinstance(resource, Machine):
            client, kind = ("GlobalAddresses" if resource.zone == "global" else "Addresses"), "address"
        if resource.zone != "global":
            words[room] = resource.zone
        words[kind] = resource.name
        found = self._gone_is_none(
            f"delete {kind} {resource.name}",
            lambda: self._client(client).delete_unary(request=words, retry=None, timeout=CALL_S),
        )
        return None if found is None else operation_of(found)

    def set_labels(self, machine: Machine, changes: Mapping[str, str]) -> Machine | None:
        """See Cloud."""
        for _ in range(TRIES):
            found = self.machine(machine.zone, machine.name)
            if found is None or all(found.labels.get(key) == value for key, value in changes.items()):
                return found
            try:
                self._set_labels(found, {**found.labels, **changes})
            except _Moved:
                continue  # somebody else wrote labels between our read and our write
        raise Unconfirmed(f"the labels of {machine.name} are changed all the time by somebody else", "try again")

    def _set_labels(self, machine: Machine, labels: Mapping[str, str]) -> None:
        body = {"labels": dict(labels), "label_fingerprint": machine.label_fingerprint}
        words: dict[str, Any] = {"project": self.project, "zone": machine.zone, "instance": machine.name}
        words["instances_set_labels_request_resource"] = body
        client = self._client("Instances")
        asked = self._gone_is_none(
            f"set labels of {machine.name}",
            lambda: client.set_labels_unary(request=words, retry=None, timeout=CALL_S),
        )
        if asked is not None:
            self._succeeded(self.wait(operation_of(asked), PATIENCE_S), f"set labels of {machine.name}")

    def no_restart(self, machine: Machine) -> None:
        """See Cloud. Of a machine that runs, only this and what happens at maintenance can be set (setScheduling)."""
        words: dict[str, Any] = {"project": self.project, "zone": machine.zone, "instance": machine.name}
        words["scheduling_resource"] = {"automatic_restart": False}
        what, client = f"keep machine {machine.name} from restarting", self._client("Instances")
        asked = self._gone_is_none(what, lambda: client.set_scheduling_unary(request=words, retry=None, timeout=CALL_S))
        if asked is not None:
            self._succeeded(self.wait(operation_of(asked), PATIENCE_S), what)

    def create_machine(self, zone: str, body: Mapping[str, Any]) -> None:
        """See Cloud."""
        what = f"create machine {body['name']}"
        resource = self._v1.Instance.from_json(json.dumps(dict(body)))
        words = {"project": self.project, "zone": zone, "instance_resource": resource, "request_id": str(uuid.uuid4())}
        client = self._client("Instances")
        try:
            asked = self._ask(what, lambda: client.insert_unary(request=words, retry=None, timeout=CALL_S))
        except _Exists:
            return
        operation = self.wait(operation_of(asked), 2 * PATIENCE_S)
        self._succeeded(operation, what)
        if not operation.done:
            raise Unconfirmed(f"could not {what} in two minutes", "the same command again looks what became of it")

    @staticmethod
    def _succeeded(operation: Operation, what: str) -> None:
        for code, message in operation.errors:
            if "QUOTA" in code.upper() or "RESOURCE_POOL_EXHAUSTED" in code.upper():
                raise QuotaExceeded(f"could not {what}: {code} {message}", "kimisession quota", (operation.zone,))
            raise Unconfirmed(f"could not {what}: {code} {message}".strip())

    # -- what may be done ----------------------------------------------------------------------------------------------

    def quotas(self) -> tuple[Quota, ...]:
        """See Cloud."""
        client = self._client("Projects")
        words = {"project": self.project, "retry": None, "timeout": CALL_S}
        project = self._ask(f"read project {self.project}", lambda: client.get(**words))
        found = [_quota("global", quota) for quota in project.quotas]
        for page in self._pages("Regions", "list", "list regions", {"project": self.project}):
            found += [_quota(region.name, quota) for region in page.items for quota in region.quotas]
        return tuple(found)

    def permitted(self, permissions: Iterable[str]) -> frozenset[str]:
        """See Cloud."""
        base = self.endpoint or "https://cloudresourcemanager.googleapis.com"
        url = f"{base}/v1/projects/{self.project}:testIamPermissions"
        body = {"permissions": list(permissions)}
        requests = importlib.import_module("google.auth.transport.requests")
        exceptions = importlib.import_module("google.api_core.exceptions")
        self._session = self._session or requests.AuthorizedSession(self._credentials)

        def post() -> Any:
            answer = self._session.post(url, json=body, timeout=CALL_S)
            if answer.status_code != 200:
                raise exceptions.from_http_response(answer)
            return answer.json()

        return frozenset(self._ask("test permissions", post).get("permissions", ()))

    def may(self, machine: Machine, permission: str) -> bool:
        """See Cloud."""
        client = self._client("Instances")
        words: dict[str, Any] = {"project": self.project, "zone": machine.zone, "resource": machine.name}
        words["test_permissions_request_resource"] = {"permissions": [permission]}
        answer = self._gone_is_none(
            f"test permissions on {machine.name}",
            lambda: client.test_iam_permissions(request=words, retry=None, timeout=CALL_S),
        )
        return answer is not None and permission in answer.permissions

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _client(self, name: str) -> Any:
        if name not in self._clients:
            options = {"api_endpoint": self.endpoint} if self.endpoint else None
            maker = getattr(self._v1, f"{name}Client")
            self._clients[name] = maker(credentials=self._credentials, client_options=options)
        return self._clients[name]

    def _pages(self, client: str, method: str, what: str, words: Mapping[str, Any]) -> Iterator[Any]:
        token, call = "", getattr(self._client(client), method)

        def one(token: str) -> Any:
            pager = call(request={**words, "max_results": PAGE, "page_token": token}, retry=None, timeout=CALL_S)
            return next(iter(pager.pages))

        while True:
            # One page by hand and not the library's pager: a page that failed is asked again, not the whole list.
            page = self._ask(what, partial(one, token))
            yield page
            token = page.next_page_token
            if not token:
                return

    def _aggregated(self, client: str, items: str, silent: set[str], **words: str) -> list[Any]:
        """The items of all zones. Zones that did not answer are added to `silent`."""
        request = {"project": self.project, **words}
        try:
            pages = list(self._pages(client, "aggregated_list", f"list {items}", request))
        except Unconfirmed as error:
            # One zone that cannot be reached may fail the list of all of them.
            return self._one_by_one(client, items, silent, request, error)
        found = []
        for page in pages:
            silent.update(_last(name) for name in page.unreachables)
            for place, scoped in page.items.items():
                if scoped.warning.code == "UNREACHABLE":
                    silent.add(_last(place))
                found += getattr(scoped, items)
        return found

    def _one_by_one(
        self, client: str, items: str, silent: set[str], request: Mapping[str, str], error: Unconfirmed
    ) -> list[Any]:
        """The same, each zone (for addresses each region) asked by itself. Raises `error` when none of them answers."""
        room = "region" if client == "Addresses" else "zone"
        alone = {"GlobalOperations": "ZoneOperations"}.get(client, client)
        places = self._client(f"{room.capitalize()}s")
        try:
            names = [place.name for place in places.list(project=self.project, retry=None, timeout=CALL_S)]
        except Exception as other:
            known = _translated(other, f"list {room}s", self.project)
            if isinstance(known, Denied):
                raise Denied(f"{error.message}; {known.message}", known.hint, known.permission) from None
            raise error from None

        def ask(name: str) -> list[Any] | None:
            try:
                pages = self._pages(alone, "list", f"list {items} in {name}", {**request, room: name})
                return [item for page in pages for item in page.items]
            except Unconfirmed:
                return None

        self._client(alone)  # made once, before the crew asks for it
        with ThreadPoolExecutor(AT_ONCE) as crew:
            answers = dict(zip(names, crew.map(ask, names), strict=True))
        silent.update(name for name, answer in answers.items() if answer is None)
        if silent >= set(names):
            raise error
        return [item for answer in answers.values() for item in answer or ()]

    def _gone_is_none(self, what: str, call: Callable[[], T]) -> T | None:
        try:
            return self._ask(what, call)
        except _Missing:
            return None

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        until, pause = self._clock() + PATIENCE_S, 0.5
        for attempt in range(1, TRIES + 1):
            try:
                return call()
            except Exception as error:
                if not _busy(error):
                    known = _translated(error, what, self.project)
                    if known is None:
                        raise  # a mistake of ours, not an answer
                    raise known from error
                if attempt == TRIES or self._clock() + pause > until:
                    raise Unconfirmed(
                        f"could not {what}: Compute Engine does not answer ({_first(error)}; asked {attempt} times)",
                        "try again in a minute",
                    ) from error
            self._sleep(pause)
            pause = min(2 * pause, 16.0)
        raise AssertionError  # the last attempt returned or raised


class _Missing(KimiError):
    """404."""


class _Exists(KimiError):
    """409, and it is not because something is in use."""


class _Moved(KimiError):
    """412: somebody else was quicker."""


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
            raise NoCredentials(f"there are no usable Google Cloud credentials here: {_first(error)}", LOGIN) from None
    if not (project or theirs):
        raise KimiError("no Google Cloud project is named", "gcloud config set project PROJECT, or give --project")
    return Compute(project or theirs, credentials, endpoint)


def _busy(error: Exception) -> bool:
    """Whether asking again may help: named answers and broken connections."""
    code = getattr(error, "code", None)
    if isinstance(code, int) and (code in _BUSY or (code == 403 and "rateLimitExceeded" in str(error))):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    retryable = getattr(error, "retryable", True)  # google.auth: an expired login stays expired
    broken = {"ConnectionError", "Timeout", "ChunkedEncodingError", "RetryError", "TransportError"}
    return bool(names & broken) and bool(retryable)


def _translated(error: Exception, what: str, project: str) -> KimiError | None:
    """Google's error as one of ours; None for what is not Google's."""
    if isinstance(error, KimiError):
        return error
    code, text = getattr(error, "code", None), _first(error)
    if isinstance(code, int):
        if (
            code == 404
            and "projects/" in text
            and "/" not in text.partition("projects/")[2].strip("'\" ").split("'")[0]
        ):
            return Denied(f"could not {what}: there is no project {project}, or you may not see it", "--project P")
        kinds: dict[int, type[KimiError]] = {404: _Missing, 412: _Moved}
        if code == 409 and "already exists" in text:
            return _Exists(text)
        if code in kinds:
            return kinds[code](text)
        if code == 401:
            return NoCredentials(f"could not {what}: Google does not accept the credentials ({text})", LOGIN)
        if code == 403 and "quota" in text.lower():
            return QuotaExceeded(f"could not {what}: {text}", "kimisession quota")
        if code == 403:
            return _denied(what, text, project)
        return Unconfirmed(f"could not {what}: Compute Engine says {code}: {text}")
    if type(error).__module__.startswith("google.auth"):
        return NoCredentials(f"could not {what}: the login is not valid any more ({text})", LOGIN)
    if type(error).__module__.startswith(("google.api_core", "requests")):
        return Unconfirmed(f"could not {what}: {type(error).__name__}: {text}")
    return None


def _denied(what: str, text: str, project: str) -> Denied:
    permission = re.search(r"'([a-z]+(?:\.[A-Za-z]+){2})'", text)
    if "disabled" in text or "has not been used" in text:
        return Denied(
            f"could not {what}: Compute Engine is not enabled in project {project}",
            f"gcloud services enable compute.googleapis.com --project {project}",
        )
    named = permission.group(1) if permission else ""
    lacking = f"this account lacks {named} on project {project}" if named else text
    grant = grant_command(project, (named,)) if named else f"kimisession guard permissions --project {project}"
    return Denied(f"could not {what}: {lacking}", grant, named)


def _first(error: BaseException) -> str:
    text = getattr(error, "message", "") or (str(error.args[0]) if error.args else str(error))
    lines = [line.strip() for line in _CALL.sub("", str(text)).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _last(url: str) -> str:
    return url.rpartition("/")[2]


def _place(item: Any) -> str:
    return _last(getattr(item, "zone", "") or "") or _last(getattr(item, "region", "") or "") or "global"


def machine_of(item: Any) -> Machine:
    """An instance of the library as a Machine."""
    nic = next(iter(item.network_interfaces), None)
    access = next(iter(nic.access_configs), None) if nic is not None else None
    stopped = item.last_stop_timestamp if item.status in ("TERMINATED", "STOPPED", "STOPPING", "SUSPENDED") else ""
    return Machine(
        item.name,
        _place(item),
        _moment(item.creation_timestamp),
        dict(item.labels),
        item.label_fingerprint,
        status=item.status,
        ended=_moment(stopped) if stopped else None,
        machine_type=_last(item.machine_type),
        spot=item.scheduling.provisioning_model == "SPOT" or bool(item.scheduling.preemptible),
        accelerators=tuple((_last(a.accelerator_type), a.accelerator_count) for a in item.guest_accelerators),
        disks=tuple((_last(disk.source), bool(disk.auto_delete)) for disk in item.disks if disk.source),
        internal_ip=nic.network_i_p if nic is not None else "",
        external_ip=access.nat_i_p if access is not None else "",
        account=next((one.email for one in item.service_accounts), ""),
    )


def _disk(item: Any) -> Disk:
    return Disk(
        item.name,
        _place(item),
        _moment(item.creation_timestamp),
        dict(item.labels),
        item.label_fingerprint,
        size_gib=int(item.size_gb),
        disk_type=_last(item.type_),
        users=tuple(_last(user) for user in item.users),
    )


def _address(item: Any) -> Address:
    return Address(
        item.name,
        _place(item),
        _moment(item.creation_timestamp),
        dict(item.labels),
        item.label_fingerprint,
        address=item.address,
        users=tuple(_last(user) for user in item.users),
    )


def operation_of(item: Any) -> Operation:
    """An operation of the library as an Operation."""
    status = item.status if isinstance(item.status, str) else item.status.name
    kind, target = item.operation_type, item.target_link
    aimed = re.search(r"/(?:instances|disks|addresses|firewalls)/([^/]+)$", target)
    return Operation(
        item.name,
        _place(item),
        kind,
        aimed.group(1) if aimed else "",
        status,
        _moment(item.insert_time or item.start_time),
        _moment(item.end_time) if item.end_time else None,
        item.user,
        item.operation_group_id,
        tuple((error.code, error.message) for error in item.error.errors),
        item.client_operation_id,
    )


def _quota(region: str, item: Any) -> Quota:
    metric = item.metric if isinstance(item.metric, str) else item.metric.name
    return Quota(region, metric, float(item.limit), float(item.usage))
