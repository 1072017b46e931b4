"""Fill a bucket with the weights of one revision and seal it.

Each file streams from the source straight into one resumable upload; nothing touches a disk here and memory
is one buffer per stream. What a later process needs to go on stands in the bucket, under `.kimisession/`:

    plan.json             model, revision, files: the first seeder writes it, every other must agree with it
    sessions/<path>.json  who is writing this file, and the uri of its upload; renewed as a sign of life
    done/<path>.json      a finished file with all its checksums
    manifest.json         the seal, written last and once; then the others go

Whatever dies, a later seeder takes over: a finished file is not read again; a half-sent one is read again
from its start (a hash cannot be stored half way) but sent only from where the store's bytes end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from kimisession.weights.bucket import READ_BYTES, Bucket, Stat, Upload
from kimisession.weights.errors import (
    BadSource,
    Conflict,
    Corrupt,
    Missing,
    SessionGone,
    SourceChanged,
    TryAgain,
    WeightsError,
)
from kimisession.weights.manifest import (
    CONTROL,
    PART_BYTES,
    SEAL,
    FileEntry,
    Hashing,
    Manifest,
    ManifestError,
    canonical,
    decode_entry,
    encode,
    entry_to_json,
    is_commit,
)
from kimisession.weights.retry import Patience, retrying
from kimisession.weights.seal import PLAN, FileProgress, Listener, Progress, ignore, verify
from kimisession.weights.seed_plan import agree, sealed_already
from kimisession.weights.source import Source, SourceFile, in_load_order
from kimisession.weights.writer import is_dead, signature, writer_id

SESSIONS = CONTROL + "sessions/"
DONE = CONTROL + "done/"
STREAMS = 8
T = TypeVar("T")
_FRESH_STARTS = 3
"""How often a file whose bytes arrive wrong is started again before it is told."""


def seed(
    source: Source,
    bucket: Bucket,
    *,
    model: str,
    revision: str | None = None,
    progress: Listener = ignore,
    streams: int = STREAMS,
    part_bytes: int = PART_BYTES,
    patience: Patience | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    writer: str | None = None,
) -> Manifest:
    """Bring `source` into `bucket`, verify it, seal it; return the sealed manifest.

    May be repeated, killed and run twice at once: the end is one seal, and a sealed bucket moves no bytes.
    `revision` None means the source's own. Raises WeightsError; the bucket then carries no seal and a later
    run goes on.
    """
    patience = patience or Patience()
    commit = retrying(patience, lambda: 0, time.sleep)(source.revision)
    if revision is not None and revision != commit:
        raise BadSource(f"{source.name} is at revision {commit}, not {revision}", "check --revision")
    if not is_commit(commit):
        raise BadSource(f"{commit!r} is no commit, so it may change", "give --revision with a full commit hash")
    seeding = _Seeding(source, bucket, model, commit, progress, part_bytes, patience, writer)
    return seeding.run(max(1, streams), now)


class _ClaimLost(Exception):
    """Another seeder took this file over."""


class _Sealed(Exception):
    """Another seeder has sealed the bucket meanwhile."""


class _Stopped(Exception):
    """This run is ending; the file stays resumable."""


class _File:
    """One file under way: what was hashed and sent so far, kept over attempts."""

    def __init__(self, source: SourceFile, part_bytes: int) -> None:
        self.source = source
        self.part_bytes = part_bytes
        self.fresh_starts = 0
        self.ready_at = 0.0
        self.seen: tuple[int, float] | None = None
        self.restart()

    def restart(self) -> None:
        self.hashing = Hashing(self.part_bytes, self.source.size if self.source.git_sha1 else None)
        self.sent = 0
        self.checked = False

    def moved(self) -> int:
        return self.hashing.size + self.sent

    def shown(self) -> FileProgress:
        return FileProgress(self.source.path, min(self.hashing.size, self.sent), self.source.size)


@dataclasses.dataclass
class _Claim:
    """Our right to a file: the generation of its session record, and the uri of its upload, "" at first."""

    generation: int | None
    uri: str


class _Seeding:
    def __init__(
        self,
        source: Source,
        bucket: Bucket,
        model: str,
        revision: str,
        progress: Listener,
        part_bytes: int,
        patience: Patience,
        writer: str | None,
    ) -> None:
        self._source = source
        self._bucket = bucket
        self._model = model
        self._revision = revision
        self._progress = progress
        self._part_bytes = part_bytes
        self._patience = patience
        self._writer = writer or writer_id()
        self._total_bytes = 0
        self._changed = threading.Condition()
        self._waiting: list[_File] = []
        self._moving: list[_File] = []
        self._done: dict[str, FileEntry] = {}
        self._kept: set[str] = set()
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._next_report = 0.0

    def run(self, streams: int, now: Callable[[], datetime]) -> Manifest:
        if (sealed := self._patiently(self._sealed)) is not None:
            self._clean_up()
            return sealed
        files = self._patiently(lambda: in_load_order(self._source))
        self._part_bytes = self._patiently(
            lambda: agree(self._bucket, self._source.name, self._model, self._revision, self._part_bytes, files)
        )
        self._total_bytes = sum(file.size for file in files)
        self._waiting = [_File(file, self._part_bytes) for file in files]
        try:
            self._stream_all(streams)
            unsealed = Manifest(
                model=self._model,
                revision=self._revision,
                files=tuple(self._done[file.path] for file in files),
                part_bytes=self._part_bytes,
                written_by=signature(),
                written_at=now().astimezone(UTC).replace(microsecond=0),
            )
            manifest = self._patiently(lambda: self._seal(unsealed))
        except _Sealed:
            manifest = self._patiently(self._must_be_sealed)
        self._clean_up()
        self._report(at_once=True)
        return manifest

    def _stream_all(self, streams: int) -> None:
        threads = [
            threading.Thread(target=self._work, name=f"seed-{number}", daemon=True)
            for number in range(min(streams, len(self._waiting)))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
        finally:
            self._stop.set()
            with self._changed:
                self._changed.notify_all()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        """One stream: take files until none is left or something is wrong."""
        try:
            while (file := self._take()) is not None:
                entry: FileEntry | None = None
                try:
                    entry = self._bring(file)
                finally:
                    with self._changed:
                        self._moving.remove(file)
                        if entry is not None:
                            self._done[file.source.path] = entry
                        else:
                            self._waiting.append(file)
                        self._changed.notify_all()
                self._report()
        except _Stopped:
            pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
            self._stop.set()

    def _take(self) -> _File | None:
        with self._changed:
            while not self._stop.is_set():
                if not self._waiting and not self._moving:
                    return None
                clock = time.monotonic()
                ready = [file for file in self._waiting if file.ready_at <= clock]
                if ready:
                    self._waiting.remove(ready[0])
                    self._moving.append(ready[0])
                    return ready[0]
                soonest = min((file.ready_at for file in self._waiting), default=clock + 1)
                self._changed.wait(min(1.0, max(0.01, soonest - clock)))
        return None

    def _bring(self, file: _File) -> FileEntry | None:
        """One file, over as many attempts as patience allows; None when another seeder has it."""
        first = True
        for attempt in retrying(self._patience, file.moved, self._sleep):
            with attempt:
                if not first and self._sealed() is not None:
                    raise _Sealed
                first = False
                try:
                    return self._attempt(file)
                except (SessionGone, Conflict, _ClaimLost) as error:
                    if self._sealed() is not None:
                        raise _Sealed from error
                    file.ready_at = time.monotonic() + min(0.2, self._patience.beat_s)
        return None

    def _attempt(self, file: _File) -> FileEntry | None:
        path = file.source.path
        if (entry := self._recorded(file)) is not None:
            return entry
        claim = self._claim(file)
        if claim is None:
            return None
        if (entry := self._recorded(file)) is not None:  # whoever held the claim before may have finished
            self._bucket.delete(SESSIONS + path + ".json")
            return entry
        found = self._bucket.stat(path)
        if found is None:
            upload = self._upload(file, claim)
            try:
                found = self._stream(file, upload, claim)
            except Conflict:
                upload.cancel()  # an object came first; what counts is whether its bytes are these
                raise
            finally:
                upload.close()
        elif self._sealed() is not None:
            raise _Sealed  # and the records are gone because it is
        else:
            file.sent = file.source.size
            self._hash_rest(file)
        if found.crc32c != file.hashing.crc32c or found.size != file.source.size:
            self._bucket.delete(path, found.generation)
            self._bucket.delete(SESSIONS + path + ".json")
            self._start_again(file, f"{self._bucket.url} stored {path} with wrong bytes")
        return self._record(file, found)

    def _stream(self, file: _File, upload: Upload, claim: _Claim) -> Stat:
        """Read from where hashing or sending stopped (the earlier), doing what each byte lacks."""
        size = file.source.size
        beat_at = time.monotonic() + self._patience.beat_s
        at = min(file.hashing.size, file.sent)
        if at < size:
            buffer = memoryview(bytearray(min(READ_BYTES, size)))
            reader = self._source.open(file.source, at)
            try:
                while at < size:
                    chunk = buffer[: reader.readinto(buffer[: size - at])]
                    if not chunk:
                        raise TryAgain(f"{self._source.name} ended {file.source.path} {size - at} bytes early")
                    file.hashing.update(chunk[max(0, file.hashing.size - at) :])
                    if file.hashing.size == size and not file.checked:
                        # Before the last bytes leave: an object with wrong bytes never comes into being.
                        self._check_source(file, upload)
                    unsent = chunk[max(0, file.sent - at) :]
                    if unsent:
                        upload.send(unsent)
                        file.sent += len(unsent)
                    at += len(chunk)
                    if time.monotonic() >= beat_at:
                        self._renew(file, claim)
                        beat_at = time.monotonic() + self._patience.beat_s
                    self._report()
                    if self._stop.is_set():
                        raise _Stopped
            finally:
                reader.close()
        self._check_source(file, upload)
        return upload.commit()

    def _hash_rest(self, file: _File) -> None:
        """Hash a file that the bucket already holds: it is read once more, and not sent."""
        size = file.source.size
        if file.hashing.size < size:
            buffer = memoryview(bytearray(min(READ_BYTES, size)))
            reader = self._source.open(file.source, file.hashing.size)
            try:
                while file.hashing.size < size:
                    chunk = buffer[: reader.readinto(buffer[: size - file.hashing.size])]
                    if not chunk:
                        raise TryAgain(f"{self._source.name} ended {file.source.path} early")
                    file.hashing.update(chunk)
                    self._report()
                    if self._stop.is_set():
                        raise _Stopped
            finally:
                reader.close()
        self._check_source(file, None)

    def _check_source(self, file: _File, upload: Upload | None) -> None:
        sha256, git_sha1 = file.source.sha256, file.source.git_sha1
        expected, got = (sha256, file.hashing.sha256) if sha256 else (git_sha1, file.hashing.git_sha1)
        if not file.checked and expected is not None and got != expected:
            kind = "sha256" if sha256 else "git blob id"
            if upload is not None:
                upload.cancel()
                self._bucket.delete(SESSIONS + file.source.path + ".json")
            self._start_again(
                file,
                f"{file.source.path} of {self._source.name} has {kind} {got}, not {expected}",
            )
        file.checked = True

    def _start_again(self, file: _File, what: str) -> None:
        """Raise: for another attempt from the first byte, or for good when it came wrong too often."""
        file.restart()
        file.fresh_starts += 1
        if file.fresh_starts >= _FRESH_STARTS:
            raise SourceChanged(
                f"{what}, {file.fresh_starts} times in a row", "check the source; nothing wrong was sealed"
            )
        raise TryAgain(what)

    def _recorded(self, file: _File) -> FileEntry | None:
        name = DONE + file.source.path + ".json"
        try:
            text, generation = self._bucket.read(name)
        except Missing:
            return None
        try:
            entry = decode_entry(text, name, self._part_bytes)
        except ManifestError:
            self._bucket.delete(name, generation)  # a record that cannot be read is work to do, not a reason to end
            return None
        if (entry.path, entry.size) != (file.source.path, file.source.size):
            self._bucket.delete(name, generation)
            return None
        file.sent = entry.size
        with self._changed:
            self._kept.add(entry.path)
        return entry

    def _record(self, file: _File, found: Stat) -> FileEntry:
        path = file.source.path
        entry = file.hashing.entry(path, found.generation if self._bucket.pins_generations else None)
        name = DONE + path + ".json"
        try:
            self._bucket.write(name, canonical(entry_to_json(entry)), replaces=None)
        except Conflict:
            text, _ = self._bucket.read(name)
            if decode_entry(text, name, self._part_bytes) != entry:
                raise Corrupt(
                    f"two seeders read different bytes for {path}", "delete the bucket and seed it again"
                ) from None
        self._bucket.delete(SESSIONS + path + ".json")
        return entry

    def _claim(self, file: _File) -> _Claim | None:
        """This file, ours alone from now on; None while another living seeder has it."""
        name = SESSIONS + file.source.path + ".json"
        try:
            text, generation = self._bucket.read(name)
        except Missing:
            claim = _Claim(None, "")
            self._renew(file, claim)
            return claim
        try:
            record = json.loads(text)
            uri, writer = str(record["uri"]), str(record["writer"])
        except (ValueError, KeyError, TypeError):
            uri, writer = "", self._writer  # a torn claim is nobody's
        clock = time.monotonic()
        if writer != self._writer and not is_dead(writer):
            if file.seen is None or file.seen[0] != generation:
                file.seen = (generation, clock)
            if clock - file.seen[1] < self._patience.stale_s:
                file.ready_at = clock + min(1.0, self._patience.beat_s)
                return None
        claim = _Claim(generation, uri)
        self._renew(file, claim)
        return claim

    def _renew(self, file: _File, claim: _Claim) -> None:
        """Write the claim anew: a sign of life, and the proof that nobody took it over. Raises _ClaimLost."""
        content = canonical({"uri": claim.uri, "writer": self._writer, "sent": file.sent})
        name = SESSIONS + file.source.path + ".json"
        try:
            claim.generation = self._bucket.write(name, content, replaces=claim.generation)
        except Conflict:
            raise _ClaimLost from None

    def _upload(self, file: _File, claim: _Claim) -> Upload:
        """The upload that the claim names, or a new one where the store no longer knows it."""
        path, size = file.source.path, file.source.size
        if claim.uri:
            with contextlib.suppress(SessionGone):
                upload = self._bucket.resume_upload(path, size, claim.uri)
                file.sent = upload.offset()
                return upload
        upload = self._bucket.start_upload(path, size)
        file.sent = 0
        claim.uri = upload.uri
        try:
            self._renew(file, claim)
        except _ClaimLost:
            upload.cancel()
            raise
        return upload

    def _sealed(self) -> Manifest | None:
        """The seal, if there is one and it is of this revision. Raises BucketTaken for another."""
        return sealed_already(self._bucket, self._model, self._revision)

    def _must_be_sealed(self) -> Manifest:
        manifest = self._sealed()
        if manifest is None:
            raise TryAgain(f"{self._bucket.url} was sealed and then deleted by someone else")
        return manifest

    def _seal(self, manifest: Manifest) -> Manifest:
        """Verify what is stored, then write the seal; of two seeders the first wins and both return it."""
        verify(self._bucket, manifest)
        try:
            self._bucket.write(SEAL, encode(manifest), replaces=None)
        except Conflict:
            sealed = self._must_be_sealed()
            if dataclasses.replace(manifest, written_by=sealed.written_by, written_at=sealed.written_at) != sealed:
                raise Corrupt(
                    f"{self._bucket.url} was sealed with other bytes by {sealed.written_by}",
                    f"delete the bucket with 'kimisession seed --delete --bucket {self._bucket.url}' and seed it again",
                ) from None
            return sealed
        return manifest

    def _clean_up(self) -> None:
        """Drop plan, records and sessions of a sealed bucket; what stays behind is harmless."""
        with contextlib.suppress(WeightsError):
            for prefix in (SESSIONS, DONE, PLAN):
                for stat in list(self._bucket.list(prefix)):
                    self._bucket.delete(stat.name)
            self._bucket.delete_leavings()

    def _patiently(self, do: Callable[[], T]) -> T:
        """Do what may be repeated until it is done or patience ends."""
        return retrying(self._patience, lambda: 0, time.sleep)(do)

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped

    def _report(self, *, at_once: bool = False) -> None:
        """Tell the listener, from one thread at a time and at most ten times a second."""
        clock = time.monotonic()
        if clock < self._next_report and not at_once:
            return
        with self._changed:
            self._next_report = clock + 0.1
            moving = tuple(file.shown() for file in self._moving)
            done_bytes = sum(entry.size for entry in self._done.values())
            self._progress(
                Progress(
                    done_bytes + sum(file.done_bytes for file in moving),
                    self._total_bytes,
                    len(self._done),
                    len(self._done) + len(moving) + len(self._waiting),
                    moving,
                    sum(self._done[path].size for path in self._kept if path in self._done),
                )
            )
