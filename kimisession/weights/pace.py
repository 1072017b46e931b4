"""How fast seeding goes: rate and time left, in all and per shard. Pure: the clock comes from the caller."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kimisession.weights.seal import FileProgress, Progress

WINDOW_S = 20.0
"""Rates are means over this long: long enough to be steady, short enough to notice a stall."""

STEADY_S = 2.0
"""Nothing is said about the time left before: the first second is small files and opening connections."""


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
        moved = (progress.done_bytes - progress.kept_bytes) - (before.done_bytes - before.kept_bytes)
        whole = _pace("", moved, progress.total_bytes - progress.done_bytes, now_s - began_s)
        return whole, *(self._of_file(file, now_s) for file in progress.moving)

    def _of_file(self, file: FileProgress, now_s: float) -> Pace:
        """Since it was first seen in the window: a file that began a second ago has not been slow for twenty."""
        for at_s, progress in self._seen:
            for then in progress.moving:
                if then.path == file.path:
                    return _pace(
                        file.path, file.done_bytes - then.done_bytes, file.size - file.done_bytes, now_s - at_s
                    )
        return _pace(file.path, 0, file.size, 0.0)


def _pace(path: str, moved: int, left: int, took_s: float) -> Pace:
    rate = max(0, moved) / took_s if took_s > 0 else 0.0
    return Pace(path, rate, left / rate if rate > 0 and took_s >= STEADY_S else None)
