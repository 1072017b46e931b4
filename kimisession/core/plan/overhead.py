"""GPU memory beside weights and KV cache: the profiled peak of a forward pass or of the sampler, and CUDA graphs."""

from __future__ import annotations

from math import hypot
from typing import NamedTuple

from kimisession.core.plan.engine_memory import CHARGE_PER_LOGIT_FLASHINFER
from kimisession.core.plan.models import BF16, Draft, ModelCard
from kimisession.core.plan.setup import GIB, Figure, Resolved, Setup

# The calibrated constants: fitted on the rows that notes/fit.md names.
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

GRAPHS_GIB = (0.13, 1.31e-3, 9.92e-6)
"""Estimate of CUDA-graph memory as a + b t + c t^2 over the largest captured size t: 0.13 at 2, 0.46 at 128 and 1.22 at
256 were logged; 3.4 at 512 was inferred from community images."""
GRAPHS_DCP_GIB = 2.2e-6
"""More of it per further decode-context rank and t^2 (community images, TRITON_MLA): each graph gathers all heads."""


class Doubt(NamedTuple):
    """A reason why the overhead is not calibrated: the least half-width it asks for, and what it probably adds."""

    says: str
    spread_gib: float = 0.0
    adds_gib: float = 0.0


class Overhead(NamedTuple):
    """The overhead, why it is not calibrated (nothing if it is), and its arithmetic line by line."""

    figure: Figure
    doubts: tuple[str, ...]
    explain: tuple[str, ...]


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


def overhead(card: ModelCard, setup: Setup, r: Resolved) -> Overhead:
    """What vLLM's profiling run takes beside the weights: the larger of the forward pass and the sampling step."""
    rules = r.engine.rules
    per_token = activation_bytes_per_token(card, setup, r.draft)
    forward = ACTIVATION_FACTOR * per_token * r.batch_tokens / GIB
    sampler = rules.sampler_bytes_per_logit * r.max_num_seqs * card.vocab / GIB
    peak = max(forward, sampler)
    doubts = _doubts(card, setup, r)
    extra = (rules.extra_eager_gib if setup.eager else rules.extra_gib) + sum(doubt.adds_gib for doubt in doubts)
    value = BASE_GIB + extra + peak
    spread = rules.spread_gib + (COMMUNITY_SPREAD_GIB if r.engine.is_fork else RELEASE_SPREAD_GIB)
    spread = max(spread, *(doubt.spread_gib for doubt in doubts), UNLOGGED_SHAPE_SPREAD * value if doubts else 0.0)
    low, high = value - spread, value + spread
    says = [doubt.says for doubt in doubts]
    if rules.spread_gib:
        says.insert(0, rules.ground)
    if r.max_num_seqs > CALIBRATED_SEQS:
        says.append(f"--max-num-seqs {r.max_num_seqs}: the sampler's peak rests on one log")
        flashinfer = sampler * CHARGE_PER_LOGIT_FLASHINFER / rules.sampler_bytes_per_logit
        low = value - hypot(spread, peak - max(forward, flashinfer))
        high = value + hypot(spread, SAMPLER_SPREAD * sampler)
    for flag, low_peak, high_peak in _assumed_peaks(card, setup, r, forward, per_token):
        says.append(f"{flag} is not stated")
        low = min(low, value - hypot(spread, peak - low_peak))
        high = max(high, value + hypot(spread, high_peak - peak))
    if says:
        ground = "not calibrated: " + "; ".join(says)
    elif r.engine.is_fork:
        ground = "calibrated on 28 logs (community builds, Kimi INT4, TP8)"
    else:
        ground = "calibrated on 9 logs of 3 settings (vLLM 0.15 to 0.20, Kimi INT4, TP8)"
    lines = (
        f"activations: {r.batch_tokens:,} tokens x {per_token:,.0f} B x {ACTIVATION_FACTOR} = {forward:.2f} GiB",
        f"sampler: {r.max_num_seqs:,} sequences x {card.vocab:,} entries x {rules.sampler_bytes_per_logit} B "
        f"= {sampler:.2f} GiB; the larger of the two counts",
        f"overhead: {BASE_GIB:.2f} base + {extra:.2f} of this version + {peak:.2f} = {value:.2f} GiB",
    )
    return Overhead(Figure(value, max(0.0, low), high, ground), tuple(says), lines)


def _doubts(card: ModelCard, setup: Setup, r: Resolved) -> tuple[Doubt, ...]:
    """Every way in which the setup leaves the calibrated regime of notes/fit.md."""
    batch_low, batch_high = CALIBRATED_BATCH
    rows = (
        (
            r.engine.version is None and not r.engine.is_fork,
            Doubt(f"engine version {r.engine.text!r} is not known", UNLOGGED_SHAPE_GIB),
        ),
        (
            not _is_kimi_int4(card),
            Doubt("the overhead was only fitted on Kimi's INT4 shape", UNLOGGED_SHAPE_GIB),
        ),
        (
            setup.pp > 1 or setup.dp > 1 or setup.tp != 8,
            Doubt(f"TP{setup.tp} PP{setup.pp} DP{setup.dp}: at most one log of such a split", UNLOGGED_SHAPE_GIB),
        ),
        (
            not batch_low <= r.batch_tokens <= batch_high,
            Doubt(f"--max-num-batched-tokens {r.batch_tokens} is outside {batch_low}-{batch_high}", UNLOGGED_SHAPE_GIB),
        ),
        (
            bool(card.index_heads),
            Doubt("sparse attention's indexer buffers are not modelled", INDEXER_GIB, INDEXER_GIB),
        ),
        (
            r.draft is not None and not r.draft.known_kind,
            Doubt(f"draft model {r.draft.name if r.draft else ''!r} is not known", UNLOGGED_SHAPE_GIB, 0.5),
        ),
        (setup.lora, Doubt("LoRA's buffers are not modelled", 3.0)),
    )
    return tuple(doubt for applies, doubt in rows if applies)


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
