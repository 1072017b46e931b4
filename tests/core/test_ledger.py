"""The ledger: every event comes back as it was written, any prefix folds, and only a confirmation makes a session gone."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from good_values import ANY_EVENT, MOMENTS, NOON, SECOND, events_of, requested
from hypothesis import given
from hypothesis import strategies as st

from kimisession.core.cost import cost_of
from kimisession.core.ledger import (
    EVENTS,
    Damaged,
    EndedOnNode,
    Event,
    Extended,
    LaunchRequested,
    PhaseBegan,
    PhaseEnded,
    Ready,
    ResourceCreated,
    ResourceGone,
    SessionRequested,
    State,
    TeardownConfirmed,
    TeardownRequested,
    Unconfirmed,
    apply,
    decode,
    encode,
    fold,
)

CREATED = ResourceCreated(NOON, "machine", "machine", Decimal("26.00"), "a test's")
GONE = ResourceGone(NOON + 60 * SECOND, "machine", "no process left")
CONFIRMED = TeardownConfirmed(NOON + 61 * SECOND, "nothing is left")


# -- the codec ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVENTS)
def test_an_event_comes_back_as_it_was_written(kind: str) -> None:
    @given(events_of(kind))
    def round_trip(event: Event) -> None:
        name, body = encode(event)
        assert name == kind
        assert decode(name, body) == event

    round_trip()


def test_a_moment_of_any_zone_is_written_in_utc() -> None:
    tokyo = datetime(2026, 11, 20, 21, 0, tzinfo=timezone(timedelta(hours=9)))
    assert json.loads(encode(Ready(tokyo))[1])["at"] == "2026-11-20T12:00:00+00:00"


def test_money_is_written_as_a_decimal_string() -> None:
    assert json.loads(encode(CREATED)[1])["usd_per_hour"] == "26.00"


def test_keys_of_a_newer_version_are_ignored() -> None:
    kind, body = encode(CREATED)
    newer = json.dumps({**json.loads(body), "carbon_grams": 12, "region": {"name": "x"}})
    assert decode(kind, newer) == CREATED


def test_a_kind_of_a_newer_version_is_damage_that_names_it() -> None:
    damaged = decode("ResourceMigrated", "{}")
    assert isinstance(damaged, Damaged)
    assert "ResourceMigrated" in damaged.why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"usd_per_hour": "NaN"}, "money"),
        ({"usd_per_hour": "Infinity"}, "money"),
        ({"usd_per_hour": "1e999"}, "money"),
        ({"usd_per_hour": "a lot"}, "InvalidOperation"),
        ({"usd_per_hour": []}, "Error"),
        ({"at": "2026-11-20T12:00:00"}, "no time zone"),
        ({"at": "yesterday"}, "ValueError"),
        ({"at": 1700000000}, "TypeError"),
        ({"kind": None}, "TypeError"),
        ({"kind": 5}, "TypeError"),
    ],
)
def test_a_wrong_value_is_damage_that_says_what_is_wrong(change: dict[str, object], why: str) -> None:
    kind, body = encode(CREATED)
    damaged = decode(kind, json.dumps({**json.loads(body), **change}))
    assert isinstance(damaged, Damaged)
    assert why in damaged.why
    assert len(damaged.why) <= 200


def test_a_truth_value_is_no_number_of_seconds() -> None:
    kind, body = encode(requested())
    assert isinstance(decode(kind, json.dumps({**json.loads(body), "idle_s": True})), Damaged)


@pytest.mark.parametrize("key", json.loads(encode(CREATED)[1]))
def test_a_missing_key_is_damage(key: str) -> None:
    kind, body = encode(CREATED)
    raw = json.loads(body)
    del raw[key]
    assert isinstance(decode(kind, json.dumps(raw)), Damaged)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([*EVENTS, "Unheard", ""]), st.text(max_size=60) | JSON.map(json.dumps))
def test_no_text_whatsoever_makes_reading_fail(kind: str, body: str) -> None:
    assert isinstance(decode(kind, body), Event | Damaged)


@given(st.sampled_from(sorted(EVENTS)), st.data())
def test_no_value_whatsoever_makes_reading_fail(kind: str, data: st.DataObject) -> None:
    _, body = encode(data.draw(events_of(kind)))
    raw = json.loads(body)
    raw[data.draw(st.sampled_from(sorted(raw)))] = data.draw(JSON)
    event = decode(kind, json.dumps(raw))
    session = fold("x", [event])
    cost_of(session, NOON)
    assert session.damage or not isinstance(event, Damaged)


def test_a_record_nested_without_end_is_damage() -> None:
    assert isinstance(decode("Ready", "[" * 200_000), Damaged)


@given(ANY_EVENT, st.data())
def test_a_torn_record_is_damage(event: Event, data: st.DataObject) -> None:
    kind, body = encode(event)
    torn = body[: data.draw(st.integers(0, len(body) - 1))]
    assert isinstance(decode(kind, torn), Damaged)


# -- the fold ----------------------------------------------------------------------------------------------------------

STORY: list[Event] = [
    requested(),
    LaunchRequested(NOON),
    CREATED,
    PhaseBegan(NOON + SECOND, "load"),
    PhaseEnded(NOON + 9 * SECOND, "load", False),
    Ready(NOON + 10 * SECOND),
    TeardownRequested(NOON + 50 * SECOND, "user", "kimisession stop"),
    EndedOnNode(NOON + 55 * SECOND, "user", "stop asked by kimisession stop", 0),
    GONE,
    CONFIRMED,
]


def test_a_story_goes_through_its_states_in_order() -> None:
    states = [fold("x", STORY[:length]).state for length in range(1, len(STORY) + 1)]
    assert states == [
        State.REQUESTED,
        State.LAUNCHING,
        State.STARTING,
        State.STARTING,
        State.STARTING,
        State.READY,
        State.ENDING,
        State.ENDING,
        State.ENDING,
        State.GONE,
    ]


def test_unconfirmed_outranks_everything_but_a_confirmation() -> None:
    loud = Unconfirmed(NOON + 56 * SECOND, "2 processes could not be killed")
    assert fold("x", [*STORY[:8], loud]).state is State.UNCONFIRMED
    assert fold("x", [*STORY[:8], loud, Ready(NOON + 57 * SECOND), GONE]).state is State.UNCONFIRMED
    assert fold("x", [*STORY[:8], loud, GONE, CONFIRMED]).state is State.GONE


def test_what_the_machine_said_outranks_what_was_asked_for() -> None:
    asked = TeardownRequested(NOON, "user", "kimisession stop")
    said = EndedOnNode(NOON, "idle", "idle 20m of 20m", 10)
    assert fold("x", [requested(), asked, said]).reason == "idle"
    assert fold("x", [requested(), said, asked]).reason == "idle"


@given(st.lists(ANY_EVENT, max_size=20), st.data())
def test_any_prefix_in_any_order_folds(events: list[Event], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(events))
    for length in range(len(shuffled) + 1):
        session = fold("x", shuffled[:length])
        assert session.name
        assert isinstance(session.state, State)
        assert isinstance(session.reason, str)
        cost_of(session, NOON)


@given(st.lists(ANY_EVENT | st.builds(Damaged, st.text(max_size=9)), max_size=20))
def test_a_session_is_gone_exactly_when_that_was_confirmed(events: list[Event | Damaged]) -> None:
    session = fold("x", events)
    confirmed = any(isinstance(event, TeardownConfirmed) for event in events)
    assert (session.state is State.GONE) == confirmed
    assert session.live == (not confirmed)


@given(st.lists(ANY_EVENT, max_size=20))
def test_damage_in_between_changes_nothing_but_the_report(events: list[Event]) -> None:
    torn: list[Event | Damaged] = []
    for event in events:
        torn += [event, Damaged("torn")]
    got = fold("x", torn)
    assert got.damage == ("torn",) * len(events)
    assert fold("x", events) == replace(got, damage=())


@given(st.lists(ANY_EVENT, max_size=12), ANY_EVENT)
def test_an_event_told_twice_in_a_row_is_told_once(events: list[Event], event: Event) -> None:
    once = apply(fold("x", events), event)
    assert apply(once, event) == once


@given(st.lists(MOMENTS, min_size=1))
def test_a_hard_cap_never_moves_back(moments: list[datetime]) -> None:
    extended = [Extended(NOON, moment, "someone") for moment in moments]
    assert fold("x", [requested(), *extended]).deadline == max(requested().deadline, *moments)


def test_a_session_whose_request_was_lost_goes_by_its_id() -> None:
    session = fold("demo-0123", [Damaged("SessionRequested cannot be read"), CREATED])
    assert session.name == "demo-0123"
    assert session.state is State.STARTING


# -- cost --------------------------------------------------------------------------------------------------------------


@given(st.lists(ANY_EVENT, max_size=15), MOMENTS, MOMENTS)
def test_cost_never_falls_as_time_passes(events: list[Event], one: datetime, other: datetime) -> None:
    session = fold("x", events)
    assert cost_of(session, min(one, other)).usd <= cost_of(session, max(one, other)).usd


@given(st.lists(ANY_EVENT, max_size=15))
def test_cost_never_falls_as_events_come_in_their_own_time(events: list[Event]) -> None:
    events.sort(key=lambda event: event.at)
    usd = [cost_of(fold("x", events[: n + 1]), event.at).usd for n, event in enumerate(events)]
    assert usd == sorted(usd)


@given(st.lists(ANY_EVENT, max_size=15), MOMENTS)
def test_a_receipt_is_final_only_after_a_confirmation(events: list[Event], now: datetime) -> None:
    cost = cost_of(fold("x", events), now)
    if cost.final:
        assert any(isinstance(event, TeardownConfirmed) for event in events)
        assert not any(line.running for line in cost.lines)
        assert cost_of(fold("x", events), datetime(2100, 1, 1, tzinfo=UTC)) == cost


def test_the_request_is_the_first_thing_that_is_known() -> None:
    session = fold("x", [requested(name="other")])
    assert isinstance(session.request, SessionRequested)
    assert (session.name, session.deadline) == ("other", NOON + timedelta(hours=2))
