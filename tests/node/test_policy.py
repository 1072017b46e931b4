"""What the policy promises: the table of tests/policy_rows.py, and what holds for every session whatever it saw."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_rows import LIMITS, ROWS, USED, Row

from kimisession.node import policy
from kimisession.node.policy import EXIT_CODES, RULES, Action, Activity, Limits, Reason, Seen, decide, span

MUTATIONS = Path(__file__).parents[1] / "core" / "policy_mutations.py"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.name))
def test_the_policy_says_what_the_table_says(row: Row) -> None:
    got = row.decide(policy)
    assert (got.action.value, got.reason.value, got.ends_at) == (row.action, row.reason, row.ends_at)
    assert row.evidence in ("", got.evidence)


def test_every_rule_has_a_row_that_fails_without_it() -> None:
    done = subprocess.run([sys.executable, str(MUTATIONS)], capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.splitlines()[1:]
    assert len(table) == len(RULES) == len(Reason)
    # What would catch it is told by name, so that a reader finds the promise.
    rules = [rule.__name__ for _, rule in RULES]
    assert [line.split()[0] for line in table] == rules


def test_every_reason_has_a_rule_an_exit_code_of_its_own_and_a_place_in_the_order() -> None:
    assert [reason for reason, _ in RULES] == list(Reason)
    assert set(EXIT_CODES) == set(Reason)
    assert len(set(EXIT_CODES.values())) == len(Reason)
    assert EXIT_CODES[Reason.USER] == 0


SECONDS = st.floats(0, 20_000, allow_nan=False)
SPANS = st.floats(0.1, 10_000, allow_nan=False)
ANY_LIMITS = st.builds(
    Limits,
    idle_s=SPANS,
    unused_s=SPANS,
    hard_cap_at=SECONDS,
    budget_at=st.none() | SECONDS,
    ready_within_s=SPANS,
    coldstart_stall_s=SPANS,
    stall_s=SPANS,
    unknown_s=SPANS,
    warn_s=SPANS,
)
ANY_SEEN = st.builds(
    Seen,
    started_at=SECONDS,
    progressed_at=SECONDS,
    phase=st.sampled_from(["boot", "load", "ready"]),
    run_at=st.none() | SECONDS,
    ready_at=st.none() | SECONDS,
    failed_step=st.none() | st.just("weights: no"),
    engine_exit=st.none() | st.integers(-15, 2),
    activity=st.sampled_from(Activity),
    running=st.integers(0, 5),
    used=st.booleans(),
    active_at=SECONDS,
    tokens_at=SECONDS,
    known_at=SECONDS,
    stop_at=st.none() | SECONDS,
)
ALIVE = ANY_SEEN.map(lambda seen: replace(seen, stop_at=None, failed_step=None, engine_exit=None))


@given(ANY_SEEN, ANY_LIMITS, SECONDS)
def test_whatever_was_seen_nothing_outlives_the_hard_cap_or_the_budget(
    seen: Seen, limits: Limits, later: float
) -> None:
    cap = limits.hard_cap_at if limits.budget_at is None else min(limits.hard_cap_at, limits.budget_at)
    assert decide(seen, limits, cap + later).action is Action.END


@given(ANY_SEEN, ANY_LIMITS, SECONDS, SECONDS)
def test_an_end_that_is_due_stays_due_while_nothing_changes(
    seen: Seen, limits: Limits, now: float, later: float
) -> None:
    if decide(seen, limits, now).action is Action.END:
        assert decide(seen, limits, now + later).action is Action.END


@given(ANY_SEEN, ANY_LIMITS, SECONDS)
def test_the_next_look_is_never_in_the_past_and_never_after_the_earliest_end(
    seen: Seen, limits: Limits, now: float
) -> None:
    decision = decide(seen, limits, now)
    dues = [due.at for _, rule in RULES if (due := rule(seen, limits, now)) is not None]
    assert decision.look_again_at >= now
    assert decision.look_again_at <= max(now, min(dues))


@given(ALIVE, ANY_LIMITS, SECONDS)
def test_looking_again_when_told_always_finds_something_new(seen: Seen, limits: Limits, now: float) -> None:
    """A keeper that were told to look again at once, for ever, would spin and fill the journal."""
    looks = 0
    while (decision := decide(seen, limits, now)).action is not Action.END:
        assert decision.look_again_at > now
        now, looks = decision.look_again_at, looks + 1
        assert looks <= len(RULES) + 1


@given(ALIVE, ANY_LIMITS, SECONDS)
def test_unknown_traffic_never_ends_a_session_as_idle_or_stalled(seen: Seen, limits: Limits, now: float) -> None:
    decision = decide(replace(seen, activity=Activity.UNKNOWN), limits, now)
    assert decision.reason not in (Reason.IDLE, Reason.UNUSED, Reason.STALLED)


@given(ALIVE, ANY_LIMITS, SECONDS)
def test_a_session_that_loads_is_never_ended_for_its_traffic(seen: Seen, limits: Limits, now: float) -> None:
    decision = decide(replace(seen, ready_at=None), limits, now)
    assert decision.reason in (Reason.HARD_CAP, Reason.BUDGET, Reason.NEVER_READY)


@given(ALIVE, ANY_LIMITS, SECONDS)
def test_activity_only_ever_puts_the_end_off(seen: Seen, limits: Limits, now: float) -> None:
    """A request that just came, with a token, never ends a session sooner."""
    quiet = replace(seen, ready_at=0.0, used=True, activity=Activity.QUIET, active_at=min(seen.active_at, now))
    active = replace(quiet, active_at=now, tokens_at=now, known_at=now)
    assert decide(active, limits, now).ends_at >= decide(quiet, limits, now).ends_at


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (-5, "0s"), (41, "41s"), (59.6, "1m"), (60, "1m"), (450, "7m 30s"), (3600, "1h"), (7500, "2h 05m")],
)
def test_a_span_is_said_as_people_say_it(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_evidence_counts_with_the_clock() -> None:
    def evidence(now: float) -> str:
        seen: dict[str, Any] = {**USED, "activity": Activity.QUIET}
        return decide(Seen(**seen), Limits(**LIMITS), now).evidence  # type: ignore[arg-type]

    assert evidence(3000) == "idle 0s of 20m, last request 14:02:00 UTC"
    assert evidence(3420) == "idle 7m of 20m, last request 14:02:00 UTC"
