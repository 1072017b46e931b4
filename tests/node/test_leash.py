"""The leash: whatever a process starts, however it hides, is found and ends; whatever ended is never mistaken for alive."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimisession.node import leash

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
FOREVER = "import time; time.sleep(600)"

#: Forks twice, leaves its session, clears its environment, closes everything: as far away as a daemon can get.
DAEMON = """
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})
    os._exit(0)
os.wait()
"""


def wait_for(what: Callable[[], Any], within_s: float = 15) -> Any:
    """The first truthy answer; fails the test when none comes in time."""
    until = time.monotonic() + within_s
    while not (answer := what()):
        assert time.monotonic() < until, "it did not come in time"
        time.sleep(0.01)
    return answer


def python(code: str, *args: str, **options: Any) -> subprocess.Popen[str]:
    """A process that runs this code."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env=ENV,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        **options,
    )


def gone(pid: int) -> bool:
    """Whether nothing runs under this pid; a zombie runs nothing."""
    return leash.start_ticks(pid) is None


def test_a_living_process_is_known_by_pid_and_birth() -> None:
    process = python(FOREVER)
    who = leash.identity(process.pid)
    assert leash.alive(who)
    process.kill()
    wait_for(lambda: not leash.alive(who))  # a zombie, not yet collected, is dead
    process.wait()
    assert not leash.alive(who)


@pytest.mark.parametrize("who", ["", ":", "abc:1", "0:0", "{mine}:1", "{mine}:", "999999999:None"])
def test_what_is_no_living_process_is_not_alive(who: str) -> None:
    assert not leash.alive(who.format(mine=os.getpid()))


def test_a_reused_pid_is_somebody_else() -> None:
    mine = leash.identity(os.getpid())
    pid, ticks = mine.split(":")
    assert leash.alive(mine)
    assert not leash.alive(f"{pid}:{int(ticks) - 1}")


def test_descendants_are_found_through_any_number_of_generations() -> None:
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {FOREVER!r}]); print(p.pid, flush=True); p.wait()"
    process = python(code)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    mine = leash.descendants(os.getpid())
    assert mine.index(process.pid) < mine.index(grandchild)  # nearest first
    assert leash.descendants(process.pid) == [grandchild]
    assert process.pid not in leash.descendants(process.pid)
    for pid in (grandchild, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: gone(grandchild))


def test_a_subreaper_kills_even_a_daemon_that_cleared_its_environment() -> None:
    code = (
        "import os, subprocess, sys; from kimisession.node import leash\n"
        "leash.become_subreaper()\n"
        f"subprocess.run([sys.executable, '-c', {DAEMON!r}], check=True)\n"
        "found = leash.descendants(os.getpid())\n"
        "print(*found, flush=True)\n"
        "print('left', leash.kill_descendants(os.getpid(), within_s=10), flush=True)\n"
    )
    out, _ = python(code).communicate(timeout=30)
    first, last = out.splitlines()
    assert len(first.split()) == 1  # the daemon was there, and was found
    assert last == "left []"
    assert all(gone(int(pid)) for pid in first.split())


def test_a_leashed_program_keeps_its_pid_and_its_arguments_and_dies_with_its_parent() -> None:
    code = (
        "import subprocess, sys; from kimisession.node import leash\n"
        "child = subprocess.Popen(leash.leashed([sys.executable, '-c', sys.argv[1], 'an argument']))\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    child_code = "import os, sys, time; print(os.getpid(), sys.argv[1], flush=True); time.sleep(600)"
    process = python(code, child_code)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == f"{pid} an argument\n"
    process.kill()  # not even its last lines run
    process.wait()
    wait_for(lambda: gone(pid))


def test_a_leash_whose_parent_is_gone_already_does_not_begin() -> None:
    dead = python("")
    dead.communicate()
    argv = leash.leashed([sys.executable, "-c", "print('it runs')"])
    argv[4] = str(dead.pid)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


def test_what_carries_a_machines_mark_is_found_and_no_other() -> None:
    machine = f"demo-{os.getpid()}"
    env = {**ENV, leash.MARK: machine}
    one = subprocess.Popen([sys.executable, "-c", FOREVER], env=env)
    other = subprocess.Popen([sys.executable, "-c", FOREVER], env={**ENV, leash.MARK: f"{machine}0"})
    try:
        wait_for(lambda: list(leash.marked(machine)) == [one.pid])
        wait_for(lambda: list(leash.marked(f"{machine}0")) == [other.pid])
    finally:
        for process in (one, other):
            process.kill()
    wait_for(lambda: list(leash.marked(machine)) == [])  # zombies carry no mark
    for process in (one, other):
        process.wait()


#: As vLLM's API server starts its EngineCore, which writes over its environment and outlives it in the same session.
ENGINE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
print(child.pid, flush=True)
time.sleep(600)
"""


def test_what_an_engine_left_in_its_session_is_found_without_mark_and_without_its_parent() -> None:
    engine = python(ENGINE, start_new_session=True)
    assert engine.stdout is not None
    child, who = int(engine.stdout.readline()), leash.identity(engine.pid)
    assert set(leash.in_session(who)) == {engine.pid, child}
    engine.kill()
    engine.wait()
    try:
        assert leash.in_session(who) == [child]
        assert not leash.in_session(f"{os.getpid()}:1"), "the number has come to belong to another process"
        assert not leash.in_session(f"{engine.pid}:{int(leash.start_ticks(child) or 0) + 1}"), "older than the engine"
        assert not leash.in_session("")
    finally:
        leash.kill(child, signal.SIGKILL)


def test_killing_what_is_gone_is_fine() -> None:
    process = python("")
    process.communicate()
    leash.kill(process.pid, signal.SIGKILL)
    assert process.returncode == 0, "it had ended by itself, and nothing was raised"


def test_a_control_group_that_this_user_may_not_make_is_no_error() -> None:
    nothing = leash.Cgroup(None)
    nothing.join(1)
    nothing.kill()
    nothing.remove()
    assert nothing.pids() == []


def test_a_control_group_is_emptied_in_one_step_where_this_user_may_make_one() -> None:
    group = leash.Cgroup.make(f"test-{os.getpid()}")
    if group.path is None:
        pytest.skip("this user may make no control group here")
    process = python(FOREVER)
    group.join(process.pid)
    assert group.pids() == [process.pid]
    group.kill()
    assert process.wait(timeout=15) == -signal.SIGKILL
    wait_for(lambda: group.pids() == [])
    group.remove()
    assert not group.path.exists()
