"""The policy as a table: one good session, one field varied a row, each rule at, just before and just after its limit.

Rows speak in plain words, so that they run on `kimisession.node.policy` and on any mutated copy of it alike.
"""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

#: The limits of a session on eight GPUs, on a clock that began at 0.
LIMITS = {
    "idle_s": 1200.0,
    "unused_s": 1800.0,
    "hard_cap_at": 7200.0,
    "budget_at": None,
    "ready_within_s": 2700.0,
    "coldstart_stall_s": 600.0,
    "stall_s": 300.0,
    "unknown_s": 300.0,
    "warn_s": 120.0,
}
#: A cold start in its fifth minute.
LOADING = {"started_at": 0.0, "progressed_at": 300.0, "phase": "load"}
#: Ready after ten minutes, last used at 3000.
USED = {
    "started_at": 0.0,
    "progressed_at": 600.0,
    "phase": "ready",
    "ready_at": 600.0,
    "activity": "quiet",
    "used": True,
    "active_at": 3000.0,
    "tokens_at": 3000.0,
    "known_at": 3000.0,
    "last_request": "14:02:00 UTC",
}
FRESH = {**USED, "used": False, "active_at": 600.0, "tokens_at": 600.0, "last_request": ""}
BUSY = {**USED, "activity": "busy", "running": 3}
DEAF = {**USED, "activity": "unknown"}


@dataclass(frozen=True)
class Row:
    """At `now`, this was seen: then `action` for `reason`, `ends_at` and, where given, this evidence."""

    name: str
    seen: dict[str, Any]
    now: float
    action: str
    reason: str
    ends_at: float
    evidence: str = ""
    limits: dict[str, Any] = field(default_factory=dict)

    def decide(self, policy: ModuleType) -> Any:
        """What this copy of the policy says."""
        seen = {**self.seen, "activity": policy.Activity(self.seen.get("activity", "unknown"))}
        return policy.decide(policy.Seen(**seen), policy.Limits(**{**LIMITS, **self.limits}), self.now)

    def holds(self, policy: ModuleType) -> bool:
        """Whether this copy of the policy says what the row says."""
        try:
            got = self.decide(policy)
        except Exception:  # a policy that raises decides nothing
            return False
        said = (got.action.value, got.reason.value, got.ends_at)
        return said == (self.action, self.reason, self.ends_at) and self.evidence in ("", got.evidence)


def around(name: str, seen: dict[str, Any], at: float, reason: str, before: str, **limits: Any) -> list[Row]:
    """Just before, at and just after the moment at which `reason` ends the session. `before` is keep or warn."""
    return [
        Row(f"{name}: not a moment early", seen, at - 0.001, before, reason, at, limits=limits),
        Row(f"{name}: on the moment", seen, at, "end", reason, at, limits=limits),
        Row(f"{name}: a moment late", seen, at + 0.001, "end", reason, at, limits=limits),
    ]


#: Started again with other flags in its second hour.
AGAIN = {**LOADING, "run_at": 4000.0, "progressed_at": 4000.0}

AT_ONCE = {"stop_at": 1000.0, "stop_by": "kimisession stop"}
DEAD = {**LOADING, "engine_exit": 1}

ROWS = [
    # each rule at its limit
    *around("idle", USED, 4200.0, "idle", "warn"),
    *around("ready and never used", FRESH, 2400.0, "never-used", "warn"),
    *around("traffic cannot be read", DEAF, 3300.0, "unknown-too-long", "warn"),
    *around("requests run without a token", BUSY, 3300.0, "stalled", "warn"),
    *around("nothing moves while loading", LOADING, 900.0, "never-ready", "keep"),
    *around("it moves and never arrives", {**LOADING, "progressed_at": 2690.0}, 2700.0, "never-ready", "keep"),
    *around("a restart that never arrives", {**AGAIN, "progressed_at": 6650.0}, 6700.0, "never-ready", "keep"),
    Row("a restart has its own time to get ready", AGAIN, 4100.0, "keep", "never-ready", 4600.0),
    *around("a busy session at its cap", {**BUSY, "tokens_at": 7199.0}, 7200.0, "hard-cap", "warn"),
    *around("a loading session at its cap", LOADING, 500.0, "hard-cap", "warn", hard_cap_at=500.0),
    *around("a deaf session at its cap", DEAF, 3100.0, "hard-cap", "warn", hard_cap_at=3100.0),
    *around("a busy session out of money", {**BUSY, "tokens_at": 5000.0}, 5000.0, "budget", "warn", budget_at=5000.0),
    *around("a loading session out of money", LOADING, 500.0, "budget", "warn", budget_at=500.0),
    # what ends at once
    Row("a person asked", {**USED, **AT_ONCE}, 3001.0, "end", "user", 1000.0, "stop asked by kimisession stop"),
    Row("a person asked while it loads", {**LOADING, **AT_ONCE}, 1000.0, "end", "user", 1000.0),
    Row("a step failed", {**LOADING, "failed_step": "weights: no"}, 400.0, "end", "setup-failed", 400.0, "weights: no"),
    Row("the engine exited", DEAD, 400.0, "end", "engine-dead", 400.0, "the engine exited with code 1 in phase load"),
    Row(
        "the engine was killed",
        {**USED, "engine_exit": -9},
        3001.0,
        "end",
        "engine-dead",
        3001.0,
        "the engine was killed by signal 9 in phase ready",
    ),
    Row("an engine that ends with 0 is dead as well", {**USED, "engine_exit": 0}, 3001.0, "end", "engine-dead", 3001.0),
    Row(
        "the cloud takes the machine back",
        {**BUSY, "preempted_at": 3000.0},
        3001.0,
        "end",
        "preempted",
        3000.0,
        "the cloud takes this spot machine back, in phase ready, 3 requests running",
    ),
    Row("the last step ended, and there is no engine", {**LOADING, "done_at": 400.0}, 400.0, "end", "done", 400.0,
        "every step ended well, and there is no engine to run"),
    # who goes first when several are due
    Row("a preemption outranks the cap", {**USED, "preempted_at": 7300.0}, 9000.0, "end", "preempted", 7300.0),
    Row("what is done is done, and the cap is not blamed", {**LOADING, "done_at": 7190.0}, 7201.0, "end", "done", 7190.0),
    Row("a person outranks the cap", {**BUSY, **AT_ONCE}, 9000.0, "end", "user", 1000.0),
    Row("the cap outranks the budget", USED, 9000.0, "end", "hard-cap", 7200.0, limits={"budget_at": 5000.0}),
    Row("the cap outranks a death", {**USED, "engine_exit": 1}, 9000.0, "end", "hard-cap", 7200.0),
    Row("the budget outranks a death", DEAD, 600.0, "end", "budget", 500.0, limits={"budget_at": 500.0}),
    Row("a failed step outranks a dead engine", {**DEAD, "failed_step": "x"}, 400.0, "end", "setup-failed", 400.0),
    Row("a death outranks a stall", {**BUSY, "engine_exit": 1}, 3400.0, "end", "engine-dead", 3400.0),
    Row("a death outranks a late start", DEAD, 2800.0, "end", "engine-dead", 2800.0),
    # what is told beforehand is what comes first
    Row("the nearest end is told", USED, 3420.0, "keep", "idle", 4200.0, "idle 7m of 20m, last request 14:02:00 UTC"),
    Row("the budget is told when it is nearer", USED, 3420.0, "keep", "budget", 4000.0, limits={"budget_at": 4000.0}),
    Row("the cap is told when it is nearer", USED, 3420.0, "keep", "hard-cap", 4000.0, limits={"hard_cap_at": 4000.0}),
    # unknown is neither busy nor idle
    Row("unknown is not idle", {**DEAF, "known_at": 9000.0}, 9000.0, "keep", "unknown-too-long", 9300.0,
        limits={"hard_cap_at": 99999.0}),
    Row("unknown is not a stall", {**DEAF, "running": 3, "known_at": 9000.0}, 9000.0, "keep", "unknown-too-long",
        9300.0, limits={"hard_cap_at": 99999.0}),
    Row("unknown is not never used", {**FRESH, "activity": "unknown", "known_at": 9000.0}, 9000.0, "keep",
        "unknown-too-long", 9300.0, limits={"hard_cap_at": 99999.0}),
    Row("busy is not idle", {**BUSY, "tokens_at": 6900.0}, 6901.0, "keep", "hard-cap", 7200.0,
        limits={"warn_s": 10.0}),
    Row("busy without running requests does not stall", {**BUSY, "running": 0}, 5000.0, "keep", "hard-cap", 7200.0),
    # loading is not idling
    Row("loading is not idling", {**LOADING, "activity": "quiet", "progressed_at": 2000.0}, 2001.0, "keep",
        "never-ready", 2600.0),
    Row("loading is not unknown", {**LOADING, "progressed_at": 2000.0}, 2001.0, "keep", "never-ready", 2600.0,
        "no progress in phase load for 1s"),
    Row("a start that moves is given its time", {**LOADING, "progressed_at": 2650.0}, 2651.0, "keep", "never-ready",
        2700.0, "not ready 44m 11s after the start, in phase load"),
    Row("a slow start is not warned of", LOADING, 890.0, "keep", "never-ready", 900.0),
    # warnings
    Row("a warning comes warn_s before the end", USED, 4080.0, "warn", "idle", 4200.0),
    Row("... and not before", USED, 4079.999, "keep", "idle", 4200.0),
    Row("a stall's evidence", BUSY, 3060.0, "keep", "stalled", 3300.0,
        "3 requests running, no token for 1m of 5m"),
    Row("unknown's evidence", DEAF, 3060.0, "keep", "unknown-too-long", 3300.0,
        "traffic cannot be read for 1m of 5m"),
    Row("unused's evidence", FRESH, 660.0, "keep", "never-used", 2400.0, "ready for 1m of 30m, no request yet"),
    Row("the cap's evidence", {**BUSY, "tokens_at": 7190.0}, 7200.0, "end", "hard-cap", 7200.0,
        "hard cap, up for 2h"),
    Row("the budget's evidence", USED, 3500.0, "end", "budget", 3500.0,
        "the budget is spent at the price that was agreed at start", limits={"budget_at": 3500.0}),
]  # fmt: skip
