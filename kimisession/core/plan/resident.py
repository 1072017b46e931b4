"""GiB of weights on each GPU after loading, and the checkpoint's size: arithmetic on tensors and vLLM's sharding."""

from __future__ import annotations

from kimisession.core.plan.engine_memory import Engine, engine_of
from kimisession.core.plan.models import (
    BF16,
    Components,
    ModelCard,
    components,
    draft_named,
    stage_layers,
)
from kimisession.core.plan.setup import GIB, Figure, Setup

RESIDENT_BASE_GIB = 0.07
RESIDENT_LAYER_GIB = 0.13 / 61
"""Beside the checkpoint's tensors: rotary tables and small buffers, and what the allocator rounds up in every layer. 0.20
for 61 layers (15 logged weights, within 0.05); 0.08 was left over for 6 layers and 0.11 for 40 (own logs, 0.26.0)."""
WEIGHTS_SPREAD_GIB = 0.15


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
        result.append(size / GIB + resident_extra_gib(count))
        begin += count
    return tuple(result)


def resident_extra_gib(layers: int) -> float:
    """What the engine holds beside the checkpoint's tensors."""
    return RESIDENT_BASE_GIB + RESIDENT_LAYER_GIB * layers


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


def weights_figure(card: ModelCard, setup: Setup, per_stage: tuple[float, ...]) -> Figure:
    """The fullest stage's weights with their interval, and why they are not calibrated if they are not."""
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
    if card.experts_format == "other":
        low, high = low - 1.0, high + 2.0
        doubts.append(
            "a number format that is not known here: what the engine makes of it when it loads is not modelled"
        )
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
    ground = "not calibrated: " + "; ".join(doubts) if doubts else "calibrated on 15 logs (TP8, DP8 with EP; INT4, FP8)"
    return Figure(value, low, high, ground)


def disk_figure(card: ModelCard) -> Figure:
    """The checkpoint on disk, in GiB: the sum of its tensors, and up to 1% of headers, tokenizer and rounding."""
    size = (card.checkpoint_bytes or components(card).total) / GIB
    ground = "logged size of the files" if card.checkpoint_bytes else "arithmetic: the sum of all tensors"
    return Figure(size, size * 0.995, size * 1.01, ground)
