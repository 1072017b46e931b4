"""Pull sealed weights onto this machine, each part verified before it counts.

    python3 -m kimisession.node.pull --from gs://bucket/prefix --to /models/kimi [--processes N --threads M]

Runs alone: Python 3.9+, the standard library, and PyPI's crc32c where it is installed (else sha256 is
checked). Prints JSON lines on stdout, for the keeper and for people:

    {"progress": {"done": BYTES, "total": BYTES, "unit": "bytes"}}      at most twice a second
    {"done": {"bytes": ..., "fetched": ..., "files": ..., "seconds": ..., "manifest": ..., "verified_by":
    ...}} {"failed": {"exit": CODE, "message": "one sentence"}}               the sentence stands on stderr,
    too

Exit codes: 0 all bytes are here and verified; 1 any other failure; 2 usage; 3 the bucket is not sealed; 4 a
part kept coming with a wrong checksum; 5 no space. After any end, also kill -9, the same command goes on:
parts that the journal names are read back and verified from the local disk, the rest is fetched. Files come
in the manifest's order, which is the order in which an engine loads them.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimisession.node.manifest import PULLED, SEAL, FileEntry, Manifest, ManifestError, Part, decode
from kimisession.node.pull_worker import Lines, best_check
from kimisession.node.wire import WireError, open_wire

JOURNAL = ".kimisession-pulling.jsonl"
LOCK = ".kimisession-pulling.lock"
PROGRESS_S = 0.5
LOCK_WAIT_S = 10.0
PART_TRIES = 3
"""How often a part may come with a wrong checksum before that is the answer."""
TRIES = 10
"""Failures in a row, over all parts, with nothing arriving between them, before the pull gives up."""
LONGEST_WAIT_S = 30.0

OK, OTHER, NOT_SEALED, WRONG_BYTES, NO_SPACE = 0, 1, 3, 4, 5


class PullError(Exception):
    """Why the pull ended: the exit code and one sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass
class Job:
    """One part to bring: `kept` means that it should be here already and is only read back."""

    number: int
    entry: FileEntry
    part: Part
    kept: bool
    wrong: int = 0

    def line(self) -> bytes:
        """What the worker is told."""
        value = {
            "job": self.number,
            "path": self.entry.path,
            "generation": self.entry.generation,
            "offset": self.part.offset,
            "size": self.part.size,
            "crc32c": self.part.crc32c,
            "sha256": self.part.sha256,
            "kept": self.kept,
        }
        return (json.dumps(value) + "\n").encode()


def say(value: dict[str, Any]) -> None:
    """One JSON line on stdout; a reader that left is no reason to stop."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(value), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Parse, pull, and turn the end into an exit code."""
    parser = argparse.ArgumentParser(prog="kimisession.node.pull", description="Pull sealed weights, verified.")
    parser.add_argument(
        "--from", dest="url", required=True, help="gs://bucket/prefix, http(s)://host/path or file:///folder"
    )
    parser.add_argument("--to", required=True, help="the folder that the engine will load from")
    cores = cores_here()
    parser.add_argument("--processes", type=int, default=max(1, min(16, cores)), help="default: cores, at most 16")
    parser.add_argument("--threads", type=int, default=4, help="connections per process (default 4)")
    chosen = parser.parse_args(arguments)
    if chosen.processes < 1 or chosen.threads < 1:
        parser.error("--processes and --threads must be at least 1")
    try:
        pull(chosen.url, Path(chosen.to).absolute(), chosen.processes, chosen.threads)
    except PullError as error:
        say({"failed": {"exit": error.code, "message": error.message}})
        print(f"pull: {error.message}", file=sys.stderr)
        return error.code
    return OK


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pull(url: str, folder: Path, processes: int, threads: int) -> None:
    """Bring every file of the sealed bucket into `folder`, verified. Raises PullError; may be repeated."""
    started = time.monotonic()
    manifest = read_manifest(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder)
    except OSError as error:
        raise PullError(OTHER, f"{folder} cannot be used: {error.strerror}; choose another --to") from None
    try:
        fetched = 0
        marker = read_marker(folder)
        whole = marker.get("manifest") == manifest.digest and sizes_agree(folder, manifest)
        if not whole or marker.get("boot") != boot_id() or not boot_id():
            with contextlib.suppress(FileNotFoundError):
                (folder / PULLED).unlink()
            check_space(folder, manifest)
            preallocate(folder, manifest)
            # What an earlier boot wrote may not have reached the disk: then every part is read back.
            jobs = plan(folder, manifest, all_kept=whole)
            crew = Crew(url, folder, manifest, jobs, processes, threads, lock)
            fetched = crew.run()
            write_marker(folder, manifest)
        with contextlib.suppress(FileNotFoundError):
            (folder / JOURNAL).unlink()
    finally:
        os.close(lock)
    say({"progress": {"done": manifest.total_bytes, "total": manifest.total_bytes, "unit": "bytes"}})
    say(
        {
            "done": {
                "bytes": manifest.total_bytes,
                "fetched": fetched,
                "files": len(manifest.files),
                "seconds": round(time.monotonic() - started, 3),
                "manifest": manifest.digest,
                "model": manifest.model,
                "revision": manifest.revision,
                "verified_by": best_check().key,
            }
        }
    )


def read_manifest(url: str) -> Manifest:
    """The seal of the bucket, read strictly. Raises PullError 3 when there is none."""
    for failures in range(TRIES):
        try:
            return decode(open_wire(url).read(SEAL), f"{url}/{SEAL}")
        except WireError as error:
            if error.kind == "missing":
                raise PullError(
                    NOT_SEALED, f"{url} is not sealed, so it is not served; run 'kimisession seed'"
                ) from None
            if error.kind not in ("busy", "cut") or failures == TRIES - 1:
                raise PullError(OTHER, error.message) from None
            time.sleep(backoff_s(failures, error.retry_after_s))
        except ManifestError as error:
            raise PullError(OTHER, f"{error}") from None
    raise AssertionError("the last try returns or raises")


def backoff_s(failures: int, asked_s: float | None) -> float:
    """How long to wait after so many failures: what the server asked for, else doubling from 50 ms."""
    return min(LONGEST_WAIT_S, 0.05 * 2.0**failures if asked_s is None else asked_s)


def take_lock(folder: Path, wait_s: float = LOCK_WAIT_S) -> int:
    """One puller per folder. The workers inherit the lock, so it lasts until the last of them has gone."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise PullError(OTHER, f"another pull into {folder} is running; wait for it or stop it") from None
            time.sleep(0.05)


def read_marker(folder: Path) -> dict[str, Any]:
    """What an earlier pull left to say that it was complete; empty if there is none."""
    try:
        with (folder / PULLED).open("rb") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_marker(folder: Path, manifest: Manifest) -> None:
    """Say, last and atomically, that all is here. Good for this boot: later ones read every part back."""
    value = {
        "manifest": manifest.digest,
        "model": manifest.model,
        "revision": manifest.revision,
        "bytes": manifest.total_bytes,
        "boot": boot_id(),
    }
    fresh = folder / (PULLED + ".new")
    with fresh.open("w") as file:
        file.write(json.dumps(value) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / PULLED)


def boot_id() -> str:
    """The kernel's name for this boot; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def sizes_agree(folder: Path, manifest: Manifest) -> bool:
    """Whether every file is here with its size."""
    try:
        return all((folder / entry.path).stat().st_size == entry.size for entry in manifest.files)
    except OSError:
        return False


def check_space(folder: Path, manifest: Manifest) -> None:
    """Refuse at once, before a byte moves, what cannot fit. Raises PullError 5."""
    there = 0
    for entry in manifest.files:
        with contextlib.suppress(OSError):
            there += min(entry.size, (folder / entry.path).stat().st_blocks * 512)
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if manifest.total_bytes - there > free:
        raise PullError(
            NO_SPACE,
            f"{folder} has {free / 1e9:.1f} GB free and {manifest.model} needs "
            f"{(manifest.total_bytes - there) / 1e9:.1f} GB; choose another --to or a larger disk",
        )


def preallocate(folder: Path, manifest: Manifest) -> None:
    """Give every file its size and its blocks, so that a full disk is told now. Raises PullError 5."""
    for entry in manifest.files:
        path = folder / entry.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.fstat(file).st_size > entry.size:
                    os.ftruncate(file, entry.size)
                if os.fstat(file).st_size < entry.size:
                    reserve(file, entry.size)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise PullError(NO_SPACE, f"{folder} is full; choose another --to or a larger disk") from None
            raise PullError(OTHER, f"{path} cannot be written: {error.strerror}; choose another --to") from None


def reserve(file: int, size: int) -> None:
    """Blocks for `size` bytes where the file system can, else just the size."""
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(file, size)


def plan(folder: Path, manifest: Manifest, all_kept: bool) -> list[Job]:
    """Every part in load order; those that the journal names for this manifest are only read back."""
    kept = set() if all_kept else read_journal(folder, manifest.digest)
    jobs: list[Job] = []
    for entry in manifest.files:
        for part in entry.parts:
            number = len(jobs)
            jobs.append(Job(number, entry, part, all_kept or number in kept))
    return jobs


def read_journal(folder: Path, digest: str) -> set[int]:
    """Numbers of the parts that an earlier run of the same manifest finished; a torn line counts as none."""
    found: set[int] = set()
    try:
        with (folder / JOURNAL).open("rb") as file:
            for number, line in enumerate(file):
                value = json.loads(line)
                if number == 0 and value != {"manifest": digest}:
                    return set()
                if number > 0 and isinstance(value, int):
                    found.add(value)
    except (OSError, ValueError):
        pass
    return found


class Member:
    """One worker process and the jobs it holds."""

    def __init__(self, url: str, folder: Path, threads: int, lock: int) -> None:
        root = str(Path(__file__).resolve().parents[2])
        known = os.environ.get("PYTHONPATH")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kimisession.node.pull_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=root + (os.pathsep + known if known else "")),
            pass_fds=(lock,),
        )
        assert self.process.stdin is not None  # what PIPE promises
        assert self.process.stdout is not None
        self._stdin = self.process.stdin
        self.stdout = self.process.stdout
        self.lines = Lines(self.stdout.fileno())
        self.jobs: dict[int, Job] = {}
        self.moving = 0
        self._send((json.dumps({"url": url, "to": str(folder), "threads": threads}) + "\n").encode())

    def give(self, job: Job) -> None:
        """Hand over a part."""
        self.jobs[job.number] = job
        self._send(job.line())

    def end(self) -> None:
        """Let go: the worker leaves when its stdin ends."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        self.stdout.close()
        self.process.kill()
        self.process.wait()

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # a worker that died is noticed by its stdout
            self._stdin.write(line)
            self._stdin.flush()


class Crew:
    """The worker processes of one pull: who does what, what failed, when to try again."""

    def __init__(
        self,
        url: str,
        folder: Path,
        manifest: Manifest,
        jobs: list[Job],
        processes: int,
        threads: int,
        lock: int,
    ) -> None:
        self._url = url
        self._folder = folder
        self._threads = threads
        self._lock = lock
        self._todo = deque(jobs)
        self._left = len(jobs)
        self._total_bytes = manifest.total_bytes
        self._done_bytes = 0
        self._fetched_bytes = 0
        self._processes = max(1, min(processes, -(-len(jobs) // threads)))
        self._members: list[Member] = []
        self._selector = selectors.DefaultSelector()
        self._window = float(self._processes * threads)
        self._failures = 0
        self._not_before = 0.0
        self._next_progress = 0.0
        fresh = folder / (JOURNAL + ".new")
        with fresh.open("wb") as file:
            file.write((json.dumps({"manifest": manifest.digest}) + "\n").encode())
            file.write(b"".join(b"%d\n" % job.number for job in jobs if job.kept))
        fresh.replace(folder / JOURNAL)
        self._journal = os.open(folder / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def run(self) -> int:
        """Work until every part is verified; the bytes that were fetched. Raises PullError."""
        try:
            for _ in range(self._processes if self._left else 0):
                self._hire()
            while self._left:
                self._hand_out()
                for key, _ in self._selector.select(PROGRESS_S / 2):
                    self._listen(key.data)
                self._progress()
        finally:
            for member in self._members:
                member.end()
            self._selector.close()
            os.close(self._journal)
        return self._fetched_bytes

    def _hire(self) -> None:
        member = Member(self._url, self._folder, self._threads, self._lock)
        self._members.append(member)
        self._selector.register(member.stdout, selectors.EVENT_READ, member)

    def _hand_out(self) -> None:
        """Give parts to the least busy, up to the window of parts that may be under way at once."""
        if time.monotonic() < self._not_before:
            return
        while self._todo and sum(len(member.jobs) for member in self._members) < int(self._window):
            member = min(self._members, key=lambda one: len(one.jobs))
            if len(member.jobs) >= self._threads:
                return
            member.give(self._todo.popleft())

    def _listen(self, member: Member) -> None:
        values = member.lines.take(0)
        if values is None:
            self._replace(member)
            return
        for value in values:
            if "moving" in value:
                member.moving = value["moving"]
            else:
                job = member.jobs.pop(value["job"])
                if "why" in value:
                    self._failed(job, value)
                else:
                    self._finished(job)

    def _finished(self, job: Job) -> None:
        if not job.kept:
            os.write(self._journal, b"%d\n" % job.number)
            self._fetched_bytes += job.part.size
        self._done_bytes += job.part.size
        self._left -= 1
        self._failures = 0
        self._window = min(float(self._processes * self._threads), self._window + 1 / self._window)

    def _failed(self, job: Job, value: dict[str, Any]) -> None:
        """Put the part back, for later and with fewer at once if the server is busy, or end with why."""
        why, message = value["why"], value.get("message", "")
        if job.kept and why in ("checksum", "missing", "cut"):
            job.kept = False  # what lay here is not what the manifest says: fetch it
            self._todo.appendleft(job)
            return
        if why == "checksum":
            job.wrong += 1
            if job.wrong >= PART_TRIES:
                number = job.entry.parts.index(job.part)
                raise PullError(
                    WRONG_BYTES,
                    f"{job.entry.path} part {number} (bytes {job.part.offset} to "
                    f"{job.part.offset + job.part.size - 1}) came {job.wrong} times with {value['what']} "
                    f"{value['got']}, expected {value['expected']}; "
                    "check the bucket with 'kimisession seed --verify'",
                )
        elif why == "space":
            raise PullError(NO_SPACE, f"{self._folder} is full; choose another --to or a larger disk")
        elif why not in ("busy", "cut"):
            raise PullError(OTHER, message)
        else:
            self._failures += 1
            if self._failures >= TRIES * self._processes * self._threads:
                raise PullError(OTHER, f"{message}; type the same command again, it goes on where it stopped")
            if why == "busy":
                self._window = max(1.0, self._window / 2)
            rounds = self._failures // (self._processes * self._threads)
            wait_s = backoff_s(rounds, value.get("retry_after_s"))
            self._not_before = max(self._not_before, time.monotonic() + wait_s)
        self._todo.appendleft(job)

    def _replace(self, member: Member) -> None:
        """A worker died: its parts go back, another takes its place."""
        self._selector.unregister(member.stdout)
        self._members.remove(member)
        member.end()
        self._todo.extendleft(reversed(list(member.jobs.values())))
        self._failures += self._threads
        if self._failures >= TRIES * self._processes * self._threads:
            raise PullError(OTHER, "the puller's workers keep dying; see the lines above")
        self._hire()

    def _progress(self) -> None:
        clock = time.monotonic()
        if clock >= self._next_progress:
            self._next_progress = clock + PROGRESS_S
            done = self._done_bytes + sum(member.moving for member in self._members)
            say(
                {
                    "progress": {
                        "done": min(done, self._total_bytes),
                        "total": self._total_bytes,
                        "unit": "bytes",
                    }
                }
            )


if __name__ == "__main__":
    sys.exit(main())
