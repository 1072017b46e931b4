"""What a whole session costs: once, per month, per start, per hour, at worst; and against an API. Money is Decimal."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from kimisession.core.plan.breakeven import break_even_tokens_per_hour
from kimisession.core.plan.coldstart import ColdStartPlan
from kimisession.core.plan.setup import GIB

SEED_VM_USD_PER_HOUR = Decimal("0.30")
SEED_HOURS = Decimal("0.5")
"""A CPU machine for about 30 minutes (public write-up, February 2026)."""

BUCKET_USD_PER_GIB_MONTH = Decimal("0.020")
"""Cloud Storage, Standard, us-central1: $0.000027397 per GiB and hour x 730 (Google's price list, read 2026-09-20)."""

API_USD_PER_MILLION_OUTPUT = Decimal(12)
API_GROUND = "Gemini 3.0 Pro's $12 per million output tokens, public write-up, February 2026"

_HOUR_S = Decimal(3600)


@dataclass(frozen=True, slots=True)
class SessionCost:
    """Dollars. `cold_start` is (low, expected, high). `preemption` is None unless a rate was stated."""

    usd_per_hour: Decimal
    seeding_once: Decimal | None
    bucket_per_month: Decimal | None
    cold_start: tuple[Decimal, Decimal, Decimal] | None
    worst: Decimal
    hours: Decimal
    preemption: Decimal | None
    break_even_tokens_per_hour: int

    @property
    def break_even_tokens_per_s(self) -> float:
        """What the machine would have to make all the time to be worth its price."""
        return self.break_even_tokens_per_hour / 3600


def session_cost(
    usd_per_hour: Decimal,
    hours: Decimal,
    *,
    weights_bytes: int,
    bucket: bool,
    start: ColdStartPlan | None,
    preemptions_per_hour: Decimal | None = None,
    api_usd_per_million: Decimal = API_USD_PER_MILLION_OUTPUT,
) -> SessionCost:
    """The cost of a session that lasts `hours`, its cap. `bucket`: the weights lie in cloud storage that is billed.

    A preemption costs the cold start once more: its expectation is rate x hours x that, and nothing where no rate is
    stated. What the work in between was worth nobody knows.
    """
    cold = None
    if start is not None:
        ends = (start.total.low, start.total.value, start.total.high)
        low, value, high = (usd_per_hour * Decimal(round(seconds)) / _HOUR_S for seconds in ends)
        cold = (low, value, high)
    return SessionCost(
        usd_per_hour=usd_per_hour,
        seeding_once=SEED_VM_USD_PER_HOUR * SEED_HOURS if bucket else None,
        bucket_per_month=BUCKET_USD_PER_GIB_MONTH * weights_bytes / GIB if bucket else None,
        cold_start=cold,
        worst=usd_per_hour * hours,
        hours=hours,
        preemption=preemptions_per_hour * hours * cold[1] if preemptions_per_hour is not None and cold else None,
        break_even_tokens_per_hour=break_even_tokens_per_hour(usd_per_hour, api_usd_per_million),
    )
