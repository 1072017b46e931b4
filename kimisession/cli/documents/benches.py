"""Measurements, alone and side by side."""

from datetime import datetime
from typing import Annotated

from typing_extensions import TypedDict

from kimisession.cli.documents.common import said


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

    bench: Annotated[int, said("counts from 1 over all sessions of this ledger")]
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
