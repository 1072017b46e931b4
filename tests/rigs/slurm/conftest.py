"""One world for the whole run, and a table of what was measured against what was written down."""

import json
import os
import time
from collections.abc import Callable, Iterator

import pytest
from bounds import PATIENCE, bound
from rig import RIGS, World

Measure = Callable[[str, float], None]


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    world = World()
    done = world.run(
        "python",
        "-c",
        "from pathlib import Path; from kimisession.rehearsal.standin_model import make_standin_model as make;"
        "make(Path('/home/me/model'))",
    )
    assert done.returncode == 0, done.stderr
    done = world.kimisession("seed", "rehearsal", "--from", "/home/me/model")
    assert done.returncode == 0, done.stderr
    try:
        yield world
    finally:
        world.close()


@pytest.fixture(scope="session")
def measure() -> Iterator[Measure]:
    """Records a figure and holds it to its bound."""
    rows: list[tuple[str, str, str, float, float]] = []

    def one(case: str, seconds: float) -> None:
        limit = bound(case)
        rows.append((case, limit.layer, limit.from_, round(seconds, 1), limit.latest_s))
        assert seconds <= limit.latest_s, f"{case}: {seconds:.1f} s from {limit.from_}, at most {limit.latest_s:g}"

    yield one
    print(f"\nbounds x {PATIENCE:g}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'case':58} {'ended by':22} {'seconds':>8} {'at most':>8}  from")
    for case, layer, since, seconds, latest in rows:
        print(f"{case:58} {layer:22} {seconds:8.1f} {latest:8g}  {since}")
    (RIGS / "slurm" / "last.json").write_text(json.dumps({"at": time.time(), "rows": rows}, indent=1))
