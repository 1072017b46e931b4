"""Receipts: exact decimals, half up at the last moment, and no figure that nobody agreed to."""

from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction

import pytest
from good_values import MONEY, NOON, SECOND, requested
from hypothesis import given
from hypothesis import strategies as st

from kimisession.core.cost import cents, cost_of, per_million, price_of, seconds_between, tokens_of
from kimisession.core.ledger import Event, ResourceCreated, ResourceGone, TeardownConfirmed, Unconfirmed, fold


def machine(usd: str | None, at: datetime = NOON, name: str = "machine", kind: str = "machine") -> ResourceCreated:
    """A resource that begins."""
    return ResourceCreated(at, name, kind, None if usd is None else Decimal(usd), "a test's")


def gone(after_s: float, name: str = "machine") -> ResourceGone:
    """... and ends."""
    return ResourceGone(NOON + timedelta(seconds=after_s), name, "seen gone")


CONFIRMED = TeardownConfirmed(NOON + timedelta(hours=1), "nothing is left")


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        ("0", "$0.00"),
        ("0.004", "$0.00"),
        ("0.005", "$0.01"),
        ("0.015", "$0.02"),
        ("0.025", "$0.03"),
        ("2.675", "$2.68"),
        ("1234.5", "$1,234.50"),
        ("999999.995", "$1,000,000.00"),
    ],
)
def test_cents_are_rounded_half_up(usd: str, text: str) -> None:
    assert cents(Decimal(usd)) == text


def test_an_hour_costs_the_price_of_an_hour_to_the_last_digit() -> None:
    assert price_of(Decimal("26.0000001"), NOON, NOON + timedelta(hours=1)) == Decimal("26.0000001")


@given(MONEY, st.integers(0, 10**12))
def test_a_price_is_exact_to_far_below_a_cent(usd_per_hour: Decimal, micros: int) -> None:
    got = price_of(usd_per_hour, NOON, NOON + timedelta(microseconds=micros))
    exact = Fraction(usd_per_hour) * micros / 3_600_000_000
    assert abs(Fraction(got) - exact) < Fraction(1, 10**15)


@given(MONEY, st.integers(0, 10**10), st.integers(0, 10**10))
def test_two_halves_cost_what_the_whole_costs(usd_per_hour: Decimal, first: int, second: int) -> None:
    middle, end = NOON + timedelta(microseconds=first), NOON + timedelta(microseconds=first + second)
    halves = price_of(usd_per_hour, NOON, middle) + price_of(usd_per_hour, middle, end)
    assert abs(halves - price_of(usd_per_hour, NOON, end)) < Decimal("1e-15")


def test_an_interval_that_runs_backwards_lasts_no_time() -> None:
    assert seconds_between(NOON + SECOND, NOON) == 0


def test_a_fraction_of_a_second_is_billed_as_that() -> None:
    assert seconds_between(NOON, NOON + timedelta(microseconds=1_234_567)) == Decimal("1.234567")


def test_every_resource_has_its_line_and_the_total_is_their_sum() -> None:
    events: list[Event] = [
        requested(),
        machine("26.00"),
        machine("0.50", NOON, "disk", "disk"),
        gone(3600),
        gone(7200, "disk"),
        CONFIRMED,
    ]
    cost = cost_of(fold("x", events), NOON + timedelta(days=9))
    assert [(line.resource.id, line.usd, line.seconds) for line in cost.lines] == [
        ("machine", Decimal("26.00"), Decimal(3600)),
        ("disk", Decimal("1.00"), Decimal(7200)),
    ]
    assert cost.usd == Decimal("27.00")
    assert cost.final


def test_what_has_no_price_is_named_and_never_guessed() -> None:
    cost = cost_of(fold("x", [requested(), machine("26.00"), machine(None, NOON, "address", "address")]), NOON)
    assert cost.unpriced == ("address",)
    assert [line.usd for line in cost.lines] == [Decimal(0), None]


def test_what_is_not_known_to_have_ended_is_billed_until_now() -> None:
    events = [requested(), machine("36.00"), Unconfirmed(NOON + 10 * SECOND, "cannot be asked")]
    for seconds in (100, 1000):
        cost = cost_of(fold("x", events), NOON + timedelta(seconds=seconds))
        assert cost.usd == Decimal(seconds) / 100
        assert not cost.final


def test_a_confirmation_without_an_end_goes_on_counting_aloud() -> None:
    cost = cost_of(fold("x", [requested(), machine("36.00"), CONFIRMED]), NOON + timedelta(hours=2))
    assert cost.usd == Decimal("72.00")
    assert not cost.final


def test_a_machine_that_began_in_the_future_costs_nothing_yet() -> None:
    assert cost_of(fold("x", [machine("26.00", NOON + 60 * SECOND)]), NOON).usd == 0


def test_an_end_before_the_beginning_is_no_refund() -> None:
    assert cost_of(fold("x", [machine("26.00"), gone(-60)]), NOON + timedelta(hours=1)).usd == 0


def test_tokens_are_summed_over_the_starts_of_the_engine_and_the_last_word_on_each_counts() -> None:
    facts = [("tokens", "100"), ("kv_tokens", "9"), ("tokens", "250"), ("tokens.2", "50"), ("tokens.3", "torn")]
    assert tokens_of(facts) == 300
    assert tokens_of([("kv_tokens", "9")]) is None
    assert per_million(Decimal(3), 300) == Decimal(10000)
    assert per_million(Decimal(3), None) is None
