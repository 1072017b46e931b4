"""What the headers of safetensors files say: names, number formats and sizes of tensors, sorted by where vLLM puts them. Pure.

A file begins with eight bytes (the header's length, little-endian) and the header, a JSON object: for each tensor its
`dtype`, `shape` and `data_offsets`. So sizes of a model are known after kilobytes of each file, and nothing has to be
derived from its dimensions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from kimisession.core.plan.models import Components, FormatUnknown, ModelCard, card_from_config

LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""The format's own limit for a header (huggingface/safetensors, MAX_HEADER_SIZE)."""

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4,
}  # fmt: skip


class BadHeader(ValueError):
    """The beginning of the file is no safetensors header; the message is one sentence that names the file."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint; `bytes` are those of its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def header_length(file: str, head: bytes, file_bytes: int) -> int:
    """Bytes of the JSON that follows the first eight. Raises BadHeader where no header can begin like this."""
    if len(head) < LENGTH_BYTES or file_bytes < LENGTH_BYTES + 2:
        raise BadHeader(f"{file} has {file_bytes:,} bytes, too few for a safetensors file")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if not 2 <= length <= MOST_HEADER_BYTES:
        raise BadHeader(f"{file} is no safetensors file: its header would have {length:,} bytes")
    if LENGTH_BYTES + length > file_bytes:
        raise BadHeader(f"{file} is cut off: its header has {length:,} bytes and the file {file_bytes:,}")
    return length


def tensors_of(file: str, head: bytes, file_bytes: int) -> tuple[Tensor, ...]:
    """The tensors of one file, out of its first bytes. Raises BadHeader for anything that is not a whole, sane header."""
    length = header_length(file, head, file_bytes)
    text = head[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(text) < length:
        raise BadHeader(f"{file} is cut off inside its header, after {len(head):,} bytes")
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        raise BadHeader(f"{file} is no safetensors file: its header is not JSON") from None
    if not isinstance(entries, dict):
        raise BadHeader(f"{file} is no safetensors file: its header is not a JSON object")
    room = file_bytes - LENGTH_BYTES - length
    return tuple(_tensor(file, name, entry, room) for name, entry in entries.items() if name != "__metadata__")


def _tensor(file: str, name: str, entry: Any, room: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole, dtype, shape, begin, end = False, "", (), 0, 0
    if not whole or not isinstance(dtype, str):
        raise BadHeader(f"{file} has a damaged header: {name[:80]!r} has no dtype, shape and data_offsets")
    if not begin <= end <= room:
        raise BadHeader(f"{file} is cut off: {name[:80]!r} would end {end - room:,} bytes behind the end of the file")
    bits = BITS.get(dtype)
    if bits is not None and (prod(shape) * bits + 7) // 8 != end - begin:
        raise BadHeader(f"{file} has a damaged header: {name[:80]!r} has {end - begin:,} bytes, not those of its shape")
    return Tensor(name, dtype, tuple(shape), end - begin)


#: The first pattern that is found in a tensor's name decides its kind, a field of Components.
KINDS: tuple[tuple[str, str], ...] = (
    (r"(vision_tower|visual|vision_model)\..*(blocks|layers)\.\d+\.", "vision_blocks"),
    (r"vision_tower|visual\.|vision_model", "vision_other"),
    (r"mm_projector|multi_modal_projector", "projector"),
    (r"\.indexer\.", "indexer"),
    (r"\.shared_experts?\.", "shared_experts"),
    (r"\.mlp\.gate\.|\.router\.", "router"),
    (r"norm", "norms"),
    (r"\.(q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj)\.", "attention_replicated"),
    (r"\.self_attn\.", "attention_sharded"),
    (r"\.mlp\.", "dense_mlp"),
    (r"embed_tokens|word_embeddings", "embed"),
    (r"lm_head", "lm_head"),
)
_LAYER = re.compile(r"(?<![\w.])(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Census:
    """A checkpoint counted. `unplaced` are bytes of tensors whose names are not known; `drafting` those of layers behind
    the last, which are loaded for drafting only. `attention_dtypes`: their number formats."""

    components: Components
    unplaced: int
    drafting: int
    unplaced_names: tuple[str, ...]
    attention_dtypes: frozenset[str]

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return self.components.total + self.unplaced + self.drafting


def census(tensors: Iterable[Tensor], layers: int) -> Census:
    """Sort tensors by kind, for a model with so many layers; what has no place is told apart."""
    sums = dict.fromkeys(Components.__dataclass_fields__, 0)
    unplaced, drafting = 0, 0
    names: list[str] = []
    attention: set[str] = set()
    compiled = [(re.compile(pattern), kind) for pattern, kind in KINDS]
    for tensor in tensors:
        layer = _LAYER.search(tensor.name)
        if layer and int(layer[1]) >= layers:
            drafting += tensor.bytes
            continue
        if ".experts." in tensor.name:  # nearly all of them: no need to try the patterns one by one
            kind = "routed_experts"
        else:
            kind = next((kind for pattern, kind in compiled if pattern.search(tensor.name)), "")
        if not kind:
            unplaced += tensor.bytes
            names.append(tensor.name)
            continue
        sums[kind] += tensor.bytes
        if kind.startswith("attention"):
            attention.add(tensor.dtype)
    return Census(Components(**sums), unplaced, drafting, tuple(names[:5]), frozenset(attention))


def counted_card(config: Mapping[str, Any], tensors: Iterable[Tensor], file_bytes: int, name: str) -> ModelCard:
    """A card out of a checkpoint's config.json and its headers: dimensions of the one, bytes of the other.

    A quantisation that is not known here is no obstacle, because its bytes are counted. Tensors whose names are not known
    are taken for replicated ones (they are added to `norms`), which errs to the safe side. Raises ModelUnknown for an
    architecture that cannot be planned.
    """
    formats: dict[str, Any] = {}
    try:
        card = card_from_config(config, name)
    except FormatUnknown:
        text = {k: v for k, v in (config.get("text_config") or config).items() if k != "quantization_config"}
        card = card_from_config({**text, "vision_config": config.get("vision_config")}, name)
        formats = {"experts_format": "other", "shared_format": "other", "dense_format": "other"}
    found = census(tensors, card.layers)
    if formats:
        formats["attention_format"] = "bf16" if found.attention_dtypes <= {"BF16", "F16", "F32"} else "other"
    told = [f"{found.unplaced:,} bytes in tensors of unknown names: {', '.join(found.unplaced_names)}"]
    return replace(
        card,
        **formats,
        counted=replace(found.components, norms=found.components.norms + found.unplaced),
        checkpoint_bytes=file_bytes,
        evidence=("config.json and the headers of the safetensors files", *(told if found.unplaced else ())),
    )
