"""Going on after a machine was taken back: another zone, the same absolute caps. Pure.

Recovery never moves a cap: hard cap and budget are those that a person agreed to at the first start, what was spent is spent, and a
dearer zone ends the money sooner.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal

from kimisession.core.cost import STATED, budget_deadline, cents, cost_of, price_of
from kimisession.core.ledger import Session
from kimisession.core.plan.prices import Offer
from kimisession.core.quote import FIRST_MINUTES, Quote

#: Ends after which going on makes sense: nobody asked for them, and no limit was reached.
RECOVERABLE = frozenset({"preempted", "vanished", "host-error"})


def zones_of(sessions: Iterable[Session]) -> frozenset[str]:
    """Where machines of these sessions were, by the ids of their resources (`gcp/ZONE/NAME`)."""
    ids = (r.id.split("/") for session in sessions for r in session.resources if r.kind == "machine")
    return frozenset(parts[1] for parts in ids if len(parts) > 2)


def next_zones(offers: Iterable[Offer], tried: Iterable[str], usd_per_hour: Decimal) -> tuple[Offer, ...]:
    """Zones to try next, the cheapest first: none that took a machine back, and none dearer than what was agreed unless all
    are, then the cheapest alone."""
    left = [offer for offer in offers if offer.spot_usd is not None and offer.zone and offer.zone not in {*tried}]
    left.sort(key=lambda offer: (offer.spot_usd or Decimal(0), offer.zone))
    agreed = [offer for offer in left if (offer.spot_usd or Decimal(0)) <= usd_per_hour]
    return tuple(agreed or left[:1])


def under_the_same_caps(quote: Quote, before: Sequence[Session], zones: Sequence[Offer]) -> Quote:
    """`quote`, made now, under the caps of `before` (newest first) and in these zones. Raises ValueError, one sentence, when
    the caps leave no time that is worth a cold start."""
    last = before[0]
    request, deadline = last.request, last.deadline
    if request is None or deadline is None:
        raise ValueError(f"the ledger has lost the caps of session {last.id}")
    worst = max((offer.spot_usd for offer in zones if offer.spot_usd is not None), default=quote.usd_per_hour)
    # Only a person's own price stands whatever the lists say of these zones.
    price = quote.usd_per_hour if quote.price_ground == STATED else max(worst, quote.usd_per_hour)
    budget_at = None
    if request.budget_usd is not None:
        spent = sum((cost_of(session, quote.at).usd for session in before), Decimal(0))
        left = request.budget_usd - spent
        budget_at = budget_deadline(quote.at, price, max(Decimal(0), left))
        budget_at = min(budget_at, request.budget_at or budget_at)
    ends_at = min(deadline, budget_at) if budget_at else deadline
    if ends_at - quote.at < FIRST_MINUTES:
        money = f"the budget of {cents(request.budget_usd or Decimal(0))}"
        what = money if budget_at and budget_at < deadline else "the hard cap"
        raise ValueError(f"{what} leaves no ten minutes: it is reached at {ends_at:%H:%M:%S} UTC")
    names = tuple(f"{offer.region}/{offer.zone}" for offer in zones)
    choices = replace(quote.choices, budget_usd=request.budget_usd, dearest_usd=price, zones=names)
    return replace(
        quote,
        choices=choices,
        usd_per_hour=price,
        deadline=deadline,
        latest=request.latest,
        budget_at=budget_at,
        worst_usd=price_of(price, quote.at, ends_at),
        recovers=last.id,
    )


@dataclass(frozen=True)
class Useful:
    """What a chain of sessions took and what came of it. `usd_per_useful_hour` is None while it was never ready."""

    sessions: int
    usd: Decimal
    ready_s: Decimal
    usd_per_useful_hour: Decimal | None


def useful(sessions: Sequence[Session], now: datetime) -> Useful:
    """Dollars of all of them over the hours in which one of them was ready: cold starts and lost machines make it dearer."""
    usd = sum((cost_of(session, now).usd for session in sessions), Decimal(0))
    ready_s = sum((_ready_s(session, now) for session in sessions), Decimal(0))
    return Useful(len(sessions), usd, ready_s, usd * 3600 / ready_s if ready_s else None)


def _ready_s(session: Session, now: datetime) -> Decimal:
    if session.first_ready_at is None:
        return Decimal(0)
    ends = [r.ended for r in session.resources if r.kind == "machine" and r.ended]
    if session.ended:  # what vanished ended when its machine did, not when somebody looked
        ends.append(session.ended.at)
    over = min(ends, default=now)
    return Decimal(max(0.0, (over - session.first_ready_at).total_seconds())).quantize(Decimal("0.001"))
