"""The wrapper: what the machine's job queue starts. It owns the keeper, and nothing outlives it.

    python3 -m kimisession.node.job MACHINE_FOLDER [LAUNCHER_PID]

When the keeper ends, however it ends, every descendant is killed, the machine's disk is released if it was made for
this session, and the job exits with the keeper's code (notes/architecture.md), 40 when the keeper was killed, 41 when
it stopped beating. No descriptor of the job is inherited by the engine, so the queue sees the end at once (a job whose
standard output is held open looks alive: teardown hazard 3).

It knows no limit and no clock time. It only answers: is the keeper still there, and does its heart beat?
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from kimisession.node import leash
from kimisession.node.config import Config, load
from kimisession.node.journal import Journal
from kimisession.node.policy import EXIT_CODES

KEEPER_KILLED = 40
KEEPER_HUNG = 41
POLL_S = 0.25
CLOSED_S = 5.0
_SCRATCH = "kimi-run-"

_ASKED_TO_END = False


def _on_term(_signal: int, _frame: FrameType | None) -> None:
    global _ASKED_TO_END  # noqa: PLW0603 - a signal handler has nowhere else to put it
    _ASKED_TO_END = True


def hold_lock(path: Path) -> int:
    """Take an exclusive lock for as long as this process lives. The kernel frees it on any death, kill -9 included."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def write_pid(machine: Path, role: str) -> None:
    """Leave our identity for whoever has to find us later. A full disk must not stop the wrapper."""
    with contextlib.suppress(OSError):
        (machine / "run" / f"pid.{role}").write_text(leash.identity(os.getpid()), encoding="ascii")


def release_disk(machine: Path, config: Config) -> None:
    """Give the session's disk back, when it was made for the session. Repeatable."""
    if config.ephemeral_disk:
        shutil.rmtree(machine / "disk", ignore_errors=True)


def make_scratch(machine: Path) -> dict[str, str]:
    """The environment of the keeper, with a TMPDIR of the session's own: each start of vLLM leaves sockets and files
    there. A short path: the kernel takes socket names of 107 characters, and vLLM adds 37. A full disk stops nothing."""
    try:
        folder = tempfile.mkdtemp(prefix=_SCRATCH, dir="/tmp" if len(tempfile.gettempdir()) > 50 else None)  # noqa: S108
    except OSError:
        return dict(os.environ)
    with contextlib.suppress(OSError):
        (machine / "run" / "scratch").write_text(folder, encoding="utf-8")
    return {**os.environ, "TMPDIR": folder}


def release_scratch(machine: Path, folder: str = "") -> None:
    """Remove the session's TMPDIR with all that the engine left there: `folder`, or the one that is written down (whoever
    made it knows it, also when somebody has removed the machine's folder). Repeatable."""
    with contextlib.suppress(OSError):
        path = Path(folder or (machine / "run" / "scratch").read_text(encoding="utf-8"))
        if path.is_absolute() and path.name.startswith(_SCRATCH):
            shutil.rmtree(path, ignore_errors=True)


def run(machine: Path, parent: int) -> int:
    """Run the keeper to its end, then clean up. Returns the job's exit code."""
    signal.signal(signal.SIGTERM, _on_term)
    signal.signal(signal.SIGINT, _on_term)
    leash.become_subreaper()
    leash.die_with_parent(signal.SIGTERM, parent)
    config = load(machine)
    journal = Journal(machine / "run" / "journal.jsonl", "wrapper")
    lock = hold_lock(machine / "run" / "job.lock")
    write_pid(machine, "wrapper")
    group = leash.Cgroup.make(config.session)
    with contextlib.suppress(OSError):
        (machine / "run" / "cgroup").write_text(str(group.path or ""), encoding="utf-8")

    lifeline, beat_end = os.pipe()
    argv = [sys.executable, "-m", "kimisession.node.keeper", str(machine), str(beat_end), str(os.getpid())]
    env = make_scratch(machine)
    keeper = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, pass_fds=(beat_end,), start_new_session=True)
    os.close(beat_end)
    group.join(keeper.pid)

    code = _watch(keeper, lifeline, config, journal, parent)
    group.kill()
    left = leash.kill_descendants(os.getpid(), within_s=10)
    group.remove()
    release_disk(machine, config)
    release_scratch(machine, "" if env == dict(os.environ) else env["TMPDIR"])  # never one that we were given
    journal.write("closed", exit_code=code, left=len(left))
    os.close(lock)
    return code


def _watch(keeper: subprocess.Popen[bytes], lifeline: int, config: Config, journal: Journal, parent: int) -> int:
    """Wait until the keeper has ended. One that stops beating is killed: by default the machine goes away."""
    # Silence is counted in waits that brought nothing, not on a clock: a machine that stood still as a whole (paused,
    # migrated, swamped) must not wake up to find its keeper hung while beats are waiting in the pipe.
    silent_for_s = 0.0
    beaten = told = False
    while True:
        readable, _, _ = select.select([lifeline], [], [], POLL_S)
        if not readable:
            silent_for_s += POLL_S
        elif os.read(lifeline, 4096):
            silent_for_s, beaten = 0.0, True
        else:  # its end is closed: it is gone, or about to be
            try:
                keeper.wait(timeout=CLOSED_S)
                break
            except subprocess.TimeoutExpired:
                silent_for_s += CLOSED_S
        if keeper.poll() is not None:
            break
        if _ASKED_TO_END and beaten and not told:
            told = True
            # The keeper ends the engine in order; it is told once, and its silence is watched all the same. Before its
            # first beat it has no handler yet, and the signal would be what kills it.
            keeper.send_signal(signal.SIGUSR1 if os.getppid() != parent else signal.SIGTERM)
        if silent_for_s > config.silent_s:
            journal.write(
                "ended",
                reason="keeper-hung",
                evidence=f"no heartbeat for {config.silent_s:g}s",
                exit_code=KEEPER_HUNG,
            )
            keeper.kill()
            keeper.wait()
            return KEEPER_HUNG
    code = keeper.returncode
    if code not in EXIT_CODES.values():
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        journal.write(
            "ended",
            reason="keeper-died",
            evidence=f"the keeper {how}",
            exit_code=KEEPER_KILLED,
        )
        return KEEPER_KILLED
    return code


def main() -> int:
    """Entry point. A launcher that gives its pid is missed even if it died before this line; else the parent is read."""
    parent = int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid()
    return run(Path(sys.argv[1]), parent)


if __name__ == "__main__":
    sys.exit(main())
