"""What exists in a cloud project that may be ours: machines, disks, addresses, and the operations that made or ended them.

Values only; asked of Compute Engine by kimisession/cloud/compute.py, judged by kimisession/core/audit.py. Pure.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kimisession.core.launch import LABEL_DEADLINE, LABEL_NAME, LABEL_OWNER, LABEL_SESSION, parse_deadline_label


@dataclass(frozen=True)
class Labelled:
    """Something that a project has, with what its labels say. `zone` is a region, or "global", where it has no zone."""

    name: str
    zone: str
    began: datetime
    labels: Mapping[str, str] = field(default_factory=dict)
    label_fingerprint: str = ""

    @property
    def session(self) -> str:
        """The session's id; empty without our labels."""
        return self.labels.get(LABEL_SESSION, "")

    @property
    def session_name(self) -> str:
        """What its user called the session; the id where that was not said."""
        return self.labels.get(LABEL_NAME) or self.session

    @property
    def owner(self) -> str:
        """Whose it is, as a label's value; empty when nobody is named."""
        return self.labels.get(LABEL_OWNER, "")

    @property
    def deadline(self) -> datetime | None:
        """After this nobody may be using it; None without a readable label."""
        try:
            return parse_deadline_label(self.labels[LABEL_DEADLINE])
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True)
class Machine(Labelled):
    """An instance. `status` is Compute Engine's word: PROVISIONING, STAGING, RUNNING, STOPPING, SUSPENDED, TERMINATED, ...

    `ended` is when it was last stopped (None: it was not). `disks` are (name of a disk, deleted with the machine).
    `accelerators` are (type, count); types with the GPU inside, such as a3-highgpu-8g, may list none.
    """

    status: str = "RUNNING"
    ended: datetime | None = None
    machine_type: str = ""
    spot: bool = False
    accelerators: tuple[tuple[str, int], ...] = ()
    disks: tuple[tuple[str, bool], ...] = ()
    internal_ip: str = ""
    external_ip: str = ""
    account: str = ""  # as whom its own processes act

    @property
    def stopped(self) -> bool:
        """Whether it no longer runs and is still there: its disk is billed."""
        return self.status in ("TERMINATED", "STOPPED", "SUSPENDED")


@dataclass(frozen=True)
class Disk(Labelled):
    """A persistent disk. `users` are the names of the machines that it is attached to."""

    size_gib: int = 0
    disk_type: str = ""
    users: tuple[str, ...] = ()


@dataclass(frozen=True)
class Address(Labelled):
    """An external address; a reserved one is billed while nothing uses it, too. `zone` is its region, or the zone of the machine
    that has it for as long as it runs; `spot`: that is a spot machine."""

    address: str = ""
    users: tuple[str, ...] = ()
    spot: bool = False


@dataclass(frozen=True)
class Firewall:
    """A firewall rule. It has no labels and costs nothing: found by name."""

    name: str
    began: datetime


Resource = Machine | Disk | Address


@dataclass(frozen=True)
class Operation:
    """Something that Compute Engine was asked to do, or did by itself. Kept there for days after the end.

    `kind` is `insert`, `bulkInsert`, `delete`, `stop`, `compute.instances.preempted`, `compute.instances.guestTerminate`,
    ...; `target` the name of what it was done to, empty for a bulkInsert, whose single inserts share its `group`.
    `errors` are (code, message); `request` is the id that whoever asked gave to the request.
    """

    name: str
    zone: str
    kind: str
    target: str
    status: str
    began: datetime
    ended: datetime | None = None
    user: str = ""
    group: str = ""
    errors: tuple[tuple[str, str], ...] = ()
    request: str = ""

    @property
    def done(self) -> bool:
        """Whether nothing more will come of it."""
        return self.status == "DONE"


@dataclass(frozen=True)
class Inventory:
    """Everything found in all zones at `at`, by the cloud's clock. `unreachable` names the zones that did not answer: with one of
    them, an empty list proves nothing."""

    at: datetime
    project: str
    machines: tuple[Machine, ...] = ()
    disks: tuple[Disk, ...] = ()
    addresses: tuple[Address, ...] = ()
    unreachable: tuple[str, ...] = ()

    @property
    def everything(self) -> tuple[Resource, ...]:
        """All of it, machines first: with a machine its disk may go."""
        return (*self.machines, *self.disks, *self.addresses)

    def of(self, session_id: str) -> "Inventory":
        """Only what belongs to one session: by label, by the machine that a disk is attached to, or by name. The same name in
        another zone is something else."""
        machines = tuple(m for m in self.machines if belongs(m, session_id))
        names = {(zone, m.name) for m in machines for zone in (m.zone, m.zone.rpartition("-")[0])}  # zone, and region
        boots = {(m.zone, name) for m in machines for name, _ in m.disks}

        def used(thing: "Disk | Address") -> bool:
            return any((thing.zone, user) in names for user in thing.users)

        disks = tuple(d for d in self.disks if belongs(d, session_id) or (d.zone, d.name) in boots or used(d))
        addresses = tuple(a for a in self.addresses if belongs(a, session_id) or used(a))
        return Inventory(self.at, self.project, machines, disks, addresses, self.unreachable)


def belongs(thing: Labelled, session_id: str) -> bool:
    """Whether its label says so or, where there is no such label, its name."""
    return thing.session == session_id if thing.session else named_after(thing.name, session_id)


#: SkyPilot 0.14.1 gives a cluster on GCP a name of at most 35 characters, the last nine of them `-` and the user's hash
#: (clouds/gcp.py; utils/common_utils.py, make_cluster_name_on_cloud). A longer one is cut and gets two digits of its md5.
_SKY_LONGEST = 35 - 9
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

#: ... and each of its machines, and the boot disk of each, what follows (provision/gcp/instance_utils.py).
_SKY_NODE = r"-[0-9a-f]{8}-(?:head|worker)-[0-9a-z]{8}-(?:compute|tpu|mig)"

_NODE = re.compile(_SKY_NODE)

#: A name that SkyPilot would give to a machine of a session of ours: `NAME-` and eight hexadecimal digits.
_OURS = re.compile(rf"([a-z][a-z0-9-]*-[0-9a-f]{{8}}){_SKY_NODE}")


def cluster_name(session_id: str) -> str:
    """The session's name on the cloud as SkyPilot shortens it, without the user's hash."""
    if len(session_id) <= _SKY_LONGEST:
        return session_id
    number, short = int(hashlib.md5(session_id.encode(), usedforsecurity=False).hexdigest(), 16), ""
    while number:
        number, digit = divmod(number, 36)
        short = _DIGITS[digit] + short
    return f"{session_id[: _SKY_LONGEST - 3].rstrip('-')}-{short[:2]}"


def named_after(name: str, session_id: str) -> bool:
    """Whether a name was made for this session: the whole of it is looked at, so that nothing similar is claimed."""
    if name == session_id:
        return True
    # Among thousands of names no pattern is made anew for each.
    cluster = cluster_name(session_id)
    return name.startswith(cluster) and bool(_NODE.fullmatch(name, len(cluster)))


def looks_like_ours(name: str) -> bool:
    """Whether a name has the shape of those that SkyPilot makes for sessions. Reason to tell a person, not to delete."""
    return bool(_OURS.fullmatch(name))


#: Operations that make machines. Compute Engine calls the second so in its lists of operations.
MAKES = ("insert", "bulkInsert")


def operations_of(session_id: str, operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Those that concern a session's machines, in their order. A bulkInsert names no machine, only its single inserts do,
    which share its group: while none of them is there it may be anybody's, and counts as this session's."""
    found = tuple(operations)
    groups: dict[str, set[bool]] = {}
    for op in found:
        if op.group and op.target:
            groups.setdefault(op.group, set()).add(named_after(op.target, session_id))
    return tuple(
        op
        for op in found
        if (named_after(op.target, session_id) if op.target else True in groups.get(op.group, {not op.done}))
    )


def may_still_make(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Those after which a machine may appear that no list shows yet."""
    return tuple(op for op in operations if op.kind in MAKES and not op.done)
