"""The seal of a bucket: reading it, checking what it promises, and deleting what it names."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from crc32c import crc32c

from kimisession.weights.bucket import READ_BYTES, Bucket
from kimisession.weights.errors import Corrupt, Missing, NotSeeded, TryAgain, WeightsError
from kimisession.weights.manifest import (
    CONTROL,
    SEAL,
    FileEntry,
    Manifest,
    ManifestError,
    Part,
    canonical,
    decode,
    encode_crc32c,
)
from kimisession.weights.retry import Patience, retrying

PLAN = CONTROL + "plan.json"
"""What a bucket is getting, until it is sealed."""
DELETING = CONTROL + "deleting.json"
"""The names of what is being deleted: written before the seal goes, and the last to go itself."""


@dataclass(frozen=True)
class FileProgress:
    """A file on its way: bytes done of its size."""

    path: str
    done_bytes: int
    size: int


@dataclass(frozen=True)
class Progress:
    """How far seeding or verifying is; `moving` are the files in flight, counted in `done_bytes`, as are the `kept_bytes` that
    an earlier run finished: they are done and say nothing of how fast it goes."""

    done_bytes: int
    total_bytes: int
    done_files: int
    total_files: int
    moving: tuple[FileProgress, ...] = ()
    kept_bytes: int = 0


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
        raise Corrupt(
            str(error), f"delete the bucket with 'kimisession seed --delete --bucket {bucket.url}' and seed it again"
        ) from None


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


def verify(
    bucket: Bucket,
    manifest: Manifest,
    progress: Listener = ignore,
    *,
    deep: bool = False,
    patience: Patience | None = None,
) -> None:
    """Check every object against the manifest. Raises Corrupt: the file, what was expected, what was found.

    By the store's own crc32c, which a folder computes from its disk and GCS keeps for what it stores. With
    `deep`, every part is read back and both its checksums are compared; one that was cut off on its way is read again, as
    long as `patience` lasts, so that one cut in hours is not the end of them. Then raises TryAgain.
    """
    quick_check(bucket, manifest)
    done_bytes = 0
    for number, entry in enumerate(manifest.files):
        progress(Progress(done_bytes, manifest.total_bytes, number, len(manifest.files)))
        if deep:
            for part in entry.parts:
                retrying(patience or Patience(), lambda: 0, time.sleep)(_read_back, bucket, entry, part)
                progress(
                    Progress(done_bytes + part.offset + part.size, manifest.total_bytes, number, len(manifest.files))
                )
        else:
            stat = bucket.stat(entry.path)
            if stat is None:
                raise _corrupt(bucket, entry, "is missing")
            if stat.crc32c != entry.crc32c:
                raise _corrupt(bucket, entry, f"has crc32c {stat.crc32c}, not {entry.crc32c}")
        done_bytes += entry.size
    progress(Progress(done_bytes, manifest.total_bytes, len(manifest.files), len(manifest.files)))


@dataclass(frozen=True)
class Deleted:
    """How many objects went, and how many stay because nobody here wrote them."""

    objects: int
    left: int


def delete(bucket: Bucket, name: str) -> Deleted:
    """Delete what a seal or a plan names, and what is kimisession's own: the seal first. What else lies there stays.

    `name` must be the bucket's name, typed by a person. May be repeated. Raises NotSeeded, and has changed nothing, where
    nothing says that kimisession wrote there: a wrong folder or bucket is told, not emptied.
    """
    if name != bucket.name:
        raise WeightsError(f"{name!r} is not the name of {bucket.url}", f"type {bucket.name} to delete it")
    there = {stat.name for stat in bucket.list()}
    control = {found for found in there if found.startswith(CONTROL)}
    if not control:
        what = "holds other things, and nothing of kimisession's" if there else "holds nothing"
        raise NotSeeded(f"{bucket.url} {what}: nothing was deleted", "check --bucket")
    named = _named(bucket)
    ours = there - control if named is None else there & named
    if DELETING not in control:  # who goes on after a kill has to know what to delete
        bucket.write(DELETING, canonical(sorted(ours)), replaces=None)
    for found in (SEAL, *sorted(ours), *sorted(control - {SEAL, DELETING}), DELETING):
        bucket.delete(found)
    bucket.delete_leavings()
    return Deleted(len(ours) + len(control - {DELETING}), len(there - control - ours))


def _named(bucket: Bucket) -> set[str] | None:
    """The files that a deletion that was broken off, the seal, or the plan names; None where none of them can be read."""
    for source in (DELETING, SEAL, PLAN):
        try:
            value = json.loads(bucket.read(source)[0])
            if source == DELETING:
                return {str(path) for path in value}
            return {str(file["path"] if source == SEAL else file[0]) for file in value["files"]}
        except (Missing, ValueError, TypeError, KeyError, IndexError):
            continue
    return None


def _read_back(bucket: Bucket, entry: FileEntry, part: Part) -> None:
    buffer = memoryview(bytearray(min(READ_BYTES, part.size)))
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
    if left and entry.generation is not None:  # its size and generation were looked up: the body was cut
        raise TryAgain(f"{entry.path} in {bucket.url} ended {left} bytes early")
    if left or encode_crc32c(crc) != part.crc32c or sha256.hexdigest() != part.sha256:
        raise _corrupt(
            bucket,
            entry,
            f"part {entry.parts.index(part)} has crc32c {encode_crc32c(crc)}, not {part.crc32c}, or another sha256",
        )


def _corrupt(bucket: Bucket, entry: FileEntry, what: str) -> Corrupt:
    return Corrupt(
        f"{entry.path} in {bucket.url} {what}",
        f"delete the bucket with 'kimisession seed --delete --bucket {bucket.url}' and seed it again",
    )
