"""What sessions took, and what weights cost while they are kept."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated

from typing_extensions import TypedDict

from kimisession.cli.documents.common import OfSession, Together, said


class ReceiptLine(TypedDict):
    """One resource: seconds times price."""

    resource: str
    kind: str
    began: datetime
    ended: datetime | None
    seconds: Decimal
    usd_per_hour: Decimal | None
    usd: Annotated[Decimal | None, said("null when nobody knows its price")]
    price_ground: str
    evidence: Annotated[str | None, said("by what its end is known, such as an operation of the cloud")]


class AttemptDocument(TypedDict):
    """A place that did not give a machine."""

    at: datetime
    place: str
    why: str


class EstimateDocument(TypedDict):
    """What was agreed, beside what was taken."""

    usd: Annotated[Decimal, said("the machines' time at the agreed price")]
    worst_usd: Annotated[Decimal, said("at the caps")]


class UsefulDocument(Together):
    """A session with those that it went on from: all dollars over the hours in which one of them was ready."""

    ready_s: Decimal
    usd_per_hour: Annotated[Decimal | None, said("null when none was ever ready")]


class ReceiptDocument(OfSession):
    """What a session took."""

    state: str
    reason: str | None
    stand_in: bool
    pretended: bool
    usd: Decimal
    final: Annotated[bool, said("everything has ended and that was confirmed")]
    unpriced: Annotated[list[str], said("resources without a known price: in no sum")]
    lines: list[ReceiptLine]
    evidence: Annotated[str | None, said("what the machine, or the cloud, said of its end")]
    confirmed: Annotated[str | None, said("by what it is proven that nothing is left")]
    attempts: list[AttemptDocument]
    estimate: Annotated[EstimateDocument | None, said("null when the agreement was lost or named no price")]
    useful: UsefulDocument
    tokens: Annotated[int | None, said("generated, as last heard; null when none was heard of")]
    usd_per_million_tokens: Annotated[Decimal | None, said("all that it took over those tokens")]


class GroupDocument(Together):
    """What several sessions took together; those with a pretended or a lost price left out."""

    tokens: int | None
    usd_per_million_tokens: Decimal | None


class WeekDocument(GroupDocument):
    """The sessions that were asked for in one week."""

    week: Annotated[str, said("its Monday, in UTC, like 2026-11-16")]


class ProfileCostDocument(GroupDocument):
    """The sessions of one profile."""

    profile: str


class StorageDocument(TypedDict):
    """What a whole bucket holds and costs a month; numbers are null when it did not say."""

    bucket: str
    location: str | None
    live_bytes: int | None
    old_bytes: Annotated[int | None, said("in noncurrent generations")]
    deleted_bytes: Annotated[int | None, said("soft-deleted, and billed until their retention ends")]
    usd_per_month: Decimal | None
    why: Annotated[str | None, said("why it has no price")]
    unpriced: Annotated[list[str], said("what is in no figure here")]


class CostsDocument(TypedDict):
    """The newest sessions, and what all of them took together."""

    sessions: list[ReceiptDocument]
    usd: Annotated[Decimal, said("of all sessions, those with a pretended price left out")]
    count: int
    weeks: list[WeekDocument]
    profiles: list[ProfileCostDocument]
    storage: Annotated[list[StorageDocument] | None, said("null unless --storage asked for it")]
