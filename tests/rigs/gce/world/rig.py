"""Start a world (world.sh), run commands in it, break things in it, and make it vanish."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kimisession.cloud.permissions import REAPER
from kimisession.node.deadline import MARK

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[3]
RIGS = CHECKOUT / ".cache" / "rigs"
IMAGE = RIGS / "gce"
PYTHON = RIGS / "venv" / "bin" / "python"
CA = str(IMAGE / "tls" / "ca.pem")
ADMIN = "http://127.0.0.1:8080"
PROJECT = "rig-project"
T = TypeVar("T")

ENV = {
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PATH": f"/run/bin:{PYTHON.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": str(CHECKOUT),
    "PYTHONDONTWRITEBYTECODE": "1",
    "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    "SKYPILOT_POD_MEMORY_GB_LIMIT": "5",
    "GOOGLE_APPLICATION_CREDENTIALS": "/root/account.json",
    "GOOGLE_CLOUD_PROJECT": PROJECT,
    **dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTPLIB2_CA_CERTS", "CURL_CA_BUNDLE"), CA),
}


def wait_for(what: str, look: Callable[[], T], within_s: float, every_s: float = 0.25) -> T:
    """The first true answer of `look`. Raises AssertionError that names what did not come."""
    until = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < until, f"{what}: not within {within_s:g} s"
        time.sleep(every_s)


class World:
    """One world with an emulated Google in it. Nothing of it outlives this object, or this process."""

    def __init__(self) -> None:
        worlds = IMAGE / "worlds"
        worlds.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="w", dir=worlds))
        self.home = self.folder / "home"
        self.log = (self.folder / "world.log").open("ab")
        argv = ["setpriv", "--pdeathsig", "KILL", str(HERE / "world.sh"), str(self.folder)]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        wait_for("the emulated Google", self._ready, 60)

    def prepare(self, *seeds: tuple[str, ...]) -> None:
        """Weights of these profiles in gs://weights/PROFILE, and a reaper that has looked once."""
        code = "from pathlib import Path; from kimisession.rehearsal.standin_model import make_standin_model as make;"
        self.out(str(PYTHON), "-c", f"{code} make(Path('/root/model'))")
        for profile, *more in seeds:
            place = ("--here", "--from", "/root/model", "--bucket", f"gs://weights/{profile}")
            done = self.kimisession("seed", profile, *place, *more)
            assert done.returncode == 0, done.stdout + done.stderr
        self.allow_the_reaper()
        done = self.kimisession("guard", "enable")
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for("the reaper", lambda: self.kimisession("guard", "status").returncode == 0, 240, 1)

    def _ready(self) -> bool:
        told = (self.folder / "world.log").read_text(encoding="utf-8", errors="replace")
        assert self.process.poll() is None, f"the world ended: {told[-600:]}"
        return "rig: ready" in told

    def _enter(self, argv: tuple[str, ...], env: Mapping[str, str]) -> list[str]:
        parent = self.process.pid
        child = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()[0]
        words = [f"{key}={value}" for key, value in {**ENV, **env}.items()]
        inside = ("-U", "-m", "-p", "-n", "-u", "-i", "--preserve-credentials")
        return ["nsenter", "-t", child, *inside, "env", "-i", *words, *argv]

    def run(self, *argv: str, within_s: float = 120, env: Mapping[str, str] = {}) -> "subprocess.CompletedProcess[str]":
        """Run a command in the world."""
        return subprocess.run(
            self._enter(argv, env),
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def out(self, *argv: str, within_s: float = 120) -> str:
        """Standard output of a command that has to work."""
        done = self.run(*argv, within_s=within_s)
        assert done.returncode == 0, f"{argv}: {done.stdout[-600:]} {done.stderr[-1200:]}"
        return done.stdout

    def kimisession(self, *words: str, within_s: float = 300) -> "subprocess.CompletedProcess[str]":
        """One of our commands, as a person would type it."""
        return self.run(str(PYTHON), "-m", "kimisession", *words, within_s=within_s)

    def begin(self, *words: str, program: str = "kimisession") -> "subprocess.Popen[str]":
        """One of our commands, or one of SkyPilot's, not waited for."""
        argv = self._enter((str(PYTHON), "-m", program, *words) if program == "kimisession" else (program, *words), {})
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def signal(self, pattern: str, number: int) -> str:
        """Send a signal to processes of the world by their command line, machines included; says which."""
        return self.run("pkill", f"-{signal.Signals(number).name[3:]}", "-e", "-f", pattern).stdout

    def kill_the_server(self) -> None:
        """SkyPilot's API server with all of its workers: those that are left behind hold its port."""
        assert "killed" in self.signal("sky.server.server", signal.SIGKILL)
        for worker in ("SkyPilot:", "multiprocessing.spawn", "multiprocessing.resource_tracker"):
            self.signal(worker, signal.SIGKILL)

    def kill_the_emulator(self) -> None:
        """It is started again with the state that it had; its machines run on meanwhile."""
        self.signal("tests.rigs.gce.emulator", signal.SIGKILL)
        wait_for("the emulator", lambda: self.run("curl", "-s", ADMIN).returncode == 0, 20)

    # -- the emulated Google -------------------------------------------------------------------------------------------

    def admin(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET a path of the emulator's admin port, or POST a body to it."""
        more = (
            ("-X", "POST", "-H", "Content-Type: application/json", "-d", json.dumps(body)) if body is not None else ()
        )
        text = self.out("curl", "-sS", "--fail-with-body", *more, ADMIN + path)
        return json.loads(text) if text.strip() else None

    def allow_the_reaper(self) -> None:
        """What `kimisession guard enable` tells the operator to run with gcloud, once."""
        email = f"kimisession-reaper@{PROJECT}.iam.gserviceaccount.com"
        role = f"projects/{PROJECT}/roles/kimisession_reaper"
        self.admin("/admin/account", {"email": email})
        self.admin("/admin/role", {"role": role, "permissions": list(REAPER)})
        self.admin("/admin/bind", {"member": f"serviceAccount:{email}", "role": role})

    def billed(self, session: str) -> list[dict[str, Any]]:
        """The lines of Google's bill for a session, or for a cluster of SkyPilot; those without an end still cost."""
        return [line for line in self.admin("/admin/bill")["lines"] if f"/{session}-" in line["resource"]]

    def deleted_by(self, session: str) -> str:
        """The layer that deleted its last machine, by Compute Engine's operation: `command` and `reaper` by their accounts; of
        the machine's own account `timer`, which says why in its request (kimisession/node/deadline.py), or `autodown`, which
        does not; `Google` where nobody asked."""
        wires = [entry["wire"] for entry in self.admin("/admin/state")["operations"].values()]
        mine = [one for one in wires if one["operationType"] == "delete" and f"/{session}-" in one["targetLink"]]
        done = [one for one in mine if "error" not in one]
        if not done:
            return "Google"
        own = "timer" if done[-1].get("clientOperationId", "").startswith(MARK) else "autodown"
        return {"laptop": "command", "kimisession-reaper": "reaper"}.get(done[-1]["user"].partition("@")[0], own)

    def exists(self, session: str) -> bool:
        """Whether something of it is still billed."""
        return any(line["end"] is None for line in self.billed(session))

    # -- machines ------------------------------------------------------------------------------------------------------

    def machine(self, session: str) -> str:
        """The name of the machine of a session, once it has one; else nothing."""
        return next((name for name in self.out("ls", "/run/vms").split() if name.startswith(f"{session}-")), "")

    def on(self, machine: str, *argv: str) -> str:
        """What a command prints that root runs on a machine, without its ssh."""
        return self.out("/run/bin/on", machine, *argv)

    def kill_on(self, machine: str, pattern: str) -> None:
        """kill -9 by command line on one machine, such as `kimisession.node.keeper`."""
        self.on(machine, "pkill", "-KILL", "-f", pattern)

    def reboot(self, machine: str) -> None:
        """As its guest would: everything on it ends, and it boots from its disk."""
        self.run("/run/bin/on", machine, "sh", "-c", "kill -39 1")

    def fill_disk(self, machine: str) -> None:
        """To its last byte."""
        self.run("/run/bin/on", machine, "sh", "-c", "cat /dev/zero > /var/tmp/fill")

    def keep_disk_full(self, machine: str) -> None:
        """... and whatever is freed is filled again."""
        again = "while :; do cat /dev/zero >> /var/tmp/fill; sleep 0.05; done"
        self.on(machine, "sh", "-c", f"setsid sh -c '{again}' > /dev/null 2>&1 < /dev/null &")

    def step_clock(self, machine: str, seconds: int) -> None:
        """Move what the kernel tells as the time of the boot, which is what SkyPilot's autodown compares: as a step of the
        machine's clock does. (The clock itself is this host's, and stays.)"""
        script = (
            f"awk '$1 == \"btime\" {{ $2 += {seconds} }} {{ print }}' /proc/stat > /run/stat.new"
            " && mv /run/stat.new /run/stat && mount --bind /run/stat /proc/stat"
        )
        self.on(machine, "sh", "-c", script)

    def close(self) -> None:
        """Make it vanish."""
        self.process.kill()
        self.process.wait()
        self.log.close()
        if not os.environ.get("KIMISESSION_RIG_KEEP"):
            shutil.rmtree(self.folder, ignore_errors=True)
