"""The documents that --json prints, as types. Nothing loads this at run time: it is for type checkers, and
`python -m kimisession.cli.documents kimisession/schemas` makes the published JSON Schemas from it.

Money is `Decimal` here and a decimal string with at most six places in the document; a moment is a `datetime` here and ISO
8601 in UTC there. None is null: not known, or not so.
"""

import json
import sys
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from typing_extensions import TypedDict

from kimisession.core.profile import FlagValue, Profile

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def _said(text: str) -> Any:
    return Field(description=text)


class LayerDocument(TypedDict):
    """One thing that ends the session by itself."""

    name: str
    armed: bool
    evidence: str


class SessionDocument(TypedDict):
    """A session as it is now."""

    session: Annotated[str, _said("its id; a name may be used again, an id never")]
    name: str
    state: Literal["requested", "launching", "starting", "ready", "ending", "unconfirmed", "gone"]
    phase: Annotated[str | None, _said("of the cold start; load.2 is that of the engine's second start")]
    profile: str | None
    infra: str | None
    stand_in: Annotated[bool, _said("no model is run")]
    pretended: Annotated[bool, _said("nobody bills its price")]
    endpoint: Annotated[str | None, _said("base URL with /v1, while it is ready and can be reached from here")]
    model: str | None
    began_at: datetime | None
    ready_at: datetime | None
    deadline: Annotated[datetime | None, _said("the hard cap")]
    budget_at: Annotated[datetime | None, _said("when the budget is spent")]
    usd_per_hour: Decimal | None
    usd: Annotated[Decimal, _said("so far")]
    seen: Annotated[bool | None, _said("whether it exists; null when its place could not be asked")]
    activity: Annotated[str | None, _said("busy, quiet or unknown")]
    next_end: Annotated[str | None, _said("the reason that comes next, like idle or hard-cap")]
    evidence: str | None
    layers: list[LayerDocument]
    reason: Annotated[str | None, _said("why it ended")]
    unconfirmed: Annotated[str | None, _said("why its end could not be proven; then the exit code is 7")]
    damage: Annotated[list[str], _said("records of the ledger that could not be read")]


class ReceiptLine(TypedDict):
    """One resource: seconds times price."""

    resource: str
    kind: str
    began: datetime
    ended: datetime | None
    seconds: Decimal
    usd_per_hour: Decimal | None
    usd: Annotated[Decimal | None, _said("null when nobody knows its price")]
    price_ground: str
    evidence: Annotated[str | None, _said("by what its end is known, such as an operation of the cloud")]


class AttemptDocument(TypedDict):
    """A place that did not give a machine."""

    at: datetime
    place: str
    why: str


class EstimateDocument(TypedDict):
    """What was agreed, beside what was taken."""

    usd: Annotated[Decimal, _said("the machines' time at the agreed price")]
    worst_usd: Annotated[Decimal, _said("at the caps")]


class UsefulDocument(TypedDict):
    """A session with those that it went on from: all dollars over the hours in which one of them was ready."""

    sessions: int
    usd: Decimal
    ready_s: Decimal
    usd_per_hour: Annotated[Decimal | None, _said("null when none was ever ready")]


class ReceiptDocument(TypedDict):
    """What a session took."""

    session: str
    name: str
    state: str
    reason: str | None
    stand_in: bool
    pretended: bool
    usd: Decimal
    final: Annotated[bool, _said("everything has ended and that was confirmed")]
    unpriced: Annotated[list[str], _said("resources without a known price: in no sum")]
    lines: list[ReceiptLine]
    evidence: Annotated[str | None, _said("what the machine, or the cloud, said of its end")]
    confirmed: Annotated[str | None, _said("by what it is proven that nothing is left")]
    attempts: list[AttemptDocument]
    estimate: Annotated[EstimateDocument | None, _said("null when the agreement was lost or named no price")]
    useful: UsefulDocument
    tokens: Annotated[int | None, _said("generated, as last heard; null when none was heard of")]
    usd_per_million_tokens: Annotated[Decimal | None, _said("all that it took over those tokens")]


class GroupDocument(TypedDict):
    """What several sessions took together; those with a pretended or a lost price left out."""

    sessions: int
    usd: Decimal
    tokens: int | None
    usd_per_million_tokens: Decimal | None


class WeekDocument(GroupDocument):
    """The sessions that were asked for in one week."""

    week: Annotated[str, _said("its Monday, in UTC, like 2026-11-16")]


class ProfileCostDocument(GroupDocument):
    """The sessions of one profile."""

    profile: str


class StorageDocument(TypedDict):
    """What a whole bucket holds and costs a month; numbers are null when it did not say."""

    bucket: str
    location: str | None
    live_bytes: int | None
    old_bytes: Annotated[int | None, _said("in noncurrent generations")]
    deleted_bytes: Annotated[int | None, _said("soft-deleted, and billed until their retention ends")]
    usd_per_month: Decimal | None
    why: Annotated[str | None, _said("why it has no price")]
    unpriced: Annotated[list[str], _said("what is in no figure here")]


class CostsDocument(TypedDict):
    """The newest sessions, and what all of them took together."""

    sessions: list[ReceiptDocument]
    usd: Annotated[Decimal, _said("of all sessions, those with a pretended price left out")]
    count: int
    weeks: list[WeekDocument]
    profiles: list[ProfileCostDocument]
    storage: Annotated[list[StorageDocument] | None, _said("null unless --storage asked for it")]


class ExtendedDocument(TypedDict):
    """A hard cap that was moved."""

    session: str
    name: str
    added_s: int
    deadline: datetime | None
    latest: Annotated[datetime | None, _said("as far as it can be moved")]


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
    cold_start_minutes: Annotated[list[int] | None, _said("from, to")]
    idle_s: int
    deadline: datetime
    budget_usd: Decimal | None
    budget_at: datetime | None
    worst_usd: Annotated[Decimal, _said("at the caps")]


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
    content: Annotated[str | None, _said("null while a reasoning model thinks")]
    model: str


class Spread(TypedDict):
    """A figure over the requests of a pass."""

    mean: float
    min: float
    max: float
    p50: float
    p99: float


class PassDocument(TypedDict):
    """So many requests at once."""

    at_once: int
    requests: int
    errors: int
    first_error: str | None
    null_contents: int
    wall_s: float
    wall_per_request_s: float
    latency_s: Spread | None
    tokens_per_s: Spread | None
    output_tokens_per_s: float | None
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    prompt_tokens: int | None
    completion_tokens: int | None
    reasoning_tokens: int | None


class BenchDocument(TypedDict):
    """A measurement of a session."""

    bench: Annotated[int, _said("counts from 1 over all sessions of this ledger")]
    session: str
    label: str
    profile: str
    flags: str
    accelerators: str
    stand_in: bool
    began_at: datetime
    model: str
    engine_version: str | None
    rounds: int
    max_tokens: int
    thinking: bool | None
    ignore_eos: bool
    passes: list[PassDocument]


class ComparedLine(TypedDict):
    """One figure of both; ratio is b / a."""

    at_once: int
    name: str
    a: float | None
    b: float | None
    ratio: float | None
    digits: int


class ComparedDocument(TypedDict):
    """Two measurements side by side."""

    a: BenchDocument
    b: BenchDocument
    lines: list[ComparedLine]


class ManifestFile(TypedDict):
    """One sealed file."""

    path: str
    bytes: int
    sha256: str
    crc32c: str


class ManifestDocument(TypedDict):
    """Sealed weights."""

    bucket: str
    model: str
    revision: str
    digest: str
    bytes: int
    files: list[ManifestFile]


class DeletedDocument(TypedDict):
    """Seeded weights that were deleted."""

    bucket: str
    objects: int


class ProfileRow(TypedDict):
    """A profile in the list."""

    name: str
    summary: str
    status: str


class SettingDocument(TypedDict):
    """A setting and who said it; both empty when nobody did."""

    value: str | None
    origin: str
    mistake: Annotated[str | None, _said("why no command could use it")]


class ConfigDocument(TypedDict):
    """Every setting, and the folders in use."""

    settings: dict[str, SettingDocument]
    places: dict[str, str]


class DryRunDocument(TypedDict):
    """What a command with --dry-run would do."""

    would: str


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

    usd_per_hour: Annotated[Decimal | None, _said("null where no price is known")]
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
    model: Annotated[NotRequired[str], _said("where the sizes of a model without a profile are from")]


class ScriptDocument(TypedDict):
    """A script with a serve command, read as a profile."""

    engine: str
    refused_flags: list[RefusedFlag]
    profile_toml: str
    plan: PlanDocument


class ErrorDocument(TypedDict):
    """What every command prints on standard error under --json when it fails."""

    error: Annotated[str, _said("one sentence")]
    hint: Annotated[str, _said("what to type next; may be empty")]
    exit_code: Literal[1, 2, 3, 4, 5, 6, 7, 124, 130]


class FindingDocument(TypedDict):
    """Something of ours in a cloud project."""

    kind: Literal["machine", "disk", "address"]
    resource: str
    zone: str
    session: str | None
    name: Annotated[str | None, _said("what its user called the session")]
    owner: str | None
    verdict: Literal[
        "live",
        "foreign",
        "ending",
        "past-deadline",
        "stopped-with-disk",
        "orphan-disk",
        "orphan-address",
        "unlabelled-ours",
    ]
    leak: Annotated[bool, _said("it should not be there")]
    due: Annotated[bool, _said("--delete deletes it")]
    why: str
    began: datetime
    since: Annotated[datetime, _said("when it began to be what the verdict says")]
    deadline: Annotated[datetime | None, _said("in its labels")]
    usd: Annotated[Decimal | None, _said("so far, of what has a price")]
    usd_per_hour: Decimal | None
    unpriced: Annotated[list[str], _said("what has no price")]


class SweepDocument(TypedDict):
    """One look at a project, after what was deleted."""

    project: str
    at: datetime
    findings: list[FindingDocument]
    unreachable: Annotated[list[str], _said("zones that did not answer; then the exit code is 7")]
    deleted: list[str]
    adopted: Annotated[list[str], _said("sessions that the ledger knows from now on")]
    left: Annotated[int, _said("leaks that are there now; not 0: the exit code is 7")]


class GuardMachineDocument(TypedDict):
    """A reaper's machine."""

    name: str
    zone: str
    status: str
    beat: Annotated[datetime | None, _said("when it last looked at everything")]
    did: str | None
    code: str | None
    code_here: Annotated[str, _said("what `guard enable` would install")]


class GuardDocument(TypedDict):
    """The reaper of a project."""

    project: str
    armed: bool
    evidence: str
    machines: list[GuardMachineDocument]


class PermissionsDocument(TypedDict):
    """What the account lacks in a project."""

    project: str
    wanted: list[str]
    missing: list[str]


class StandingDocument(TypedDict):
    """A quota in a region."""

    market: Literal["spot", "on demand"]
    metric: str
    region: Annotated[str, _said("global: of the whole project")]
    needed: int
    limit: Annotated[int | None, _said("null where the API does not list it")]
    used: int | None
    enough: bool | None


class QuotaDocument(TypedDict):
    """The quotas that a machine needs."""

    project: str
    accelerators: str
    quotas: list[StandingDocument]


#: The kinds of documents that each command may print.
DOCUMENTS: dict[str, dict[str, Any]] = {
    "profiles": {"profiles": list[ProfileRow], "profile": Profile},
    "plan": {"plan": PlanDocument, "plans": list[PlanDocument], "script": ScriptDocument},
    "seed": {
        "manifest": ManifestDocument,
        "deleted": DeletedDocument,
        "receipt": ReceiptDocument,
        "dry-run": DryRunDocument,
    },
    "start": {"session": SessionDocument, "quote": QuoteDocument, "receipt": ReceiptDocument},
    "status": {"sessions": list[SessionDocument], "session": SessionDocument},
    "connect": {"endpoint": EndpointDocument},
    "test": {"test": list[AnswerDocument]},
    "bench": {"bench": BenchDocument, "benches": list[BenchDocument], "bench-compare": ComparedDocument},
    "extend": {"extended": ExtendedDocument, "dry-run": DryRunDocument},
    "restart": {"session": SessionDocument, "receipt": ReceiptDocument, "dry-run": DryRunDocument},
    "stop": {"receipt": ReceiptDocument, "dry-run": DryRunDocument},
    "cost": {"costs": CostsDocument, "receipt": ReceiptDocument},
    "config-show": {"config": ConfigDocument},
    "sweep": {"sweep": SweepDocument},
    "guard-status": {"guard": GuardDocument},
    "guard-permissions": {"permissions": PermissionsDocument},
    "quota": {"quota": QuotaDocument},
}


class _Plain(GenerateJsonSchema):
    """Decimals as the strings that they are printed as."""

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        return {"type": "string", "pattern": r"^-?[0-9]+\.[0-9]{2,6}$"}

    def datetime_schema(self, schema: Any) -> JsonSchemaValue:
        return {"type": "string", "format": "date-time", "pattern": "Z$"}


def schemas() -> dict[str, dict[str, Any]]:
    """Every published schema, by its file's stem."""
    made = {command: _of_command(command, kinds) for command, kinds in DOCUMENTS.items()}
    error = TypeAdapter(ErrorDocument).json_schema(schema_generator=_Plain)
    return {**made, "error": {"$schema": DRAFT, "$id": "urn:kimisession:schema:1:error", **error}}


def _of_command(command: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """Any line that the command may print: schema_version, kind, data."""
    definitions: dict[str, Any] = {}
    variants = []
    for kind, type_ in kinds.items():
        content = TypeAdapter(type_).json_schema(mode="serialization", schema_generator=_Plain)
        definitions |= content.pop("$defs", {})
        variants.append(
            {
                "type": "object",
                "properties": {"schema_version": {"const": 1}, "kind": {"const": kind}, "data": content},
                "required": ["schema_version", "kind", "data"],
            }
        )
    return {
        "$schema": DRAFT,
        "$id": f"urn:kimisession:schema:1:{command}",
        "title": f"kimisession {command.replace('-', ' ')} --json",
        "description": "One line on standard output.",
        "oneOf": variants,
        "$defs": dict(sorted(definitions.items())),
    }


if __name__ == "__main__":
    for stem, schema in schemas().items():
        text = json.dumps(schema, indent=2) + "\n"
        (Path(sys.argv[1]) / f"{stem}.json").write_text(text, encoding="utf-8")
