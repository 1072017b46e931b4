"""Decide whether a session should end, and why. Never end it.

Everything is a number of seconds on ONE clock that never steps and that goes on during suspend
(`keeper.boot_clock`): a clock step must not move a deadline. Nothing here reads a clock, a file or a socket.

Each rule answers one question: *if nothing changes from now on, when does this rule end the session?* The first rule
of `RULES` whose moment has come wins; the earliest moment of all is when to look again, and is the countdown that
people read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Optional


class Activity(str, Enum):
    """What the traffic says. A failed scrape is UNKNOWN: neither busy nor idle."""

    BUSY = "busy"
    QUIET = "quiet"
    UNKNOWN = "unknown"


class Action(str, Enum):
    """What the keeper has to do."""

    KEEP = "keep"
    WARN = "warn"
    END = "end"


class Reason(str, Enum):
    """Why a session ends. The keeper's exit code for each is in `EXIT_CODES`."""

    USER = "user"
    PREEMPTED = "preempted"
    DONE = "done"
    HARD_CAP = "hard-cap"
    BUDGET = "budget"
    SETUP_FAILED = "setup-failed"
    ENGINE_DEAD = "engine-dead"
    NEVER_READY = "never-ready"
    STALLED = "stalled"
    UNKNOWN = "unknown-too-long"
    UNUSED = "never-used"
    IDLE = "idle"


#: Exit code of the keeper for each reason; 0 means that a person asked. Others are documented in notes/architecture.md.
EXIT_CODES = {
    Reason.USER: 0,
    Reason.IDLE: 10,
    Reason.UNUSED: 11,
    Reason.HARD_CAP: 12,
    Reason.BUDGET: 13,
    Reason.PREEMPTED: 14,
    Reason.DONE: 15,
    Reason.SETUP_FAILED: 20,
    Reason.ENGINE_DEAD: 21,
    Reason.NEVER_READY: 22,
    Reason.STALLED: 23,
    Reason.UNKNOWN: 24,
}


@dataclass(frozen=True)
class Limits:
    """When a session must end. `*_at` are moments on the keeper's clock, `*_s` are durations in seconds."""

    idle_s: float
    unused_s: float  # "ready but never used" has a deadline of its own
    hard_cap_at: float  # there is always one
    budget_at: float | None  # absolute: worst price at start; a cheaper price never moves it
    ready_within_s: float
    coldstart_stall_s: float  # no output and no progress at all while starting
    stall_s: float  # requests running, no token
    unknown_s: float
    warn_s: float  # how long before an end to warn


@dataclass(frozen=True)
class Seen:
    """What the keeper saw, as of `now`. All moments are on the keeper's clock."""

    started_at: float  # the keeper
    progressed_at: float  # the cold start last moved (a phase, a shard, a line)
    phase: str = "boot"
    run_at: float | None = None  # this start of the engine, when it is not the first
    ready_at: float | None = None  # one completion came back
    done_at: float | None = None  # the last step ended well, and there is no engine to start
    failed_step: str | None = None  # "weights: checksum of ... is wrong"
    engine_exit: int | None = None
    activity: Activity = Activity.UNKNOWN
    running: int = 0  # requests in the engine, waiting ones included
    used: bool = False  # anything came after the readiness probe
    active_at: float = 0.0  # last request, token or terminal input; `ready_at` when there was none
    tokens_at: float = 0.0  # last token, or last moment without running requests
    known_at: float = 0.0  # last scrape that could be read
    last_request: str = ""  # time of day, for people
    stop_at: float | None = None
    stop_by: str = ""
    preempted_at: float | None = None  # the cloud said that it takes the machine back


@dataclass(frozen=True)
class Due:
    """The moment at which a rule ends the session if nothing changes, and what a person may read about it."""

    at: float
    evidence: str


@dataclass(frozen=True)
class Decision:
    """What to do now. `reason` and `ends_at` name the rule that is due, or the one that comes next."""

    action: Action
    reason: Reason
    evidence: str
    ends_at: float
    look_again_at: float


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


def span(seconds: float) -> str:
    """Seconds as people say them: 41s, 7m, 7m 30s, 2h, 2h 05m."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    if hours:
        return f"{hours}h {minutes:02d}m" if minutes else f"{hours}h"
    if minutes:
        return f"{minutes}m {secs:02d}s" if secs else f"{minutes}m"
    return f"{secs}s"


def user(seen: Seen, limits: Limits, now: float) -> Due | None:
    """A person, or a signal, asked."""
    return None if seen.stop_at is None else Due(seen.stop_at, f"stop asked by {seen.stop_by}")


def preempted(seen: Seen, limits: Limits, now: float) -> Due | None:
    """The cloud takes the machine back within seconds: end in order what can be ended."""
    if seen.preempted_at is None:
        return None
    lost = f", {_requests(seen.running)} running" if seen.running else ""
    return Due(seen.preempted_at, f"the cloud takes this spot machine back, in phase {seen.phase}{lost}")


def done(seen: Seen, limits: Limits, now: float) -> Due | None:
    """A session without an engine, such as a seeding, is over when its steps are."""
    return None if seen.done_at is None else Due(seen.done_at, "every step ended well, and there is no engine to run")


def hard_cap(seen: Seen, limits: Limits, now: float) -> Due | None:
    """Needs no scrape: a busy session ends at its cap too."""
    return Due(limits.hard_cap_at, f"hard cap, up for {span(now - seen.started_at)}")


def over_budget(seen: Seen, limits: Limits, now: float) -> Due | None:
    """The dollar cap is a moment, so it needs neither a scrape nor a price."""
    if limits.budget_at is None:
        return None
    return Due(limits.budget_at, "the budget is spent at the price that was agreed at start")


def setup_failed(seen: Seen, limits: Limits, now: float) -> Due | None:
    """A step before the engine failed: nothing will come of waiting."""
    return None if seen.failed_step is None else Due(now, seen.failed_step)


def engine_dead(seen: Seen, limits: Limits, now: float) -> Due | None:
    """The engine's process ended, in whatever phase."""
    if seen.engine_exit is None:
        return None
    code = seen.engine_exit
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    return Due(now, f"the engine {how} in phase {seen.phase}")


def never_ready(seen: Seen, limits: Limits, now: float) -> Due | None:
    """Loading is not idling: a stall alarm (nothing moves), and a cap for a start that moves but never arrives."""
    if seen.ready_at is not None:
        return None
    stalled_at = seen.progressed_at + limits.coldstart_stall_s
    began_at = seen.started_at if seen.run_at is None else seen.run_at
    late_at = began_at + limits.ready_within_s
    if stalled_at < late_at:
        return Due(stalled_at, f"no progress in phase {seen.phase} for {span(now - seen.progressed_at)}")
    return Due(late_at, f"not ready {span(now - began_at)} after the start, in phase {seen.phase}")


def stalled(seen: Seen, limits: Limits, now: float) -> Due | None:
    """A hung engine looks busy: requests run, but no token comes."""
    if seen.ready_at is None or seen.activity is not Activity.BUSY or not seen.running:
        return None
    text = f"{_requests(seen.running)} running, no token for {span(now - seen.tokens_at)} of {span(limits.stall_s)}"
    return Due(seen.tokens_at + limits.stall_s, text)


def unknown_too_long(seen: Seen, limits: Limits, now: float) -> Due | None:
    """Not knowing has a deadline of its own, else a deaf engine would be billed to its cap."""
    if seen.ready_at is None or seen.activity is not Activity.UNKNOWN:
        return None
    text = f"traffic cannot be read for {span(now - seen.known_at)} of {span(limits.unknown_s)}"
    return Due(seen.known_at + limits.unknown_s, text)


def never_used(seen: Seen, limits: Limits, now: float) -> Due | None:
    """Ready, and nobody came."""
    if seen.ready_at is None or seen.used or seen.activity is not Activity.QUIET:
        return None
    text = f"ready for {span(now - seen.active_at)} of {span(limits.unused_s)}, no request yet"
    return Due(seen.active_at + limits.unused_s, text)


def idle(seen: Seen, limits: Limits, now: float) -> Due | None:
    """Known to be quiet, for long enough."""
    if seen.ready_at is None or not seen.used or seen.activity is not Activity.QUIET:
        return None
    last = f", last request {seen.last_request}" if seen.last_request else ""
    text = f"idle {span(now - seen.active_at)} of {span(limits.idle_s)}{last}"
    return Due(seen.active_at + limits.idle_s, text)


Rule = Callable[[Seen, Limits, float], Optional[Due]]

#: The first whose moment has come wins. People before clocks, clocks before guesses.
RULES: tuple[tuple[Reason, Rule], ...] = (
    (Reason.USER, user),
    (Reason.PREEMPTED, preempted),
    (Reason.DONE, done),
    (Reason.HARD_CAP, hard_cap),
    (Reason.BUDGET, over_budget),
    (Reason.SETUP_FAILED, setup_failed),
    (Reason.ENGINE_DEAD, engine_dead),
    (Reason.NEVER_READY, never_ready),
    (Reason.STALLED, stalled),
    (Reason.UNKNOWN, unknown_too_long),
    (Reason.UNUSED, never_used),
    (Reason.IDLE, idle),
)


def decide(seen: Seen, limits: Limits, now: float) -> Decision:
    """Say whether the session should end at `now`, and why; if not, what would end it next and when to look again."""
    dues = [(reason, due) for reason, rule in RULES if (due := rule(seen, limits, now)) is not None]
    for reason, due in dues:
        if due.at <= now:
            return Decision(Action.END, reason, due.evidence, due.at, now)
    reason, due = min(dues, key=lambda pair: pair[1].at)  # hard_cap always speaks: never empty
    warns_at = due.at - limits.warn_s
    if now < warns_at:
        return Decision(Action.KEEP, reason, due.evidence, due.at, warns_at)
    # Before readiness only the caps are worth a warning: a slow shard is shown by its progress, not by an alarm.
    warns = seen.ready_at is not None or reason in (Reason.HARD_CAP, Reason.BUDGET)
    return Decision(Action.WARN if warns else Action.KEEP, reason, due.evidence, due.at, due.at)
