"""One world for the whole run: real SkyPilot, an emulated Google, machines that are namespaces of this one."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from tests.rigs.gce.bounds import PATIENCE, bound
from tests.rigs.gce.matrix.cells import WIRE
from tests.rigs.gce.matrix.wire import Outcome, play
from tests.rigs.gce.world.rig import CHECKOUT, IMAGE, World

Measure = Callable[[str, float], None]
Outcomes = dict[str, "Future[Outcome]"]


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """With weights in gs://weights, and a reaper. SkyPilot's server is started by its first user."""
    world = World()
    try:
        world.prepare(("rehearsal",), ("kimi-k2.5-int4", "--checkpoint", "native"))
        yield world
        done = world.kimisession("guard", "disable", "-y")
        assert done.returncode == 0, done.stderr
        assert world.kimisession("guard", "status").returncode == 1
    finally:
        world.close()


@pytest.fixture(scope="session")
def wire() -> Iterator[Callable[[], Outcomes]]:
    """The wire cells of the matrix, two at a time, from the first call on: they fill the minutes in which the sessions of the
    world only wait."""
    crew, begun = ThreadPoolExecutor(2), Outcomes()

    def begin() -> Outcomes:
        if not begun:
            begun.update({cell.key: crew.submit(play, cell) for cell in WIRE})
        return begun

    yield begin
    crew.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def measure() -> Iterator[Measure]:
    """Records a figure and holds it to its bound."""
    rows: list[tuple[str, str, str, float, float]] = []
    began = time.monotonic()

    def one(case: str, seconds: float) -> None:
        limit = bound(case)
        rows.append((case, limit.layer, limit.from_, round(seconds, 1), limit.latest_s))
        assert seconds <= limit.latest_s, f"{case}: {seconds:.1f} s from {limit.from_}, at most {limit.latest_s:g}"

    yield one
    # Plays in threads redirect sys.stdout for a moment each, and may leave it redirected.
    say = partial(print, file=sys.__stdout__, flush=True)
    took_s, load = round(time.monotonic() - began), round(os.getloadavg()[0], 1)
    say(f"\nbounds x {PATIENCE:g}, load average {load} on {os.cpu_count()} cores, {took_s} s in all")
    say(f"{'case':55} {'ended by':32} {'seconds':>8} {'at most':>8}  from")
    for case, layer, since, seconds, latest in rows:
        say(f"{case:55} {layer:32} {seconds:8.1f} {latest:8g}  {since}")
    ready, gone = (next((row[3] for row in rows if row[0].startswith(case)), None) for case in ("start to", "idle to"))
    if ready is None or gone is None:  # a part of the run: the figures of the last whole one are kept
        return
    words = ("git", "-C", str(CHECKOUT), "describe", "--always", "--dirty=+")
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    about = {"at": time.time(), "commit": commit, "took_s": took_s, "load": load, "patience": PATIENCE}
    figures = {"start_to_ready_s": ready, "idle_to_gone_s": gone}
    (IMAGE / "last.json").write_text(json.dumps({**about, **figures, "rows": rows}, indent=1) + "\n")
    say(f"start to ready {ready} s, idle to gone {gone} s")
