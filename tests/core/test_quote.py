"""What is agreed to before anything exists: every cap is a moment, and the worst case is what the nearest cap costs."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest
from good_values import NOON, PROFILE, choices
from hypothesis import given
from hypothesis import strategies as st

from kimisession.core.cost import price_of
from kimisession.core.launch import LABEL_DEADLINE, parse_deadline_label
from kimisession.core.quote import launch_spec, make_quote

PRICES = st.decimals(1, 500, places=2)
BUDGETS = st.decimals(0, 5000, places=2)
DURATIONS = st.integers(1, 8 * 3600)


def test_a_good_quote_has_the_profiles_caps() -> None:
    quote = make_quote(PROFILE, choices(), NOON)
    assert (quote.deadline, quote.latest) == (NOON + timedelta(hours=2), NOON + timedelta(hours=8))
    assert (quote.idle_s, quote.budget_at, quote.worst_usd) == (1200, None, Decimal("52.00"))
    assert quote.ends_at == quote.deadline


@given(PRICES, BUDGETS)
def test_a_budget_is_a_moment_at_which_no_more_than_it_is_spent(price: Decimal, budget: Decimal) -> None:
    quote = make_quote(PROFILE, choices(usd_per_hour=price, budget_usd=budget), NOON)
    assert quote.budget_at is not None
    assert price_of(price, NOON, quote.budget_at) <= budget
    assert price_of(price, NOON, quote.budget_at + timedelta(seconds=1)) > budget


@given(PRICES, st.none() | BUDGETS, DURATIONS)
def test_the_worst_case_is_what_the_nearest_cap_costs(price: Decimal, budget: Decimal | None, duration_s: int) -> None:
    quote = make_quote(PROFILE, choices(usd_per_hour=price, budget_usd=budget, duration_s=duration_s), NOON)
    caps = [price_of(price, NOON, quote.deadline)]
    if quote.budget_at is not None and budget is not None:
        caps.append(price_of(price, NOON, quote.budget_at))
        assert quote.worst_usd <= budget
    assert quote.worst_usd == min(caps)
    assert quote.ends_at == min(filter(None, (quote.deadline, quote.budget_at)))


@given(PRICES, BUDGETS, DURATIONS)
def test_the_label_and_the_keeper_get_the_nearest_cap_and_not_a_second_more(
    price: Decimal, budget: Decimal, duration_s: int
) -> None:
    quote = make_quote(PROFILE, choices(usd_per_hour=price, budget_usd=budget, duration_s=duration_s), NOON)
    spec = launch_spec(quote, "demo-0123abcd", "someone")
    assert spec.deadline == quote.ends_at
    assert parse_deadline_label(spec.labels[LABEL_DEADLINE]) <= quote.ends_at
    assert spec.limits.hard_cap_utc == quote.deadline.timestamp()
    assert spec.limits.duration_s == duration_s


def test_what_costs_nothing_has_no_budget_to_spend() -> None:
    quote = make_quote(PROFILE, choices(usd_per_hour=Decimal(0), budget_usd=Decimal(5)), NOON)
    assert (quote.budget_at, quote.worst_usd) == (None, Decimal(0))


def test_a_price_of_ones_own_says_that_it_is() -> None:
    quote = make_quote(PROFILE, choices(usd_per_hour=Decimal(3)), NOON)
    assert (quote.price_ground, quote.worst_usd) == ("stated by you with --price", Decimal(6))


def test_only_a_profiles_own_price_can_be_pretended() -> None:
    pretended = replace(PROFILE, price=replace(PROFILE.price, pretended=True))
    assert make_quote(pretended, choices(), NOON).pretended
    assert not make_quote(pretended, choices(usd_per_hour=Decimal(3)), NOON).pretended


def test_a_duration_beyond_the_profiles_longest_is_refused() -> None:
    make_quote(PROFILE, choices(duration_s=8 * 3600), NOON)
    with pytest.raises(ValueError, match="longer than the 8h"):
        make_quote(PROFILE, choices(duration_s=8 * 3600 + 1), NOON)


def test_a_huge_budget_is_no_error() -> None:
    assert make_quote(PROFILE, choices(budget_usd=Decimal(10) ** 30), NOON).ends_at == NOON + timedelta(hours=2)


def test_flags_of_the_user_go_over_the_checkpoints_over_the_profiles() -> None:
    checkpoint = replace(PROFILE.checkpoints[0], flags={"max-model-len": 2, "kv-cache-dtype": "fp8"})
    quote = make_quote(PROFILE, choices(checkpoint=checkpoint, sets={"kv-cache-dtype": "auto"}), NOON)
    assert quote.flags == {"max-model-len": 2, "kv-cache-dtype": "auto"}


def test_patience_with_an_unused_session_follows_the_users_idle_limit() -> None:
    def unused_s(idle_s: int | None) -> float:
        return launch_spec(make_quote(PROFILE, choices(idle_s=idle_s), NOON), "x", "me").limits.unused_s

    assert (unused_s(None), unused_s(1200), unused_s(600)) == (1800, 1800, 900)


def test_a_stand_in_never_goes_by_the_models_own_name() -> None:
    assert make_quote(PROFILE, choices(), NOON).served_name == "kimi-k2.5-stand-in"


def test_terminals_count_only_on_a_machine_that_is_the_sessions_alone() -> None:
    def watches(infra: str) -> bool:
        spec = launch_spec(make_quote(PROFILE, choices(infra=infra), NOON), "x", "me")
        return spec.limits.watch_terminals

    assert (watches("local"), watches("slurm"), watches("gcp")) == (False, False, True)


def test_a_streaming_profile_reads_the_bucket_and_copies_nothing() -> None:
    streaming = replace(PROFILE, load="stream")
    spec = launch_spec(make_quote(streaming, choices(bucket_url="gs://weights/k"), NOON), "demo-0123abcd", "someone")
    assert "weights" not in [step.name for step in spec.steps]
    argv = list(spec.engine.argv)
    assert argv[argv.index("--model") + 1] == "gs://weights/k"
    assert argv[argv.index("--load-format") + 1] == "runai_streamer"
    assert not spec.ephemeral_disk
    with pytest.raises(ValueError, match="no bucket in the cloud"):
        make_quote(streaming, choices(bucket_url="file:///weights"), NOON)
