"""Start a world (world.sh, services.sh), run commands in it, and make it vanish."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from bounds import PATIENCE

from kimisession.node.journal import read_journal

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[2]
RIGS = CHECKOUT / ".cache" / "rigs"
PYTHON = RIGS / "venv" / "bin" / "python"
HOME = "/home/me"  # of the ordinary user in the world
#: A cap that a start on a busy machine does not reach.
START = ("start", "rehearsal", "--infra", "slurm", "--duration", "9m", "-y")
T = TypeVar("T")

everything = pytest.mark.skipif(not os.environ.get("KIMISESSION_RIG_ALL"), reason="make test-slurm ALL=1")


def wait_for(what: str, look: Callable[[], T], within_s: float, every_s: float = 0.25) -> T:
    """The first true answer of `look`. Raises AssertionError that names what did not come, on a busy machine later."""
    until = time.monotonic() + within_s * PATIENCE
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
        lines, _ = read_journal(self.run / "journal.jsonl")
        return next((line for line in lines if line["kind"] == kind), {})

    def pid(self, role: str) -> int:
        """The pid of keeper, wrapper or engine, inside the world."""
        return int((self.run / f"pid.{role}").read_text(encoding="ascii").partition(":")[0])

    @property
    def queued(self) -> bool:
        """Whether squeue lists it."""
        return any(self.id in job for job in self.world.jobs())

    def slurm_job(self) -> str:
        """The number of its job."""
        (line,) = [line for line in self.world.out("squeue", "-h", "-o", "%i %j").splitlines() if self.id in line]
        return line.split()[0]


class World:
    """One world. Nothing of it outlives this object, or this process."""

    def __init__(self) -> None:
        worlds = RIGS / "slurm" / "worlds"
        worlds.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="w", dir=worlds))
        self.log = (self.folder / "world.log").open("ab")
        argv = ["setpriv", "--pdeathsig", "KILL", str(HERE / "world.sh"), str(self.folder), str(HERE / "services.sh")]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        self.env = {
            "HOME": HOME,
            "USER": "me",
            "LOGNAME": "me",
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
        self.left_at: dict[str, float] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def jobs(self) -> set[str]:
        """Names of the jobs that squeue lists."""
        return set(self.out("squeue", "-h", "-o", "%j").split())

    def _watch(self) -> None:
        """Note when each job leaves the queue: a test may be busy elsewhere in that second."""
        seen: set[str] = set()
        while self.process.poll() is None:
            with contextlib.suppress(
                AssertionError, OSError, IndexError
            ):  # slurmctld was busy, or the world just ended
                now = self.jobs()
                self.left_at |= {name: time.time() for name in seen - now}
                seen |= now
                seen -= self.left_at.keys()
            time.sleep(0.5)

    def _ready(self) -> bool:
        told = (self.folder / "world.log").read_text(encoding="utf-8", errors="replace")
        assert self.process.poll() is None, f"the world ended: {told[-600:]}"
        return "rig: ready" in told

    @functools.cached_property
    def first(self) -> str:
        """The pid, seen from outside, of the world's process 1."""
        parent = self.process.pid
        return Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()[0]

    @property
    def home(self) -> Path:
        """The home of the world's user, with whatever is mounted in there, seen from outside."""
        return Path(f"/proc/{self.first}/root{HOME}")

    def _enter(self, argv: tuple[str, ...], root: bool = False) -> list[str]:
        env = [f"{key}={value}" for key, value in self.env.items()]
        owner = self.home.stat()
        who = () if root else ("-S", str(owner.st_uid), "-G", str(owner.st_gid))
        return [
            "nsenter",
            "-t",
            self.first,
            "-m",
            "-p",
            "-n",
            "-u",
            "-i",
            *who,
            "env",
            "-i",
            "--default-signal=INT",
            *env,
            *argv,
        ]

    def run(self, *argv: str, within_s: float = 120, root: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command in the world, as its user or as root."""
        return subprocess.run(
            self._enter(argv, root),
            capture_output=True,
            text=True,
            timeout=within_s * PATIENCE,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def out(self, *argv: str) -> str:
        """Standard output of a command that has to work."""
        done = self.run(*argv)
        assert done.returncode == 0, f"{argv}: {done.stderr[-600:]}"
        return done.stdout

    def kimisession(self, *words: str, within_s: float = 240) -> subprocess.CompletedProcess[str]:
        """One of our commands, as a person would type it."""
        return self.run(str(PYTHON), "-m", "kimisession", *words, within_s=within_s)

    def status(self, name: str) -> dict[str, Any]:
        """What `kimisession status NAME --json` says of one session; its layers as {name: armed}."""
        done = self.kimisession("status", name, "--json")
        assert done.returncode == 0, done.stderr
        (told,) = json.loads(done.stdout)["data"]
        return {**told, "layers": {layer["name"]: layer["armed"] for layer in told["layers"]}}

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        """One of our commands, not waited for."""
        argv = self._enter((str(PYTHON), "-m", "kimisession", *words))
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def signal(self, pattern: str, number: int, root: bool = False) -> str:
        """Send a signal to processes of the world by their command line; says which."""
        return self.run("pkill", f"-{signal.Signals(number).name[3:]}", "-e", "-f", pattern, root=root).stdout

    def left_queue(self, session: Session, within_s: float) -> float:
        """When its job left the queue, waited for; seconds since 1970."""

        def left() -> float:
            return next((at for name, at in self.left_at.items() if session.id in name), 0.0)

        try:
            return wait_for(f"{session.id} to leave the queue", left, within_s)
        except AssertionError as late:
            told = (session.run / "journal.jsonl").read_text(encoding="utf-8").splitlines()[-4:]
            logs = (f"/var/log/slurm/{name}.log" for name in ("slurmctld", "slurmd"))
            told += [self.run("tail", "-n", "20", log, root=True).stdout for log in logs]
            raise AssertionError("\n".join([str(late), self.out("squeue"), *told])) from None

    def kill_the_server(self) -> None:
        """SkyPilot's API server with all of its workers: those that are left behind hold its port."""
        assert "killed" in self.signal("sky.server.server", signal.SIGKILL)
        for worker in ("SkyPilot:", "multiprocessing.spawn", "multiprocessing.resource_tracker"):
            self.signal(worker, signal.SIGKILL)

    def session(self, name: str) -> Session | None:
        """The newest session of this name that Slurm or a machine's folder knows."""
        rented = self.home / ".local" / "state" / "kimisession" / "rented"
        found = sorted(rented.glob(f"{name}-????????"), key=lambda path: path.stat().st_mtime)
        return Session(self, found[-1].name) if found else None

    def close(self) -> None:
        """Make it vanish. With KIMISESSION_RIG_KEEP its folder stays, with a copy of the user's home."""
        if os.environ.get("KIMISESSION_RIG_KEEP"):
            subprocess.run(["cp", "-a", str(self.home), str(self.folder / "home")], check=False)
        self.process.kill()
        self.process.wait()
        self.log.close()
        if not os.environ.get("KIMISESSION_RIG_KEEP"):
            shutil.rmtree(self.folder, ignore_errors=True)


def launching(world: World, name: str) -> Session:
    """The session whose command is in the middle of its launch: the job has its node, the keeper did not begin."""
    session = wait_for("a folder", lambda: world.session(name), 60)
    assert session
    wait_for("a job", lambda: session.queued, 120, every_s=0.1)
    assert not session.journal("started")
    return session


def dead(world: World, pid: int) -> bool:
    """Whether a process of the world is gone; a zombie is."""
    told = world.run("ps", "-o", "stat=", "-p", str(pid)).stdout.strip()
    return not told or told.startswith("Z")


def all_dead(world: World, session: Session) -> None:
    """Wait until none of its three processes is there."""
    for role in ("keeper", "wrapper", "engine"):
        pid = session.pid(role)
        wait_for(f"the {role} to be gone", lambda pid=pid: dead(world, pid), 20)  # type: ignore[misc]


def nothing_left(world: World, session: Session) -> None:
    """No secret of it, and nothing of SkyPilot's, in the user's home: whoever met its end has tidied up."""
    machine = session.run.parent

    def sky() -> list[Path]:
        return list((world.home / ".sky_clusters").glob(f"{session.id}-*"))

    assert not [name for name in ("api_key", "webhook", "hf_token") if (machine / name).exists()]
    wait_for(f"the folders of {session.id} to go", lambda: not (machine / "disk").exists() and not sky(), 30)
