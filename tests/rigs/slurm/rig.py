"""Start a world (world.sh, services.sh), run commands in it, and make it vanish."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[2]
RIGS = CHECKOUT / ".cache" / "rigs"
PYTHON = RIGS / "venv" / "bin" / "python"
T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T], within_s: float, every_s: float = 0.25) -> T:
    """The first true answer of `look`. Raises AssertionError that names what did not come."""
    until = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < until, f"{what}: not within {within_s:g} s"
        time.sleep(every_s)


@dataclass(frozen=True)
class Session:
    """A session as the machine's own folder tells it."""

    world: "World"
    id: str

    @property
    def run(self) -> Path:
        """`run/` of the machine's folder, seen from outside of the world."""
        return self.world.home / ".kimisession" / self.id / "run"

    def journal(self, kind: str) -> dict[str, Any]:
        """The first line of a kind; empty when there is none yet."""
        try:
            lines = (self.run / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return {}
        return next((line for line in map(json.loads, lines) if line["kind"] == kind), {})

    def pid(self, role: str) -> int:
        """The pid of keeper, wrapper or engine, inside the world."""
        return int((self.run / f"pid.{role}").read_text(encoding="ascii").partition(":")[0])

    @property
    def queued(self) -> bool:
        """Whether squeue lists it."""
        return self.id in self.world.out("squeue", "-h", "-o", "%j %T")


class World:
    """One world. Nothing of it outlives this object, or this process."""

    def __init__(self) -> None:
        worlds = RIGS / "slurm" / "worlds"
        worlds.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="w", dir=worlds))
        self.home = self.folder / "home"
        self.log = (self.folder / "world.log").open("ab")
        argv = ["setpriv", "--pdeathsig", "KILL", str(HERE / "world.sh"), str(self.folder), str(HERE / "services.sh")]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        self.env = {
            "HOME": "/root",
            "USER": "root",
            "LOGNAME": "root",
            "TMPDIR": "/tmp",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PATH": f"{PYTHON.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(CHECKOUT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_POD_MEMORY_GB_LIMIT": "5",
        }
        wait_for("a Slurm node that is idle", self._ready, 60)

    def _ready(self) -> bool:
        told = (self.folder / "world.log").read_text(encoding="utf-8", errors="replace")
        assert self.process.poll() is None, f"the world ended: {told[-600:]}"
        return "rig: ready" in told

    def _enter(self, argv: tuple[str, ...]) -> list[str]:
        parent = self.process.pid
        child = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()[0]
        env = [f"{key}={value}" for key, value in self.env.items()]
        return ["nsenter", "-t", child, "-m", "-p", "-n", "-u", "-i", "env", "-i", *env, *argv]

    def run(self, *argv: str, within_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command in the world."""
        return subprocess.run(
            self._enter(argv), capture_output=True, text=True, timeout=within_s, check=False, stdin=subprocess.DEVNULL
        )

    def out(self, *argv: str) -> str:
        """Standard output of a command that has to work."""
        done = self.run(*argv)
        assert done.returncode == 0, f"{argv}: {done.stderr[-600:]}"
        return done.stdout

    def kimisession(self, *words: str, within_s: float = 240) -> subprocess.CompletedProcess[str]:
        """One of our commands, as a person would type it."""
        return self.run(str(PYTHON), "-m", "kimisession", *words, within_s=within_s)

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        """One of our commands, not waited for."""
        argv = self._enter((str(PYTHON), "-m", "kimisession", *words))
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def signal(self, pattern: str, number: int) -> str:
        """Send a signal to processes of the world by their command line; says which."""
        return self.run("pkill", f"-{signal.Signals(number).name[3:]}", "-e", "-f", pattern).stdout

    def session(self, name: str) -> Session | None:
        """The newest session of this name that Slurm or a machine's folder knows."""
        rented = self.home / ".local" / "state" / "kimisession" / "rented"
        found = sorted(rented.glob(f"{name}-????????"), key=lambda path: path.stat().st_mtime)
        return Session(self, found[-1].name) if found else None

    def close(self) -> None:
        """Make it vanish."""
        self.process.kill()
        self.process.wait()
        self.log.close()
        if not os.environ.get("KIMISESSION_RIG_KEEP"):
            shutil.rmtree(self.folder, ignore_errors=True)
