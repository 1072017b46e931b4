"""Profiles and plans: does it fit, with which flags, how soon, for how much."""

from decimal import Decimal
from typing import Annotated, Literal, NotRequired

from typing_extensions import TypedDict

from kimisession.cli.documents.common import said
from kimisession.core.profile import FlagValue


class ProfileRow(TypedDict):
    """A profile in the list."""

    name: str
    summary: str
    status: str


class FigureDocument(TypedDict):
    """A figure with its interval and where it is from."""

    value: float
    low: float
    high: float
    ground: str


class PhaseDocument(FigureDocument):
    """Seconds of a phase of the cold start."""

    name: str
    after: list[str]


class ColdStartDocument(TypedDict):
    """How soon it would be ready."""

    seconds: FigureDocument
    path: list[str]
    phases: list[PhaseDocument]


class AdviceStep(TypedDict):
    """One change that would help."""

    name: str
    gib: float
    tokens: int
    costs: str
    evidence: str


class AdviceDocument(TypedDict):
    """The cheapest changes that meet a wish."""

    wish: str
    reached: str
    sentence: str
    steps: list[AdviceStep]
    flags: list[str]


class RefusedFlag(TypedDict):
    """A flag that the engine's own parser does not take."""

    flag: str
    why: str
    replacement: str


class PlannedEngine(TypedDict):
    """The serving program."""

    kind: str
    version: str


class PlannedStack(TypedDict):
    """The software below it."""

    contradictions: list[str]
    warnings: list[str]


class PriceDocument(TypedDict):
    """An hour of the whole machine."""

    usd_per_hour: Annotated[Decimal | None, said("null where no price is known")]
    ground: str


class PlannedCost(TypedDict):
    """What a session would take."""

    cold_start_usd: Decimal | None
    worst_usd: Decimal | None
    hours: Decimal
    seeding_once_usd: Decimal | None
    bucket_usd_per_month: Decimal | None
    preemption_usd: Decimal | None
    break_even_output_tokens_per_hour: int | None


class OfferDocument(TypedDict):
    """A place's price of an hour."""

    zone: str
    instance: str
    spot_usd: Decimal | None
    on_demand_usd: Decimal | None


class PlanDocument(TypedDict):
    """Does it fit, with which flags, how soon, for how much."""

    profile: str
    accelerators: str
    infra: str
    checkpoint: str
    verdict: Literal["starts", "borderline", "does not start", "not known"]
    reason: str
    calibrated: bool
    figures: dict[str, FigureDocument]
    engine: PlannedEngine
    flags: dict[str, FlagValue]
    argv: list[str]
    changes: dict[str, FlagValue]
    advice: AdviceDocument | None
    refused_flags: list[RefusedFlag]
    stack: PlannedStack
    cold_start: ColdStartDocument | None
    price: PriceDocument
    cost: PlannedCost
    offers: list[OfferDocument]
    model: Annotated[NotRequired[str], said("where the sizes of a model without a profile are from")]


class ScriptDocument(TypedDict):
    """A script with a serve command, read as a profile."""

    engine: str
    refused_flags: list[RefusedFlag]
    profile_toml: str
    plan: PlanDocument
