"""Events, and the session that they fold into. A session IS the fold of its events: nothing else is remembered.

Any prefix folds. A record that cannot be read, or is of a kind that this version does not know, becomes a line of
`Session.damage`: reported, never fatal.
"""

import json
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True)
class Event:
    """Something that happened, or was intended, at an aware UTC moment."""

    at: datetime


@dataclass(frozen=True)
class SessionRequested(Event):
    """A person agreed to a quote. First event of every session; nothing exists yet."""

    name: str
    owner: str
    profile: str
    checkpoint: str
    infra: str
    accelerators: str
    served_name: str
    port: int
    usd_per_hour: Decimal
    price_ground: str
    idle_s: int
    deadline: datetime  # the hard cap
    latest: datetime  # what `extend` can reach
    budget_usd: Decimal | None
    budget_at: datetime | None
    engine_flags: str
    stand_in: bool  # no model is run
    pretended: bool  # the price is one that nobody bills
    recovers: str = ""  # the id of the session whose caps it goes on under
    bucket: str = ""  # where its weights are, or go to
    dearest_usd: Decimal | None = None  # an hour in the dearest zone that it might have ended up in, as the quote said


@dataclass(frozen=True)
class LaunchRequested(Event):
    """The engine is about to be asked: from here on something may exist."""


@dataclass(frozen=True)
class ResourceCreated(Event):
    """Something that is billed (or would be) exists. `at` is when it began, by the provider's clock."""

    resource: str
    kind: str  # machine, disk, address, seed-vm, bucket
    usd_per_hour: Decimal | None
    price_ground: str


@dataclass(frozen=True)
class ResourceGone(Event):
    """The provider says that it is gone. `at` is when it ended."""

    resource: str
    evidence: str


@dataclass(frozen=True)
class LaunchFailed(Event):
    """The engine could not launch. What exists all the same is known by its own events."""

    why: str


@dataclass(frozen=True)
class AttemptFailed(Event):
    """A zone, or another place, did not give a machine. Nothing of it is billed unless a resource says so."""

    place: str
    why: str


@dataclass(frozen=True)
class PhaseBegan(Event):
    """A cold-start phase began on the machine."""

    phase: str


@dataclass(frozen=True)
class PhaseEnded(Event):
    """... and ended."""

    phase: str
    failed: bool


@dataclass(frozen=True)
class Fact(Event):
    """Something that the engine said of itself, such as its KV cache's size."""

    name: str
    value: str


@dataclass(frozen=True)
class Ready(Event):
    """One completion came back. `run` counts the engine's starts on this machine, from 1."""

    run: int = 1


@dataclass(frozen=True)
class Restarted(Event):
    """The engine was stopped to start again with other flags, as start number `run`."""

    run: int
    flags: str


@dataclass(frozen=True)
class ExtendRequested(Event):
    """A person wants the hard cap moved: intent, on disk before any layer is touched."""

    deadline: datetime
    by: str


@dataclass(frozen=True)
class ExtendRefused(Event):
    """The place did not move it: the cap of before holds."""

    deadline: datetime
    why: str


@dataclass(frozen=True)
class Extended(Event):
    """The hard cap was moved: every layer has it."""

    deadline: datetime
    by: str


@dataclass(frozen=True)
class Benched(Event):
    """The endpoint was measured. `result` is the JSON of `kimisession.node.benchmark.measure`; the rest is what it was
    measured on. Changes nothing in the session."""

    label: str
    result: str
    profile: str
    flags: str  # of the engine's start that answered
    engine_version: str  # as the server said it; empty when it did not
    accelerators: str
    stand_in: bool


@dataclass(frozen=True)
class TeardownRequested(Event):
    """Intent, on disk before the act."""

    reason: str
    by: str


@dataclass(frozen=True)
class EndedOnNode(Event):
    """The machine itself said that it ended, and why."""

    reason: str
    evidence: str
    exit_code: int


@dataclass(frozen=True)
class Unconfirmed(Event):
    """A teardown was asked for and could not be proven. Stays loud until it is."""

    why: str


@dataclass(frozen=True)
class TeardownConfirmed(Event):
    """The provider says that nothing is left."""

    evidence: str


EVENTS: dict[str, type[Event]] = {
    cls.__name__: cls
    for cls in (
        SessionRequested,
        LaunchRequested,
        ResourceCreated,
        ResourceGone,
        LaunchFailed,
        AttemptFailed,
        PhaseBegan,
        PhaseEnded,
        Fact,
        Ready,
        Restarted,
        ExtendRequested,
        ExtendRefused,
        Extended,
        Benched,
        TeardownRequested,
        EndedOnNode,
        Unconfirmed,
        TeardownConfirmed,
    )
}


@dataclass(frozen=True)
class Damaged:
    """A record that this version cannot read."""

    why: str


def encode(event: Event) -> tuple[str, str]:
    """(kind, JSON). Money is a decimal string, time ISO 8601 in UTC."""

    def plain(value: Any) -> Any:
        if isinstance(value, datetime):
            return value.astimezone(UTC).isoformat()
        return str(value) if isinstance(value, Decimal) else value

    return type(event).__name__, json.dumps({f.name: plain(getattr(event, f.name)) for f in fields(event)})


def decode(kind: str, body: str) -> Event | Damaged:
    """The event, or what is wrong with the record. Never raises. Keys that this version does not know are ignored, so
    that a newer writer of the same kind can be read."""
    cls = EVENTS.get(kind)
    if cls is None:
        return Damaged(f"event of unknown kind {kind[:40]!r}")
    try:
        raw = json.loads(body)
        hints = _hints(kind)
        return cls(**{f.name: _typed(raw, f.name, hints[f.name], f.default) for f in fields(cls)})
    except (ValueError, TypeError, KeyError, InvalidOperation, RecursionError) as error:
        return Damaged(f"{kind} cannot be read: {type(error).__name__}: {error}"[:200])


@cache
def _hints(kind: str) -> dict[str, Any]:
    """The fields' types, worked out once for each kind: that was half of the time of decoding a long ledger."""
    return get_type_hints(EVENTS[kind])


def _typed(raw: dict[str, Any], name: str, hint: Any, default: Any) -> Any:
    if name not in raw and default is not MISSING:
        return default
    value = raw[name]
    options = get_args(hint) or (hint,)
    if value is None and type(None) in options:
        return None
    want = next(option for option in options if option is not type(None))
    if want is datetime:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            raise ValueError(f"{name} has no time zone")
        return moment
    if want is Decimal:
        money = Decimal(value)
        if not money.is_finite() or (money and abs(money.adjusted()) > 12):
            raise ValueError(f"{name} is not an amount of money")
        return money
    if not isinstance(value, want) or (want is int and isinstance(value, bool)):
        raise TypeError(f"{name} is {type(value).__name__}, not {want.__name__}")
    return value


class State(StrEnum):
    """Where a session stands. GONE is the only end; UNCONFIRMED is loud."""

    REQUESTED = "requested"
    LAUNCHING = "launching"
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"
    UNCONFIRMED = "unconfirmed"
    GONE = "gone"


@dataclass(frozen=True)
class Resource:
    """Something billed, from `began` to `ended` (None: still there as far as anybody knows)."""

    id: str
    kind: str
    began: datetime
    usd_per_hour: Decimal | None
    price_ground: str
    ended: datetime | None = None
    evidence: str = ""  # by what its end is known


@dataclass(frozen=True)
class Phase:
    """A phase of the cold start."""

    name: str
    began: datetime
    ended: datetime | None = None
    failed: bool = False


@dataclass(frozen=True)
class Session:
    """The fold of a session's events. See `fold`."""

    id: str
    request: SessionRequested | None = None
    launched_at: datetime | None = None
    resources: tuple[Resource, ...] = ()
    phases: tuple[Phase, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    ready_at: datetime | None = None  # of the current run
    first_ready_at: datetime | None = None
    run: int = 1
    restarts: tuple[Restarted, ...] = ()
    deadline: datetime | None = None
    extending: datetime | None = None  # asked for, and nobody knows yet whether it came to be
    launch_failed: str = ""
    attempts: tuple[AttemptFailed, ...] = ()
    teardown: TeardownRequested | None = None
    ended: EndedOnNode | None = None
    unconfirmed: str = ""
    confirmed: TeardownConfirmed | None = None
    damage: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the user called it; the id when the request was lost."""
        return (self.request.name if self.request else "") or self.id

    @property
    def state(self) -> State:
        """Where it stands; see `State`. Nothing but a confirmation makes it GONE."""
        if self.confirmed:
            return State.GONE
        if self.unconfirmed:
            return State.UNCONFIRMED
        if self.teardown or self.ended:
            return State.ENDING
        if self.ready_at:
            return State.READY
        if self.resources:
            return State.STARTING
        return State.LAUNCHING if self.launched_at else State.REQUESTED

    @property
    def live(self) -> bool:
        """Whether money may still be spent on it."""
        return self.confirmed is None

    @property
    def reason(self) -> str:
        """Why it ended: what the machine said outranks what was asked for."""
        if self.ended:
            return self.ended.reason
        if self.teardown:
            return self.teardown.reason
        return "launch-failed" if self.launch_failed else ""


def apply(session: Session, event: Event | Damaged) -> Session:  # noqa: PLR0912 - one arm an event
    """The session after one more event. Total: every event is accepted in every state, and twice is once."""
    match event:
        case Damaged(why=why):
            return replace(session, damage=(*session.damage, why))
        case SessionRequested():
            return replace(session, request=event, deadline=event.deadline)
        case LaunchRequested():
            return replace(session, launched_at=session.launched_at or event.at)
        case ResourceCreated():
            known = {r.id for r in session.resources}
            resource = Resource(event.resource, event.kind, event.at, event.usd_per_hour, event.price_ground)
            return session if event.resource in known else replace(session, resources=(*session.resources, resource))
        case ResourceGone():
            changed = tuple(
                replace(r, ended=max(event.at, r.began), evidence=event.evidence)
                if r.id == event.resource and r.ended is None
                else r
                for r in session.resources
            )
            return replace(session, resources=changed)
        case LaunchFailed(why=why):
            return replace(session, launch_failed=why)
        case AttemptFailed():
            told = {(a.place, a.why) for a in session.attempts}
            again = (event.place, event.why) in told
            return session if again else replace(session, attempts=(*session.attempts, event))
        case PhaseBegan(phase=name):
            known_phases = {p.name for p in session.phases}
            return (
                session if name in known_phases else replace(session, phases=(*session.phases, Phase(name, event.at)))
            )
        case PhaseEnded(phase=name):
            changed_phases = tuple(
                replace(p, ended=event.at, failed=event.failed) if p.name == name and p.ended is None else p
                for p in session.phases
            )
            return replace(session, phases=changed_phases)
        case Fact():
            if dict(session.facts).get(event.name) == event.value:
                return session
            return replace(session, facts=(*session.facts, (event.name, event.value)))
        case Ready() if event.run >= session.run:  # greater: the record of the restart was lost
            at = (session.ready_at if event.run == session.run else None) or event.at
            return replace(session, run=event.run, ready_at=at, first_ready_at=session.first_ready_at or event.at)
        case Restarted() if event.run > session.run:
            return replace(session, ready_at=None, run=event.run, restarts=(*session.restarts, event))
        case ExtendRequested(deadline=deadline):
            return replace(session, extending=max(deadline, session.extending or deadline))
        case ExtendRefused(deadline=deadline):
            open_ = session.extending if session.extending and session.extending > deadline else None
            return replace(session, extending=open_)
        case Extended(deadline=deadline):
            moved = max(deadline, session.deadline or deadline)
            open_ = session.extending if session.extending and session.extending > moved else None
            return replace(session, deadline=moved, extending=open_)
        case TeardownRequested():
            return replace(session, teardown=session.teardown or event)
        case EndedOnNode():
            return replace(session, ended=session.ended or event)
        case Unconfirmed(why=why):
            return replace(session, unconfirmed=why) if session.confirmed is None else session
        case TeardownConfirmed():
            return replace(session, confirmed=session.confirmed or event, unconfirmed="")
    return session


def fold(session_id: str, events: Iterable[Event | Damaged]) -> Session:
    """The session that these events make."""
    session = Session(session_id)
    for event in events:
        session = apply(session, event)
    return session
