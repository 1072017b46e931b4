"""What runs on this machine, read from /proc. Knows nothing of kimisession: what it says is a second opinion."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_S = 0.05


@dataclass(frozen=True)
class Process:
    """A living process. `ticks`, when it began, makes its pid unmistakable."""

    pid: int
    ticks: int
    parent: int
    session: int
    state: str

    @property
    def identity(self) -> tuple[int, int]:
        """What no other process ever has."""
        return self.pid, self.ticks


def look(pid: int) -> Process | None:
    """The process of this pid; None when there is none, or only a zombie, which runs nothing and holds nothing."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text.rsplit(b")", 1)[1].split()
    state = fields[0].decode()
    return None if state in "ZX" else Process(pid, int(fields[19]), int(fields[1]), int(fields[3]), state)


def everything() -> dict[int, Process]:
    """Every living process by pid."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names are wanted
    return {pid: process for pid in pids if (process := look(pid)) is not None}


def argv(pid: int) -> tuple[str, ...]:
    """Its command line; empty when it is gone."""
    try:
        return tuple(Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1])
    except OSError:
        return ()


def environment(pid: int) -> tuple[bytes, ...]:
    """Its environment, NAME=VALUE each, as it was at its start; empty when it is gone or has none."""
    try:
        return tuple(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")[:-1])
    except OSError:
        return ()


def children(pid: int) -> list[int]:
    """Its living children."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return [process.pid for process in everything().values() if process.parent == pid]


def same(process: Process | None) -> bool:
    """Whether exactly this process still lives."""
    if process is None:
        return False
    now = look(process.pid)
    return now is not None and now.identity == process.identity


def signal_exactly(process: Process, number: int) -> None:
    """Signal this process and no successor of its pid."""
    if same(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


@dataclass
class Sighting:
    """One process of a stage: when it was first and last seen, by this machine's wall clock."""

    process: Process
    first: float
    last: float
    argv: tuple[str, ...]


@dataclass
class Troupe:
    """All processes that ever carried one mark, or descended from one that did."""

    seen: dict[tuple[int, int], Sighting] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)  # pids of commands, which are no part of a machine
    alive: int = 0
    gone_at: float | None = None


class Watch:
    """Twenty times a second: which processes of which stage live? One thread for all stages.

    A process belongs to a stage when its environment carries the stage's mark, or when its parent belonged to it when
    it was first seen; it then belongs for ever, whatever it does to its environment, session or parent.
    """

    def __init__(self, variable: str = "REHEARSAL_STAGE") -> None:
        self._variable = f"{variable}=".encode()
        self._troupes: dict[str, Troupe] = {}
        self._owner: dict[tuple[int, int], str] = {}  # "" is nobody of ours
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.longest_gap_s = 0.0
        self.sampled_at = 0.0  # wall clock of the last whole sample
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    def end(self) -> None:
        """Stop sampling."""
        self._ended.set()

    def troupe(self, mark: str) -> Troupe:
        """The processes of one stage."""
        with self._lock:
            return self._troupes.setdefault(mark, Troupe())

    def add(self, mark: str, process: Process) -> None:
        """A process that a sample may have been too late for."""
        with self._lock:
            now = time.time()
            self._owner[process.identity] = mark
            seen = self._troupes.setdefault(mark, Troupe()).seen
            seen.setdefault(process.identity, Sighting(process, now, now, argv(process.pid)))

    def machine(self, mark: str) -> list[Sighting]:
        """All that were ever seen, commands left out."""
        troupe = self.troupe(mark)
        with self._lock:
            return [s for s in troupe.seen.values() if s.process.pid not in troupe.left_out]

    def living(self, mark: str) -> list[Sighting]:
        """Those that live this very moment, commands left out."""
        return [sighting for sighting in self.machine(mark) if same(sighting.process)]

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(SAMPLE_S):
            with self._lock:
                self._sample()
            now = time.monotonic()
            self.longest_gap_s, before = max(self.longest_gap_s, now - before), now

    def _sample(self) -> None:
        now, table = time.time(), everything()
        for process in sorted(table.values(), key=lambda p: p.ticks):
            owner = self._owner.get(process.identity)
            if owner is None:
                owner = self._owner[process.identity] = self._belongs(process, table)
            if owner:
                troupe = self._troupes.setdefault(owner, Troupe())
                sighting = troupe.seen.get(process.identity)
                if sighting is None:
                    troupe.seen[process.identity] = Sighting(process, now, now, argv(process.pid))
                else:
                    sighting.last = now
        living = {process.identity for process in table.values()}
        for troupe in self._troupes.values():
            troupe.alive = sum(
                1 for who in troupe.seen if who in living and troupe.seen[who].process.pid not in troupe.left_out
            )
            if troupe.alive:
                troupe.gone_at = None
            elif troupe.gone_at is None and any(pid not in troupe.left_out for pid, _ in troupe.seen):
                troupe.gone_at = now
        self.sampled_at = now

    def _belongs(self, process: Process, table: dict[int, Process]) -> str:
        for entry in environment(process.pid):
            if entry.startswith(self._variable):
                return entry[len(self._variable) :].decode()
        parent = table.get(process.parent)
        return self._owner.get(parent.identity, "") if parent else ""


def wait_until(done: Callable[[], bool], within_s: float, every_s: float = 0.02) -> bool:
    """Wait for a condition; False when it did not come in time."""
    until = time.monotonic() + within_s
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(every_s)
    return True


def kill_all(sightings: Iterable[Sighting], number: int = 9) -> None:
    """End processes that this test run started, each by its identity."""
    for sighting in sightings:
        signal_exactly(sighting.process, number)
