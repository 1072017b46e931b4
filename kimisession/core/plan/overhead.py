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
COUNTED_BASE_GIB = 0.25
"""The same where buffers are counted one by one: 0.16 to 0.35 was left over in own logs (TP1, TP4, TP8), of which 0.07 to
0.23 is what vLLM prints as non-torch memory."""
COUNTED_TP = (1, 4, 8)
"""The splits that those own logs have."""
CONTEXT_ROWS = 65536
"""Rows of cached context that MLA's prefill expands at once, at most (mla_attention.py, determine_chunked_prefill_...)."""
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
LOGGED_COMPUTE = {False: 9.0, True: 12.0}
"""The GPUs of the calibration logs, by whether they are of community builds: Hopper, and RTX PRO 6000."""

GRAPHS_GIB = (0.13, 1.31e-3, 9.92e-6)
"""Estimate of CUDA-graph memory as a + b t + c t^2 over the largest captured size t: 0.13 at 2, 0.46 at 128 and 1.22 at
256 were logged; 3.4 at 512 was inferred from community images."""
GRAPHS_DCP_GIB = 2.2e-6
"""More of it per further decode-context rank and t^2 (community images, TRITON_MLA): each graph gathers all heads."""


COUNTED_DCP_GIB = 0.48
"""The same where it is counted: 0.36 GiB more was logged with DCP4 at size 128 (own run, 4x H200, 31 layers): the heads of
all ranks are gathered, so it is taken to grow with the share that comes from others."""


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


def standing_bytes(card: ModelCard, setup: Setup, batch_tokens: int) -> float:
    """The experts' two workspaces, which vLLM keeps for good (Marlin, read in 0.26.0: experts/marlin_moe.py, workspace.py).

    One row of each per batched token and chosen expert: as wide as the wider of hidden and intermediate, and of hidden
    and gate-and-up. For K2 both are 7,168 wide on any split.
    """
    if not card.experts:
        return 0.0
    width = card.moe_intermediate if setup.ep else card.moe_intermediate / setup.tp
    rows = batch_tokens * card.experts_per_token * setup.dp
    return rows * (max(width, card.hidden) + max(2 * width, card.hidden)) * BF16


def attention_bytes(card: ModelCard, setup: Setup, r: Resolved, batch_tokens: int) -> float:
    """MLA's part of the profiled pass (0.26.0, mla_attention.py): the expanded context, and the batch's own rows.

    The context is min(65,536, max(8 x max_model_len, 4 x max_num_seqs x block)) tokens times the rank's heads: 2.0 GiB
    for K2 on one GPU, 0.25 at TP8. Beside it hidden state, residual, queries and output of the batch.
    """
    by_requests = r.max_num_seqs * r.block_size
    context = max(min(max(8 * r.max_model_len, 4 * by_requests), CONTEXT_ROWS), by_requests)
    heads = card.heads / setup.tp
    batch = 2 * card.hidden + heads * (card.nope + card.rope + card.v_dim)
    return BF16 * (context * heads * (card.nope + card.v_dim) + batch_tokens * batch)


def graph_size(setup: Setup, resolved: Resolved) -> int:
    """The largest batch that vLLM captures: 2 x max_num_seqs x (1 + draft tokens), at most 512 and the batch."""
    query = 1 + (setup.draft_tokens if resolved.draft else 0)
    return min(resolved.max_num_seqs * query * 2, 512, resolved.batch_tokens)


def graphs_gib(setup: Setup, resolved: Resolved) -> Figure:
    """CUDA-graph memory as vLLM estimates it (whether it comes off the KV cache is the version's affair)."""
    if setup.eager:
        return Figure(0.0, 0.0, 0.0, "arithmetic: eager captures no graphs")
    size = graph_size(setup, resolved)
    if is_counted(resolved):
        return _counted_graphs_gib(setup, resolved, size)
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


def _counted_graphs_gib(setup: Setup, r: Resolved, size: int) -> Figure:
    """The estimate as vLLM 0.26 makes it: what the first capture takes, and the second's for each of the others.

    Sizes 1, 2, 4 and every 8 are captured piecewise up to `size` and whole up to the sequences. Own logs of size 128:
    0.29 GiB with 6 layers, 0.36 with 40, 0.46 with 61; 0.13 was logged for size 2 (0.20.0).
    """
    first = 0.11 + 1.0e-3 * size
    whole = min(size, r.max_num_seqs * (1 + (setup.draft_tokens if r.draft else 0)))
    graphs = sum(max(0, (3 + n // 8 if n >= 8 else 1 + (n > 1) + (n > 3)) - 1) for n in (size, whole))
    value = first + graphs * (1.0 + 0.11 * r.layers) / 1024
    value += COUNTED_DCP_GIB * (1 - 1 / setup.dcp) * size / 128
    doubts = [
        *([f"CUDA graphs of size {size}: one own log"] if size > 128 else []),
        *([f"CUDA graphs with DCP{setup.dcp}: one own log, of DCP4"] if setup.dcp > 1 else []),
        *(["CUDA graphs of a draft model: no own log"] if r.draft else []),
    ]
    ground = "calibrated on 3 own estimates of size 128 (6, 40 and 61 layers)"
    if doubts:
        ground = f"not calibrated: {'; '.join(doubts)}"
    half = 0.2 + 0.4 * value if doubts else 0.12
    return Figure(value, max(0.0, value - half), value + half, ground)


def is_counted(r: Resolved) -> bool:
    """Whether this engine's buffers were read one by one (vLLM 0.21 and later) rather than fitted as one factor."""
    return r.engine.rules.counted_one_by_one and not r.engine.is_fork


def forward_gib(card: ModelCard, setup: Setup, r: Resolved, batch_tokens: int) -> float:
    """Peak of the profiled forward pass."""
    if not is_counted(r):
        return ACTIVATION_FACTOR * activation_bytes_per_token(card, setup, r.draft) * batch_tokens / GIB
    drafts = r.draft.aux_hidden_states * card.hidden * BF16 * batch_tokens if r.draft else 0
    return (standing_bytes(card, setup, batch_tokens) + attention_bytes(card, setup, r, batch_tokens) + drafts) / GIB


def sampler_gib(card: ModelCard, setup: Setup, r: Resolved, seqs: int, bytes_per_logit: int) -> float:
    """Peak of the sampling step that follows; the experts' workspaces stand beside it where the version keeps them."""
    standing = standing_bytes(card, setup, r.batch_tokens) if is_counted(r) else 0.0
    return (standing + bytes_per_logit * seqs * card.vocab) / GIB


def overhead(card: ModelCard, setup: Setup, r: Resolved) -> Overhead:
    """What vLLM's profiling run takes beside the weights: the larger of the forward pass and the sampling step."""
    rules = r.engine.rules
    forward = forward_gib(card, setup, r, r.batch_tokens)
    sampler = sampler_gib(card, setup, r, r.max_num_seqs, rules.sampler_bytes_per_logit)
    peak = max(forward, sampler)
    base = COUNTED_BASE_GIB if is_counted(r) else BASE_GIB
    doubts = _doubts(card, setup, r)
    # A counted version's extra is FlashInfer's buffers for its fused all-reduce, where that is installed: none on one GPU.
    compiled = 0.0 if is_counted(r) and setup.tp == 1 else rules.extra_gib
    extra = (rules.extra_eager_gib if setup.eager else compiled) + sum(doubt.adds_gib for doubt in doubts)
    value = base + extra + peak
    spread = rules.spread_gib + (COMMUNITY_SPREAD_GIB if r.engine.is_fork else RELEASE_SPREAD_GIB)
    spread = max(spread, *(doubt.spread_gib for doubt in doubts), UNLOGGED_SHAPE_SPREAD * value if doubts else 0.0)
    low, high = value - spread, value + spread
    says = [doubt.says for doubt in doubts]
    if rules.spread_gib:
        says.insert(0, rules.ground)
    if r.max_num_seqs > CALIBRATED_SEQS:
        says.append(f"--max-num-seqs {r.max_num_seqs}: the sampler's peak rests on one log")
        flashinfer = sampler_gib(card, setup, r, r.max_num_seqs, CHARGE_PER_LOGIT_FLASHINFER)
        low = value - hypot(spread, peak - max(forward, flashinfer))
        high = value + hypot(spread, SAMPLER_SPREAD * sampler)
    for flag, low_peak, high_peak in _assumed_peaks(card, setup, r, forward):
        says.append(f"{flag} is not stated")
        low = min(low, value - hypot(spread, peak - low_peak))
        high = max(high, value + hypot(spread, high_peak - peak))
    if says:
        ground = "not calibrated: " + "; ".join(says)
    elif r.engine.is_fork:
        ground = "calibrated on 28 logs (community builds, Kimi INT4, TP8)"
    elif is_counted(r):
        ground = f"calibrated: {rules.ground}"
    else:
        ground = "calibrated on 9 logs of 3 settings (vLLM 0.15 to 0.20, Kimi INT4, TP8)"
    lines = (
        _forward_line(card, setup, r, forward),
        f"sampler: {r.max_num_seqs:,} sequences x {card.vocab:,} entries x {rules.sampler_bytes_per_logit} B"
        f"{' and the experts workspaces' if is_counted(r) else ''} = {sampler:.2f} GiB; the larger of the two counts",
        f"overhead: {base:.2f} base + {extra:.2f} of this version + {peak:.2f} = {value:.2f} GiB",
    )
    return Overhead(Figure(value, max(0.0, low), high, ground), tuple(says), lines)


def _forward_line(card: ModelCard, setup: Setup, r: Resolved, forward: float) -> str:
    """The forward pass's arithmetic."""
    if is_counted(r):
        standing = standing_bytes(card, setup, r.batch_tokens) / GIB
        attention = attention_bytes(card, setup, r, r.batch_tokens) / GIB
        return (
            f"activations: {standing:.2f} GiB of the experts' two workspaces for {r.batch_tokens:,} tokens + "
            f"{attention:.2f} GiB of attention with its expanded context = {forward:.2f} GiB"
        )
    per_token = activation_bytes_per_token(card, setup, r.draft)
    return f"activations: {r.batch_tokens:,} tokens x {per_token:,.0f} B x {ACTIVATION_FACTOR} = {forward:.2f} GiB"


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
            setup.pp > 1 or setup.dp > 1 or setup.tp not in (COUNTED_TP if is_counted(r) else (8,)),
            Doubt(f"TP{setup.tp} PP{setup.pp} DP{setup.dp}: at most one log of such a split", UNLOGGED_SHAPE_GIB),
        ),
        (
            r.compute != LOGGED_COMPUTE[r.engine.is_fork],
            Doubt("no log of such a GPU: kernels and their buffers are others", UNLOGGED_SHAPE_GIB),
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


def _assumed_peaks(card: ModelCard, setup: Setup, r: Resolved, forward: float) -> list[tuple[str, float, float]]:
    """For flags that are not stated: the peaks that their usual values give."""
    found: list[tuple[str, float, float]] = []
    if "max_num_batched_tokens" in setup.assumed:
        smallest, largest = (forward_gib(card, setup, r, n) for n in (2048, 16384))
        found.append(("--max-num-batched-tokens", smallest, max(largest, forward)))
    if "max_num_seqs" in setup.assumed:
        sampler = sampler_gib(card, setup, r, 1024, r.engine.rules.sampler_bytes_per_logit)
        found.append(("--max-num-seqs", forward, max((1 + SAMPLER_SPREAD) * sampler, forward)))
    return found


def _is_kimi_int4(card: ModelCard) -> bool:
    """The shape that the calibration logs have, whatever the layers: K2's widths, INT4 experts, bf16 elsewhere."""
    return (card.hidden, card.experts, card.moe_intermediate, card.experts_format) == (7168, 384, 2048, "int4-g32")
