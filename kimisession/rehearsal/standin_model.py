"""The folder that the stand-in engine "serves": real safetensors shards with a real index, and no model inside.

Seeding, sealing, pulling and verifying move real bytes; the config says in plain words that nothing can be inferred
from them.
"""

from __future__ import annotations

from pathlib import Path

from kimisession.rehearsal.shards import Tensor, pseudorandom_bytes, write_json, write_shards

MIB = 1024 * 1024


def make_standin_model(folder: Path, shards: int = 4, shard_bytes: int = 4 * MIB) -> tuple[Path, ...]:
    """Write a stand-in model into `folder` (made if absent) and return the files, config.json first.

    Each shard holds one tensor of `shard_bytes` bytes; the file is its header (some hundred bytes) longer. The bytes
    depend on the arguments only, so that a second call writes the same files. Raises ValueError for less than one
    shard or one byte.
    """
    if shards < 1 or shard_bytes < 1:
        raise ValueError(f"a stand-in needs at least 1 shard of 1 byte, not {shards} of {shard_bytes}")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "kimisession-standin",
        "architectures": ["KimisessionStandIn"],
        "note": "A stand-in for rehearsals: the shards are pseudorandom bytes, there is no model in them.",
    }
    tensors = [Tensor(f"standin.part.{n}", "U8", (shard_bytes,), _fill) for n in range(shards)]
    return (write_json(folder / "config.json", config), *write_shards(folder, [[tensor] for tensor in tensors]))


def _fill(tensor: Tensor) -> bytes:
    return pseudorandom_bytes(tensor.name, tensor.size_bytes)
