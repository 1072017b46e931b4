"""The manifest of seeded weights: what a sealed bucket holds, down to the checksum of each part.

The one reader and writer of this format: the seeder on the user's side imports it, the puller on the rented
machine runs with it (so: standard library only, Python 3.9+). Pure: text in, values out.

Format (schema 1, JSON): checksums are crc32c as Google Cloud Storage writes it (base64 of the four bytes, big
endian, so that it compares with `x-goog-hash` as it is) and sha256 in lower-case hex. Files stand in load
order. Parts cut each file every `part_bytes` bytes, so that ranged reads that finish out of order can each be
verified.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

SCHEMA = 1
PART_BYTES = 32 * 2**20
CONTROL = ".kimisession/"
"""Objects under this prefix are ours (seal, plan, sessions); no file of a model may have such a name."""
SEAL = CONTROL + "manifest.json"
"""The object whose presence says that the bucket is seeded."""
PULLED = ".kimisession-pulled.json"

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SEGMENT = re.compile(r"[A-Za-z0-9_.+=@,][A-Za-z0-9_.+=@,-]{0,199}")


class ManifestError(ValueError):
    """A manifest that cannot be trusted: one sentence with the file and the key."""


@dataclass(frozen=True)
class Part:
    """One verified range of a file: offset and size in bytes."""

    offset: int
    size: int
    crc32c: str
    sha256: str


@dataclass(frozen=True)
class FileEntry:
    """One file: its size in bytes, both checksums, its generation (None where the store has none)."""

    path: str
    size: int
    sha256: str
    crc32c: str
    generation: int | None
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Manifest:
    """What a sealed bucket holds. `revision` is a commit or a content digest, never a branch."""

    model: str
    revision: str
    files: tuple[FileEntry, ...]
    part_bytes: int
    written_by: str
    written_at: datetime
    schema: int = SCHEMA

    @property
    def total_bytes(self) -> int:
        """The bytes of all files."""
        return sum(entry.size for entry in self.files)

    @property
    def digest(self) -> str:
        """The sha256 (hex) of the canonical JSON: the same manifest, the same digest, anywhere."""
        return hashlib.sha256(encode(self)).hexdigest()


def encode_crc32c(value: int) -> str:
    """A crc32c as GCS writes it: base64 of four big-endian bytes."""
    return base64.b64encode(value.to_bytes(4, "big")).decode("ascii")


def check_path(path: str, where: str = "path") -> str:
    """Return `path` if it is a safe relative name, else raise ManifestError.

    Safe: segments of letters, digits and `_.+=@,-` joined by `/`, no `.` or `..`, not under our own names.
    """
    segments = path.split("/")
    if path.startswith("/"):
        raise ManifestError(f"{where}: {path!r} is absolute; only names inside the folder are taken")
    if any(segment in (".", "..") for segment in segments):
        raise ManifestError(f"{where}: {path!r} leaves its folder; names with '.' or '..' are refused")
    if len(path) > 900 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise ManifestError(f"{where}: {path!r} has an empty segment or characters outside A-Z a-z 0-9 _.+=@,-")
    if segments[0].startswith(".kimisession"):
        raise ManifestError(f"{where}: {path!r} is a name that kimisession keeps for itself")
    return path


def is_commit(revision: str) -> bool:
    """Whether this names immutable content: a git commit (40 hex) or a content digest (64 hex)."""
    return _COMMIT.fullmatch(revision) is not None


def encode(manifest: Manifest) -> bytes:
    """The canonical JSON of a manifest: sorted keys, no spaces, one newline at the end, UTC to the second."""
    written_at = manifest.written_at.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    value = {
        "schema": manifest.schema,
        "model": manifest.model,
        "revision": manifest.revision,
        "part_bytes": manifest.part_bytes,
        "written_by": manifest.written_by,
        "written_at": written_at,
        "files": [entry_to_json(entry) for entry in manifest.files],
    }
    return canonical(value)


def canonical(value: object) -> bytes:
    """JSON with sorted keys and no spaces, so that equal values are equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"


def entry_to_json(entry: FileEntry) -> dict[str, object]:
    """One file as a JSON object; `entry_from_json` reads it back."""
    return {
        "path": entry.path,
        "size": entry.size,
        "sha256": entry.sha256,
        "crc32c": entry.crc32c,
        "generation": entry.generation,
        "parts": [
            {"offset": part.offset, "size": part.size, "crc32c": part.crc32c, "sha256": part.sha256}
            for part in entry.parts
        ],
    }


def decode(text: bytes, source: str = "manifest.json") -> Manifest:
    """Read a manifest strictly. Raises ManifestError naming `source` and the key of the first mistake."""
    found = _Keys(
        _parse(text, source),
        source,
        "",
        ("schema", "model", "revision", "part_bytes", "written_by", "written_at", "files"),
    )
    schema = found.number("schema", 1)
    if schema != SCHEMA:
        raise ManifestError(
            f"{source}: schema is {schema}, this kimisession reads {SCHEMA}; upgrade kimisession to read it"
        )
    found.check()
    part_bytes = found.number("part_bytes", 1)
    revision = found.text("revision")
    if not is_commit(revision):
        raise ManifestError(f"{source}: revision: {revision!r} is no commit (40 or 64 hex digits)")
    try:
        written_at = datetime.strptime(found.text("written_at"), "%Y-%m-%dT%H:%M:%SZ")  # noqa: DTZ007
    except ValueError:
        raise ManifestError(f"{source}: written_at: expected a time such as 2026-11-21T10:00:00Z") from None
    files = tuple(
        entry_from_json(item, source, part_bytes, f"files[{number}]")
        for number, item in enumerate(found.items("files"))
    )
    _no_clash([entry.path for entry in files], source)
    return Manifest(
        model=found.text("model"),
        revision=revision,
        files=files,
        part_bytes=part_bytes,
        written_by=found.text("written_by"),
        written_at=written_at.replace(tzinfo=timezone.utc),
        schema=schema,
    )


def decode_entry(text: bytes, source: str, part_bytes: int) -> FileEntry:
    """Read the record of one finished file. Raises ManifestError."""
    return entry_from_json(_parse(text, source), source, part_bytes, "file")


def entry_from_json(value: object, source: str, part_bytes: int, key: str) -> FileEntry:
    """Read one file strictly: its parts must tile it every `part_bytes`. Raises ManifestError."""
    found = _Keys(value, source, key, ("path", "size", "sha256", "crc32c", "generation", "parts"))
    found.check()
    path = check_path(found.text("path"), f"{source}: {key}.path")
    size = found.number("size", 0)
    parts = []
    offset = 0
    for number, item in enumerate(found.items("parts")):
        part = _Keys(item, source, f"{key}.parts[{number}]", ("offset", "size", "crc32c", "sha256"))
        part.check()
        if part.number("offset", 0) != offset or part.number("size", 1) != min(part_bytes, size - offset):
            raise ManifestError(f"{source}: {key}.parts[{number}]: parts of {path} do not tile its {size} bytes")
        parts.append(Part(offset, part.number("size", 1), part.crc32c("crc32c"), part.sha256("sha256")))
        offset += parts[-1].size
    if offset != size:
        raise ManifestError(f"{source}: {key}.parts: parts of {path} cover {offset} of its {size} bytes")
    generation = None if found.value["generation"] is None else found.number("generation", 1)
    return FileEntry(path, size, found.sha256("sha256"), found.crc32c("crc32c"), generation, tuple(parts))


def _parse(text: bytes, source: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ManifestError(f"{source}: not valid JSON ({error})") from None


def _no_clash(paths: list[str], source: str) -> None:
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise ManifestError(f"{source}: files: {path!r} is listed twice")
        seen.add(path)
    for path in paths:
        segments = path.split("/")
        for depth in range(1, len(segments)):
            parent = "/".join(segments[:depth])
            if parent in seen:
                raise ManifestError(f"{source}: files: {parent!r} is both a file and the folder of {path!r}")


class _Keys:
    """A JSON object whose keys are read by type, with the place of a mistake in the sentence."""

    def __init__(self, value: object, source: str, key: str, known: tuple[str, ...]) -> None:
        if not isinstance(value, dict):
            raise ManifestError(f"{source}: {key or 'the whole'}: expected an object")
        self.value: dict[str, Any] = value
        self._source = source
        self._prefix = key + "." if key else ""
        self._known = known

    def check(self) -> None:
        for key in self.value:
            if key not in self._known:
                raise ManifestError(f"{self._source}: {self._prefix}{key}: unknown key")
        for key in self._known:
            if key not in self.value:
                raise ManifestError(f"{self._source}: {self._prefix}{key}: missing")

    def _bad(self, key: str, expected: str) -> ManifestError:
        return ManifestError(
            f"{self._source}: {self._prefix}{key}: expected {expected}, found {self.value.get(key)!r:.60}"
        )

    def text(self, key: str) -> str:
        value = self.value.get(key)
        if not isinstance(value, str) or not value or not value.isprintable():
            raise self._bad(key, "a line of text")
        return value

    def number(self, key: str, least: int) -> int:
        value = self.value.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._bad(key, f"a whole number of at least {least}")
        return value

    def items(self, key: str) -> list[Any]:
        value = self.value.get(key)
        if not isinstance(value, list):
            raise self._bad(key, "a list")
        return value

    def sha256(self, key: str) -> str:
        value = self.text(key)
        if not _SHA256.fullmatch(value):
            raise self._bad(key, "a sha256 (64 hex digits)")
        return value

    def crc32c(self, key: str) -> str:
        value = self.text(key)
        try:
            raw = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != 4 or len(value) != 8:
            raise self._bad(key, "a crc32c (base64 of four bytes)")
        return value
