"""From what was seen to what happened, and to what has to be done next. Pure: the controller acts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from kimisession.core.cost import STATED, TOKENS, UNPRICED
from kimisession.core.ledger import (
    AttemptFailed,
    EndedOnNode,
    Event,
    Extended,
    Fact,
    LaunchFailed,
    PhaseBegan,
    PhaseEnded,
    Ready,
    ResourceCreated,
    ResourceGone,
    Restarted,
    Session,
    TeardownConfirmed,
    Unconfirmed,
    apply,
)

#: How long after its deadline a machine may be seen before somebody else than its own layers ends it.
DEADLINE_GRACE = timedelta(seconds=60)

#: How long after its end nobody may know whether it is gone before every command says so: an end in order, a deletion that
#: takes its minutes, and the two lists of a proof fit in.
PROOF_WITHIN = timedelta(minutes=10)

#: For so long after a launch was asked for, an empty list proves nothing: the request may still be on its way.
LAUNCH_GRACE = timedelta(seconds=60)


@dataclass(frozen=True)
class SeenResource:
    """A resource as its provider tells it. `ended` is None while it exists."""

    id: str
    kind: str
    began: datetime
    ended: datetime | None = None
    evidence: str = ""
    usd_per_hour: Decimal | None = None  # what its provider asks for it, where that is known
    price_ground: str = ""


@dataclass(frozen=True)
class Layer:
    """One thing that ends the session by itself, and whether that was checked where it runs."""

    name: str
    armed: bool
    evidence: str


@dataclass(frozen=True)
class Observation:
    """What an engine saw of one session at `at`.

    `present` is False only when the provider says that nothing is left, and None when it could not be asked (`why`).
    `unguarded` says that something exists that no layer will end. `endpoint` is where a rented machine's endpoint can be
    reached from here, once there is a way to it.
    """

    at: datetime
    present: bool | None
    why: str = ""
    resources: tuple[SeenResource, ...] = ()
    journal: tuple[Mapping[str, Any], ...] = ()
    layers: tuple[Layer, ...] = ()
    unguarded: bool = False
    endpoint: str = ""

    @property
    def beat(self) -> Mapping[str, Any]:
        """The keeper's last heartbeat; empty when there was none."""
        return next((line for line in reversed(self.journal) if line.get("kind") == "beat"), {})


def news(session: Session, seen: Observation) -> list[Event]:
    """The events that `seen` adds to `session`. Asking twice adds nothing twice."""
    events: list[Event] = []
    request = session.request
    known = {r.id: r for r in session.resources}
    for resource in seen.resources:
        if resource.id not in known:
            price, ground = resource.usd_per_hour, resource.price_ground or "not priced"
            if request and resource.kind == "machine" and (price is None or request.price_ground == STATED):
                price = None if request.price_ground == UNPRICED else request.usd_per_hour
                ground = request.price_ground
            events.append(ResourceCreated(resource.began, resource.id, resource.kind, price, ground))
    events.extend(_from_journal(session, seen))
    events.extend(_served(session, seen))
    for resource in seen.resources:
        before = known.get(resource.id)
        if resource.ended is not None and (before is None or before.ended is None):
            events.append(ResourceGone(resource.ended, resource.id, resource.evidence))
    if seen.present is None and session.live and not session.unconfirmed and not _loud(events):
        events.extend(_unproven(session, seen, events))
    if seen.present is False and session.live and not _still_launching(session, seen, events):
        events.extend(_gone(session, seen, events))
    return events


def _served(session: Session, seen: Observation) -> Iterator[Event]:
    """What the engine generated so far, as a fact: written down when it has grown by a quarter, and once more at the end, so
    that a ledger that is looked at every second grows by a handful of records."""
    beat = seen.beat
    try:
        at, tokens = datetime.fromisoformat(beat["at"]), int(beat["tokens"])
    except (KeyError, TypeError, ValueError):
        return
    before = seen.journal[: len(seen.journal) - list(reversed(seen.journal)).index(beat)]
    run = max(
        (line["run"] for line in before if line.get("kind") == "restarted" and _is_int(line.get("run"))), default=1
    )
    name = TOKENS if run == 1 else f"{TOKENS}.{run}"
    told = dict(session.facts).get(name, "")
    known = int(told) if told.isdigit() else 0
    over = any(line.get("kind") in ("ending", "ended", "closed") for line in seen.journal)
    if at.tzinfo and tokens > known and (over or tokens * 4 >= known * 5):
        yield Fact(at, name, str(tokens))


def _is_int(value: object) -> bool:
    return isinstance(value, int)


def _loud(events: list[Event]) -> bool:
    return any(isinstance(event, Unconfirmed) for event in events)


def _unproven(session: Session, seen: Observation, events: list[Event]) -> Iterator[Event]:
    """Loud, once it should have been proven gone for so long and nobody can say that it is."""
    for event in events:  # an end or an extension that is heard only now counts now
        session = apply(session, event)
    moments = [session.teardown.at if session.teardown else None, session.ended.at if session.ended else None]
    moments += _last_moments(session)
    ends = min((moment for moment in moments if moment), default=None)
    if ends is not None and seen.at - ends > PROOF_WITHIN:
        yield Unconfirmed(seen.at, f"it was to end at {ends:%Y-%m-%d %H:%M:%S} UTC: {seen.why}")


def _last_moments(session: Session) -> list[datetime]:
    """The absolute moments at which its own layers end it: hard cap and budget."""
    # An extension that was asked for and neither confirmed nor refused may have come to be.
    cap = max((moment for moment in (session.deadline, session.extending) if moment), default=None)
    return [m for m in (cap, session.request.budget_at if session.request else None) if m is not None]


def _still_launching(session: Session, seen: Observation, events: list[Event]) -> bool:
    """Whether a command may be about to create what is not there yet."""
    if session.resources or events or session.launch_failed or session.teardown or session.ended:
        return False
    asked_at = session.launched_at or (session.request.at if session.request else None)
    return asked_at is not None and seen.at - asked_at < LAUNCH_GRACE


def _gone(session: Session, seen: Observation, events: list[Event]) -> Iterator[Event]:
    closed = {e.resource for e in events if isinstance(e, ResourceGone)}
    for resource in session.resources:
        if resource.ended is None and resource.id not in closed:
            yield ResourceGone(seen.at, resource.id, f"first seen gone: {seen.why}")
    if not session.resources and not seen.resources:
        if not session.launch_failed:
            yield LaunchFailed(seen.at, "nothing was created")
    elif not session.ended and not session.teardown and not any(isinstance(e, EndedOnNode) for e in events):
        yield _unexplained(session, seen, events)
    yield TeardownConfirmed(seen.at, seen.why)


def _unexplained(session: Session, seen: Observation, events: list[Event]) -> EndedOnNode:
    """The end of a machine that nobody heard: as far as it is known, never guessed."""
    for line in seen.journal:
        if line.get("kind") == "ending" and {"reason", "evidence"} <= line.keys():
            return EndedOnNode(seen.at, str(line["reason"]), f"{line['evidence']}; then its machine went", -1)
    gone = {"by": "Compute Engine", "kind": "deleted"}
    deleted = next((line for line in reversed(seen.journal) if gone.items() <= line.items()), None)
    if deleted is None:
        words = next((e.evidence for e in events if isinstance(e, ResourceGone)), "")
        told = f"the machine went away without a word{'; ' + words if words else ''}"
        return EndedOnNode(seen.at, "vanished", told, -1)
    reason, who = "deleted", "somebody deleted its machine"
    if deleted.get("itself"):
        reason, who = "self-deleted", "its own account deleted its machine"
    caps = ", ".join(f"{moment:%Y-%m-%d %H:%M:%S} UTC" for moment in _last_moments(session))
    told = f"{who}, and why is not known here: {deleted.get('evidence', '')}; its caps were at {caps}"
    return EndedOnNode(seen.at, reason, told, -1)


class _Facts:
    """What the ledger knows of each fact, in order: after a restart one may come back to a value that it had before."""

    def __init__(self, session: Session) -> None:
        self.known: dict[str, int] = {}
        for name, _ in session.facts:
            self.known[name] = self.known.get(name, 0) + 1
        self.latest: dict[str, str] = {}
        self.seen: dict[str, int] = {}

    def is_new(self, name: str, value: str) -> bool:
        """Whether the journal's next value of a fact is a change that the ledger does not have yet."""
        if self.latest.get(name) == value:
            return False
        self.latest[name] = value
        self.seen[name] = self.seen.get(name, 0) + 1
        return self.seen[name] > self.known.get(name, 0)


def _from_journal(session: Session, seen: Observation) -> Iterator[Event]:  # noqa: PLR0912 - one arm a kind of line
    """Journal lines as events. A line that is not understood is left out: it stays in the journal itself."""
    began = {p.name for p in session.phases}
    ended = {p.name for p in session.phases if p.ended}
    facts = _Facts(session)
    tried = {(a.place, a.why) for a in session.attempts}
    ready_run = session.run if session.ready_at else session.run - 1
    run, over, deadline = session.run, session.ended is not None, session.deadline
    loud = bool(session.unconfirmed) or not session.live
    decided: tuple[str, str] | None = None
    for line in seen.journal:
        try:
            at, kind = datetime.fromisoformat(line["at"]), line["kind"]
            if at.tzinfo is None:
                continue
            phase = str(line.get("phase", ""))
            if kind == "phase" and line["state"] == "began" and phase not in began:
                began.add(phase)
                yield PhaseBegan(at, phase)
            elif kind == "phase" and line["state"] in ("ended", "failed") and phase in began - ended:
                ended.add(phase)
                yield PhaseEnded(at, phase, line["state"] == "failed")
            elif kind == "fact" and facts.is_new(str(line["name"]), str(line["value"])):
                yield Fact(at, str(line["name"]), str(line["value"]))
            elif kind == "attempt" and (attempt := (str(line["place"]), str(line["why"]))) not in tried:
                tried.add(attempt)
                yield AttemptFailed(at, *attempt)
            elif kind == "ready" and int(line.get("run", 1)) > ready_run:
                ready_run = int(line.get("run", 1))
                yield Ready(at, ready_run)
            elif kind == "restarted" and int(line["run"]) > run:
                run = int(line["run"])
                yield Restarted(at, run, str(line["flags"]))
            elif kind == "extended":
                moved = datetime.fromtimestamp(float(line["hard_cap_utc"]), at.tzinfo)
                if deadline is None or moved > deadline:
                    deadline = moved
                    yield Extended(at, moved, "keeper")
            elif kind == "ending" and not decided:
                decided = str(line["reason"]), str(line["evidence"])
            elif kind == "ended" and not over:
                reason, evidence = str(line["reason"]), str(line["evidence"])
                if decided and decided[0] != reason:  # something died while it was ending: not why it ended
                    reason, evidence = decided[0], f"{decided[1]}; then {evidence}"
                over = True
                yield EndedOnNode(at, reason, evidence, int(line["exit_code"]))
            elif kind == "closed" and int(line["left"]) and not loud:
                loud = True
                yield Unconfirmed(at, f"{line['left']} processes could not be killed")
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            continue


def must_tear_down(session: Session, seen: Observation) -> str:
    """Why somebody has to end what was seen, right now; empty when nobody has to."""
    if seen.present is not True:
        return ""
    if not session.live:
        return "ghost"  # it was proven gone, and is there: created by a command that nobody waited for
    if session.teardown is not None:
        return session.teardown.reason
    if seen.unguarded:
        return "unguarded"
    if any(seen.at - DEADLINE_GRACE > moment for moment in _last_moments(session)):
        return "past-deadline"
    return ""
