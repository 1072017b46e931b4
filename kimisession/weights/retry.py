"""How long the seeder tries: named errors only, bounded by tries without progress, instant under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tenacity

from kimisession.weights.errors import TryAgain


@dataclass(frozen=True)
class Patience:
    """The seeder's times, in seconds, and its tries.

    `tries` counts attempts in a row that moved no byte. Another seeder's file is left to it for `stale_s`
    after its last sign of life; a living seeder gives one every `beat_s`.
    """

    tries: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0
    beat_s: float = 10.0
    stale_s: float = 60.0


def retrying(patience: Patience, moved: Callable[[], int], sleep: Callable[[float], None]) -> tenacity.Retrying:
    """Attempts that go on while bytes move; the last TryAgain is raised when `tries` in a row moved none.

    A wait asked for by the server (Retry-After) is kept as it is; else it doubles, with jitter, from
    `first_wait_s`.
    """
    last = moved()
    idle = 0

    def stop(state: tenacity.RetryCallState) -> bool:
        nonlocal last, idle
        now = moved()
        idle = 0 if now != last else idle + 1
        last = now
        return idle >= patience.tries

    backoff = tenacity.wait_random_exponential(multiplier=patience.first_wait_s, max=patience.longest_wait_s)

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, TryAgain) and error.retry_after_s is not None:
            return min(error.retry_after_s, 10 * patience.longest_wait_s)
        return backoff(state)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TryAgain), stop=stop, wait=wait, sleep=sleep, reraise=True
    )
