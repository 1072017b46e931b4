"""Sessions as `start`, `status` and `extend` print them, and where one answers."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Literal

from typing_extensions import TypedDict

from kimisession.cli.documents.common import Armed, OfSession, said


class LayerDocument(Armed):
    """One thing that ends the session by itself."""

    name: str


class SessionDocument(TypedDict):
    """A session as it is now."""

    session: Annotated[str, said("its id; a name may be used again, an id never")]
    name: str
    state: Literal["requested", "launching", "starting", "ready", "ending", "unconfirmed", "gone"]
    phase: Annotated[str | None, said("of the cold start; load.2 is that of the engine's second start")]
    profile: str | None
    infra: str | None
    stand_in: Annotated[bool, said("no model is run")]
    pretended: Annotated[bool, said("nobody bills its price")]
    endpoint: Annotated[str | None, said("base URL with /v1, while it is ready and can be reached from here")]
    model: str | None
    began_at: datetime | None
    ready_at: datetime | None
    deadline: Annotated[datetime | None, said("the hard cap")]
    budget_at: Annotated[datetime | None, said("when the budget is spent")]
    usd_per_hour: Decimal | None
    usd: Annotated[Decimal, said("so far")]
    seen: Annotated[bool | None, said("whether it exists; null when its place could not be asked")]
    activity: Annotated[str | None, said("busy, quiet or unknown")]
    next_end: Annotated[str | None, said("the reason that comes next, like idle or hard-cap")]
    evidence: str | None
    layers: list[LayerDocument]
    reason: Annotated[str | None, said("why it ended")]
    unconfirmed: Annotated[str | None, said("why its end could not be proven; then the exit code is 7")]
    damage: Annotated[list[str], said("records of the ledger that could not be read")]


class QuoteDocument(TypedDict):
    """What a start would be and cost: `start --dry-run`."""

    name: str
    profile: str
    infra: str
    accelerators: str
    checkpoint: str
    bucket: str
    fit: str | None
    usd_per_hour: Decimal
    price_ground: str
    pretended: bool
    cold_start_minutes: Annotated[list[int] | None, said("from, to")]
    idle_s: int
    deadline: datetime
    budget_usd: Decimal | None
    budget_at: datetime | None
    worst_usd: Annotated[Decimal, said("at the caps")]


class ExtendedDocument(OfSession):
    """A hard cap that was moved."""

    added_s: int
    deadline: datetime | None
    latest: Annotated[datetime | None, said("as far as it can be moved")]


class EndpointDocument(TypedDict):
    """Where a session answers. The key is secret."""

    base_url: str
    api_key: str
    model: str


class AnswerDocument(TypedDict):
    """One question's answer and time."""

    name: str
    seconds: float
    completion_tokens: int
    still_thinking: bool
    content: Annotated[str | None, said("null while a reasoning model thinks")]
    model: str
