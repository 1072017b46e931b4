"""The whole session in dollars, and an hour of it against an API."""

from decimal import Decimal

import pytest

from kimisession.core.plan.coldstart import cold_start
from kimisession.core.plan.session_cost import SessionCost, session_cost
from kimisession.profile_file import load_profile

BYTES = 595_147_639_776


def cost(usd: str = "26", hours: str = "2", rate: str | None = None) -> SessionCost:
    start = cold_start(load_profile("kimi-k2.5"), BYTES, infra="gcp")
    known = None if rate is None else Decimal(rate)
    return session_cost(
        Decimal(usd), Decimal(hours), weights_bytes=BYTES, bucket=True, start=start, preemptions_per_hour=known
    )


def test_two_hours_of_8xh100_spot_are_52_dollars() -> None:
    assert cost().worst == Decimal(52)


@pytest.mark.parametrize(("usd", "tokens"), [("20", 1_666_667), ("26", 2_166_667)])
def test_the_break_even_follows_from_its_inputs(usd: str, tokens: int) -> None:
    """The write-up prints 1.68M and 2.13M for these prices: see notes/claims.md."""
    assert cost(usd).break_even_tokens_per_hour == tokens


def test_seeding_is_paid_once_and_the_bucket_each_month() -> None:
    found = cost()
    assert found.seeding_once == Decimal("0.150")
    assert found.bucket_per_month is not None
    assert round(found.bucket_per_month, 2) == Decimal("11.09")


def test_no_rate_no_figure_for_preemption() -> None:
    assert cost().preemption is None


def test_a_preemption_costs_the_cold_start_again() -> None:
    found = cost(rate="0.5")
    assert found.cold_start is not None
    assert found.preemption == found.cold_start[1]
