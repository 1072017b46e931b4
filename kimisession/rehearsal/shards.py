"""Writing real safetensors shards and their index, with the standard library alone.

The format (its README, "Format"): 8 bytes of little-endian header length, a JSON header that gives each tensor's
dtype, shape and byte range, then the bytes. The names follow Hugging Face: `model-00001-of-00004.safetensors` and
`model.safetensors.index.json`, so that whatever reads a real checkpoint reads these.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
DTYPE_BYTES = {"U8": 1, "BF16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written: its name, dtype, shape, and a function that makes its bytes when they are needed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Callable[[Tensor], bytes]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def pseudorandom_bytes(label: str, size_bytes: int) -> bytes:
    """Bytes that look random and depend on `label` only: the same on every machine and Python, for ever.

    SHAKE-128 is an extendable hash: one call makes any length, at some 400 MB/s.
    """
    return hashlib.shake_128(label.encode()).digest(size_bytes)


def write_shards(folder: Path, shards: Sequence[Sequence[Tensor]]) -> tuple[Path, ...]:
    """Write one file per shard and the index; return their paths, index last. Existing files are replaced.

    The index's `metadata.total_size` is what Hugging Face puts there: bytes of tensors, without headers.
    Raises ValueError if a name occurs twice, for then a reader would silently load one of the two.
    """
    names = [tensor.name for shard in shards for tensor in shard]
    if len(set(names)) != len(names):
        raise ValueError(f"a tensor name occurs twice among the {len(names)} given; give each tensor one name")
    written: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(path, shard)
        written.append(path)
        weight_map |= {tensor.name: path.name for tensor in shard}
    total_bytes = sum(tensor.size_bytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    written.append(write_json(folder / INDEX_NAME, index))
    return tuple(written)


def write_json(path: Path, content: object) -> Path:
    """Write `content` as indented JSON with a final newline; return `path`."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=True) + "\n", encoding="ascii")
    return path


def _write_shard(path: Path, tensors: Sequence[Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # readers map the file and want the bytes 8-aligned; the format allows spaces
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            file.write(tensor.fill(tensor))
