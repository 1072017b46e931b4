"""Where weights come from: the interface, and a local folder. The hub is in `kimisession.weights.hub`."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kimisession.weights.bucket import FileRange, Reader
from kimisession.weights.errors import BadSource, Missing, SourceChanged
from kimisession.weights.manifest import ManifestError, canonical, check_path

_INDEX = ".safetensors.index.json"
_SHARD = re.compile(rb':\s*"([^"\\]{1,255}\.safetensors)"')
_LONGEST_MATCH = 600


@dataclass(frozen=True)
class SourceFile:
    """A file to seed: its size in bytes, and what the source says of its bytes: a sha256 or a git blob id (hex)."""

    path: str
    size: int
    sha256: str | None
    git_sha1: str | None = None


class Source(Protocol):
    """Files of one immutable revision. `name` is what errors call it."""

    name: str

    def revision(self) -> str:
        """The commit or content digest of what `files` lists; never a branch."""
        ...

    def files(self) -> tuple[SourceFile, ...]:
        """Every file to seed. Raises BadSource, SourceDenied, TryAgain."""
        ...

    def open(self, file: SourceFile, offset: int) -> Reader:
        """The bytes of a file from `offset` on. Raises SourceChanged, SourceDenied, TryAgain."""
        ...


class FolderSource:
    """A local folder. Its revision is a digest of names, sizes and sha256s, so reading it costs one pass.

    Hidden files and folders are left out, as are links that lead out of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path.resolve()
        self._files: tuple[SourceFile, ...] | None = None

    def revision(self) -> str:
        """See Source.revision."""
        listed = [[file.path, file.size, file.sha256] for file in self.files()]
        return hashlib.sha256(canonical(listed)).hexdigest()

    def files(self) -> tuple[SourceFile, ...]:
        """See Source.files. Hashes the folder once; later calls return the same answer."""
        if self._files is None:
            if not self._path.is_dir():
                raise BadSource(f"{self.name} is no folder", "give the folder that holds config.json and the shards")
            self._files = tuple(self._scan())
            if not self._files:
                raise BadSource(f"{self.name} holds no files", "give the folder that holds config.json and the shards")
        return self._files

    def open(self, file: SourceFile, offset: int) -> Reader:
        """See Source.open."""
        try:
            reader = FileRange(self._path / file.path, offset)
        except Missing:
            raise SourceChanged(
                f"{file.path} is no longer in {self.name}", "put it back, then type the same command again"
            ) from None
        return reader

    def _scan(self) -> list[SourceFile]:
        found = []
        for folder, folders, names in os.walk(self._path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(folder, name)
                if name.startswith(".") or not path.resolve().is_relative_to(self._path) or not path.is_file():
                    continue
                relative = path.relative_to(self._path).as_posix()
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    found.append(SourceFile(relative, os.fstat(file.fileno()).st_size, digest))
        return sorted(found, key=lambda file: file.path)


def in_load_order(source: Source) -> tuple[SourceFile, ...]:
    """The files of a source in load order: small files first, then shards in the order of the index.

    Raises BadSource for a shard that an index names and the source lacks, and for names that cannot be
    objects.
    """
    files = {file.path: file for file in source.files()}
    for path in files:
        try:
            check_path(path)
        except ManifestError as error:
            raise BadSource(f"{source.name} cannot be seeded: {error}", "rename that file") from None
    rank: dict[str, int] = {}
    for path in sorted(files):
        if path.endswith(_INDEX):
            folder = path[: path.rfind("/") + 1]
            for shard in _shards_of(source, files[path]):
                if folder + shard not in files:
                    raise BadSource(
                        f"{path} of {source.name} names {shard}, which is not there",
                        "complete the download of the model, then seed it again",
                    )
                rank.setdefault(folder + shard, len(rank))
    return tuple(
        sorted(
            files.values(),
            key=lambda file: (file.path.endswith(".safetensors"), rank.get(file.path, len(rank)), file.path),
        )
    )


def _shards_of(source: Source, index: SourceFile) -> list[str]:
    """Shard names in order of first appearance.

    Scanned, not parsed: the index of a trillion-parameter model has hundreds of thousands of entries, and as
    Python objects they would take more memory than all streams of the seeder together.
    """
    found: dict[str, None] = {}
    buffer = memoryview(bytearray(2**20))
    tail = b""
    reader = source.open(index, 0)
    try:
        while count := reader.readinto(buffer):
            text = tail + bytes(buffer[:count])
            for match in _SHARD.finditer(text):
                found.setdefault(match.group(1).decode("utf-8", "replace"))
            tail = text[-_LONGEST_MATCH:]
    finally:
        reader.close()
    return list(found)
