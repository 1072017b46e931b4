"""How a session looks: as a row, as a page, as a receipt, while it starts, while it waits for its end."""

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from kimisession.cli import show
from kimisession.core.cost import UNPRICED, cents, cost_of, estimate_of, per_million, price_of, tokens_of
from kimisession.core.ledger import Phase, Session, State
from kimisession.core.lifecycle import Observation
from kimisession.core.recovery import RECOVERABLE, useful
from kimisession.node.policy import span

#: Reasons as people say them.
REASONS = {
    "idle": "idle",
    "never-used": "never used",
    "done": "done",
    "hard-cap": "hard cap",
    "budget": "budget spent",
    "user": "stopped by you",
    "setup-failed": "setup failed",
    "engine-dead": "the engine died",
    "never-ready": "never got ready",
    "stalled": "stalled: requests without tokens",
    "unknown-too-long": "traffic could not be read",
    "keeper-died": "the keeper died",
    "keeper-hung": "the keeper hung",
    "supervisor-died": "the supervisor died",
    "wrapper-died": "the wrapper died",
    "past-deadline": "past its deadline",
    "launch-failed": "the launch failed",
    "unguarded": "nothing was guarding it",
    "vanished": "the machine vanished",
    "self-deleted": "its machine deleted itself; why is not known here",
    "deleted": "somebody deleted its machine",
    "preempted": "the cloud took the machine back",
    "host-error": "the machine's host crashed",
    "ghost": "it came up after it was proven gone",
}
#: So long after the end that it foretold, a keeper is not merely slow: ending in order takes 30 s with the grace that
#: profiles have by default, and the rest is for clocks that differ.
LATE_S = 45.0
EXPECTED = frozenset({"done", "idle", "never-used", "hard-cap", "budget", "user"})

#: Ends that come next because nothing else does.
_CAPS = {"hard-cap": "the hard cap", "budget": "the budget's end"}

#: A countdown that is no screen speaks when so many seconds are left, and when what happens changes.
_MILESTONES_S = (0, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)


def seconds_since(at: datetime, now: datetime) -> float:
    """Seconds from `at` to `now`."""
    return (now - at).total_seconds()


def began_at(session: Session) -> datetime | None:
    """When its first machine began to exist."""
    return min((r.began for r in session.resources), default=None)


def ended_at(session: Session) -> datetime | None:
    """When its last resource was gone; None while one is there."""
    ends = [r.ended for r in session.resources]
    return max((e for e in ends if e), default=None) if ends and all(ends) else None


def phase_now(session: Session, seen: Observation) -> str:
    """The phase of the cold start with its progress, or the state."""
    if session.state is not State.STARTING:
        return session.state.value
    phase = str(seen.beat.get("phase", "setup"))
    return f"{phase_text(phase)}{progress_text(progress_of(seen, phase))}"


def phase_text(name: str) -> str:
    """A phase as people read it. Those of a restarted engine carry the number of its start: `load.2`."""
    phase, _, run = name.partition(".")
    return f"{phase}, start {run}" if run else phase


def progress_of(seen: Observation, phase: str) -> Any:
    """The last that was told of a phase's progress; None before anything was."""
    told = (line for line in reversed(seen.journal) if line.get("kind") == "progress" and line.get("phase") == phase)
    return next(told, None)


def progress_text(progress: Any) -> str:
    """` 45% (29/64 shards)` for a progress line; empty without one."""
    if not progress or not progress.get("total"):
        return ""
    done, total, unit = float(progress.get("done") or 0), float(progress["total"]), str(progress.get("unit", ""))
    amount = f"{show.size(done)} of {show.size(total)}" if unit == "bytes" else f"{done:g}/{total:g} {unit}".rstrip()
    return f" {done / total:.0%} ({amount})"


def spent(session: Session, now: datetime) -> Decimal:
    """Exact dollars so far."""
    return cost_of(session, now).usd


def ends_text(session: Session, seen: Observation, now: datetime) -> str:
    """What ends it next, and when, out of the keeper's own last heartbeat."""
    if session.state not in (State.STARTING, State.READY) or "ends_utc" not in seen.beat:
        return session.state.value
    late_s = now.timestamp() - float(seen.beat["ends_utc"])
    if late_s > LATE_S and seen.present:
        return f"OVERDUE by {span(late_s)}: its keeper did not end it; kimisession stop {session.name}"
    return f"in {span(left_s(seen, now))}: {evidence_text(seen)}"


def left_s(seen: Observation, now: datetime) -> float:
    """Seconds until the end that the keeper's last heartbeat foretells, if nothing changes."""
    return max(0.0, float(seen.beat.get("ends_utc", 0)) - now.timestamp())


def evidence_text(seen: Observation) -> str:
    """Why that end comes next. A cap that only comes next because of traffic is not given as if it were at fault."""
    cap = _CAPS.get(str(seen.beat.get("next")))
    if cap is None:
        return str(seen.beat.get("evidence", ""))
    return f"{cap}; busy{requests_text(seen, ' with ')}" if seen.beat.get("activity") == "busy" else cap


def requests_text(seen: Observation, before: str = "") -> str:
    """`2 requests` that run now, after `before`; empty without any."""
    running = int(seen.beat.get("running") or 0)
    return f"{before}{running} {'request' if running == 1 else 'requests'}" if running else ""


def endpoint_of(session: Session, seen: Observation) -> str:
    """Where the endpoint can be reached from here right now, without a trailing slash; empty while there is no way."""
    if session.request is None:
        return ""
    return f"http://127.0.0.1:{session.request.port}" if session.request.infra == "local" else seen.endpoint


def page(session: Session, seen: Observation, now: datetime) -> list[tuple[str, str]]:
    """Everything that a person wants to know of one session."""
    request = session.request
    rows = [("state", state_text(session, seen))]
    if request:
        rows.append(
            (
                "profile",
                f"{request.profile}, checkpoint {request.checkpoint}, {request.accelerators} on {request.infra}",
            )
        )
        if request.stand_in:
            rows.append(("note", "stand-in engine: no model is run"))
        if session.state is State.READY:
            base = endpoint_of(session, seen)
            there = f"{base}/v1" if base else f"kimisession connect {session.name} opens a way to it"
            rows.append(("endpoint", f"{there}  model {request.served_name}"))
    kv_tokens = dict(session.facts).get("kv_tokens", "")
    if kv_tokens.isdigit():
        rows.append(("kv cache", f"{int(kv_tokens):,} tokens"))
    if session.restarts:
        rows.append(("restarted", restarts_text(session, now)))
    began = began_at(session)
    if began and request:
        up = seconds_since(began, ended_at(session) or now)
        rows.append(
            (
                "spent",
                f"{cents(spent(session, now))} in {span(up)} at {cents(request.usd_per_hour)}/h{pretended(session)}",
            )
        )
    if session.live and session.state in (State.STARTING, State.READY) and session.deadline and request:
        rows.append(("next end", ends_text(session, seen, now)))
        rows.append(("hard cap", show.moment(session.deadline, now)))
        if request.budget_at and request.budget_usd is not None:
            rows.append(("budget", f"{cents(request.budget_usd)}, spent at {show.moment(request.budget_at, now)}"))
    if seen.layers and session.live:
        words = [(f"{'armed' if x.armed else 'NOT ARMED'}", x) for x in seen.layers]
        wide = max(len(word) for word, _ in words)
        rows.append(("layers", "\n".join(f"{word:<{wide}}  {x.name}: {x.evidence}" for word, x in words)))
    if session.reason:
        rows.append(("ended by", why_text(session)))
    if session.unconfirmed:
        rows.append(("UNCONFIRMED", session.unconfirmed))
    rows.extend(("damaged", text) for text in session.damage)
    return rows


def restarts_text(session: Session, now: datetime) -> str:
    """How often the engine was started anew, and with what the last time."""
    last, times = session.restarts[-1], len(session.restarts)
    often = {1: "once, at", 2: "twice, last at"}.get(times, f"{times} times, last at")
    with_what = "the flags of before" if last.flags == "as before" else last.flags
    return f"{often} {show.moment(last.at, now)} with {with_what}"


def pretended(session: Session) -> str:
    """A mark on every dollar of a session whose price is pretended, or not known."""
    if session.request and session.request.price_ground == UNPRICED:
        return " (not priced)"
    return " (pretended)" if session.request and session.request.pretended else ""


def state_text(session: Session, seen: Observation) -> str:
    """The state, with phase and progress while it starts, and why it could not be seen."""
    if seen.present is None:
        return f"{session.state.value}, but it cannot be seen now: {seen.why}"
    return phase_now(session, seen) if session.state is State.STARTING else session.state.value


def why_text(session: Session) -> str:
    """The reason of the end, with the evidence."""
    text = REASONS.get(session.reason, session.reason)
    evidence = session.ended.evidence if session.ended else ""
    if session.reason == "user" and evidence.startswith("stop asked by "):
        return f"{text} ({evidence.removeprefix('stop asked by ')})"
    if evidence.startswith(text) or (session.reason == "budget" and evidence):
        return evidence
    return f"{text}: {evidence}" if evidence else text


def summary(session: Session, seen: Observation, now: datetime) -> dict[str, Any]:
    """A session for --json."""
    request, began = session.request, began_at(session)
    base = endpoint_of(session, seen)
    return {
        "session": session.id,
        "name": session.name,
        "state": session.state.value,
        "phase": seen.beat.get("phase"),
        "profile": request.profile if request else None,
        "infra": request.infra if request else None,
        "stand_in": bool(request and request.stand_in),
        "pretended": bool(request and request.pretended),
        "endpoint": f"{base}/v1" if base and session.state is State.READY else None,
        "model": request.served_name if request else None,
        "began_at": began,
        "ready_at": session.ready_at,
        "deadline": session.deadline,
        "budget_at": request.budget_at if request else None,
        "usd_per_hour": request.usd_per_hour if request else None,
        "usd": spent(session, now),
        "seen": seen.present,
        "activity": seen.beat.get("activity"),
        "next_end": seen.beat.get("next"),
        "evidence": seen.beat.get("evidence"),
        "layers": [{"name": x.name, "armed": x.armed, "evidence": x.evidence} for x in seen.layers],
        "reason": session.reason or None,
        "unconfirmed": session.unconfirmed or None,
        "damage": list(session.damage),
    }


def rented(session: Session) -> bool:
    """Whether somebody else's machine was paid for."""
    return session.request is not None and session.request.infra != "local"


def receipt_data(session: Session, now: datetime, chain: Sequence[Session] = ()) -> dict[str, object]:
    """A receipt for --json. `chain`: itself and what it went on from."""
    cost, estimate, took = cost_of(session, now), estimate_of(session, now), useful(chain or (session,), now)
    tokens = tokens_of(session.facts)
    priced = session.request is not None and session.request.price_ground != UNPRICED
    return {
        "session": session.id,
        "name": session.name,
        "state": session.state.value,
        "reason": session.reason or None,
        "stand_in": bool(session.request and session.request.stand_in),
        "pretended": bool(session.request and session.request.pretended),
        "usd": cost.usd,
        "final": cost.final,
        "unpriced": list(cost.unpriced),
        "lines": [
            {
                "resource": line.resource.id,
                "kind": line.resource.kind,
                "began": line.resource.began,
                "ended": line.resource.ended,
                "seconds": line.seconds,
                "usd_per_hour": line.resource.usd_per_hour,
                "usd": line.usd,
                "price_ground": line.resource.price_ground,
                "evidence": line.resource.evidence or None,
            }
            for line in cost.lines
        ],
        "evidence": session.ended.evidence if session.ended else None,
        "confirmed": session.confirmed.evidence if session.confirmed else None,
        "attempts": [{"at": a.at, "place": a.place, "why": a.why} for a in session.attempts],
        "estimate": {"usd": estimate.usd, "worst_usd": estimate.worst_usd} if estimate else None,
        "useful": {
            "sessions": took.sessions,
            "usd": took.usd,
            "ready_s": took.ready_s,
            "usd_per_hour": took.usd_per_useful_hour,
        },
        "tokens": tokens,
        "usd_per_million_tokens": per_million(cost.usd, tokens) if priced else None,
    }


def receipt(session: Session, now: datetime, chain: Sequence[Session] = ()) -> None:
    """What it took, resource by resource; of a rented machine with the evidence. `chain`: itself and what it went on from."""
    if show.SETTINGS.json:
        show.as_json("receipt", receipt_data(session, now, chain))
        return
    cost, request, began, ended = cost_of(session, now), session.request, began_at(session), ended_at(session)
    heading = f"Receipt  {session.id}"
    show.out(
        show.paint(heading, "bold", sys.stdout)
        + ("  stand-in engine: no model was run" if request and request.stand_in else "")
    )
    rows = []
    if began:
        rows.append(("began", show.moment(began, now)))
    if session.first_ready_at and began:
        waited = seconds_since(began, session.first_ready_at)
        after = f"{waited:.1f} s" if waited < 60 else span(waited)
        rows.append(("ready", f"{show.moment(session.first_ready_at, now)}, after {after}"))
    if ended:
        rows.append(("ended", f"{show.moment(ended, now)}: {why_text(session)}"))
    else:
        rows.append(("state", f"{session.state.value}: everything not known to have ended is counted until now"))
    if session.unconfirmed:
        rows.append(("UNCONFIRMED", session.unconfirmed))
    for line in cost.lines:
        usd = "no price known" if line.usd is None else cents(line.usd)
        price = "" if line.resource.usd_per_hour is None else f" x {_rate(line.resource.usd_per_hour)}/h"
        took = f"{line.seconds:,.1f} s" + (f" ({span(float(line.seconds))})" if line.seconds >= 60 else "")
        evidence = f"\n{line.resource.evidence}" if rented(session) and line.resource.evidence else ""
        rows.append((line.resource.kind, f"{took}{price} = {usd}{evidence}"))
    rows.extend(("tried", f"{a.place}{': ' if a.place else ''}{a.why}") for a in session.attempts)
    rows.append(("total", f"{cents(cost.usd)}{pretended(session)}"))
    estimate = estimate_of(session, now)
    if estimate and rented(session):
        agreed = f"{cents(estimate.usd)} for this time at the agreed price, {cents(estimate.worst_usd)} at the caps"
        rows.append(("estimate", agreed))
    took_all = useful(chain or (session,), now)
    if took_all.usd_per_useful_hour is not None and (len(chain) > 1 or session.reason in RECOVERABLE):
        machines = f"{took_all.sessions} {'machine' if took_all.sessions == 1 else 'machines'}"
        hour = f"{cents(took_all.usd_per_useful_hour)} per useful hour: {cents(took_all.usd)} for {machines}"
        rows.append(("useful", f"{hour}, ready for {span(float(took_all.ready_s))}"))
    if tokens := tokens_of(session.facts):
        usd_each = per_million(cost.usd, tokens) if request and request.price_ground != UNPRICED else None
        each = f", {cents(usd_each)} per million{pretended(session)}" if usd_each is not None else ""
        rows.append(("served", f"{tokens:,} tokens generated, as last heard{each}"))
    if request:
        rows.append(("price from", request.price_ground))
    if cost.unpriced:
        rows.append(("not priced", ", ".join(cost.unpriced)))
    show.pairs(rows)


def _rate(usd_per_hour: Decimal) -> str:
    """Dollars of an hour; of a small disk or an address to the hundredth of a cent."""
    return cents(usd_per_hour) if usd_per_hour >= 1 or not usd_per_hour else f"${usd_per_hour:.4f}"


def phase_line(session: Session, phase: Phase, until: datetime, after: str = "") -> str:
    """A phase of the cold start, what it took until then, and what follows."""
    rate = session.request.usd_per_hour if session.request else Decimal(0)
    took, usd = f"{seconds_since(phase.began, until):.1f} s", cents(price_of(rate, phase.began, until))
    return f"  {phase.name.partition('.')[0]:<10}{took:>9}{usd:>9}{'  FAILED' if phase.failed else after}"


def phase_table(session: Session, seen: Observation, now: datetime) -> list[str]:
    """The cold start as a table, with the phases that run now and how far they are. Of a restart only its own phases."""
    return [
        phase_line(session, phase, phase.ended or now, "" if phase.ended else f"  {_progress_after(seen, phase.name)}")
        for phase in session.phases
        if run_of(phase) == session.run
    ]


def run_of(phase: Phase) -> int:
    """Which start of the engine a phase belongs to."""
    number = phase.name.partition(".")[2]
    return int(number) if number.isdigit() else 1


def _progress_after(seen: Observation, phase: str) -> str:
    """`45% (29/64 shards), 12s left at this pace` for a phase that runs."""
    told = [line for line in seen.journal if line.get("kind") == "progress" and line.get("phase") == phase]
    if not told:
        return "runs"
    return f"{progress_text(told[-1]).strip()}{_left(told[0], told[-1])}" or "runs"


def _left(first: Any, last: Any) -> str:
    """What is left of a phase if it goes on as between these two lines of its progress."""
    try:
        took = (datetime.fromisoformat(last["at"]) - datetime.fromisoformat(first["at"])).total_seconds()
        pace = (float(last["done"]) - float(first["done"])) / took
        return f", {span((float(last['total']) - float(last['done'])) / pace)} left at this pace" if pace > 0 else ""
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return ""


class Progress:
    """Turns one observation after another into lines: a line for each phase that ended, a warning, a countdown."""

    def __init__(self, countdown: bool) -> None:
        self.countdown = countdown
        self.told = 0
        self.run = 1
        self.warned = 0
        self.said: tuple[object, ...] = ()

    def lines(self, session: Session, seen: Observation, now: datetime) -> Iterator[str]:
        """What is new."""
        ended = [phase for phase in session.phases if phase.ended]
        for phase in ended[self.told :]:
            if run_of(phase) != self.run:
                self.run = run_of(phase)
                yield f"  start {self.run} of the engine"
            yield phase_line(session, phase, phase.ended or now)
        self.told = len(ended)
        warnings = [str(line.get("text", "")) for line in seen.journal if line.get("kind") == "warn"]
        for text in warnings[self.warned :]:
            yield f"  {show.paint('warning'.ljust(10), 'warn', sys.stderr)}{text}"
        self.warned = len(warnings)
        if self.countdown and session.state is State.READY and "ends_utc" in seen.beat:
            left, activity = left_s(seen, now), str(seen.beat.get("activity", ""))
            said = activity, seen.beat.get("next"), next((m for m in _MILESTONES_S if m >= round(left)), -1)
            if said != self.said:
                self.said = said
                cap, requests = _CAPS.get(str(seen.beat.get("next"))), requests_text(seen)
                yield f"  {activity:<10}" + (
                    f"{requests + '; ' if requests else ''}{cap} in {span(left)}"
                    if cap
                    else f"{evidence_text(seen)}, ends in {span(left)}"
                )

    def flash(self, session: Session, seen: Observation, now: datetime) -> str:
        """The line that stays while nothing is new."""
        began = began_at(session)
        up = span(seconds_since(began, now)) if began else "0s"
        return f"  {phase_now(session, seen)}  {up}  {cents(spent(session, now))}{pretended(session)}"


def utc_now() -> datetime:
    """Now, aware."""
    return datetime.now(UTC)
