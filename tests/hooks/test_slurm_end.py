"""How a session's job on Slurm ends itself, with the real script and real processes. Stand-ins: Slurm's own commands, `getent`,
and a batch script with the traps of the one that SkyPilot 0.14.1 writes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from good_values import PROFILE, an_id, choices

from kimisession.core.quote import launch_spec, make_quote
from kimisession.engines.payload import lay_out
from kimisession.engines.task import run_script

#: Its clean-up takes a second here; the node's folders and the user's home go in its middle.
BATCH = """\
cleanup() { saved=$?; echo begun >> "$told"; sleep 1; echo cleaned >> "$told"; exit $saved; }
trap cleanup EXIT
trap 'exit 0' TERM
( while true; do sleep 61; done ) &
touch "$told"
sleep infinity
"""
ID = an_id("demo")


class Job:
    """One allocation: a batch script, and what its only step runs."""

    def __init__(self, home: Path) -> None:
        self.told = home / "told"
        self.batch = subprocess.Popen(
            ["bash", "-c", BATCH], env={**os.environ, "told": str(self.told)}, start_new_session=True
        )
        while not self.told.exists():
            time.sleep(0.01)
        self.home = home
        limits = replace(PROFILE.limits, stop_grace="1s")
        quote = make_quote(replace(PROFILE, limits=limits, load="in-place"), choices(infra="slurm"), datetime.now(UTC))
        self.spec = launch_spec(quote, ID, "someone")
        self.machine = home / ".kimisession" / ID
        self.machine.mkdir(parents=True)
        engine = replace(self.spec.engine, argv=("sh", "-c", "exit 3"))  # type: ignore[type-var]
        lay_out(self.machine, replace(self.spec, engine=engine, steps=()), {"api_key": "hidden"})
        self.command("getent", f'echo "me:x:0:0::{home}/users:/bin/sh"')
        self.command("squeue", "date +%s")
        self.command("scancel", f'echo "$*" >> "{home}/scancel"')
        self.command(
            "scontrol", f'if [ "$1" = listpids ]; then cat "{home}/pids"; else echo "$*" >> "{home}/scontrol"; fi'
        )

    def command(self, name: str, text: str) -> None:
        path = self.home / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def children(self) -> list[int]:
        """Of the batch shell, the loop's child before it."""
        told = subprocess.run(["ps", "-e", "-o", "pid=,pgid="], capture_output=True, text=True, check=True).stdout
        pairs = (line.split() for line in told.splitlines())
        return [int(pid) for pid, group in pairs if int(group) == self.batch.pid and int(pid) != self.batch.pid]

    def run(self) -> int:
        """The job's script, to its end."""
        path = f"{self.home / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
        env = {"HOME": str(self.home), "PATH": path, "SLURM_JOB_ID": "7"}
        script = ["bash", "-c", run_script(self.spec, "slurm")]
        return subprocess.run(script, env=env, check=False, timeout=60, stdin=subprocess.DEVNULL).returncode


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for pid in (*job.children(), job.batch.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    job.batch.wait()


def test_skypilots_batch_script_cleans_up_to_its_end_whatever_order_slurm_lists_the_processes_in(job: Job) -> None:
    # As proctrack/linuxproc has it: children first. One that dies before its shell is told makes the shell clean up, and
    # the shell's own TERM then breaks that off.
    rows = [f"{pid} 7 batch - -" for pid in job.children()] + [f"{job.batch.pid} 7 batch 0 0", "4194303 7 extern 0 0"]
    (job.home / "pids").write_text("PID JOBID STEPID LOCALID GLOBALID\n" + "\n".join(rows) + "\n")
    assert job.run() == 21
    job.batch.wait(timeout=30)
    assert job.told.read_text().split() == ["begun", "cleaned"]
    assert not (job.home / "scancel").exists(), "nobody tells it twice"
    limits = (job.home / "scontrol").read_text().splitlines()
    assert limits[-1].endswith("TimeLimit=2"), "slurmctld ends it in two minutes, whatever happens here"
    machine = job.home / "users" / ".kimisession" / ID
    assert (machine / "run" / "ending").is_dir(), "`stop` sees that it is being ended"
    assert not (machine / "api_key").exists()


def test_where_slurm_does_not_list_processes_it_is_told_by_scancel(job: Job) -> None:
    (job.home / "pids").write_text("")
    assert job.run() == 21
    assert (job.home / "scancel").read_text() == "--signal=TERM --full 7\n"
