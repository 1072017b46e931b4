"""Will it fit, and what will it hold: weights, overhead, KV cache and context of a served MLA model, before renting.

The causes are modelled one by one (notes/fit.md), each in its file: `resident` has the weights, `overhead` the
activations, sampler and CUDA graphs, `kv` the cache. Here they are put together into a verdict. Every figure says what
it rests on and how far off it may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, hypot
from typing import Literal

from kimisession.core.plan.engine_memory import may_refuse_fp8_with_dcp, refuses_fp8_with_dcp
from kimisession.core.plan.gpus import Gpu
from kimisession.core.plan.kv import kv_blocks, needed_kv_bytes, printed_tokens, token_bytes
from kimisession.core.plan.models import ModelCard
from kimisession.core.plan.overhead import CALIBRATED_SEQS, graphs_gib, overhead
from kimisession.core.plan.resident import disk_figure, resident_extra_gib, resident_gib, weights_figure
from kimisession.core.plan.setup import GIB, Figure, Resolved, Setup, resolve

Verdict = Literal["starts", "does not start", "borderline"]

OUTSIDE_BUDGET_GIB = 1.5
"""CUDA context and NCCL, which vLLM's budget does not count (snapshot after NCCL init, vllm pull 25359, Sep 2025)."""
GRAPHS_ERROR_GIB = 1.0
CONTEXT_GIB = 0.5
"""A CUDA context alone takes about so much before anything is loaded: vLLM compares what is free with the budget first
('Free memory on device ... on startup is less than desired GPU memory utilization')."""


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


def predict(card: ModelCard, gpu: Gpu, setup: Setup) -> Fit:
    """What this setup will hold and whether it starts. Raises CannotPlan for a setup that the engine would refuse."""
    r = resolve(card, gpu, setup)
    per_stage = resident_gib(card, setup)
    weights = weights_figure(card, setup, per_stage)
    over, doubts, overhead_lines = overhead(card, setup, r)
    graphs = graphs_gib(setup, r)
    graphs_taken = graphs.value if r.graphs_in_budget else 0.0
    budget = r.total_gib * r.utilisation
    value = budget - max(per_stage) - over.value - graphs_taken
    # Weights and overhead rarely err to the same side; a wide interval of one of them alone must still be kept.
    down = hypot(over.high - over.value, weights.high - weights.value)
    up = hypot(over.value - over.low, weights.value - weights.low)
    if r.graphs_in_budget:
        down, up = hypot(down, graphs.high - graphs.value), hypot(up, graphs.value - graphs.low)
    if not doubts and not setup.assumed and not (r.graphs_in_budget and graphs.ground.startswith("not")):
        # The calibrated spread was measured on KV memory as a whole: it holds the other terms' small errors already.
        down = up = over.high - over.value
    up += max(per_stage) - min(per_stage)  # a log's rank may be of the lighter pipeline stage
    graph_doubt = (
        (graphs.ground.removeprefix("not calibrated: "),)
        if (r.graphs_in_budget and graphs.ground.startswith("not"))
        else ()
    )
    if "vision" in setup.assumed or setup.vision == "unknown":
        doubts = (*doubts, "vision mode is not stated")
    all_doubts = (*doubts, *graph_doubt)
    ground = "not calibrated: " + "; ".join(all_doubts) if all_doubts else over.ground
    kv = Figure(value, value - down, value + up, ground)
    per_token = token_bytes(card, setup, r)
    tokens, longest, concurrency = _capacity(card, setup, r, kv, per_token)
    need = needed_kv_bytes(r.max_model_len, per_token, r.block_size, setup.dcp) / GIB
    verdict, reason = _verdict(setup, r, weights, over, kv, need, longest)
    spare = _spare_above_budget(setup, r, graphs)
    if verdict != "does not start" and spare is not None and spare < 0:
        verdict, reason = _graphs_do_not_fit(verdict, reason, r, graphs, spare)
    verdict, reason = _asks_for_too_much(verdict, reason, r)
    if verdict == "starts" and setup.dcp > 1 and r.kv_element_bytes == 1 and may_refuse_fp8_with_dcp(r.engine):
        verdict, reason = (
            "borderline",
            (
                f"{reason} But whether vLLM {r.engine.text} takes --kv-cache-dtype fp8 with --decode-context-parallel-size "
                "was not read; 0.20 refuses it at the first token."
            ),
        )
    above = () if spare is None else (f"above the budget after CUDA graphs, context and NCCL: {spare:.2f} GiB",)
    explain = (
        f"budget: {r.total_gib:.2f} GiB x {r.utilisation:g} = {budget:.2f} GiB ({gpu.name}, vLLM {r.engine.text})",
        f"weights: {max(per_stage):.2f} GiB per GPU, of which {resident_extra_gib(card.layers // setup.pp):.2f} "
        "for rounding and tables",
        *overhead_lines,
        f"CUDA graphs: {graphs.value:.2f} GiB, "
        + ("taken off the KV cache" if r.graphs_in_budget else "not taken off"),
        f"KV memory: {budget:.2f} - {max(per_stage):.2f} - {over.value:.2f} - {graphs_taken:.2f} = {value:.2f} GiB",
        f"KV per token: {per_token:,} B; blocks of {r.block_size}; DCP {setup.dcp} holds {setup.dcp} times the tokens",
        f"one request of {r.max_model_len:,} tokens needs {need:.2f} GiB",
        *above,
    )
    return Fit(
        weights_gib_per_gpu=weights,
        overhead_gib=over,
        cudagraph_gib=graphs,
        kv_gib_per_gpu=kv,
        kv_tokens=tokens,
        longest_context=longest,
        concurrency=concurrency,
        host_ram_gib=_host_ram(setup),
        disk_gib=disk_figure(card),
        verdict=verdict,
        reason=reason,
        calibrated=not all_doubts,
        resolved=r,
        explain=explain,
    )


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


def _asks_for_too_much(verdict: Verdict, reason: str, r: Resolved) -> tuple[Verdict, str]:
    """What a budget beyond the memory that is free at the start makes of a verdict."""
    left = r.total_gib * (1 - r.utilisation)
    early = r.engine.version is not None and r.engine.version < (0, 8)  # one of those ran at 1.0 (a log of 0.7)
    if verdict == "does not start" or left >= OUTSIDE_BUDGET_GIB or early:
        return verdict, reason
    safer = int(100 * (1 - OUTSIDE_BUDGET_GIB / r.total_gib)) / 100
    says = (
        f"--gpu-memory-utilization {r.utilisation:g} leaves {left:.2f} GiB for CUDA's context and NCCL, which take about "
        f"{OUTSIDE_BUDGET_GIB}; lower it to {safer:.2f}."
    )
    return ("does not start", says) if left < CONTEXT_GIB else ("borderline", says)


def _host_ram(setup: Setup) -> Figure:
    """Host memory of the engine's processes: about 6 GiB a worker and 8 for the server; the page cache comes on top."""
    value = 8.0 + 6.0 * setup.n_gpus
    return Figure(value, 4.0 + 3.0 * setup.n_gpus, 16.0 + 16.0 * setup.n_gpus, "not calibrated: no log states it")
