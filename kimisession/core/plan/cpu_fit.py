"""Engines that keep the experts in host memory: what RAM they hold, what loading takes, and which quota is enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kimisession.core.plan.fit import Verdict
from kimisession.core.plan.kv import kv_bytes_per_token
from kimisession.core.plan.models import BF16, ModelCard, components, routed_layer_bytes
from kimisession.core.plan.setup import GIB, Figure

HYBRID_VRAM_EXTRA_GIB = 4.8
"""GPU memory beside weights, GPU experts and KV with SGLang and KT-Kernel: 31 GB and 39 GB in all for two settings
(kvcache-ai/ktransformers issue 1817) leave 4 to 6."""
PROCESS_GIB = 28.0
"""Host memory beside the experts once loaded: 600 GB in all with 8 of 384 experts per layer on the GPU
(kvcache-ai/ktransformers issue 1816) leave 38; non-expert weights pass through host memory."""
LOADING_FACTOR = 1.55
"""Host memory per expert layer while loading, over the layer itself: one death at layer 35 of 60 under a 480 GiB limit
(K2.5 RAWINT4, two H100 NVL, public deployment notes) is 13.7 GiB a layer against 8.86. One log; an upper bound."""
INT8_BYTES = 1.0
CpuFormat = Literal["checkpoint", "int8"]


@dataclass(frozen=True, slots=True)
class HostFit:
    """Host memory of an engine with experts on the CPU, in GiB.

    `loaded_gib` is what it holds when it serves, `loading_gib` the most that loading may take. `last_layer` is the MoE
    layer (1-based) at which memory runs out while loading, by either rate, or None if it does not.
    """

    per_layer_gib: float
    loaded_gib: Figure
    loading_gib: Figure
    enough_quota_gib: int
    verdict: Verdict
    reason: str
    last_layer: tuple[int | None, int | None]
    explain: tuple[str, ...]


def expert_layer_gib(card: ModelCard, stored_as: CpuFormat = "checkpoint") -> float:
    """GiB of one layer's routed experts in host memory: as in the checkpoint, or in AMX's INT8 (one byte a weight)."""
    if stored_as == "checkpoint":
        return routed_layer_bytes(card) / GIB
    return 3 * card.experts * card.hidden * card.moe_intermediate * INT8_BYTES / GIB


def host_fit(
    card: ModelCard,
    quota_gib: float,
    *,
    gpu_experts: int = 0,
    stored_as: CpuFormat = "checkpoint",
    copies: int = 1,
    files_in_ram_gib: float = 0.0,
    cpu_only: bool = False,
) -> HostFit:
    """Whether `quota_gib` of host memory (a cgroup limit, or the machine) is enough for a CPU or hybrid engine.

    `gpu_experts` per layer live on the GPU instead. `copies` is 2 where every NUMA node holds all experts.
    `files_in_ram_gib` is a RAM disk with the checkpoint, which counts against the same memory. With `cpu_only` the
    non-expert weights stay in host memory too.
    """
    share = 1 - min(gpu_experts, card.experts) / card.experts if card.experts else 0.0
    per_layer = expert_layer_gib(card, stored_as) * share * copies
    experts = per_layer * card.moe_layers
    parts = components(card)
    rest = (parts.total - parts.routed_experts) / GIB if cpu_only else 0.0
    base = PROCESS_GIB + rest + files_in_ram_gib
    loaded = base + experts
    loading = base - PROCESS_GIB + experts * LOADING_FACTOR
    loaded_figure = Figure(
        loaded,
        loaded - 25,
        loaded + 15,
        "experts are arithmetic; the rest calibrated on 1 log"
        if copies == 1
        else "not calibrated: two copies of the experts are arithmetic only",
    )
    loading_figure = Figure(
        max(loaded, loading), loaded, max(loaded, loading), "not calibrated: the rate of one death, carried on"
    )
    enough = int(-(-loading_figure.high // 10) * 10)
    layers = card.moe_layers
    steady_death = _dies_at(quota_gib, base, per_layer, layers)
    rate_death = _dies_at(quota_gib, base - PROCESS_GIB, per_layer * LOADING_FACTOR, layers)
    where = f"between layer {rate_death} and {steady_death}" if rate_death != steady_death else f"at layer {rate_death}"
    if quota_gib < loaded_figure.low:
        verdict: Verdict = "does not start"
        reason = (
            f"{layers} layers of {per_layer:.2f} GiB need {loaded:.0f} GiB of host memory and the limit is "
            f"{quota_gib:.0f}: loading dies {where}; "
            f"raise the quota to {enough} GiB."
        )
    elif quota_gib < loading_figure.high:
        verdict = "borderline"
        reason = (
            f"{quota_gib:.0f} GiB holds the {loaded:.0f} GiB that serving takes, but loading may take up to "
            f"{loading_figure.high:.0f}; a quota of {enough} GiB is sure."
        )
    else:
        verdict = "starts"
        most = f"{loading_figure.high:.0f} GiB at most"
        reason = f"{quota_gib:.0f} GiB covers loading ({most}) and serving ({loaded:.0f} GiB)."
    return HostFit(
        per_layer_gib=per_layer,
        loaded_gib=loaded_figure,
        loading_gib=loading_figure,
        enough_quota_gib=enough,
        verdict=verdict,
        reason=reason,
        last_layer=(rate_death, steady_death),
        explain=(
            f"experts: {layers} layers x {per_layer:.3f} GiB = {experts:.1f} GiB of host memory",
            f"beside them: {base:.1f} GiB (processes {PROCESS_GIB:.0f}, non-expert weights {rest:.1f}, "
            f"files in RAM {files_in_ram_gib:.1f})",
            f"served: {loaded:.1f} GiB; while loading at most {loading_figure.high:.1f} GiB "
            f"({LOADING_FACTOR} x per layer, one log)",
        ),
    )


def _dies_at(quota_gib: float, base_gib: float, per_layer_gib: float, layers: int) -> int | None:
    """The first layer, counted from 1, that does not fit any more; None if all do."""
    if per_layer_gib <= 0:
        return None
    fitting = int(max(0.0, quota_gib - base_gib) // per_layer_gib)
    return None if fitting >= layers else fitting + 1


def hybrid_vram(card: ModelCard, *, gpu_experts: int, context: int, gpus: int = 1) -> Figure:
    """GiB of GPU memory per GPU with KT-Kernel: non-expert weights, the experts put on the GPU, KV and the rest.

    Two settings of K2.5 on one GPU were stated by a maintainer: 31 GB (1 expert, 32K) and 39 GB (5 experts, 64K).
    """
    parts = components(card)
    weights = (parts.total - parts.routed_experts) / GIB
    experts = card.moe_layers * expert_layer_gib(card) * gpu_experts / card.experts if card.experts else 0.0
    kv = context * kv_bytes_per_token(card, element_bytes=BF16) / GIB
    value = (weights + experts) / gpus + kv + HYBRID_VRAM_EXTRA_GIB
    ground = "calibrated on 2 settings (one GPU, K2.5)" if gpus == 1 else "not calibrated: more than one GPU"
    return Figure(value, value - 4, value + 4, ground)
