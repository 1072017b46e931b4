"""The supervisor of one local machine: outlives the command, ends with the job.

    python -m kimisession.engines.local_supervisor MACHINE_FOLDER

It plays the part that a cloud's autodown plays: when the job has ended, however it ended, it closes the machine. It has
a deadline of its own, the one in the machine's labels plus `GRACE_S`, for a keeper or a wrapper that does not end. When
it dies itself, the kernel tells the wrapper, which ends the session: fail cheap.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from kimisession.engines.local_machine import Machine
from kimisession.node import job, leash
from kimisession.node.journal import Journal

GRACE_S = 15.0
POLL_S = 0.2
PAST_DEADLINE = 42
WRAPPER_KILLED = 43

_ASKED = False


def _on_term(_signal: int, _frame: FrameType | None) -> None:
    global _ASKED  # noqa: PLW0603 - a signal handler has nowhere else to put it
    _ASKED = True


def _boot_deadline(machine: Machine) -> float:
    """The labels' deadline on a clock that never steps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) + machine.deadline.timestamp() - time.time()


def supervise(machine: Machine) -> int:
    """Run the job to its end and close the machine. Returns 0 when it is closed, 1 when something is left."""
    signal.signal(signal.SIGTERM, _on_term)
    signal.signal(signal.SIGINT, _on_term)
    leash.become_subreaper()
    lock = job.hold_lock(machine.run / "supervisor.lock")
    job.write_pid(machine.folder, "supervisor")
    journal = Journal(machine.run / "journal.jsonl", "supervisor")
    grace_s = machine.stop_grace_s()
    if machine.gone is None:
        wrapper = _start_job(machine)
        _wait(machine, wrapper, journal, grace_s)
        if wrapper.returncode < 0:  # it had no chance to say so itself
            evidence = f"the wrapper was killed by signal {-wrapper.returncode}"
            journal.write("ended", reason="wrapper-died", evidence=evidence, exit_code=WRAPPER_KILLED)
        # A daemon that cleared its environment carries no mark: without its keeper and wrapper it is our child now.
        leash.kill_descendants(os.getpid(), within_s=10)
    closed = machine.close("supervisor")
    if not closed:
        journal.write("closed", exit_code=1, left=len(machine.leftovers()))
    os.close(lock)
    return 0 if closed else 1


def _start_job(machine: Machine) -> subprocess.Popen[bytes]:
    # The machine's own copy first; what the user set stays for an engine that needs it.
    path = os.pathsep.join(filter(None, (str(machine.folder / "lib"), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path}
    argv = [sys.executable, "-m", "kimisession.node.job", str(machine.folder), str(os.getpid())]
    with (machine.run / "job.log").open("ab") as log:
        return subprocess.Popen(
            argv,
            env=env,
            cwd=machine.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait(machine: Machine, wrapper: subprocess.Popen[bytes], journal: Journal, grace_s: float) -> None:
    """Until the job has ended; by force when it is late."""
    labels, deadline = machine.record.get("labels"), _boot_deadline(machine)
    force_at = float("inf")
    forced = False
    while wrapper.poll() is None:
        time.sleep(POLL_S)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        record = machine.record
        if record.get("labels") and record["labels"] != labels:
            labels, deadline = record["labels"], _boot_deadline(machine)
        stopping = _ASKED or (machine.folder / "control" / "stop.json").exists()
        # The folder is the machine's record: without it nobody can find the machine any more, so it must not live.
        if stopping or not machine.folder.exists():
            force_at = min(force_at, now + grace_s + 10)
            if not forced and (_ASKED or not machine.folder.exists()):
                wrapper.terminate()
                forced = True
        if now > min(force_at, deadline + GRACE_S):
            journal.write(
                "ended",
                reason="past-deadline",
                evidence="the job did not end by itself; killed",
                exit_code=PAST_DEADLINE,
            )
            # The wrapper first asks its keeper; after that nothing is asked.
            wrapper.terminate()
            try:
                wrapper.wait(timeout=grace_s + 5)
            except subprocess.TimeoutExpired:
                wrapper.kill()
                wrapper.wait()
            leash.kill_descendants(os.getpid(), within_s=10)


def main() -> int:
    """Entry point."""
    return supervise(Machine(Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
