"""What a session took: events times prices, in Decimal. Nothing is estimated that was not agreed or observed."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal

from kimisession.core.ledger import Resource, Session

CENT = Decimal("0.01")

#: The ground of a price that a person knows better than any list: it is never replaced by one.
STATED = "stated by you with --price"

#: The ground of a price that nobody here knows. The figure beside it, 0, is none: no line of a receipt is made with it.
UNPRICED = "not priced"
_MICROS_PER_HOUR = Decimal(3_600_000_000)


@dataclass(frozen=True)
class Line:
    """One resource on the receipt. `usd` is None when nobody knows its price: then it is named, never guessed."""

    resource: Resource
    seconds: Decimal
    usd: Decimal | None
    running: bool


@dataclass(frozen=True)
class Cost:
    """A receipt: exact dollars over all priced lines, and the names of those without a price."""

    lines: tuple[Line, ...]
    usd: Decimal
    unpriced: tuple[str, ...]
    final: bool  # everything has ended and that was confirmed


def seconds_between(began: datetime, ended: datetime) -> Decimal:
    """Exact seconds, never negative."""
    micros = max(0, (ended - began) // timedelta(microseconds=1))
    return Decimal(micros) / 1_000_000


def price_of(usd_per_hour: Decimal, began: datetime, ended: datetime) -> Decimal:
    """Exact dollars for an interval."""
    return usd_per_hour * (seconds_between(began, ended) * 1_000_000) / _MICROS_PER_HOUR


def cost_of(session: Session, now: datetime) -> Cost:
    """What the session has taken until `now`. What is not known to have ended is billed until `now`."""
    lines = []
    for resource in session.resources:
        ended = resource.ended or max(now, resource.began)
        usd = None if resource.usd_per_hour is None else price_of(resource.usd_per_hour, resource.began, ended)
        lines.append(Line(resource, seconds_between(resource.began, ended), usd, resource.ended is None))
    total = sum((line.usd for line in lines if line.usd is not None), Decimal(0))
    unpriced = tuple(line.resource.id for line in lines if line.usd is None)
    final = session.confirmed is not None and not any(line.running for line in lines)
    return Cost(tuple(lines), total, unpriced, final)


#: The fact that has the tokens which an engine's first start generated; later starts have `tokens.2` and so on.
TOKENS = "tokens"


def tokens_of(facts: Iterable[tuple[str, str]]) -> int | None:
    """Tokens generated, over all starts of the engine, as far as they were heard: the last heartbeat that somebody looked at.
    None when none was."""
    last = {name: value for name, value in facts if name == TOKENS or name.startswith(f"{TOKENS}.")}
    return sum(int(value) for value in last.values() if value.isdigit()) or None


def per_million(usd: Decimal, tokens: int | None) -> Decimal | None:
    """Dollars for a million of them; None without any."""
    return usd * 1_000_000 / tokens if tokens else None


@dataclass(frozen=True)
class Estimate:
    """What the quote says of a session: its machine time at the agreed price, and the most that the caps allow."""

    usd: Decimal
    worst_usd: Decimal


def estimate_of(session: Session, now: datetime) -> Estimate | None:
    """Beside `cost_of`, which goes by what exists and its own prices. None when the agreement was lost or named no price."""
    request = session.request
    if request is None or session.deadline is None or request.price_ground == UNPRICED:
        return None
    machines = [r for r in session.resources if r.kind == "machine"]
    usd = sum((price_of(request.usd_per_hour, r.began, r.ended or max(now, r.began)) for r in machines), Decimal(0))
    ends_at = min(session.deadline, request.budget_at or session.deadline)
    dearest = max(request.usd_per_hour, request.dearest_usd or Decimal(0))
    return Estimate(usd, price_of(dearest, request.at, ends_at))


def cents(usd: Decimal) -> str:
    """Dollars to the cent, half up, with a dollar sign: $1,234.50."""
    return f"${usd.quantize(CENT, ROUND_HALF_UP):,}"


def budget_deadline(began: datetime, usd_per_hour: Decimal, budget_usd: Decimal) -> datetime:
    """When the budget is spent at this price, rounded down to the second. A cheaper price later never moves it."""
    if usd_per_hour <= 0:
        return datetime.max.replace(tzinfo=began.tzinfo)
    seconds = int(budget_usd * 3600 / usd_per_hour)
    return began + timedelta(seconds=min(seconds, 10**9))
