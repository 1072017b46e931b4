"""The reaper on its own pretended machine: what people type, its code out of the metadata, its package, its token, TLS."""

import json
import os
import signal
from datetime import UTC, datetime, timedelta

import pytest

from kimisession.core.guard import NAME
from kimisession.core.launch import session_labels
from tests.rigs.gce.world.rig import PROJECT, PYTHON, World, wait_for

everything = pytest.mark.skipif(not os.environ.get("KIMISESSION_RIG_ALL"), reason="make test-gce ALL=1")

#: Installs its package, looks, beats: seen in 9 s on a quiet machine and 60 s on a busy one.
FIRST_BEAT_S = 240


@pytest.fixture(scope="module")
def guarded(world: World) -> World:
    """The world's project, whose reaper has looked. Its account has exactly the permissions that our notes say (rig.py)."""
    armed_again(world)
    return world


def armed_again(world: World) -> None:
    """Until `guard status` says that it is armed and verified."""
    wait_for("a heartbeat", lambda: world.kimisession("guard", "status").returncode == 0, FIRST_BEAT_S, 2)


def look_now(world: World) -> None:
    """Cut its pause short."""
    world.run("/run/bin/on", NAME, "pkill", "-x", "sleep")


def insert(world: World, session: str, deadline: datetime, zone: str = "europe-west4-b") -> None:
    """A machine that somebody began from a laptop that is gone: no ledger, no keeper, no timer knows of it."""
    body = {
        "name": f"{session}-0f0f0f0f-head-ab12cd34-compute",
        "machineType": f"zones/{zone}/machineTypes/e2-small",
        "labels": session_labels(session, "lost", "somebody", deadline),
        "disks": [
            {
                "boot": True,
                "autoDelete": True,
                "initializeParams": {"sourceImage": "projects/debian-cloud/global/images/family/debian-12"},
            }
        ],
        "networkInterfaces": [{"network": f"projects/{PROJECT}/global/networks/default"}],
    }
    code = "import json, sys; from kimisession.cloud.compute import open_compute; "
    code += "open_compute().create_machine(sys.argv[1], json.loads(sys.argv[2]))"
    world.out(str(PYTHON), "-c", code, zone, json.dumps(body))


def names(world: World) -> set[str]:
    """The sessions of the machines that exist."""
    instances = world.admin("/admin/state")["instances"].values()
    return {one["labels"]["kimisession-session"] for one in instances if "kimisession-session" in one.get("labels", {})}


def wait_until_gone(world: World, session: str) -> None:
    """Its pauses are cut short meanwhile."""

    def gone() -> bool:
        look_now(world)
        return session not in names(world)

    wait_for("its deletion", gone, FIRST_BEAT_S, 5)


def now() -> datetime:
    return datetime.now(UTC)


def test_a_machine_that_nobody_knows_goes_after_its_deadline_and_a_live_one_stays(guarded: World) -> None:
    insert(guarded, "old-1a2b3c4d", now() - timedelta(hours=1))
    insert(guarded, "new-1a2b3c4d", now() + timedelta(hours=1))
    assert names(guarded) >= {"old-1a2b3c4d", "new-1a2b3c4d"}
    look_now(guarded)
    wait_for("its deletion", lambda: "old-1a2b3c4d" not in names(guarded), 90)
    assert "new-1a2b3c4d" in names(guarded)


@everything
def test_it_looks_again_after_a_reboot(guarded: World) -> None:
    guarded.reboot(NAME)
    insert(guarded, "boot-1a2b3c4d", now() - timedelta(hours=1))
    wait_for("its deletion", lambda: "boot-1a2b3c4d" not in names(guarded), FIRST_BEAT_S)


@everything
def test_it_looks_again_after_an_outage_of_compute_engine(guarded: World) -> None:
    insert(guarded, "late-1a2b3c4d", now() - timedelta(hours=1))
    guarded.kill_the_emulator()
    look_now(guarded)
    wait_until_gone(guarded, "late-1a2b3c4d")
    armed_again(guarded)


@everything
def test_killed_while_it_looks_it_looks_again(guarded: World) -> None:
    insert(guarded, "kill-1a2b3c4d", now() - timedelta(hours=1))
    look_now(guarded)
    wait_for("a run", lambda: guarded.signal("kimisession.cloud.reaper", signal.SIGKILL), 30, 0.05)
    wait_until_gone(guarded, "kill-1a2b3c4d")
