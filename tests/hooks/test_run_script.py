"""The script that SkyPilot runs as a session's job on GCP, run here: real bash, real gib.sh, real wrapper and keeper. Stand-ins:
sudo, and arm.sh, which only writes down how it was called."""

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

from kimisession.core.launch import LaunchSpec, Step
from kimisession.core.quote import launch_spec, make_quote
from kimisession.engines.payload import lay_out
from kimisession.engines.task import AFTER_FAILED_S, GRACE_S, run_script

SUDO = '#!/bin/sh\n[ "$1" != -n ] || shift\nexec "$@"\n'
ARM = '#!/bin/sh\necho "$(date +%s) $*" >> "{told}"\nexit {code}\n'
ENGINE = 'env > "$0/env"; exit 3'
GIB = {
    "NCCL_NET": "gIB",
    "NCCL_TUNER_CONFIG_PATH": "/usr/local/gib/a.txtpb",
    "NCCL_CONF_FILE": "/usr/local/gib/nccl.conf",
}


class Job:
    """One job in a home of its own."""

    def __init__(self, home: Path, arm_code: int = 0) -> None:
        self.home = home
        limits = replace(PROFILE.limits, stop_grace="1s")
        quote = make_quote(replace(PROFILE, limits=limits), choices(infra="gcp"), datetime.now(UTC))
        spec = launch_spec(quote, an_id("demo"), "someone")
        engine = replace(spec.engine, argv=("sh", "-c", ENGINE, "@{machine}/run"))
        self.spec: LaunchSpec = replace(
            spec, engine=engine, steps=(Step("gib", ("@{machine}/scripts/hooks/gib.sh", "check")),)
        )
        self.machine = home / ".kimisession" / spec.session_id
        self.machine.mkdir(parents=True)
        lay_out(self.machine, self.spec, {"api_key": "hidden"})
        self.armed = home / "armed"
        self._script(self.machine / "scripts" / "deadline" / "arm.sh", ARM.format(told=self.armed, code=arm_code))
        self._script(home / "bin" / "sudo", SUDO)

    def _script(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, **env: str) -> "subprocess.CompletedProcess[str]":
        """To its end, and to the end of its output: that is when SkyPilot calls a job over."""
        path = f"{self.home / 'bin'}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        return subprocess.run(
            ["bash", "-c", run_script(self.spec, "gcp")],
            env={"HOME": str(self.home), "PATH": path, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    def arms(self) -> list[list[str]]:
        """The words of each call of arm.sh, its second first."""
        return [line.split() for line in self.armed.read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    yield Job(tmp_path)
    for pid in (int(path.read_text()) for path in tmp_path.glob("pid.*")):
        os.kill(pid, signal.SIGKILL)


def test_the_engine_has_none_of_gibs_variables_that_the_jobs_shell_had(job: Job) -> None:
    done = job.run(NCCL_NVLS_ENABLE="0", LD_LIBRARY_PATH="/usr/local/gib/lib64:/opt/mine", **GIB)
    assert done.returncode == 21, done.stderr
    env = dict(line.split("=", 1) for line in (job.machine / "run" / "env").read_text().splitlines() if "=" in line)
    assert not GIB.keys() & env.keys()
    assert not [name for name, value in env.items() if "/usr/local/gib" in value]
    assert (env["NCCL_NVLS_ENABLE"], env["LD_LIBRARY_PATH"]) == ("0", "/opt/mine"), "somebody's own choice stays"


def test_the_machines_own_end_is_armed_first_and_drawn_near_when_the_keeper_has_ended(job: Job) -> None:
    assert job.run().returncode == 21
    first, last = job.arms()
    assert first[1:3] == ["--deadline", str(int(job.spec.deadline.timestamp()) + GRACE_S)]
    began = (job.machine / "run" / "journal.jsonl").stat().st_ctime
    assert int(first[0]) <= began
    assert int(last[2]) - int(last[0]) in (AFTER_FAILED_S - 1, AFTER_FAILED_S), "soon, not at the deadline"
    assert last[3:7] == ["--grace-s", "0", "--without-keeper-s", str(AFTER_FAILED_S)]
    assert last[7:9] == ["--because", "21"], "what its deletion will tell"
    assert not (job.machine / "api_key").exists()


def test_a_machine_whose_end_cannot_be_armed_runs_no_session(tmp_path: Path) -> None:
    job = Job(tmp_path, arm_code=5)
    assert job.run().returncode == 20
    told = (job.machine / "run" / "journal.jsonl").read_text()
    assert "could not be armed" in told
    assert '"kind":"started"' not in told


def test_a_read_back_that_hangs_does_not_hold_the_jobs_output(job: Job) -> None:
    hanging = job.home / "hanging"
    job._script(hanging, f'#!/bin/sh\necho $$ > "{job.home}/pid.hanging"\nexec sleep 300\n')
    (job.home / ".sky").mkdir()
    (job.home / ".sky" / "python_path").write_text(str(hanging))
    began = time.monotonic()
    assert job.run().returncode == 21
    assert time.monotonic() - began < 30
    assert (job.home / "pid.hanging").exists(), "it did hang"
