"""The seal of a bucket: reading it, checking what it promises, and deleting what it names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from crc32c import crc32c

from kimisession.weights.bucket import READ_BYTES, Bucket
from kimisession.weights.errors import Corrupt, Missing, NotSeeded, WeightsError
from kimisession.weights.manifest import SEAL, FileEntry, Manifest, ManifestError, decode, encode_crc32c


@dataclass(frozen=True)
class FileProgress:
    """A file on its way: bytes done of its size."""

    path: str
    done_bytes: int
    size: int


@dataclass(frozen=True)
class Progress:
    """How far seeding or verifying is; `moving` are the files in flight, counted in `done_bytes`."""

    done_bytes: int
    total_bytes: int
    done_files: int
    total_files: int
    moving: tuple[FileProgress, ...] = ()


Listener = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """The listener that does not care."""


def read_seal(bucket: Bucket) -> Manifest:
    """The manifest of a sealed bucket. Raises NotSeeded, or Corrupt when the seal itself cannot be read."""
    try:
        text, _ = bucket.read(SEAL)
    except Missing:
        raise NotSeeded(
            f"{bucket.url} is not seeded: it carries no seal", "run 'kimisession seed' to fill and seal it"
        ) from None
    try:
        return decode(text, f"{bucket.url}/{SEAL}")
    except ManifestError as error:
        raise Corrupt(str(error), "delete the bucket with 'kimisession seed --delete' and seed it again") from None


def quick_check(bucket: Bucket, manifest: Manifest) -> None:
    """Check names, sizes and generations against one listing; no byte is read. Raises Corrupt."""
    found = {stat.name: stat for stat in bucket.list()}
    for entry in manifest.files:
        stat = found.get(entry.path)
        if stat is None:
            raise _corrupt(bucket, entry, "is missing")
        if stat.size != entry.size:
            raise _corrupt(bucket, entry, f"has {stat.size} bytes, not {entry.size}")
        if entry.generation is not None and stat.generation != entry.generation:
            raise _corrupt(bucket, entry, f"was overwritten (generation {stat.generation}, not {entry.generation})")


def verify(bucket: Bucket, manifest: Manifest, progress: Listener = ignore, *, deep: bool = False) -> None:
    """Check every object against the manifest. Raises Corrupt: the file, what was expected, what was found.

    By the store's own crc32c, which a folder computes from its disk and GCS keeps for what it stores. With
    `deep`, every part is read back and both its checksums are compared.
    """
    quick_check(bucket, manifest)
    done_bytes = 0
    for number, entry in enumerate(manifest.files):
        progress(Progress(done_bytes, manifest.total_bytes, number, len(manifest.files)))
        if deep:
            _read_back(bucket, entry)
        else:
            stat = bucket.stat(entry.path)
            if stat is None:
                raise _corrupt(bucket, entry, "is missing")
            if stat.crc32c != entry.crc32c:
                raise _corrupt(bucket, entry, f"has crc32c {stat.crc32c}, not {entry.crc32c}")
        done_bytes += entry.size
    progress(Progress(done_bytes, manifest.total_bytes, len(manifest.files), len(manifest.files)))


def delete(bucket: Bucket, name: str) -> int:
    """Delete a seeded or half seeded bucket: the seal first, then everything, until nothing is listed.

    `name` must be the bucket's name, typed by a person. Returns the number of objects deleted; may be
    repeated.
    """
    if name != bucket.name:
        raise WeightsError(f"{name!r} is not the name of {bucket.url}", f"type {bucket.name} to delete it")
    count = int(bucket.stat(SEAL) is not None)
    bucket.delete(SEAL)
    while names := [stat.name for stat in bucket.list()]:
        for found in names:
            bucket.delete(found)
            count += 1
    bucket.delete_leavings()
    return count


def _read_back(bucket: Bucket, entry: FileEntry) -> None:
    buffer = memoryview(bytearray(READ_BYTES))
    for number, part in enumerate(entry.parts):
        sha256 = hashlib.sha256()
        crc = 0
        left = part.size
        reader = bucket.open(entry.path, part.offset, part.size, entry.generation)
        try:
            while left and (count := reader.readinto(buffer[: min(left, READ_BYTES)])):
                sha256.update(buffer[:count])
                crc = crc32c(buffer[:count], crc)
                left -= count
        finally:
            reader.close()
        if left or encode_crc32c(crc) != part.crc32c or sha256.hexdigest() != part.sha256:
            raise _corrupt(
                bucket,
                entry,
                f"part {number} has crc32c {encode_crc32c(crc)}, not {part.crc32c}, or another sha256",
            )


def _corrupt(bucket: Bucket, entry: FileEntry, what: str) -> Corrupt:
    return Corrupt(
        f"{entry.path} in {bucket.url} {what}",
        "delete the bucket with 'kimisession seed --delete' and seed it again",
    )
