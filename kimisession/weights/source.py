"""Where weights come from: the interface, and a local folder. The hub is in `kimisession.weights.hub`."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from kimisession.core.plan.tensors import LENGTH_BYTES, BadHeader, header_length, tensors_of
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

    Hidden files and folders are left out. Links to files are followed, wherever they lead: a snapshot in the hub's own cache
    is nothing else. What cannot be followed is refused, because what is left out silently is missing in the seal.
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
        found: list[tuple[str, Path]] = []
        for folder, folders, names in os.walk(self._path, onerror=_refuse):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            linked = [name for name in folders if Path(folder, name).is_symlink()]
            for name in sorted([*linked, *(name for name in names if not name.startswith("."))]):
                path = Path(folder, name)
                if not path.is_file():
                    raise BadSource(
                        f"{path} is a link to a folder or to nothing, or no file",
                        "put the file itself there, or move it away",
                    )
                found.append((path.relative_to(self._path).as_posix(), path))
        # Headers first: a cut file is told now, and not after hundreds of gigabytes were hashed.
        for relative, path in found:
            if relative.endswith(".safetensors"):
                _refuse_cut(path, relative)
        listed = []
        for relative, path in sorted(found):
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    listed.append(SourceFile(relative, os.fstat(file.fileno()).st_size, digest))
            except OSError as error:
                _refuse(error)
        return listed


def _refuse(error: OSError) -> NoReturn:
    raise BadSource(
        f"{error.filename} cannot be read: {error.strerror}", "mend its permissions, or name another folder"
    )


def _refuse_cut(path: Path, name: str) -> None:
    """Raise BadSource for a file of tensors that ends before its last tensor does: a folder has no checksums of its own, and a
    download that was broken off would be sealed like any other."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(LENGTH_BYTES)
            tensors_of(name, head + file.read(header_length(name, head, size)), size)
    except BadHeader as error:
        raise BadSource(str(error), "download that file again, then type the same command") from None
    except OSError as error:
        _refuse(error)


def in_load_order(source: Source) -> tuple[SourceFile, ...]:
    """The files of a source in load order: small files first, then shards in the order of the index.

    Raises BadSource for a shard that an index names and the source lacks, for names that cannot be objects, and where there
    are no safetensors files at all: then it is another folder, or a model that no engine here loads.
    """
    files = {file.path: file for file in source.files()}
    if not any(path.endswith(".safetensors") for path in files):
        raise BadSource(
            f"{source.name} holds no safetensors files, so there are no weights to seed",
            "name the folder or repository that holds config.json and the shards",
        )
    for path in files:
        try:
            check_path(path)
        except ManifestError as error:
            raise BadSource(
                f"{source.name} cannot be seeded: {error}",
                "leave that file out: seed a folder without it, with --from FOLDER",
            ) from None
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
