"""`kimisession start --infra slurm` through real SkyPilot on a real Slurm. In this order: the cases share one world, and five
sessions are launched at once because a launch takes half a minute."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from bounds import CLEAN_UP, READY, bound
from rig import (
    CHECKOUT,
    HOME,
    PYTHON,
    START,
    Session,
    World,
    all_dead,
    everything,
    launching,
    nothing_left,
    wait_for,
)

Measure = Callable[[str, float], None]
Command = subprocess.Popen[str]

#: Session by session what is special about it.
FIVE = {
    "gpus": (
        "--idle",
        "45s",
        "--gpus",
        "H200:8",
        "--checkpoint",
        "stand-in",
    ),  # all GPUs that the node pretends to have
    "orphan": ("--idle", "45s", "--set", "workers=2", "--set", "fault=orphan"),  # its engine leaves a process behind
    "alone": ("--idle", "45s"),
    "lost": (),
    "broken": (),
}


@pytest.fixture(scope="module")
def commands(world: World) -> dict[str, tuple[float, Command]]:
    """Five commands that start sessions, and when each began."""
    return {name: (time.monotonic(), world.begin(*START, "--name", name, *more)) for name, more in FIVE.items()}


@pytest.fixture(scope="module")
def three(world: World, commands: dict[str, tuple[float, Command]], measure: Measure) -> dict[str, Session]:
    """Three ready sessions."""
    found = {}
    for name in ("gpus", "orphan", "alone"):
        began, command = commands[name]
        told = command.communicate(timeout=bound(READY.case).latest_s + 60)[0]
        assert command.returncode == 0, told
        assert f"{name} is ready" in told
        if name == "gpus":
            print(told)
        measure(READY.case, time.monotonic() - began)
        session = world.session(name)
        assert session
        found[name] = session
    return found


# -- while they are launched -------------------------------------------------------------------------------------------


def test_ctrl_c_during_the_launch_leaves_nothing(
    world: World, commands: dict[str, tuple[float, Command]], measure: Measure
) -> None:
    session = launching(world, "broken")
    began = time.time()
    world.signal("kimisession start .* broken", signal.SIGINT)
    told = commands["broken"][1].communicate(timeout=200)[0]
    assert commands["broken"][1].returncode == 130, told
    assert not session.queued, told
    measure("Ctrl-C during the launch", time.time() - began)


@pytest.fixture(scope="module")
def lost(world: World, commands: dict[str, tuple[float, Command]]) -> tuple[Session, float]:
    """A session whose command was killed in the middle of the launch, and when."""
    session = launching(world, "lost")
    killed_at = time.time()
    world.signal("kimisession start .* lost", signal.SIGKILL)
    assert commands["lost"][1].wait(timeout=10) == -signal.SIGKILL
    return session, killed_at


def test_a_session_whose_command_died_in_the_launch_is_known_to_the_next_command(
    world: World, lost: tuple[Session, float]
) -> None:
    assert world.status("lost")["state"] == "starting"


# -- ready -------------------------------------------------------------------------------------------------------------


def test_a_session_answers_through_its_tunnel_and_is_a_host_that_ssh_knows(
    world: World, three: dict[str, Session]
) -> None:
    for name in three:
        done = world.kimisession("test", name, "--json")
        assert done.returncode == 0, done.stderr
    # SkyPilot's own state on the node is read there, next to the cold start.
    # Skylets of several sessions share this node's one port for them, so one of them may just be starting again.
    told = [world.status(name)["layers"] for name in three]
    assert all(layers["keeper"] and layers["time limit"] for layers in told), told
    wait_for("a skylet", lambda: any(world.status(name)["layers"].get("SkyPilot autodown") for name in three), 30)
    base = json.loads(world.kimisession("connect", "gpus", "--json").stdout)["data"]["base_url"]
    # Node and laptop share one loopback here, so the session's own port is taken: this one is the tunnel's.
    assert f":{three['gpus'].journal('ready')['port']}/" not in base
    assert world.out("ssh", "gpus", "hostname").strip() == "rig"


def test_the_key_is_in_two_files_of_its_user_and_in_the_engines_environment_and_nowhere_else(
    world: World, three: dict[str, Session]
) -> None:
    session = three["gpus"]
    files = {f"{HOME}/.kimisession/{session.id}/api_key", f"{HOME}/.local/state/kimisession/keys/{session.id}"}
    key = min(files)
    # -xdev: what is bound in from outside is none of the session's, such as a checkout that lies in /tmp.
    everywhere = f"{HOME} /tmp /run /var/log /var/spool /var/tmp /dev/shm"
    look = f"find {everywhere} -xdev -type f -exec grep -lFs -f {key} {{}} +; grep -lFs -f {key} /proc/[0-9]*/cmdline"
    found = world.run("sh", "-c", look, root=True)
    assert set(found.stdout.split()) == files
    assert {(world.home / Path(name).relative_to(HOME)).stat().st_mode & 0o777 for name in files} == {0o600}
    knowing = world.run("sh", "-c", f"grep -lFs -f {key} /proc/[0-9]*/environ | cut -d/ -f3", root=True).stdout.split()
    assert [int(pid) for pid in knowing] == [session.pid("engine")]
    # What anybody on the cluster may see of a job, and what its user may of its script.
    secret = (session.run.parent / "api_key").read_text(encoding="ascii").strip()
    for words in (("show", "job", "-dd", session.slurm_job()), ("write", "batch_script", session.slurm_job(), "-")):
        told = world.out("scontrol", *words)
        assert session.id in told
        assert secret not in told


def test_a_session_whose_comment_was_written_anew_is_still_seen(world: World, three: dict[str, Session]) -> None:
    # Some sites' job_submit plugins do that, and any user may.
    job = three["gpus"].slurm_job()
    labels = world.out("squeue", "-h", "-j", job, "-o", "%k").strip()
    world.out("scontrol", "update", f"JobId={job}", "Comment=project x | y")
    assert world.status("gpus")["state"] == "ready"
    world.out("scontrol", "update", f"JobId={job}", f"Comment={labels}")


def test_the_tunnel_comes_back_after_its_ssh_was_killed(world: World, three: dict[str, Session]) -> None:
    killed = world.signal("ssh .* -N -L .* gpus-", signal.SIGKILL)
    assert "killed" in killed
    done = wait_for("an answer", lambda: world.kimisession("test", "gpus", "--json").returncode == 0, 40)
    assert done


def test_extend_is_refused_in_slurms_own_words_and_nothing_has_moved(world: World, three: dict[str, Session]) -> None:
    before = world.status("gpus")["deadline"]
    limit = world.out("squeue", "-h", "-j", three["gpus"].slurm_job(), "-o", "%l")
    done = world.kimisession("extend", "1m", "gpus")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Access/permission denied" in done.stderr
    assert "longer --duration" in done.stderr
    assert world.status("gpus")["deadline"] == before
    assert world.out("squeue", "-h", "-j", three["gpus"].slurm_job(), "-o", "%l") == limit
    assert not (three["gpus"].run.parent / "control" / "extend.json").exists()


# -- what ends them ----------------------------------------------------------------------------------------------------


def test_a_dead_keeper_ends_the_session_with_its_engine_and_what_the_engine_left(
    world: World, three: dict[str, Session], measure: Measure
) -> None:
    session = three["orphan"]
    engine = session.pid("engine")
    left = "kimisession-stand-in-orphan"
    assert world.run("kill", "-0", str(engine)).returncode == 0, "the engine is alive"
    assert world.run("pgrep", "-f", left).returncode == 0, "so is what it left behind"
    # It holds its output, which is a file of its own: SkyPilot reads the job's to its end.
    held = world.out("readlink", *(f"/proc/{engine}/fd/{fd}" for fd in (0, 1, 2))).split()
    assert held == ["/dev/null", *[f"{HOME}/.kimisession/{session.id}/run/engine.log"] * 2]
    began = time.time()
    world.out("kill", "-9", str(session.pid("keeper")))
    measure("kill -9 of the keeper", world.left_queue(session, bound("kill -9 of the keeper").latest_s) - began)
    assert world.run("kill", "-0", str(engine)).returncode != 0
    assert world.run("pgrep", "-f", left).returncode != 0
    assert session.journal("ended")["reason"] == "keeper-died"


def test_another_job_does_not_keep_the_machine_and_a_dead_api_server_ends_nothing_else(
    world: World, three: dict[str, Session], lost: tuple[Session, float], measure: Measure
) -> None:
    wait_for("the keeper of the lost one", lambda: lost[0].journal("started"), READY.latest_s)
    done = world.run("sky", "exec", "-d", three["gpus"].id, "--cpus", "1", "sleep inf")
    assert done.returncode == 0, done.stdout + done.stderr
    # It waits for the keeper's CPUs, and an unfinished job is all that SkyPilot needs to keep a machine.
    queue = world.out("sky", "queue", three["gpus"].id)
    assert len([line for line in queue.splitlines() if "PENDING" in line or "RUNNING" in line]) == 2, queue
    # One request each, the last; then SkyPilot's server dies, with all of its workers.
    last = {}
    for name in ("gpus", "alone"):
        assert world.kimisession("test", name, "--json").returncode == 0
        last[name] = time.time()
    world.kill_the_server()
    assert world.kimisession("test", "alone", "--json").returncode == 0, "the tunnel needs no server"
    last["alone"] = time.time()
    for name, case in (
        ("gpus", "idle, with `sky exec sleep inf` on it"),
        ("alone", "kill -9 of SkyPilot's API server"),
    ):
        measure(case, world.left_queue(three[name], bound(case).latest_s) - last[name])
        assert three[name].journal("ended")["reason"] == "idle"


def test_a_session_whose_command_died_in_the_launch_ends_by_itself(
    world: World, lost: tuple[Session, float], measure: Measure
) -> None:
    session, killed_at = lost
    case = "kill -9 of the command during the launch"
    measure(case, world.left_queue(session, bound(case).latest_s) - killed_at)
    assert session.journal("ended")["reason"] == "never-used"
    assert "never used" in world.kimisession("status", "lost", "--watch").stdout


def test_afterwards_squeue_and_sky_status_are_empty_and_each_has_a_receipt(
    world: World, three: dict[str, Session]
) -> None:
    first = world.kimisession("status")  # the first that meets their end, and has SkyPilot look
    assert "SkyPilot" not in first.stdout, "progress is not data"
    assert "no session is running" in world.kimisession("status").stdout
    assert not world.out("squeue", "-h").strip()
    told = world.out("sky", "status")
    assert not any(session.id in told for session in three.values()), told
    wait_for("nothing of SkyPilot's", lambda: not list((world.home / ".sky_clusters").iterdir()), 30)
    for name, reason in (("gpus", "idle"), ("alone", "idle"), ("orphan", "keeper-died")):
        receipt = json.loads(world.kimisession("cost", three[name].id, "--json").stdout)
        assert receipt["data"]["reason"] == reason
        # Slurm has forgotten these jobs: they wrote down themselves when they ended.
        (machine,) = [r for r in receipt["data"]["lines"] if r["kind"] == "machine"]
        late = datetime.fromisoformat(machine["ended"]) - datetime.fromisoformat(three[name].journal("ended")["at"])
        assert abs(late.total_seconds()) <= bound(CLEAN_UP.case).latest_s
        assert not list(three[name].run.parent.glob("api_key"))
    print(world.kimisession("cost", three["gpus"].id).stdout)


def test_skypilot_itself_reads_every_file_in_sky_and_every_task_of_ours(world: World) -> None:
    script = """
import glob, sky
from datetime import UTC, datetime
from kimisession.engines.task import task_config
from test_skypilot_task import NOW, SPEC, slurm
for name in glob.glob(CHECKOUT + "/sky/*.yaml"):
    assert sky.Task.from_yaml(name).run
for infra in ("gcp", "slurm", "kubernetes"):
    sky.Task.from_yaml_config(task_config(SPEC, infra, "/home/me", NOW))
everything = slurm(cluster="rig", partition="gpu", account="a", qos="q", modules=("m",), conda="/c", cpus=8, memory_gib=9)
sky.Task.from_yaml_config(task_config(everything, "slurm", "/home/me", NOW))
print("read")
"""
    prelude = f"import sys; CHECKOUT = {str(CHECKOUT)!r}; sys.path.insert(0, CHECKOUT + '/tests/edges')\n"
    assert world.out(str(PYTHON), "-c", prelude + script).strip().endswith("read")


@everything
def test_an_api_server_that_dies_in_the_launch_is_followed_by_a_teardown(world: World, measure: Measure) -> None:
    command = world.begin(*START, "--name", "served")
    session = launching(world, "served")
    began = time.time()
    world.kill_the_server()
    told = command.communicate(timeout=300)[0]
    assert command.returncode not in (0, 7), told
    assert not session.queued, told
    measure("kill -9 of the API server during the launch", time.time() - began)


@everything
@pytest.mark.timeout(500)
def test_what_nobody_guards_is_ended_by_slurm_itself(world: World, measure: Measure) -> None:
    world.begin(*START, "--name", "unseen", "--duration", "1m")
    session = launching(world, "unseen")
    world.signal("kimisession start .* unseen", signal.SIGKILL)
    world.kill_the_server()
    began = time.time()
    case = "kill -9 of command and API server before the keeper ran"
    measure(case, world.left_queue(session, bound(case).latest_s) - began)
    assert not session.journal("started")


@everything
@pytest.mark.timeout(500)
def test_when_all_of_ours_on_the_node_is_killed_at_once_skypilots_autodown_ends_it(
    world: World, measure: Measure
) -> None:
    case = "kill -9 of all that is ours on the node"
    done = world.kimisession(*START, "--name", "bare", "--idle", "8m", within_s=bound(READY.case).latest_s)
    assert done.returncode == 0, done.stdout + done.stderr
    session = world.session("bare")
    assert session
    wait_for("skylet", lambda: world.status("bare")["layers"].get("SkyPilot autodown"), 60, every_s=2)
    rows = [line.split() for line in world.out("scontrol", "listpids", session.slurm_job()).splitlines()]
    (step,) = {row[2] for row in rows if row[0] == str(session.pid("keeper"))}
    began = time.time()
    world.run("kill", "-9", *(row[0] for row in rows if row[2] == step), root=True)
    measure(case, world.left_queue(session, bound(case).latest_s) - began)
    all_dead(world, session)
    assert world.status("bare")["state"] == "gone"
    nothing_left(world, session)
