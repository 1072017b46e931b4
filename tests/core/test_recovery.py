"""Going on after a machine was taken back never moves a cap, and says what an hour of use came to."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from good_values import NOON, PROFILE, choices, requested

from kimisession.core.ledger import EndedOnNode, Ready, ResourceCreated, ResourceGone, Session, TeardownConfirmed, fold
from kimisession.core.plan.prices import Offer
from kimisession.core.quote import Quote, launch_spec, make_quote
from kimisession.core.recovery import next_zones, under_the_same_caps, useful, zones_of

HOUR = timedelta(hours=1)


def offer(zone: str, spot: str | None) -> Offer:
    return Offer("gcp", zone[:-2], zone, "a3-highgpu-8g", Decimal(90), None if spot is None else Decimal(spot))


A, B, C = offer("us-central1-a", "20"), offer("us-east5-a", "25"), offer("europe-west4-b", "40")


def lost(**request: Any) -> Session:
    """A session of 26 dollars an hour that was ready after twenty minutes and taken back after an hour."""
    given = {"infra": "gcp", "deadline": NOON + 4 * HOUR, "latest": NOON + 8 * HOUR, **request}
    return fold(
        "demo-0123abcd",
        [
            requested(**given),
            ResourceCreated(NOON, "gcp/us-central1-a/node", "machine", Decimal(26), "a test's"),
            Ready(NOON + HOUR / 3),
            EndedOnNode(NOON + HOUR, "preempted", "taken back", 14),
            ResourceGone(NOON + HOUR, "gcp/us-central1-a/node", "preempted"),
            TeardownConfirmed(NOON + HOUR, "two empty lists"),
        ],
    )


def again(minutes: int = 65, **changes: Any) -> Quote:
    """What the same command would agree to now, on its own."""
    return make_quote(PROFILE, choices(infra="gcp", **changes), NOON + timedelta(minutes=minutes))


def test_the_next_zones_are_the_cheapest_that_took_nothing_back_and_cost_no_more_than_was_agreed() -> None:
    offers = (A, B, C, offer("asia-east1-c", None))
    assert next_zones(offers, zones_of([lost()]), Decimal(26)) == (B,)
    assert next_zones(offers, (), Decimal(26)) == (A, B)
    assert next_zones(offers, ("us-east5-a",), Decimal(10)) == (A,), "all are dearer: the cheapest"
    assert next_zones((), (), Decimal(26)) == ()


def test_hard_cap_and_longest_stay_where_they_were() -> None:
    quote = under_the_same_caps(again(), [lost()], (B,))
    assert (quote.deadline, quote.latest, quote.recovers) == (NOON + 4 * HOUR, NOON + 8 * HOUR, "demo-0123abcd")
    spec = launch_spec(quote, "demo-00000001", "me")
    assert spec.deadline == NOON + 4 * HOUR
    assert spec.limits.hard_cap_utc == (NOON + 4 * HOUR).timestamp()
    assert spec.placement.zones == ("us-east5/us-east5-a",)


def test_what_was_spent_is_spent() -> None:
    budget = lost(budget_usd=Decimal(52), budget_at=NOON + 2 * HOUR)
    quote = under_the_same_caps(again(), [budget], ())
    assert quote.budget_at == NOON + 2 * HOUR, (
        "26 of 52 are left; the moment of before is earlier than now plus an hour"
    )
    assert quote.choices.budget_usd == Decimal(52)


def test_a_dearer_zone_ends_the_money_sooner_and_a_cheaper_one_never_later() -> None:
    budget = lost(budget_usd=Decimal(52), budget_at=NOON + 2 * HOUR)
    dear = under_the_same_caps(again(), [budget], (C,))
    assert dear.usd_per_hour == Decimal(40)
    assert dear.budget_at == NOON + timedelta(minutes=65) + timedelta(minutes=39)
    cheap = under_the_same_caps(again(usd_per_hour=Decimal(1)), [budget], (A,))
    assert cheap.budget_at == NOON + 2 * HOUR


def test_a_price_out_of_a_list_gives_way_to_a_dearer_zone_and_one_that_a_person_stated_does_not() -> None:
    budget = lost(budget_usd=Decimal(104))
    listed = under_the_same_caps(again(usd_per_hour=Decimal(26), price_ground="a list"), [budget], (C,))
    assert (listed.usd_per_hour, listed.worst_usd) == (Decimal(40), Decimal(78))
    stated = under_the_same_caps(again(usd_per_hour=Decimal(26)), [budget], (C,))
    assert stated.usd_per_hour == Decimal(26)


@pytest.mark.parametrize(
    ("minutes", "request_", "what"),
    [(231, {}, "the hard cap"), (111, {"budget_usd": Decimal(52), "budget_at": NOON + 2 * HOUR}, "the budget of")],
)
def test_caps_that_leave_no_ten_minutes_are_refused(minutes: int, request_: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        under_the_same_caps(again(minutes), [lost(**request_)], ())


def test_an_extended_cap_is_the_one_that_holds() -> None:
    session = replace(lost(), deadline=NOON + 6 * HOUR)
    assert under_the_same_caps(again(), [session], ()).deadline == NOON + 6 * HOUR


def test_an_hour_of_use_costs_what_was_paid_for_cold_starts_and_lost_machines_too() -> None:
    took = useful([lost()], NOON + HOUR)
    assert (took.usd, took.ready_s) == (Decimal(26), Decimal(2400))
    assert took.usd_per_useful_hour == Decimal(39)
    both = useful([lost(), lost()], NOON + HOUR)
    assert (both.sessions, both.usd_per_useful_hour) == (2, Decimal(39))
    never = fold("x", [requested(), ResourceCreated(NOON, "m", "machine", Decimal(26), "a test's")])
    assert useful([never], NOON + HOUR).usd_per_useful_hour is None


def test_a_machine_that_vanished_was_of_use_until_it_went_and_not_until_somebody_looked() -> None:
    seen_late = replace(lost(), ended=EndedOnNode(NOON + 2 * HOUR, "vanished", "without a word", -1))
    assert useful([seen_late], NOON + 2 * HOUR).ready_s == Decimal(2400)
