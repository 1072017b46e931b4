"""How a model is served, with every default of its version filled in, and what a figure is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kimisession.core.plan.engine_memory import Engine, block_size_of, engine_of
from kimisession.core.plan.gpus import Gpu
from kimisession.core.plan.models import BF16, Draft, ModelCard, draft_named

GIB = 2**30
VisionMode = Literal["data", "weights", "text-only", "unknown"]


class CannotPlan(ValueError):
    """The setup is not one that the engine accepts; the message says which flag and what it may be."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its interval and what it rests on."""

    value: float
    low: float
    high: float
    ground: str

    def __str__(self) -> str:
        return f"{self.value:,.2f} ({self.low:,.2f} to {self.high:,.2f}; {self.ground})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the model is served, in vLLM's terms; None means the version's own default.

    `assumed` names fields that a log does not state and that were filled in: they widen the interval.
    `draft` is the draft model's repository or None. `lora`: --enable-lora.
    """

    engine_version: str = "0.15.0"
    tp: int = 8
    pp: int = 1
    dp: int = 1
    ep: bool = False
    dcp: int = 1
    utilisation: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_dtype: str = "auto"
    eager: bool = False
    vision: VisionMode = "weights"
    draft: str | None = None
    draft_tokens: int = 3
    attention_backend: str = ""
    block_size: int | None = None
    gpu_total_gib: float | None = None
    graphs_in_budget: bool | None = None
    lora: bool = False
    assumed: frozenset[str] = field(default_factory=frozenset)

    @property
    def n_gpus(self) -> int:
        """GPUs of the whole deployment."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setup with every default filled in for its version and GPU."""

    engine: Engine
    utilisation: float
    total_gib: float
    max_model_len: int
    max_num_seqs: int
    batch_tokens: int
    kv_element_bytes: int
    block_size: int
    graphs_in_budget: bool
    draft: Draft | None
    layers: int
    compute: float


def resolve(card: ModelCard, gpu: Gpu, setup: Setup) -> Resolved:
    """Fill in the version's defaults. Raises CannotPlan for a setup that the engine would refuse."""
    for name in ("tp", "pp", "dp", "dcp"):
        if getattr(setup, name) < 1:
            raise CannotPlan(f"{name} is {getattr(setup, name)}; it must be 1 or more")
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
        stated = getattr(setup, name)
        if stated is not None and stated < 1:
            raise CannotPlan(f"--{name.replace('_', '-')} is {stated}; it must be 1 or more")
    if setup.gpu_total_gib is not None and setup.gpu_total_gib <= 0:
        raise CannotPlan(f"gpu_total_gib is {setup.gpu_total_gib}; it must be above 0")
    if setup.tp % setup.dcp:
        raise CannotPlan(f"--decode-context-parallel-size {setup.dcp} must divide --tensor-parallel-size {setup.tp}")
    if card.heads % setup.tp:
        raise CannotPlan(f"--tensor-parallel-size {setup.tp} must divide the {card.heads} attention heads")
    if setup.pp > card.layers:
        raise CannotPlan(f"--pipeline-parallel-size {setup.pp} is more than the {card.layers} layers")
    if setup.utilisation is not None and not 0 < setup.utilisation <= 1:
        raise CannotPlan(f"--gpu-memory-utilization {setup.utilisation} must be above 0 and at most 1")
    engine = engine_of(setup.engine_version)
    rules = engine.rules
    total = gpu.total_gib if setup.gpu_total_gib is None else setup.gpu_total_gib
    batch = rules.batch_tokens_160gib if total >= 160 else rules.batch_tokens
    seqs = rules.max_num_seqs
    if gpu.name.startswith("A100"):
        batch, seqs = 2048, 256
    kv = "fp8" if "fp8" in setup.kv_dtype else "bf16" if "16" in setup.kv_dtype else card.kv_dtype
    graphs = rules.graphs_in_budget if setup.graphs_in_budget is None else setup.graphs_in_budget
    return Resolved(
        engine=engine,
        utilisation=rules.utilisation if setup.utilisation is None else setup.utilisation,
        total_gib=total,
        max_model_len=setup.max_model_len or card.max_context,
        max_num_seqs=setup.max_num_seqs or seqs,
        batch_tokens=setup.max_num_batched_tokens or batch,
        kv_element_bytes=1 if kv == "fp8" else BF16,
        block_size=setup.block_size or block_size_of(setup.attention_backend, gpu.compute, kv, engine.version),
        graphs_in_budget=graphs and not setup.eager,
        draft=draft_named(setup.draft, card) if setup.draft else None,
        layers=card.layers,
        compute=gpu.compute,
    )
