"""What of a project is ours, and what of that should not be there any more; and when "gone" is proven. Pure.

One rule decides alone: the deadline in a resource's label, plus a grace in which the machine's own layers end it. The
keeper's heartbeat is not asked: a machine without a keeper ends itself by its own timer, and one whose labels nobody
refreshes must not live longer for it. What has our labels and no readable deadline gets `WITHOUT_DEADLINE`. Beside that,
what is stopped and still billed for its disk, and what was left behind by a machine that is gone.

Only labels, and names made from a session's id, make something ours to delete. A similar name is shown and never touched.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum

from kimisession.core.cost import price_of
from kimisession.core.inventory import (
    MAKES,
    Address,
    Disk,
    Inventory,
    Machine,
    Operation,
    Resource,
    looks_like_ours,
    may_still_make,
    named_after,
)

#: The machine's own timer fires up to 300 s after the deadline in the label (engines/task.py GRACE_S, scripts/deadline
#: --grace-s) and its deletion takes about a minute.
GRACE = timedelta(minutes=7)

#: Something that was just made or just stopped is not left over yet: an insert makes its disk first, and a machine that was
#: preempted with termination action DELETE is stopped before it is gone.
FRESH = timedelta(minutes=5)

#: How long something with our labels may exist when its deadline cannot be read.
WITHOUT_DEADLINE = timedelta(hours=24)

#: Two empty lists prove something only when they are this far apart.
APART = timedelta(seconds=60)


class Verdict(StrEnum):
    """What a resource is. All but LIVE, FOREIGN and ENDING are leaks."""

    LIVE = "live"
    FOREIGN = "another owner's"
    ENDING = "ending"  # past its deadline or stopped, and its own layers still have time to delete it
    PAST_DEADLINE = "past its deadline"
    STOPPED_WITH_DISK = "stopped, disk billed"
    ORPHAN_DISK = "left-over disk"
    ORPHAN_ADDRESS = "left-over address"
    UNLABELLED_OURS = "named like ours, no labels"


#: Whoever of ours deletes a labelled machine marks the request ("kimi"): a session's own machine with its exit code
#: (node/deadline.py), command and reaper with `BY_US` (cloud/compute.py). Compute Engine keeps the mark with the operation.
MARK = "6b696d69"
BY_US = 0xFFFF
_MARKED = re.compile(rf"{MARK}-([0-9a-f]{{4}})-4[0-9a-f]{{3}}-8[0-9a-f]{{3}}-[0-9a-f]{{12}}")

_CALM = (Verdict.LIVE, Verdict.FOREIGN, Verdict.ENDING)


@dataclass(frozen=True)
class Price:
    """Dollars per hour and where the figure is from; None where nobody knows it."""

    usd_per_hour: Decimal | None
    ground: str


PriceOf = Callable[[Resource], Price]


@dataclass(frozen=True)
class Finding:
    """One resource that is, or may be, ours.

    `since` is when it began to be what `verdict` says. `due`: whoever asked may delete it. `usd_per_hour` is what it
    takes now and `usd` what it took so far, with the disks attached to it, over what has a price; `unpriced` names the rest.
    """

    resource: Resource
    verdict: Verdict
    why: str
    since: datetime
    session: str
    owner: str
    due: bool
    usd_per_hour: Decimal | None = None
    usd: Decimal | None = None
    unpriced: tuple[str, ...] = ()

    @property
    def leak(self) -> bool:
        """Whether it should not be there."""
        return self.verdict not in _CALM


def kind_of(resource: Resource) -> str:
    """What people call it."""
    return "machine" if isinstance(resource, Machine) else "disk" if isinstance(resource, Disk) else "address"


def unpriced(resource: Resource) -> Price:
    """No price at all, for who does not need one."""
    return Price(None, "not asked")


def audit(
    found: Inventory,
    now: datetime,
    owner: str = "",
    known: Iterable[str] = (),
    price: PriceOf = unpriced,
    grace: timedelta = GRACE,
    done: Iterable[Operation] = (),
) -> tuple[Finding, ...]:
    """A finding for everything of ours, leaks first, then by name.

    `owner` is who asks: another's live session is FOREIGN. `known` are ids of sessions of which `owner` knows otherwise
    (the ledger's): what has no labels and was named after one of those, or after a labelled one, is that session's.
    Disks and addresses in use are part of what uses them, and no findings of their own. `done` are operations on machines: a
    disk without labels that has the name and zone of a machine that one of ours deleted was that machine's boot disk.
    """
    deleted = {(op.zone, op.target): op for op in done if op.kind == "delete" and _MARKED.fullmatch(op.request)}
    sessions = {thing.session for thing in found.everything if thing.session} | {*known}
    machines = {machine.name: machine for machine in found.machines}
    alive = {m.session or _session_of(m.name, sessions) for m in found.machines} - {""}
    judged = []
    for thing in found.everything:
        if isinstance(thing, Disk | Address) and thing.users:
            continue
        session = thing.session or _session_of(thing.name, sessions)
        if session:
            verdict, why, since = _verdict(thing, session in alive, now, grace)
            if verdict is Verdict.LIVE and owner and thing.owner not in ("", owner):
                verdict = Verdict.FOREIGN
        elif (
            isinstance(thing, Machine | Disk)
            and looks_like_ours(thing.name)
            and thing.name not in machines.keys() - {thing.name if isinstance(thing, Machine) else ""}
        ):
            verdict, since = Verdict.UNLABELLED_OURS, thing.began
            why = "no labels, and no session of that name is known here: look before you delete it"
            ended = deleted[thing.zone, thing.name].ended if (thing.zone, thing.name) in deleted else None
            if isinstance(thing, Disk) and ended and thing.began < ended < now - FRESH:
                verdict, since = Verdict.ORPHAN_DISK, ended
                why = f"the boot disk of a session's machine that was deleted {_utc(ended)}"
        else:
            continue
        due = verdict not in (*_CALM, Verdict.UNLABELLED_OURS)
        judged.append(Finding(thing, verdict, why, since, session, thing.owner, due, *_cost(thing, found, now, price)))
    return tuple(
        sorted(judged, key=lambda f: (not f.leak, f.session, kind_of(f.resource) != "machine", f.resource.name))
    )


def _session_of(name: str, sessions: Iterable[str]) -> str:
    return next((session for session in sessions if named_after(name, session)), "")


def _verdict(thing: Resource, has_machine: bool, now: datetime, grace: timedelta) -> tuple[Verdict, str, datetime]:
    deadline = thing.deadline
    ends = deadline or thing.began + WITHOUT_DEADLINE
    past = f"its deadline was {_utc(ends)}" if deadline else f"made {_utc(thing.began)}, and no deadline can be read"
    if isinstance(thing, Machine) and thing.stopped:
        since = thing.ended or thing.began
        if now - since < FRESH:
            return Verdict.ENDING, f"{thing.status} since {_utc(since)}", since
        return Verdict.STOPPED_WITH_DISK, f"{thing.status} since {_utc(since)}: nothing will start or delete it", since
    if isinstance(thing, Disk | Address) and not has_machine:
        leak = Verdict.ORPHAN_DISK if isinstance(thing, Disk) else Verdict.ORPHAN_ADDRESS
        if now - thing.began < FRESH:
            return Verdict.LIVE, f"made {_utc(thing.began)}: its machine may be on its way", thing.began
        return leak, "no machine of its session is left", thing.began
    if now - grace > ends:  # a label may name a moment after which there is none to add to
        return Verdict.PAST_DEADLINE, past, ends
    if now > ends:
        return Verdict.ENDING, f"{past}; its own layers have until {_utc(ends + grace)}", ends
    return Verdict.LIVE, f"ends by {_utc(ends)}", thing.began


def _cost(
    thing: Resource, found: Inventory, now: datetime, price: PriceOf
) -> tuple[Decimal | None, Decimal | None, tuple[str, ...]]:
    names = {name for name, _ in thing.disks} if isinstance(thing, Machine) else set[str]()
    disks = [d for d in found.disks if d.name in names and d.zone == thing.zone]
    per_hour: list[Decimal] = []
    so_far: list[Decimal] = []
    missing = sorted(names - {d.name for d in disks})
    for part in (thing, *disks):
        usd = price(part).usd_per_hour
        if usd is None:
            missing.append(part.name if part is thing else f"disk {part.name}")
            continue
        stopped = isinstance(part, Machine) and part.stopped
        ended = (part.ended or now) if isinstance(part, Machine) and stopped else now
        per_hour.append(Decimal(0) if stopped else usd)
        so_far.append(price_of(usd, part.began, ended))
    return (
        sum(per_hour, Decimal(0)) if per_hour else None,
        sum(so_far, Decimal(0)) if so_far else None,
        tuple(dict.fromkeys(missing)),
    )


def _utc(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


# -- gone -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """Whether a session is proven gone, and by what. `look_again_at`: when another list may complete the proof; None where
    something has to happen first."""

    gone: bool
    evidence: str
    look_again_at: datetime | None = None


def proof_of_gone(
    first: Inventory, second: Inventory, operations: Iterable[Operation], apart: timedelta = APART
) -> Proof:
    """`first` and `second` are all that was found of one session at two moments (`Inventory.of`), in that order, and
    `operations` what was done to its machines in any zone, read after `first`.

    An insert whose answer was lost may still be on its way to Compute Engine, so one empty list proves nothing: gone means
    that every operation that could have made a machine is DONE, and that two lists of all zones, `apart`, were empty.
    """
    silent = sorted({*first.unreachable, *second.unreachable})
    if silent:
        return Proof(False, f"{', '.join(silent)} did not answer")
    if second.everything:
        return Proof(False, f"still there: {_names(second)}")
    operations = tuple(operations)
    pending = may_still_make(operations)
    if pending:
        told = ", ".join(f"{op.kind} {op.target or op.name} in {op.zone} ({op.status})" for op in pending)
        return Proof(False, f"may still make a machine: {told}")
    if first.everything:
        return Proof(False, f"one empty list; before it, there was {_names(first)}", second.at + apart)
    between = second.at - first.at
    if between < apart:
        return Proof(False, f"two empty lists, but only {between.total_seconds():.0f} s apart", first.at + apart)
    made = [op for op in operations if op.kind in MAKES]
    done = (
        f"all {len(made)} requests that could have made a machine are done"
        if made
        else "no request for a machine is known"
    )
    return Proof(
        True,
        f"two empty lists of all zones of {second.project}, {between.total_seconds():.0f} s apart "
        f"({first.at:%H:%M:%S}, {second.at:%H:%M:%S} UTC); {done}",
    )


def _names(found: Inventory) -> str:
    return ", ".join(f"{kind_of(thing)} {thing.name} in {thing.zone}" for thing in found.everything[:5])


#: What ends a machine, in the order in which a cause outranks its consequences: a preempted one is deleted afterwards.
_ENDS = (
    ("compute.instances.preempted", "preempted"),
    ("compute.instances.hostError", "host error"),
    ("compute.instances.guestTerminate", "shut down from inside"),
    ("delete", "deleted"),
    ("stop", "stopped"),
)


#: After these a machine runs again.
_STARTS_AGAIN = ("compute.instances.automaticRestart", "start")


def code_told(machine: str, operations: Iterable[Operation]) -> tuple[int, Operation] | None:
    """The exit code that the machine told when it asked for its own deletion, and that operation; None when it told none.
    Whether or not that deletion came to be: the session had ended."""
    for op in operations:
        told = _MARKED.fullmatch(op.request)
        if op.target == machine and op.kind == "delete" and told and int(told[1], 16) != BY_US:
            return int(told[1], 16), op
    return None


def what_ended(machine: str, operations: Iterable[Operation]) -> tuple[str, Operation] | None:
    """Why a machine went, and the operation that says so; None when no operation is known.

    What came before a restart ended nothing: after a host error Compute Engine starts a machine on demand again by itself
    (`automaticRestart`). It is billed as if it had run in between, the dearer reading.
    """
    mine: list[Operation] = []
    for op in operations:
        if op.target == machine and op.kind in _STARTS_AGAIN and not op.errors:
            mine = []
        elif op.target == machine:
            mine.append(op)
    for kind, words in _ENDS:
        # The last one: a deletion that said DONE while the machine stayed was not its end.
        for op in reversed(mine):
            if op.kind == kind and not op.errors:
                return words, op
    return None
