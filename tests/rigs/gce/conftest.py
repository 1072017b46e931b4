"""One world for the whole run: real SkyPilot, an emulated Google, machines that are namespaces of this one."""

import json
import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.rigs.gce.bounds import PATIENCE, bound
from tests.rigs.gce.world.rig import IMAGE, World, wait_for

Measure = Callable[[str, float], None]


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """With weights in gs://weights, and a reaper. SkyPilot's server is started by its first user."""
    world = World()
    try:
        done = world.kimisession("seed", "rehearsal", "--here", "--bucket", "gs://weights/rehearsal")
        assert done.returncode == 0, done.stdout + done.stderr
        world.allow_the_reaper()
        done = world.kimisession("guard", "enable")
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for(
            "the reaper's first look", lambda: "armed and verified" in world.kimisession("guard", "status").stdout, 90
        )
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
    print(f"{'case':55} {'ended by':32} {'seconds':>8} {'at most':>8}  from")
    for case, layer, since, seconds, latest in rows:
        print(f"{case:55} {layer:32} {seconds:8.1f} {latest:8g}  {since}")
    (IMAGE / "last.json").write_text(json.dumps({"at": time.time(), "rows": rows}, indent=1))
