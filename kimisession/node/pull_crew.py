"""The worker processes of one pull: who brings which part, what failed, when to try again."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kimisession.node.manifest import FileEntry, Manifest, Part
from kimisession.node.pull_place import JOURNAL, NO_SPACE, OTHER, WRONG_BYTES, PullError, read_journal
from kimisession.node.pull_worker import Lines
from kimisession.node.pull_worker import main as serve_jobs

PROGRESS_S = 0.5
PART_TRIES = 3
"""How often a part may come with a wrong checksum before that is the answer."""
TRIES = 12
"""Rounds of failures in a row, with nothing arriving between them, before the pull gives up: under two minutes of waiting, for a
machine that waits is paid for. A round is what fails of the parts that were given out before the last failure was answered."""
LONGEST_WAIT_S = 30.0
ABREAST = 16
"""Files under way at once: enough that connections seldom share one, few enough that the first shards are whole long
before the last. Not settled: over 2 GiB on ext4 it halved the CPU (0.37 against 0.65 s/GiB, medians of 5, busy machine),
over 4 GiB it did not show (notes/benchmarks.md, weights)."""


@dataclass
class Job:
    """One part to bring: `kept` means that it should be here already and is only read back."""

    number: int
    entry: FileEntry
    part: Part
    kept: bool
    wrong: int = 0
    given_at: float = 0.0

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


def backoff_s(failures: int, asked_s: float | None) -> float:
    """How long to wait after so many failures: what the server asked for, else doubling from 50 ms."""
    return min(LONGEST_WAIT_S, 0.05 * 2.0**failures if asked_s is None else asked_s)


def plan(folder: Path, manifest: Manifest, all_kept: bool, abreast: int) -> list[Job]:
    """Every part; those that the journal names for this manifest are only read back.

    In load order, `abreast` files at a time and their parts in turn: two threads that write into one file wait for
    each other's lock on it, so each connection has a file of its own as long as there are enough.
    """
    kept = set() if all_kept else read_journal(folder, manifest.digest)
    numbered: list[list[Job]] = []
    for entry in manifest.files:
        first = numbered[-1][-1].number + 1 if numbered else 0
        jobs = [
            Job(number, entry, part, all_kept or number in kept) for number, part in enumerate(entry.parts, start=first)
        ]
        if jobs:
            numbered.append(jobs)
    ordered: list[Job] = []
    for at in range(0, len(numbered), abreast):
        group = numbered[at : at + abreast]
        for turn in range(max(len(jobs) for jobs in group)):
            ordered += [jobs[turn] for jobs in group if turn < len(jobs)]
    return ordered


class Member:
    """One worker process and the jobs it holds. Forked, not started anew: this process has no threads and the
    imports are done, so a worker costs a millisecond instead of a tenth of a second of CPU."""

    def __init__(self, url: str, folder: Path, threads: int, others: list[Member]) -> None:
        theirs_in, self._jobs_out = os.pipe()
        self.results_in, theirs_out = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            ours = [self._jobs_out, self.results_in]
            become_worker(theirs_in, theirs_out, ours + [end for other in others for end in other.ends()])
        os.close(theirs_in)
        os.close(theirs_out)
        self.lines = Lines(self.results_in)
        self.jobs: dict[int, Job] = {}
        self.moving = 0
        self._send((json.dumps({"url": url, "to": str(folder), "threads": threads}) + "\n").encode())

    def ends(self) -> list[int]:
        """This process's ends of the two pipes."""
        return [self._jobs_out, self.results_in]

    def give(self, job: Job) -> None:
        """Hand over a part."""
        self.jobs[job.number] = job
        self._send(job.line())

    def end(self) -> None:
        """Let go, and wait until the worker is gone: then no thread of its writes any more."""
        for end in self.ends():
            os.close(end)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # a worker that died is noticed by the end of its results
            while line:
                line = line[os.write(self._jobs_out, line) :]


def become_worker(jobs_in: int, results_out: int, not_mine: list[int]) -> NoReturn:
    """In the forked process: keep the lock of the folder and the two pipes, and serve until the parent is gone."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(jobs_in, 0)
        os.dup2(results_out, 1)
        for end in (jobs_in, results_out, *not_mine):
            os.close(end)
        serve_jobs()
    finally:
        os._exit(1)


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
    ) -> None:
        self._url = url
        self._folder = folder
        self._threads = threads
        self._todo = deque(jobs)
        self._left = len(jobs)
        self._total_bytes = manifest.total_bytes
        self._done_bytes = 0
        self._fetched_bytes = 0
        self._processes = max(1, min(processes, -(-len(jobs) // threads)))
        self._members: list[Member] = []
        self._selector = selectors.DefaultSelector()
        self._window = float(self._processes * threads)
        self._rounds = 0
        self._round_at = 0.0
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
        member = Member(self._url, self._folder, self._threads, self._members)
        self._members.append(member)
        self._selector.register(member.results_in, selectors.EVENT_READ, member)

    def _hand_out(self) -> None:
        """Give parts to the least busy, up to the window of parts that may be under way at once."""
        if time.monotonic() < self._not_before:
            return
        while self._todo and sum(len(member.jobs) for member in self._members) < int(self._window):
            member = min(self._members, key=lambda one: len(one.jobs))
            if len(member.jobs) >= self._threads:
                return
            job = self._todo.popleft()
            job.given_at = time.monotonic()
            member.give(job)

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
        self._rounds = 0
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
            if job.given_at >= self._round_at:
                self._rounds, self._round_at = self._rounds + 1, time.monotonic()
            if self._rounds >= TRIES:
                raise PullError(OTHER, f"{message}; type the same command again, it goes on where it stopped")
            if why == "busy":
                self._window = max(1.0, self._window / 2)
            wait_s = backoff_s(self._rounds - 1, value.get("retry_after_s"))
            self._not_before = max(self._not_before, time.monotonic() + wait_s)
        self._todo.appendleft(job)

    def _replace(self, member: Member) -> None:
        """A worker died: its parts go back, another takes its place."""
        self._selector.unregister(member.results_in)
        self._members.remove(member)
        member.end()
        self._todo.extendleft(reversed(list(member.jobs.values())))
        self._rounds += 1
        if self._rounds >= TRIES:
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
