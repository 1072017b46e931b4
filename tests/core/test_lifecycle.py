"""From what was seen to what happened: nothing is told twice, nothing is called gone that was only not seen."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from good_values import ANY_EVENT, NOON, SECOND, requested
from hypothesis import given
from hypothesis import strategies as st

from kimisession.core.ledger import (
    EndedOnNode,
    Event,
    Extended,
    Fact,
    LaunchFailed,
    LaunchRequested,
    PhaseBegan,
    PhaseEnded,
    Ready,
    ResourceCreated,
    ResourceGone,
    Restarted,
    Session,
    State,
    TeardownConfirmed,
    TeardownRequested,
    Unconfirmed,
    apply,
    fold,
)
from kimisession.core.lifecycle import (
    DEADLINE_GRACE,
    LAUNCH_GRACE,
    Observation,
    SeenResource,
    must_tear_down,
    news,
)

REQUEST = requested()
LATER = NOON + timedelta(minutes=10)
UP = SeenResource("m", "machine", NOON + SECOND)
DOWN = replace(UP, ended=NOON + 300 * SECOND, evidence="no process left")
LAUNCHED = fold("x", [REQUEST, LaunchRequested(NOON)])
RUNNING = fold("x", [REQUEST, LaunchRequested(NOON), *news(LAUNCHED, Observation(NOON + 2 * SECOND, True, "", (UP,)))])


def line(kind: str, after_s: float = 5, **fields: Any) -> Mapping[str, Any]:
    """A line of the machine's journal."""
    return {"at": (NOON + timedelta(seconds=after_s)).isoformat(), "kind": kind, "by": "keeper", **fields}


def learn(session: Session, seen: Observation) -> Session:
    """The session once that was seen."""
    events = news(session, seen)
    for event in events:
        session = apply(session, event)
    return session


def test_a_machine_is_billed_from_the_moment_that_its_provider_names() -> None:
    assert news(LAUNCHED, Observation(LATER, True, "", (UP,))) == [
        ResourceCreated(UP.began, "m", "machine", Decimal("26.00"), "a test's")
    ]


def test_what_has_no_agreed_price_gets_none() -> None:
    disk = SeenResource("d", "disk", NOON)
    (created,) = news(LAUNCHED, Observation(LATER, True, "", (disk,)))
    assert isinstance(created, ResourceCreated)
    assert created.usd_per_hour is None


def test_a_machine_that_is_seen_gone_is_billed_to_the_moment_that_its_provider_names() -> None:
    events = news(RUNNING, Observation(LATER, False, "no process left", (DOWN,)))
    assert ResourceGone(NOON + 300 * SECOND, "m", "no process left") in events
    assert events[-1] == TeardownConfirmed(LATER, "no process left")


def test_a_machine_that_is_no_longer_listed_is_billed_until_that_was_seen() -> None:
    events = news(RUNNING, Observation(LATER, False, "not listed"))
    assert [type(event) for event in events] == [ResourceGone, EndedOnNode, TeardownConfirmed]
    assert events[0].at == LATER


def test_a_machine_that_went_without_a_word_vanished() -> None:
    gone = learn(RUNNING, Observation(LATER, False, "not listed", (DOWN,)))
    assert (gone.state, gone.reason) == (State.GONE, "vanished")


@pytest.mark.parametrize(("itself", "reason"), [(True, "self-deleted"), (False, "deleted")])
def test_a_machine_that_somebody_deleted_did_not_vanish_and_nobody_guesses_why(itself: bool, reason: str) -> None:
    told = {**line("deleted", 290, evidence="deleted by vm@p, operation o"), "itself": itself, "by": "Compute Engine"}
    gone = learn(RUNNING, Observation(LATER, False, "not listed", (DOWN,), (told,)))
    assert (gone.state, gone.reason) == (State.GONE, reason)
    assert gone.ended is not None
    assert "why is not known here: deleted by vm@p, operation o" in gone.ended.evidence
    asked = apply(RUNNING, TeardownRequested(NOON, "user", "kimisession stop"))
    assert learn(asked, Observation(LATER, False, "not listed", (DOWN,), (told,))).reason == "user"


def test_a_machine_that_was_ending_when_it_was_last_heard_ended_for_that_reason() -> None:
    told = line("ending", 290, reason="idle", evidence="idle 20m of 20m")
    assert learn(RUNNING, Observation(LATER, False, "not listed", (DOWN,), (told,))).reason == "idle"
    torn = line("ending", 290)
    assert learn(RUNNING, Observation(LATER, False, "not listed", (DOWN,), (torn,))).reason == "vanished"


def test_a_machine_that_was_asked_to_go_did_not_vanish() -> None:
    asked = apply(RUNNING, TeardownRequested(NOON, "user", "kimisession stop"))
    assert learn(asked, Observation(LATER, False, "not listed", (DOWN,))).reason == "user"


def test_a_machine_that_said_why_did_not_vanish() -> None:
    said = line("ended", 290, reason="idle", evidence="idle 20m of 20m", exit_code=10)
    gone = learn(RUNNING, Observation(LATER, False, "no process left", (DOWN,), (said,)))
    assert (gone.state, gone.reason) == (State.GONE, "idle")


def test_a_launch_that_created_nothing_is_gone_and_says_so() -> None:
    events = news(LAUNCHED, Observation(LATER, False, "not listed"))
    assert events == [LaunchFailed(LATER, "nothing was created"), TeardownConfirmed(LATER, "not listed")]
    assert learn(LAUNCHED, Observation(LATER, False, "not listed")).reason == "launch-failed"


def test_the_reason_of_a_failed_launch_is_not_written_over() -> None:
    failed = apply(LAUNCHED, LaunchFailed(NOON, "no H100 in 3 zones"))
    assert learn(failed, Observation(LATER, False, "not listed")).launch_failed == "no H100 in 3 zones"


@pytest.mark.parametrize("session", [fold("x", [REQUEST]), LAUNCHED], ids=["requested", "launching"])
def test_an_empty_list_right_after_a_launch_proves_nothing(session: Session) -> None:
    assert news(session, Observation(NOON + LAUNCH_GRACE - SECOND, False, "not listed")) == []
    assert news(session, Observation(NOON + LAUNCH_GRACE, False, "not listed")) != []


@pytest.mark.parametrize("event", [LaunchFailed(NOON, "no"), TeardownRequested(NOON, "user", "me")], ids=str)
def test_a_launch_that_failed_or_was_stopped_need_not_be_waited_for(event: Event) -> None:
    assert learn(apply(LAUNCHED, event), Observation(NOON + SECOND, False, "not listed")).state is State.GONE


@pytest.mark.parametrize("session", [LAUNCHED, RUNNING], ids=["launching", "running"])
def test_not_being_able_to_ask_is_no_news(session: Session) -> None:
    assert news(session, Observation(LATER, None, "the provider does not answer")) == []


def test_processes_that_cannot_be_killed_stay_loud() -> None:
    loud = learn(RUNNING, Observation(LATER, True, "", (UP,), (line("closed", exit_code=10, left=2),)))
    assert loud.state is State.UNCONFIRMED
    assert loud.unconfirmed == "2 processes could not be killed"


def test_a_clean_close_is_not_loud() -> None:
    assert news(RUNNING, Observation(LATER, True, "", (UP,), (line("closed", exit_code=10, left=0),))) == []


def test_the_journal_becomes_phases_facts_and_readiness() -> None:
    journal = (
        line("phase", 1, phase="load", state="began"),
        line("fact", 2, name="kv_tokens", value=204800),
        line("phase", 3, phase="load", state="ended", took_s=2),
        line("phase", 3, phase="graphs", state="began"),
        line("phase", 4, phase="graphs", state="failed"),
        line("ready", 5, run=1, port=8000),
    )
    events = news(RUNNING, Observation(LATER, True, "", (UP,), journal))
    assert events == [
        PhaseBegan(NOON + SECOND, "load"),
        Fact(NOON + 2 * SECOND, "kv_tokens", "204800"),
        PhaseEnded(NOON + 3 * SECOND, "load", False),
        PhaseBegan(NOON + 3 * SECOND, "graphs"),
        PhaseEnded(NOON + 4 * SECOND, "graphs", True),
        Ready(NOON + 5 * SECOND),
    ]


def test_an_engine_that_starts_again_is_ready_again_only_when_it_says_so() -> None:
    journal = [line("ready", 5, run=1), line("restarted", 6, run=2, flags="max-model-len=16384")]
    again = learn(RUNNING, Observation(LATER, True, "", (UP,), tuple(journal)))
    assert (again.state, again.run) == (State.STARTING, 2)
    assert news(again, Observation(LATER, True, "", (UP,), tuple(journal))) == []
    journal.append(line("ready", 9, run=2))
    ready = learn(again, Observation(LATER, True, "", (UP,), tuple(journal)))
    assert (ready.state, ready.ready_at, ready.first_ready_at) == (State.READY, NOON + 9 * SECOND, NOON + 5 * SECOND)
    assert [restart.flags for restart in ready.restarts] == ["max-model-len=16384"]


def test_a_fact_that_comes_back_to_what_it_was_is_news_again() -> None:
    journal = [line("fact", i, name="kv_tokens", value=value) for i, value in enumerate((16384, 32768, 32768, 16384))]
    for told in range(1, 5):
        seen = Observation(LATER, True, "", (UP,), tuple(journal[:told]))
        known = learn(RUNNING, seen)
        assert dict(known.facts) == {"kv_tokens": str(journal[told - 1]["value"])}
        assert news(known, seen) == []


def test_a_restart_whose_record_was_torn_does_not_hide_readiness() -> None:
    torn = Observation(LATER, True, "", (UP,), (line("ready", 5, run=1), {"kind": "damaged"}, line("ready", 9, run=2)))
    ready = learn(RUNNING, torn)
    assert (ready.state, ready.run, ready.ready_at) == (State.READY, 2, NOON + 9 * SECOND)
    assert news(ready, torn) == []


def test_an_extension_that_somebody_else_made_is_learned_from_the_machine() -> None:
    moved = NOON + timedelta(hours=3)
    seen = Observation(LATER, True, "", (UP,), (line("extended", 5, hard_cap_utc=moved.timestamp()),))
    assert news(RUNNING, seen) == [Extended(NOON + 5 * SECOND, moved, "keeper")]
    assert learn(RUNNING, seen).deadline == moved


def test_an_extension_of_our_own_is_not_learned_again() -> None:
    moved = NOON + timedelta(hours=3, microseconds=123457)
    ours = apply(RUNNING, Extended(NOON, moved, "me"))
    assert news(ours, Observation(LATER, True, "", (UP,), (line("extended", hard_cap_utc=moved.timestamp()),))) == []


# -- nothing twice -----------------------------------------------------------------------------------------------------

_PHASES = st.sampled_from(["boot", "load", "load.2"])
_NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-3, 5)
JOURNAL_LINES = st.one_of(
    st.builds(line, st.just("phase"), phase=_PHASES, state=st.sampled_from(["began", "ended", "failed", "?"])),
    st.builds(line, st.just("fact"), name=st.sampled_from(["kv_tokens", "gpu"]), value=st.integers(0, 2)),
    st.builds(line, st.just("ready"), run=st.integers(0, 3)),
    st.builds(line, st.just("restarted"), run=st.integers(0, 3), flags=st.just("x=1")),
    st.builds(line, st.just("extended"), hard_cap_utc=_NUMBERS | st.floats(1.79e9, 1.8e9)),
    st.builds(line, st.just("ended"), reason=st.just("idle"), evidence=st.just("idle"), exit_code=_NUMBERS),
    st.builds(line, st.just("closed"), left=_NUMBERS, exit_code=st.just(0)),
    st.builds(line, st.just("beat")),
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["ready", "phase", "damaged", "ended"])},
        optional={"at": st.sampled_from(["2026-11-20T12:00:00", "noon", 5, None])},
    ),
)
RESOURCES = st.builds(
    SeenResource,
    st.sampled_from(["m", "disk"]),
    st.sampled_from(["machine", "disk"]),
    st.just(NOON),
    st.none() | st.just(NOON + 60 * SECOND),
)
OBSERVATIONS = st.builds(
    Observation,
    st.just(LATER) | st.just(NOON + SECOND),
    st.sampled_from([True, False, None]),
    st.just("seen"),
    st.lists(RESOURCES, max_size=3).map(tuple),
    st.lists(JOURNAL_LINES, max_size=12).map(tuple),
)
SESSIONS = st.lists(ANY_EVENT, max_size=8).map(lambda events: fold("x", events)) | st.sampled_from([LAUNCHED, RUNNING])


def test_an_extension_that_is_heard_only_now_keeps_the_old_cap_from_being_loud() -> None:
    assert RUNNING.deadline is not None
    late = RUNNING.deadline + timedelta(minutes=11)
    extended = line("extended", hard_cap_utc=(RUNNING.deadline + timedelta(hours=1)).timestamp())
    assert any(isinstance(event, Unconfirmed) for event in news(RUNNING, Observation(late, None, "silent")))
    told = news(RUNNING, Observation(late, None, "silent", journal=(extended,)))
    assert [type(event) for event in told] == [Extended]


@given(SESSIONS, OBSERVATIONS)
def test_the_same_observation_is_news_once(session: Session, seen: Observation) -> None:
    known = learn(session, seen)
    again = news(known, seen)
    # A journal may tell an end before its beginning; then one more look settles it.
    assert not again or not news(learn(known, seen), seen)
    assert not any(isinstance(event, TeardownConfirmed | LaunchFailed | Unconfirmed) for event in again)


@given(SESSIONS, OBSERVATIONS)
def test_a_session_is_gone_only_when_the_provider_says_that_nothing_is_left(
    session: Session, seen: Observation
) -> None:
    known = learn(session, seen)
    if known.state is State.GONE:
        assert session.state is State.GONE or seen.present is False


@given(SESSIONS, OBSERVATIONS)
def test_every_piece_of_news_is_an_event_with_a_zone(session: Session, seen: Observation) -> None:
    for event in news(session, seen):
        assert event.at.tzinfo is not None


def test_a_journal_that_says_everything_strangely_is_read_to_its_end() -> None:
    odd = (line("extended", hard_cap_utc=1e300), line("closed", left=float("inf")), line("restarted", run="x"))
    assert news(RUNNING, Observation(LATER, True, "", (UP,), (*odd, line("ready", 5)))) == [Ready(NOON + 5 * SECOND)]


def test_a_phase_whose_beginning_was_torn_off_ends_unheard_instead_of_for_ever() -> None:
    seen = Observation(LATER, True, "", (UP,), ({"kind": "damaged"}, line("phase", phase="load", state="ended")))
    assert news(RUNNING, seen) == []


def test_leftovers_of_a_session_that_is_proven_gone_are_old_news() -> None:
    seen = Observation(LATER, False, "no process left", (DOWN,), (line("closed", left=2),))
    gone = learn(RUNNING, seen)
    assert gone.state is State.GONE
    assert news(gone, seen) == []


# -- who has to be ended -----------------------------------------------------------------------------------------------

SEEN_UP = Observation(LATER, True, "", (UP,))


def test_a_guarded_session_before_its_deadline_is_left_alone() -> None:
    assert must_tear_down(RUNNING, SEEN_UP) == ""


def test_what_nothing_guards_is_torn_down_at_once() -> None:
    assert must_tear_down(RUNNING, replace(SEEN_UP, unguarded=True)) == "unguarded"


def test_what_a_person_asked_to_end_is_torn_down_until_it_is_gone() -> None:
    asked = apply(RUNNING, TeardownRequested(NOON, "user", "kimisession stop"))
    assert must_tear_down(asked, replace(SEEN_UP, unguarded=True)) == "user"


@pytest.mark.parametrize("budget", [False, True], ids=["hard cap", "budget"])
def test_its_own_layers_have_a_minute_after_the_deadline(budget: bool) -> None:
    ends = NOON + timedelta(hours=1 if budget else 2)
    session = RUNNING
    if budget:
        session = replace(RUNNING, request=requested(budget_usd=Decimal(26), budget_at=ends))
    assert must_tear_down(session, replace(SEEN_UP, at=ends + DEADLINE_GRACE)) == ""
    assert must_tear_down(session, replace(SEEN_UP, at=ends + DEADLINE_GRACE + SECOND)) == "past-deadline"


def test_an_extension_moves_the_moment_at_which_others_step_in() -> None:
    extended = apply(RUNNING, Extended(NOON, NOON + timedelta(hours=3), "me"))
    assert must_tear_down(extended, replace(SEEN_UP, at=NOON + timedelta(hours=2, minutes=5))) == ""


def test_a_machine_of_a_session_that_was_proven_gone_is_a_ghost_and_goes() -> None:
    gone = apply(RUNNING, TeardownConfirmed(NOON, "not listed"))
    assert must_tear_down(gone, SEEN_UP) == "ghost"


@pytest.mark.parametrize("present", [False, None])
def test_what_is_not_seen_is_not_torn_down(present: bool | None) -> None:
    assert must_tear_down(RUNNING, Observation(LATER + timedelta(days=9), present, unguarded=True)) == ""


@given(SESSIONS, OBSERVATIONS)
def test_whatever_was_seen_there_is_an_answer(session: Session, seen: Observation) -> None:
    assert isinstance(must_tear_down(session, seen), str)


def test_restarts_of_a_story_are_kept() -> None:
    restarted = Restarted(NOON, 2, "max-model-len=16384")
    assert apply(apply(RUNNING, Ready(NOON)), restarted).state is State.STARTING


def beat(seconds: int, tokens: object) -> Mapping[str, Any]:
    return line("beat", seconds, tokens=tokens)


def told_tokens(session: Session, *journal: Mapping[str, Any]) -> list[tuple[str, str]]:
    events = news(session, Observation(LATER, True, "", (UP,), journal))
    return [(e.name, e.value) for e in events if isinstance(e, Fact) and e.name.startswith("tokens")]


def test_what_was_generated_is_written_down_when_it_has_grown_by_a_quarter_and_at_the_end() -> None:
    assert told_tokens(RUNNING, beat(10, 0)) == []
    assert told_tokens(RUNNING, beat(10, 4), beat(20, 100)) == [("tokens", "100")]
    known = apply(RUNNING, Fact(NOON, "tokens", "100"))
    assert told_tokens(known, beat(30, 124)) == []
    assert told_tokens(known, beat(30, 125)) == [("tokens", "125")]
    assert told_tokens(known, beat(30, 101), line("ending", 31, reason="idle", evidence="idle")) == [("tokens", "101")]
    assert told_tokens(known, beat(30, 100), line("ending", 31, reason="idle", evidence="idle")) == []


def test_what_another_start_of_the_engine_generated_is_counted_by_itself() -> None:
    known = apply(RUNNING, Fact(NOON, "tokens", "100"))
    again = line("restarted", 15, run=2, flags="")
    assert told_tokens(known, beat(10, 100), again, beat(20, 7)) == [("tokens.2", "7")]
    assert told_tokens(known, beat(20, "many")) == []
