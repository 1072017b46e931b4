"""What a model is made of: its dimensions, its number formats, and the bytes of each kind of tensor.

Everything is arithmetic on the architecture, so a model without a card works from its config.json
(`card_from_config`). Checked against the published sizes: Kimi K2.5 comes out at 595.15 GB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil
from typing import Any, Literal

Format = Literal["bf16", "fp8-block", "int4-g32", "nvfp4", "mxfp4", "other"]
FORMATS: tuple[Format, ...] = ("bf16", "fp8-block", "int4-g32", "nvfp4", "mxfp4")
"""Those whose sizes are arithmetic. "other" is a format that is not known here: its bytes must be counted in the files."""

BF16 = 2
FP32 = 4


class ModelUnknown(ValueError):
    """The architecture cannot be planned for; the message says which field is missing or foreign."""


class FormatUnknown(ModelUnknown):
    """The dimensions are known and the quantisation is not."""


@dataclass(frozen=True, slots=True)
class Vision:
    """A ViT in front of the model, with a patch-merging projector (MoonViT of Kimi K2.5)."""

    layers: int
    hidden: int
    intermediate: int
    patch: int
    pos_emb_height: int
    pos_emb_width: int
    merge_height: int
    merge_width: int


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The dimensions that decide memory, named as in DeepSeek's config.json, and how each part is stored.

    `index_heads` and `index_dim` are those of a sparse-attention indexer (0 where there is none);
    `nextn_layers` are the multi-token-prediction layers that ship with the model and are loaded for MTP drafting only.
    `experts_format` and the other formats are of the checkpoint; embeddings, norms, router and lm_head are bf16.
    `kv_dtype` is what `--kv-cache-dtype auto` comes to. `evidence` names the sources of the dimensions and sizes.
    `counted` are bytes read out of the checkpoint's own headers; with them nothing is derived from the dimensions.
    """

    name: str
    layers: int
    first_dense: int
    hidden: int
    dense_intermediate: int
    moe_intermediate: int
    experts: int
    experts_per_token: int
    shared_experts: int
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    vocab: int
    max_context: int
    experts_format: Format = "bf16"
    shared_format: Format = "bf16"
    dense_format: Format = "bf16"
    attention_format: Format = "bf16"
    kv_dtype: Literal["bf16", "fp8"] = "bf16"
    tied: bool = False
    vision: Vision | None = None
    index_heads: int = 0
    index_dim: int = 0
    nextn_layers: int = 0
    shards: int | None = None
    checkpoint_bytes: int | None = None
    aliases: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    counted: Components | None = None

    def __post_init__(self) -> None:
        """Refuse a card whose numbers cannot be a model. Raises ModelUnknown, which names the field."""
        for field in ("layers", "hidden", "heads", "kv_lora", "rope", "vocab", "max_context"):
            if getattr(self, field) <= 0:
                raise ModelUnknown(f"{self.name}: {field} must be above 0, not {getattr(self, field)}")
        if not 0 <= self.first_dense <= self.layers:
            raise ModelUnknown(f"{self.name}: first_dense must be between 0 and {self.layers} layers")

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.first_dense if self.experts else 0


@dataclass(frozen=True, slots=True)
class Components:
    """Bytes of the whole checkpoint by kind of tensor; the kinds are those that vLLM places differently."""

    routed_experts: int
    shared_experts: int
    dense_mlp: int
    attention_replicated: int
    attention_sharded: int
    indexer: int
    router: int
    embed: int
    lm_head: int
    norms: int
    vision_blocks: int
    vision_other: int
    projector: int

    @property
    def total(self) -> int:
        """Bytes of all tensors together, as the index of the checkpoint states them."""
        return sum(getattr(self, field.name) for field in fields(self))


def matrix_bytes(rows: int, columns: int, stored_as: Format) -> int:
    """Bytes of one weight matrix, scales included.

    fp8-block: one fp32 scale per 128x128 block. int4-g32: 4 bits and one bf16 scale per 32 weights. nvfp4: 4 bits,
    one fp8 scale per 16 weights and two fp32 per matrix. mxfp4: 4 bits and one byte per 32 weights.
    """
    weights = rows * columns
    match stored_as:
        case "bf16":
            return weights * BF16
        case "fp8-block":
            return weights + FP32 * ceil(rows / 128) * ceil(columns / 128)
        case "int4-g32":
            return weights // 2 + BF16 * rows * ceil(columns / 32)
        case "nvfp4":
            return weights // 2 + rows * ceil(columns / 16) + 2 * FP32
        case "mxfp4":
            return weights // 2 + rows * ceil(columns / 32)
        case "other":
            raise ModelUnknown(
                "the size of a matrix in a number format that is not known here must be counted, not derived"
            )


def _mlp_bytes(hidden: int, intermediate: int, stored_as: Format) -> int:
    """A gated MLP: gate and up (intermediate x hidden), down (hidden x intermediate)."""
    up = matrix_bytes(intermediate, hidden, stored_as)
    return 2 * up + matrix_bytes(hidden, intermediate, stored_as)


def routed_layer_bytes(card: ModelCard) -> int:
    """Bytes of the routed experts of one MoE layer."""
    if card.counted is not None:
        return card.counted.routed_experts // max(1, card.moe_layers)
    return card.experts * _mlp_bytes(card.hidden, card.moe_intermediate, card.experts_format) if card.experts else 0


def components(card: ModelCard) -> Components:
    """Bytes by kind of tensor: counted where somebody counted them, else from the dimensions alone."""
    if card.counted is not None:
        return card.counted
    at = card.attention_format
    query = card.heads * (card.nope + card.rope)
    if card.q_lora:
        replicated = matrix_bytes(card.q_lora, card.hidden, at)
        sharded = matrix_bytes(query, card.q_lora, at)
    else:
        replicated = 0
        sharded = matrix_bytes(query, card.hidden, at)
    replicated += matrix_bytes(card.kv_lora + card.rope, card.hidden, at)
    sharded += matrix_bytes(card.heads * (card.nope + card.v_dim), card.kv_lora, at)
    sharded += matrix_bytes(card.hidden, card.heads * card.v_dim, at)
    indexer = 0
    if card.index_heads:
        indexer = BF16 * (
            card.q_lora * card.index_heads * card.index_dim
            + card.hidden * card.index_dim
            + card.hidden * card.index_heads
            + 2 * card.index_dim
        )
    shared_inter = card.moe_intermediate * card.shared_experts
    blocks, other, projector = _vision_bytes(card.vision, card.hidden)
    return Components(
        routed_experts=card.moe_layers * routed_layer_bytes(card),
        shared_experts=card.moe_layers * _mlp_bytes(card.hidden, shared_inter, card.shared_format)
        if card.shared_experts
        else 0,
        dense_mlp=(card.layers - card.moe_layers) * _mlp_bytes(card.hidden, card.dense_intermediate, card.dense_format),
        attention_replicated=card.layers * replicated,
        attention_sharded=card.layers * sharded,
        indexer=card.layers * indexer,
        router=card.moe_layers * card.experts * (card.hidden * BF16 + FP32),
        embed=card.vocab * card.hidden * BF16,
        lm_head=0 if card.tied else card.vocab * card.hidden * BF16,
        norms=(card.layers * (2 * card.hidden + card.q_lora + card.kv_lora) + card.hidden) * BF16,
        vision_blocks=blocks,
        vision_other=other,
        projector=projector,
    )


def _vision_bytes(vision: Vision | None, text_hidden: int) -> tuple[int, int, int]:
    """Blocks; patch and position embeddings with the last norm; projector. All bf16, linears with bias."""
    if vision is None:
        return 0, 0, 0
    h, mid = vision.hidden, vision.intermediate
    block = (3 * h * h + 3 * h) + (h * h + h) + (h * mid + mid) + (mid * h + h) + 4 * h
    other = (3 * vision.patch**2 * h + h) + vision.pos_emb_height * vision.pos_emb_width * h + 2 * h
    merged = h * vision.merge_height * vision.merge_width
    projector = 2 * h + (merged * merged + merged) + (merged * text_hidden + text_hidden)
    return vision.layers * block * BF16, other * BF16, projector * BF16


def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage as vLLM splits them: the rest goes to the stages before the last, from the back.

    Source: vllm/distributed/utils.py get_pp_indices, 0.15 to 0.33.
    """
    parts = [layers // pp] * pp
    rest = layers % pp
    for step in range(rest):
        parts[-(2 + step) if pp > 1 else 0] += 1
    return tuple(parts)


# --- a model that is in no card ------------------------------------------------------------------------------------


def card_from_config(config: Mapping[str, Any], name: str | None = None) -> ModelCard:
    """Read a Hugging Face config.json (as a dict) of the DeepSeek-V3 family: MLA, with or without routed experts.

    A multimodal wrapper with `text_config` is unwrapped. Raises ModelUnknown, which names the missing field, for
    another architecture (one without MLA has no `kv_lora_rank`) or a quantisation that is not known here.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    label = name or str(config.get("_name_or_path") or (config.get("architectures") or ["unnamed model"])[0])

    def number(key: str, default: int | None = None) -> int:
        value = text.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelUnknown(
                f"{label}: config.json has no whole number {key!r}; only models with DeepSeek's MLA can be planned"
            )
        return value

    layers = number("num_hidden_layers")
    experts = number("n_routed_experts", 0)
    formats = _formats(config, text, label)
    return ModelCard(
        name=label,
        layers=layers,
        first_dense=number("first_k_dense_replace", 0) if experts else layers,
        hidden=number("hidden_size"),
        dense_intermediate=number("intermediate_size"),
        moe_intermediate=number("moe_intermediate_size", 0),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", 0),
        shared_experts=number("n_shared_experts", 0),
        heads=number("num_attention_heads"),
        q_lora=number("q_lora_rank", 0),
        kv_lora=number("kv_lora_rank"),
        nope=number("qk_nope_head_dim"),
        rope=number("qk_rope_head_dim"),
        v_dim=number("v_head_dim"),
        vocab=number("vocab_size"),
        max_context=number("max_position_embeddings"),
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        vision=_vision(config),
        index_heads=number("index_n_heads", 0),
        index_dim=number("index_head_dim", 0),
        nextn_layers=number("num_nextn_predict_layers", 0),
        evidence=("config.json",),
        **formats,
    )


def _formats(config: Mapping[str, Any], text: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Which parts are quantised, out of `quantization_config` and its ignore list."""
    quant: Mapping[str, Any] = text.get("quantization_config") or config.get("quantization_config") or {}
    if not quant:
        return {}
    method = str(quant.get("quant_method", ""))
    stored_as: Format
    kv = "bf16"
    if method == "fp8":
        return dict.fromkeys(("experts_format", "shared_format", "dense_format", "attention_format"), "fp8-block")
    if method == "compressed-tensors":
        groups = list((quant.get("config_groups") or {}).values())
        weights: Mapping[str, Any] = (groups[0].get("weights") or {}) if groups else {}
        if (weights.get("num_bits"), weights.get("group_size"), weights.get("type")) != (4, 32, "int"):
            raise FormatUnknown(f"{label}: compressed-tensors {dict(weights)} is not the INT4 group 32 that is known")
        stored_as = "int4-g32"
    elif method == "modelopt":
        algo = str(quant.get("quant_algo") or (quant.get("quantization") or {}).get("quant_algo") or "")
        if algo.upper() != "NVFP4":
            raise FormatUnknown(f"{label}: modelopt {algo or 'without quant_algo'} is not the NVFP4 that is known")
        stored_as = "nvfp4"
        if quant.get("kv_cache_scheme") or (quant.get("quantization") or {}).get("kv_cache_quant_algo"):
            kv = "fp8"
    else:
        raise FormatUnknown(f"{label}: quantisation {method!r} is not known; write a card for it")
    entries = quant.get("ignore") or quant.get("exclude_modules") or ()
    ignored = " ".join(str(entry).replace("\\", "") for entry in entries)
    dense_ignored = any(
        mark in ignored for mark in ("mlp.(gate|up|gate_up|down)_proj", "layers.0.mlp", ".mlp.gate_proj")
    )
    return {
        "experts_format": stored_as,
        "shared_format": "bf16" if "shared_experts" in ignored else stored_as,
        "dense_format": "bf16" if dense_ignored else stored_as,
        "attention_format": "bf16" if "self_attn" in ignored else stored_as,
        "kv_dtype": kv,
    }


def _vision(config: Mapping[str, Any]) -> Vision | None:
    """MoonViT's dimensions, from either spelling of its `vision_config`; None for a text model."""
    raw: Mapping[str, Any] | None = config.get("vision_config")
    if not raw:
        return None

    def of(*keys: str, default: int) -> int:
        return next((int(raw[key]) for key in keys if raw.get(key) is not None), default)

    merge = raw.get("merge_kernel_size") or (2, 2)
    return Vision(
        layers=of("vt_num_hidden_layers", "num_hidden_layers", default=27),
        hidden=of("vt_hidden_size", "hidden_size", default=1152),
        intermediate=of("vt_intermediate_size", "intermediate_size", default=4304),
        patch=of("patch_size", default=14),
        pos_emb_height=of("init_pos_emb_height", default=64),
        pos_emb_width=of("init_pos_emb_width", default=64),
        merge_height=int(merge[0]),
        merge_width=int(merge[1]),
    )


# --- draft models ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draft:
    """A speculative-decoding draft model beside the target: bytes that every rank holds, and bytes split over TP.

    `aux_hidden_states` is how many of the target's hidden states it keeps alive while the target runs. `known` means
    that its size was logged, `known_kind` that its shape is: EAGLE-3 with MLA, or the model's own MTP layer.
    """

    name: str
    replicated_bytes: int
    sharded_bytes: int
    kv_layers: int
    aux_hidden_states: int
    known: bool
    known_kind: bool
    evidence: str


def draft_named(text: str, card: ModelCard) -> Draft | None:
    """The draft model that `text` (a repository, or a log's remark) names; None for "none" or nothing.

    EAGLE-3 with MLA is arithmetic on the target's dimensions: one MLA layer over [embedding, hidden], a dense MLP, a
    3-to-1 fusion, its own lm_head; 0.76 GiB per GPU at TP8 against 0.76 logged (public nanoserve-mini logs, 2026-06-08:
    71.92 - 71.16). Another draft gets the same size, marked as not known.
    """
    low = text.strip().lower()
    if low in ("", "none", "no", "off"):
        return None
    if "mtp" in low and card.nextn_layers:
        return _own_mtp_layer(text.strip(), card)
    fp8 = "fp8" in low.replace("draft kv fp8", "").replace("kv fp8", "")
    stored_as: Format = "fp8-block" if fp8 else "bf16"
    h = card.hidden
    replicated = matrix_bytes(h, 3 * h, stored_as) + matrix_bytes(
        card.q_lora + card.kv_lora + card.rope, 2 * h, stored_as
    )
    sharded = (
        card.vocab * h * BF16
        + _mlp_bytes(h, card.dense_intermediate, stored_as)
        + matrix_bytes(card.heads * (card.nope + card.rope), card.q_lora or h, stored_as)
        + matrix_bytes(card.heads * (card.nope + card.v_dim), card.kv_lora, stored_as)
        + matrix_bytes(h, card.heads * card.v_dim, stored_as)
    )
    known = "eagle3" in low and not fp8
    return Draft(
        name=text.strip(),
        replicated_bytes=replicated,
        sharded_bytes=sharded,
        kv_layers=1,
        aux_hidden_states=3,
        known=known,
        known_kind="eagle3" in low or "fp8" in low or "mtp" in low,
        evidence="own arithmetic, 0.76 GiB at TP8 as logged" if known else "size assumed to be that of EAGLE-3 MLA",
    )


def _own_mtp_layer(name: str, card: ModelCard) -> Draft:
    """The model's own next-token layer: one more MoE layer and the fusion of state and embedding, both tables shared.

    GLM-5.1 logged 0.95 GiB for it at TP8 (56.62 - 55.67); this gives 0.98.
    """
    parts = components(card)
    moe, layers = max(card.moe_layers, 1), card.layers
    return Draft(
        name=name,
        replicated_bytes=(parts.attention_replicated + parts.indexer + parts.norms) // layers
        + parts.router // moe
        + matrix_bytes(card.hidden, 2 * card.hidden, "bf16"),
        sharded_bytes=(parts.routed_experts + parts.shared_experts) // moe + parts.attention_sharded // layers,
        kv_layers=1,
        aux_hidden_states=1,
        known=True,
        known_kind=True,
        evidence="arithmetic on the target's own layer",
    )
