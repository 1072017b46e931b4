"""One world for the whole run: real SkyPilot, an emulated Google, machines that are namespaces of this one."""

import os
from collections.abc import Iterator

import pytest

from tests.rigs.gce.world.rig import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Up in seconds. Its bucket gs://weights holds the stand-in's weights; SkyPilot's server is started by its first user."""
    world = World()
    try:
        done = world.kimisession("seed", "rehearsal", "--bucket", "gs://weights/rehearsal")
        assert done.returncode == 0, done.stdout + done.stderr
        yield world
    finally:
        world.close()


@pytest.fixture(scope="session", autouse=True)
def _alone() -> Iterator[None]:
    yield
    print(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
