"""Small weights with a real index, and sources that misbehave, for the tests of seeding and pulling."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from kimisession.weights.bucket import Reader
from kimisession.weights.errors import TryAgain
from kimisession.weights.retry import Patience
from kimisession.weights.source import FolderSource, SourceFile

PART_BYTES = 65536
HEADER_BYTES = 128
HASTY = Patience(tries=6, first_wait_s=0, longest_wait_s=0.01, beat_s=0.05, stale_s=0.5)


def weights_folder(path: Path, shards: int = 4, shard_bytes: int = 200_001, seed: int = 1) -> Path:
    """A folder like a model's: config, an index in another order than the names, shards, an empty file."""
    path.mkdir(parents=True)
    rng = random.Random(seed)
    weight_map = {}
    for number in range(shards, 0, -1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        (path / name).write_bytes(tensors(rng.randbytes(shard_bytes + number - HEADER_BYTES)))
        weight_map[f"layer.{shards - number}"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text('{"model_type": "kimi_k2"}')
    (path / "empty.txt").write_bytes(b"")
    (path / "sub").mkdir()
    (path / "sub" / "tokenizer.json").write_text("{}")
    return path


def tensors(content: bytes) -> bytes:
    """A safetensors file of one tensor with this content, HEADER_BYTES longer than it."""
    header = json.dumps({"t": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}})
    return (HEADER_BYTES - 8).to_bytes(8, "little") + header.encode().ljust(HEADER_BYTES - 8) + content


def same_files(left: Path, right: Path) -> bool:
    """Whether `right` holds every file of `left` with the same bytes."""
    names = [path.relative_to(left) for path in left.rglob("*") if path.is_file()]
    return bool(names) and all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


class WatchedSource(FolderSource):
    """A folder that counts what is read; `spoil(path, offset, chunk)` may change, cut or raise."""

    def __init__(self, path: Path, spoil: Callable[[str, int, memoryview], int] | None = None) -> None:
        super().__init__(path)
        self.read_bytes = 0
        self.opened: list[tuple[str, int]] = []
        self._spoil = spoil

    def open(self, file: SourceFile, offset: int) -> Reader:
        """See Source.open."""
        self.opened.append((file.path, offset))
        return _Watched(self, file.path, offset, super().open(file, offset), self._spoil)


class _Watched:
    def __init__(
        self,
        source: WatchedSource,
        path: str,
        at: int,
        reader: Reader,
        spoil: Callable[[str, int, memoryview], int] | None,
    ) -> None:
        self._source, self._path, self._at, self._reader, self._spoil = source, path, at, reader, spoil

    def readinto(self, buffer: memoryview) -> int:
        count = self._reader.readinto(buffer[:32768])
        if self._spoil is not None:
            count = self._spoil(self._path, self._at, buffer[:count])
        self._at += count
        self._source.read_bytes += count
        return count

    def close(self) -> None:
        self._reader.close()


def flip_once(path: str, at: int, times: int = 1) -> Callable[[str, int, memoryview], int]:
    """Flip a bit of the byte at `at` of `path`, the first `times` that it is read."""
    left = [times]

    def spoil(name: str, offset: int, chunk: memoryview) -> int:
        if name == path and offset <= at < offset + len(chunk) and left[0]:
            left[0] -= 1
            chunk[at - offset] ^= 1
        return len(chunk)

    return spoil


def cut_every(count: int) -> Callable[[str, int, memoryview], int]:
    """Cut the connection at every `count`-th read, and every second time end the body early instead."""
    reads = [0]

    def spoil(name: str, offset: int, chunk: memoryview) -> int:
        reads[0] += 1
        if reads[0] % count == 0:
            if reads[0] % (2 * count) == 0:
                return 0
            raise TryAgain("connection reset")
        return len(chunk)

    return spoil
