"""What a session costs against an API's price per token. Money is Decimal."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal

MILLION = Decimal(1_000_000)


def break_even_tokens_per_hour(usd_per_hour: Decimal, usd_per_million_tokens: Decimal) -> int:
    """Tokens that an API would sell for one hour's price: below, the API is cheaper. Rounded up to a whole token.

    Raises ValueError for a token price of 0 or less, which has no break-even.
    """
    if usd_per_million_tokens <= 0:
        raise ValueError(f"the price per million tokens must be above 0, not {usd_per_million_tokens}")
    return int((usd_per_hour * MILLION / usd_per_million_tokens).to_integral_value(ROUND_CEILING))
