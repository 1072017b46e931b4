"""The manifest of seeded weights, for the user's side.

The format itself lives in `kimisession.node.manifest`, because the puller on the rented machine needs it
there and it must not be written twice. What stands here is what only a writer needs: hashing a stream into a
`FileEntry`.
"""

from __future__ import annotations

import hashlib

from crc32c import crc32c

from kimisession.node.manifest import (
    CONTROL,
    PART_BYTES,
    SCHEMA,
    SEAL,
    FileEntry,
    Manifest,
    ManifestError,
    Part,
    canonical,
    check_path,
    decode,
    decode_entry,
    encode,
    encode_crc32c,
    entry_to_json,
    is_commit,
)

__all__ = [
    "CONTROL",
    "PART_BYTES",
    "SCHEMA",
    "SEAL",
    "FileEntry",
    "Hashing",
    "Manifest",
    "ManifestError",
    "Part",
    "canonical",
    "check_path",
    "decode",
    "decode_entry",
    "encode",
    "encode_crc32c",
    "entry_to_json",
    "is_commit",
]


class Hashing:
    """Both checksums of a stream, for the whole and per part, with no byte kept."""

    def __init__(self, part_bytes: int, git_size: int | None = None) -> None:
        """With `git_size`, the size of the whole, the git blob id is computed, too (`git_sha1`)."""
        self.size = 0
        self._git = hashlib.sha1(b"blob %d\0" % (git_size or 0), usedforsecurity=False)
        self._git_wanted = git_size is not None
        self._part_bytes = part_bytes
        self._sha256 = hashlib.sha256()
        self._crc32c = 0
        self._parts: list[Part] = []
        self._part_size = 0
        self._part_sha256 = hashlib.sha256()
        self._part_crc32c = 0

    def update(self, chunk: memoryview) -> None:
        """Take the next bytes of the stream."""
        self._sha256.update(chunk)
        if self._git_wanted:
            self._git.update(chunk)
        self._crc32c = crc32c(chunk, self._crc32c)
        self.size += len(chunk)
        while chunk:
            piece = chunk[: self._part_bytes - self._part_size]
            chunk = chunk[len(piece) :]
            self._part_sha256.update(piece)
            self._part_crc32c = crc32c(piece, self._part_crc32c)
            self._part_size += len(piece)
            if self._part_size == self._part_bytes:
                self._close_part()

    @property
    def sha256(self) -> str:
        """The sha256 of what came so far, in hex."""
        return self._sha256.hexdigest()

    @property
    def git_sha1(self) -> str:
        """The git blob id, in hex; meaningful at the end of a stream whose size was told beforehand."""
        return self._git.hexdigest()

    @property
    def crc32c(self) -> str:
        """The crc32c of what came so far, as GCS writes it."""
        return encode_crc32c(self._crc32c)

    def entry(self, path: str, generation: int | None) -> FileEntry:
        """The finished file. Call it once, at the end of the stream."""
        if self._part_size:
            self._close_part()
        return FileEntry(path, self.size, self.sha256, self.crc32c, generation, tuple(self._parts))

    def _close_part(self) -> None:
        offset = self._parts[-1].offset + self._parts[-1].size if self._parts else 0
        self._parts.append(
            Part(offset, self._part_size, encode_crc32c(self._part_crc32c), self._part_sha256.hexdigest())
        )
        self._part_size = 0
        self._part_sha256 = hashlib.sha256()
        self._part_crc32c = 0
