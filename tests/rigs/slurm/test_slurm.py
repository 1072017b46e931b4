"""`kimisession start --infra slurm` through real SkyPilot on a real Slurm. In this order: the cases share one world, and three
sessions are launched at once because a launch takes half a minute."""

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import datetime

import pytest
from bounds import bound
from rig import CHECKOUT, PYTHON, Session, World, wait_for

START = ("start", "rehearsal", "--infra", "slurm", "-y")
Measure = Callable[[str, float], None]
everything = pytest.mark.skipif(not os.environ.get("KIMISESSION_RIG_ALL"), reason="make test-slurm ALL=1")


@pytest.fixture(scope="module")
def three(world: World, measure: Measure) -> dict[str, Session]:
    """Three ready sessions: one claims all GPUs that the node pretends to have."""
    began = time.monotonic()
    claim = ("--gpus", "H200:8", "--checkpoint", "stand-in")
    starts = {
        name: world.begin(*START, "--name", name, "--idle", "45s", *(claim if name == "gpus" else ()))
        for name in ("gpus", "orphan", "alone")
    }
    for name, start in starts.items():
        told = start.communicate(timeout=bound("start to ready").latest_s + 60)[0]
        assert start.returncode == 0, told
        assert f"{name} is ready" in told
        if name == "gpus":
            print(told)
    measure("start to ready", time.monotonic() - began)
    found = {name: world.session(name) for name in starts}
    return {name: session for name, session in found.items() if session}


def kill_the_server(world: World) -> None:
    """SkyPilot's API server with all of its workers: those that are left behind hold its port."""
    assert "killed" in world.signal("sky.server.server", signal.SIGKILL)
    for worker in ("SkyPilot:", "multiprocessing.spawn", "multiprocessing.resource_tracker"):
        world.signal(worker, signal.SIGKILL)


def gone(session: Session, within_s: float) -> None:
    wait_for(f"{session.id} to leave the queue", lambda: not session.queued, within_s)


def test_a_session_answers_through_its_tunnel_and_is_a_host_that_ssh_knows(
    world: World, three: dict[str, Session]
) -> None:
    for name in three:
        done = world.kimisession("test", name, "--json")
        assert done.returncode == 0, done.stderr
    # SkyPilot's own state on the node is read there, next to the cold start.
    wait_for("layers", lambda: "armed    SkyPilot autodown: skylet" in world.kimisession("status", "gpus").stdout, 60)
    base = json.loads(world.kimisession("connect", "gpus", "--json").stdout)["data"]["base_url"]
    # Node and laptop share one loopback here, so the session's own port is taken: this one is the tunnel's.
    assert f":{three['gpus'].journal('ready')['port']}/" not in base
    assert world.out("ssh", "gpus", "hostname").strip() == "rig"


def test_the_key_is_in_no_argument_no_log_and_no_file_of_skypilots(world: World, three: dict[str, Session]) -> None:
    places = "/root/.sky /root/sky_logs /root/.sky_clusters /root/.sky_provision /var/log/slurm /var/spool /proc/[0-9]*/cmdline"
    key = f"/root/.kimisession/{three['gpus'].id}/api_key"
    assert world.run("grep", "-lF", "-f", key, key).returncode == 0
    found = world.run("sh", "-c", f"grep -rlFs -f {key} {places}")
    assert found.stdout == ""
    assert (three["gpus"].run.parent / "api_key").stat().st_mode & 0o777 == 0o600


def test_the_tunnel_comes_back_after_its_ssh_was_killed(world: World, three: dict[str, Session]) -> None:
    killed = world.signal("ssh .* -N -L .* gpus-", signal.SIGKILL)
    assert "killed" in killed
    done = wait_for("an answer", lambda: world.kimisession("test", "gpus", "--json").returncode == 0, 40)
    assert done


def test_a_dead_keeper_ends_the_session_with_its_engine(
    world: World, three: dict[str, Session], measure: Measure
) -> None:
    session = three["orphan"]
    engine = session.pid("engine")
    assert world.run("kill", "-0", str(engine)).returncode == 0
    began = time.monotonic()
    world.out("kill", "-9", str(session.pid("keeper")))
    gone(session, bound("kill -9 of the keeper").latest_s)
    measure("kill -9 of the keeper", time.monotonic() - began)
    assert world.run("kill", "-0", str(engine)).returncode != 0
    assert session.journal("ended")["reason"] == "keeper-died"


def test_another_job_does_not_keep_the_machine_and_a_dead_api_server_ends_nothing_else(
    world: World, three: dict[str, Session], measure: Measure
) -> None:
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
    kill_the_server(world)
    assert world.kimisession("test", "alone", "--json").returncode == 0, "the tunnel needs no server"
    last["alone"] = time.time()
    for name, case in (
        ("gpus", "idle, with `sky exec sleep inf` on it"),
        ("alone", "kill -9 of SkyPilot's API server"),
    ):
        gone(three[name], bound(case).latest_s)
        measure(case, time.time() - last[name])
        assert three[name].journal("ended")["reason"] == "idle"


def test_afterwards_squeue_and_sky_status_are_empty_and_each_has_a_receipt(
    world: World, three: dict[str, Session]
) -> None:
    first = world.kimisession("status")  # the first that meets their end, and has SkyPilot look
    assert "SkyPilot" not in first.stdout, "progress is not data"
    assert "no session is running" in world.kimisession("status").stdout
    assert not world.out("squeue", "-h").strip()
    told = world.out("sky", "status")
    assert not any(session.id in told for session in three.values()), told
    assert not list((world.home / ".sky_clusters").iterdir())
    for name, reason in (("gpus", "idle"), ("alone", "idle"), ("orphan", "keeper-died")):
        receipt = json.loads(world.kimisession("cost", three[name].id, "--json").stdout)
        assert receipt["data"]["reason"] == reason
        # Slurm has forgotten these jobs: they wrote down themselves when they ended.
        (machine,) = [r for r in receipt["data"]["lines"] if r["kind"] == "machine"]
        late_s = datetime.fromisoformat(machine["ended"]) - datetime.fromisoformat(three[name].journal("ended")["at"])
        assert abs(late_s.total_seconds()) < 10
        assert not list(three[name].run.parent.glob("api_key"))
    print(world.kimisession("cost", three["gpus"].id).stdout)


def _launching(world: World, name: str, *more: str) -> "tuple[object, Session]":
    """A command in the middle of its launch: the job has its node, the keeper did not begin."""
    command = world.begin(*START, "--name", name, *more)
    session = wait_for("a folder", lambda: world.session(name), 60)
    wait_for("a job", lambda: session.queued, 120, every_s=0.1)
    assert not session.journal("started")
    return command, session


def test_ctrl_c_during_the_launch_leaves_nothing(world: World, measure: Measure) -> None:
    command, session = _launching(world, "broken")
    began = time.monotonic()
    world.signal("kimisession start .* broken", signal.SIGINT)
    told = command.communicate(timeout=200)[0]  # type: ignore[attr-defined]
    assert command.returncode == 130, told  # type: ignore[attr-defined]
    assert not session.queued, told
    measure("Ctrl-C during the launch", time.monotonic() - began)


def test_a_session_whose_command_died_in_the_launch_ends_by_itself(world: World, measure: Measure) -> None:
    _, session = _launching(world, "lost")
    began = time.monotonic()
    world.signal("kimisession start .* lost", signal.SIGKILL)
    assert world.kimisession("status", "lost", "--json").returncode == 0
    wait_for("the keeper", lambda: session.journal("started"), 180)
    gone(session, bound("kill -9 of the command during the launch").latest_s)
    measure("kill -9 of the command during the launch", time.monotonic() - began)
    assert session.journal("ended")["reason"] == "never-used"
    assert "never used" in world.kimisession("status", "lost", "--watch").stdout


@everything
def test_an_api_server_that_dies_in_the_launch_is_followed_by_a_teardown(world: World, measure: Measure) -> None:
    command, session = _launching(world, "served")
    began = time.monotonic()
    kill_the_server(world)
    told = command.communicate(timeout=300)[0]  # type: ignore[attr-defined]
    assert command.returncode not in (0, 7), told  # type: ignore[attr-defined]
    assert not session.queued, told
    measure("kill -9 of the API server during the launch", time.monotonic() - began)


@everything
@pytest.mark.timeout(500)
def test_what_nobody_guards_is_ended_by_slurm_itself(world: World, measure: Measure) -> None:
    _, session = _launching(world, "unseen", "--duration", "1m")
    world.signal("kimisession start .* unseen", signal.SIGKILL)
    kill_the_server(world)
    began = time.monotonic()
    gone(session, bound("kill -9 of command and API server before the keeper ran").latest_s)
    measure("kill -9 of command and API server before the keeper ran", time.monotonic() - began)
    assert not session.journal("started")


def test_skypilot_itself_reads_every_file_in_sky_and_every_task_of_ours(world: World) -> None:
    script = """
import glob, sky
from datetime import UTC, datetime
from kimisession.engines.task import task_config
from test_skypilot_task import NOW, SPEC, slurm
for name in glob.glob(CHECKOUT + "/sky/*.yaml"):
    assert sky.Task.from_yaml(name).run
for infra in ("gcp", "slurm", "kubernetes"):
    sky.Task.from_yaml_config(task_config(SPEC, infra, "/root", NOW))
everything = slurm(cluster="rig", partition="gpu", account="a", qos="q", modules=("m",), conda="/c", cpus=8, memory_gib=9)
sky.Task.from_yaml_config(task_config(everything, "slurm", "/root", NOW))
print("read")
"""
    prelude = f"import sys; CHECKOUT = {str(CHECKOUT)!r}; sys.path.insert(0, CHECKOUT + '/tests/edges')\n"
    assert world.out(str(PYTHON), "-c", prelude + script).strip().endswith("read")


@everything
@pytest.mark.skipif(not (CHECKOUT / ".venv-vllm").exists(), reason="make rehearse ENGINE=vllm installs it")
def test_real_vllm_serves_a_miniature_of_kimi_from_a_slurm_job(world: World, measure: Measure) -> None:
    engine = ("--engine-python", str(CHECKOUT / ".venv-vllm" / "bin" / "python"))
    assert world.kimisession("seed", "rehearsal-vllm").returncode == 0
    began = time.monotonic()
    done = world.kimisession(
        "start", "rehearsal-vllm", "--infra", "slurm", "--name", "mini", "-y", *engine, within_s=bound("vllm").latest_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measure("vllm", time.monotonic() - began)
    session = world.session("mini")
    assert session
    answers = world.kimisession("test", "mini", "--max-tokens", "64")
    assert answers.returncode == 0, answers.stderr
    asked = time.time()
    print(done.stderr, done.stdout, answers.stdout)
    gone(session, bound("vllm, idle").latest_s)
    measure("vllm, idle", time.time() - asked)
    assert session.journal("ended")["reason"] == "idle"
