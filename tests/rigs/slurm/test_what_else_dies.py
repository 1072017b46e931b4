"""What else may die, fill up or be away under a session on Slurm. The sessions are launched at once; the reboot comes last."""

import os
import signal
import time
from collections.abc import Callable

import pytest
from bounds import BOOT_S, READY, bound
from rig import HOME, START, Session, World, all_dead, everything, nothing_left, wait_for

Measure = Callable[[str, float], None]
pytestmark = everything

FOLDERS = f"{HOME}/.kimisession"


@pytest.fixture(scope="module")
def sessions(world: World) -> dict[str, Session]:
    """Ready sessions whose folders are on a small file system of their own."""
    mount = f"mkdir -p {FOLDERS} && mount -t tmpfs -o size=300m,mode=700 none {FOLDERS} && chown me: {FOLDERS}"
    assert world.run("sh", "-c", mount, root=True).returncode == 0
    names = {"full": "45s", "script": "8m", "cancelled": "8m", "away": "8m", "rebooted": "8m"}
    starts = {name: world.begin(*START, "--name", name, "--idle", idle) for name, idle in names.items()}
    found = {}
    for name, start in starts.items():
        told = start.communicate(timeout=bound(READY.case).latest_s + 60)[0]
        assert start.returncode == 0, told
        session = world.session(name)
        assert session
        found[name] = session
    return found


def test_a_full_disk_does_not_keep_the_machine(world: World, sessions: dict[str, Session], measure: Measure) -> None:
    case = "idle, with a full disk under the machine's folder"
    world.run("dd", "if=/dev/zero", f"of={FOLDERS}/filler", "bs=1M")
    assert os.statvfs(world.home / ".kimisession").f_bavail == 0
    assert world.kimisession("test", "full", "--json").returncode == 0
    asked = time.time()
    measure(case, world.left_queue(sessions["full"], bound(case).latest_s) - asked)
    world.out("rm", f"{FOLDERS}/filler")
    assert world.status("full")["state"] == "gone"


def test_the_batch_script_may_die_alone(world: World, sessions: dict[str, Session], measure: Measure) -> None:
    case, session = "kill -9 of the job's batch script", sessions["script"]
    began = time.time()
    assert "killed" in world.signal(f"job0*{session.slurm_job()}/slurm_script", signal.SIGKILL, root=True)
    measure(case, world.left_queue(session, bound(case).latest_s) - began)
    all_dead(world, session)
    assert world.status("script")["state"] == "gone"
    nothing_left(world, session)


def test_a_scancel_from_elsewhere_ends_all_of_it(world: World, sessions: dict[str, Session], measure: Measure) -> None:
    case, session = "scancel by somebody else", sessions["cancelled"]
    began = time.time()
    world.out("scancel", session.slurm_job())
    measure(case, world.left_queue(session, bound(case).latest_s) - began)
    all_dead(world, session)
    told = world.status("cancelled")
    print(told["state"], told["reason"], session.journal("ended"))
    assert told["state"] == "gone"
    nothing_left(world, session)


def test_a_dead_tunnel_process_is_replaced_by_the_next_command(world: World, sessions: dict[str, Session]) -> None:
    assert "killed" in world.signal("kimisession.engines.tunnel .*away-", signal.SIGKILL)
    assert world.kimisession("test", "away", "--json").returncode == 0


def test_a_stop_while_the_login_node_hangs_says_so_and_can_be_said_again(
    world: World, sessions: dict[str, Session], measure: Measure
) -> None:
    world.run("pkill", "-STOP", "-x", "sshd", root=True)
    try:
        began = time.time()
        done = world.kimisession("stop", "away", within_s=300)
        assert done.returncode == 7, done.stdout + done.stderr
        assert "kimisession stop away" in done.stderr, "what to type next"
        measure("stop, with the login node away", time.time() - began)
    finally:
        world.run("pkill", "-CONT", "-x", "sshd", root=True)
    began = time.time()
    done = world.kimisession("stop", "away", within_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    measure("stop, once the login node is back", time.time() - began)
    assert not sessions["away"].queued


def test_a_restart_of_slurmd_is_nothing_to_a_session(world: World, sessions: dict[str, Session]) -> None:
    world.run("pkill", "-KILL", "-x", "slurmd", root=True)
    world.run("slurmd", root=True)
    wait_for("the node", lambda: "mix" in world.out("sinfo", "-h", "-o", "%T"), 60)
    assert world.kimisession("test", "rebooted", "--json").returncode == 0
    assert sessions["rebooted"].queued


def test_a_reboot_of_the_node_ends_the_job_and_nothing_comes_back(
    world: World, sessions: dict[str, Session], measure: Measure
) -> None:
    case, session = "reboot of the node", sessions["rebooted"]
    inside = f"grep -lsz '^SLURM_JOB_ID={session.slurm_job()}$' /proc/[0-9]*/environ | cut -d/ -f3"
    world.run("sh", "-c", f"pkill -KILL -x slurmd; pkill -KILL -x slurmstepd; kill -KILL $({inside})", root=True)
    began = time.time()
    time.sleep(BOOT_S)  # it boots
    world.run("slurmd", "-b", root=True)
    # Where slurmctld does not miss the job, it would stand there as running until its time limit; whoever looks ends it.
    wait_for(
        "Slurm or a command to end it", lambda: world.status("rebooted")["state"] == "gone", bound(case).latest_s, 5
    )
    measure(case, world.left_queue(session, 1) - began)
    all_dead(world, session)
    told = world.status("rebooted")
    assert told["state"] == "gone"
    assert told["reason"], "the receipt names one"
    nothing_left(world, session)
