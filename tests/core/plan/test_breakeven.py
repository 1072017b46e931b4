"""Session money against an API's price."""

from __future__ import annotations

from decimal import Decimal

import pytest

from kimisession.core.plan.breakeven import break_even_tokens_per_hour


def test_the_break_even_follows_from_the_stated_prices() -> None:
    """$20 and $26 an hour against $12 per million: a write-up has 1.68M and 2.13M, from prices that it rounded for print."""
    assert break_even_tokens_per_hour(Decimal(20), Decimal(12)) == 1_666_667
    assert break_even_tokens_per_hour(Decimal(26), Decimal(12)) == 2_166_667
    assert break_even_tokens_per_hour(Decimal("20.16"), Decimal(12)) == 1_680_000
    assert break_even_tokens_per_hour(Decimal("25.60"), Decimal(12)) == 2_133_334
    assert break_even_tokens_per_hour(Decimal("25.60"), Decimal(2)) == 12_800_000


def test_a_free_api_has_no_break_even() -> None:
    with pytest.raises(ValueError, match="above 0"):
        break_even_tokens_per_hour(Decimal(20), Decimal(0))
