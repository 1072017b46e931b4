"""How fast seeding goes: rate and time left, in all and per shard. Pure: the clock comes from the caller."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kimisession.weights.seal import Progress

WINDOW_S = 20.0
"""Rates are means over this long: long enough to be steady, short enough to notice a stall."""


@dataclass(frozen=True)
class Pace:
    """Bytes per second and seconds left (None while unknown or standing still)."""

    path: str
    bytes_per_s: float
    left_s: float | None


class Pacing:
    """Turns progress into paces. Feed it every progress with the monotonic time it came at."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Progress]] = deque()

    def feed(self, progress: Progress, now_s: float) -> tuple[Pace, ...]:
        """The pace of the whole (path "") first, then of each file in flight."""
        self._seen.append((now_s, progress))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()
        began_s, before = self._seen[0]
        took_s = now_s - began_s
        then = {file.path: file.done_bytes for file in before.moving}
        whole = _pace("", progress.done_bytes - before.done_bytes, progress.total_bytes - progress.done_bytes, took_s)
        return whole, *(
            _pace(file.path, file.done_bytes - then.get(file.path, 0), file.size - file.done_bytes, took_s)
            for file in progress.moving
        )


def _pace(path: str, moved: int, left: int, took_s: float) -> Pace:
    rate = max(0, moved) / took_s if took_s > 0 else 0.0
    return Pace(path, rate, left / rate if rate > 0 else None)
