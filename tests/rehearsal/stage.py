"""One session's own little world: homes, profile, port, and the real commands as separate processes."""

from __future__ import annotations

import fcntl
import http.client
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from processes import SAMPLE_S, Process, Watch, argv, children, everything, kill_all, look, wait_until

PROFILE = """\
name = "{name}"
summary = "A session whose every limit is a second or two"
status = "runs here"

[model]
served_name = "kimi-k2.5"

[engine]
kind = "vllm"
version = "stand-in"
command = ["@{{python}}", "-m", "kimisession.node.standin"]

[engine.flags]
tokens-per-second = 100

[hardware]
infra = "local"
accelerators = ["CPU:1"]

[[checkpoints]]
name = "stand-in"
repo = "stand-in"
bytes = 8192
architectures = ["cpu"]
context = 8192

[price]
usd_per_hour = 26.00
ground = "pretended"

[limits]
{limits}
"""

#: Short, so that sixty sessions fit into a minute; `silent` leaves room for a machine whose two cores are busy.
LIMITS: Mapping[str, str | float] = {
    "idle": "60s",
    "unused": "60s",
    "duration": "5m",
    "longest": "10m",
    "ready_within": "60s",
    "coldstart_stall": "30s",
    "stall": "2s",
    "unknown": "2s",
    "warn": "1s",
    "silent": "3s",
    "stop_grace": "1s",
    "tick": 0.1,
    "scrape": 0.25,
}

#: What the modules of each role are called on a command line.
ROLES = {
    "supervisor": "kimisession.engines.local_supervisor",
    "wrapper": "kimisession.node.job",
    "keeper": "kimisession.node.keeper",
    "engine": "kimisession.node.standin",
    "puller": "kimisession.node.pull",
}

_PORTS = itertools.count(21000 + os.getpid() % 400 * 20)


def a_port() -> int:
    """A port that nobody listens on now; every caller gets another one."""
    for port in _PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port left")


def environment_for(root: Path, package: Path | None = None) -> dict[str, str]:
    """The environment of commands whose homes are under `root`; `package` is a folder that holds another kimisession."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KIMISESSION_")}
    env.pop("PYTHONPATH", None)
    env |= {f"KIMISESSION_{kind.upper()}_HOME": str(root / kind) for kind in ("state", "data", "config")}
    env |= {"NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if package is not None:
        env["PYTHONPATH"] = str(package)
    return env


def seeded_bucket(root: Path) -> str:
    """Seed the smallest stand-in model once; every stage pulls from it. Returns its URL."""
    from kimisession.rehearsal.standin_model import make_standin_model

    make_standin_model(root / "model", shards=1, shard_bytes=4096)
    config = root / "config" / "profiles"
    config.mkdir(parents=True)
    limits = "\n".join(f"{key} = {json.dumps(value)}" for key, value in LIMITS.items())
    (config / "cell.toml").write_text(PROFILE.format(name="cell", limits=limits))
    url = f"file://{root}/bucket"
    words = ["seed", "cell", "--from", str(root / "model"), "--bucket", url]
    subprocess.run(
        [sys.executable, "-m", "kimisession", *words],
        env=environment_for(root),
        check=True,
        capture_output=True,
        cwd=root,
    )
    return url


class Stage:
    """Homes of its own in a new folder, one profile `cell`, one port. `close` kills what is left and removes it all."""

    def __init__(
        self,
        watch: Watch,
        bucket: str,
        *,
        limits: Mapping[str, str | float] | None = None,
        package: Path | None = None,
    ) -> None:
        self.watch, self.bucket = watch, bucket
        self.mark = secrets.token_hex(6)
        self.root = Path(tempfile.mkdtemp(prefix="kimi-stage-"))
        self.port = a_port()
        self.env = {**environment_for(self.root, package), "REHEARSAL_STAGE": self.mark}
        profiles = self.root / "config" / "profiles"
        profiles.mkdir(parents=True)
        text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in {**LIMITS, **(limits or {})}.items())
        (profiles / "cell.toml").write_text(PROFILE.format(name="cell", limits=text))
        self.commands: list[subprocess.Popen[bytes]] = []
        self.request: http.client.HTTPConnection | None = None

    # -- commands ------------------------------------------------------------------------------------------------------

    def command(self, *words: str) -> subprocess.Popen[bytes]:
        """Type a command; its output goes to files beside the homes."""
        number = len(self.commands)
        with (self.root / f"out.{number}").open("wb") as out, (self.root / f"err.{number}").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "kimisession", *words],
                env=self.env,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.commands.append(process)
        self.watch.troupe(self.mark).left_out.add(process.pid)
        return process

    def told(self, process: subprocess.Popen[bytes]) -> str:
        """What a command has written so far."""
        number = self.commands.index(process)
        return (self.root / f"out.{number}").read_text() + (self.root / f"err.{number}").read_text()

    def out(self, process: subprocess.Popen[bytes]) -> str:
        """What a command has written to standard output."""
        return (self.root / f"out.{self.commands.index(process)}").read_text()

    def run(self, *words: str, within_s: float = 60) -> tuple[int, str]:
        """Type a command and wait for it: exit code and everything it said."""
        process = self.command(*words)
        process.wait(timeout=within_s)
        return process.returncode, self.told(process)

    def ask(self, *words: str) -> Any:
        """The data of a --json command."""
        process = self.command(*words, "--json")
        process.wait(timeout=60)
        found = self.out(process)
        assert found, f"kimisession {' '.join(words)} said nothing: {self.told(process)}"
        return json.loads(found)["data"]

    def start(self, *more: str, name: str = "cell", port: int | None = None) -> subprocess.Popen[bytes]:
        """`kimisession start`, in the background."""
        words = ("--name", name, "--bucket", self.bucket, "--port", str(port or self.port), "-y")
        return self.command("start", "cell", *words, *more)

    # -- the machine ---------------------------------------------------------------------------------------------------

    def machines(self) -> list[Path]:
        """Folders of machines, whole or not."""
        return sorted((self.root / "state" / "machines").glob("*"))

    def launching(self) -> bool:
        """Whether a command still holds the machine's launch lock."""
        with (self.machine / "launch.lock").open("rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @property
    def machine(self) -> Path:
        """The one machine's folder. Raises AssertionError when there is none, or more."""
        found = self.machines()
        assert len(found) == 1, found
        return found[0]

    def journal(self, machine: Path | None = None) -> list[dict[str, Any]]:
        """Whole lines of a machine's journal; empty while there is none."""
        try:
            text = ((machine or self.machine) / "run" / "journal.jsonl").read_text()
        except (OSError, AssertionError):
            return []
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def gone(self, machine: Path | None = None) -> dict[str, Any]:
        """What was recorded when the machine was found gone; empty when it was not."""
        try:
            found: dict[str, Any] = json.loads(((machine or self.machine) / "gone.json").read_text())
        except (OSError, AssertionError):
            return {}
        return found

    def process(self, role: str) -> Process | None:
        """The living process of this role, found by its command line and environment, not by what it wrote down."""
        mark = f"REHEARSAL_STAGE={self.mark}".encode()
        for process in everything().values():
            words = argv(process.pid)
            if ROLES[role] in words and mark in _environment(process.pid):
                return process
        return None

    def child(self, of: int, role: str) -> Process | None:
        """A child of this role."""
        return next((p for pid in children(of) if ROLES[role] in argv(pid) and (p := look(pid))), None)

    def quiet(self) -> bool:
        """Whether the keeper has said that it is ready, and since then that nobody asks anything."""
        lines = self.journal()
        ready = next((n for n, line in enumerate(lines) if line["kind"] == "ready"), None)
        return ready is not None and any(x["kind"] == "beat" and x["activity"] == "quiet" for x in lines[ready:])

    def wait_ready(self, within_s: float = 40) -> bool:
        """Until it is ready and quiet."""
        return wait_until(self.quiet, within_s)

    def wait_kind(self, kind: str, within_s: float = 40) -> bool:
        """Until the journal has a line of this kind."""
        return wait_until(lambda: any(line["kind"] == kind for line in self.journal()), within_s)

    def keep_asking(self) -> None:
        """Open one request that streams for half a minute; held until `hang_up`."""
        key = (self.root / "state" / "keys" / self.machine.name).read_text()
        body = {
            "model": "kimi-k2.5-stand-in",
            "messages": [{"role": "user", "content": "Go on."}],
            "stream": True,
            "max_tokens": 3000,
            "ignore_eos": True,
        }
        self.request = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.request.request("POST", "/v1/chat/completions", json.dumps(body), headers)

    def hang_up(self) -> None:
        """The client leaves."""
        if self.request is not None:
            self.request.close()
            self.request = None

    # -- the end -------------------------------------------------------------------------------------------------------

    def nothing_runs(self, since: float = 0.0) -> float | None:
        """When no process of this stage's machines was left, by our own sampling; None while there is one, and until the
        first two samples after `since`."""
        return self.watch.troupe(self.mark).gone_at if self.watch.sampled_at > since + 2 * SAMPLE_S else None

    def close(self) -> None:
        """Whatever a test did, nothing of it stays."""
        self.hang_up()
        for process in self.commands:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        until = time.monotonic() + 10
        while (left := self.watch.living(self.mark)) and time.monotonic() < until:
            kill_all(left)
            time.sleep(SETTLE_S)
        for path in self.root.glob("state/machines/*/run/cgroup"):
            if (group := path.read_text().strip()) and Path(group).is_dir():
                wait_until(lambda group=group: removed(Path(group)), 10)  # type: ignore[misc]
        shutil.rmtree(self.root, ignore_errors=True)


SETTLE_S = 0.1


def _environment(pid: int) -> tuple[bytes, ...]:
    from processes import environment

    return environment(pid)


def removed(group: Path) -> bool:
    """Remove an empty control group; it is busy while a large process in it is still being taken apart."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
