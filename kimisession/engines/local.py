"""The local engine: a session on the machine at hand, for people who own the GPUs, and for the rehearsal.

The same LaunchSpec that clouds get runs here, under a supervisor that outlives the command.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from kimisession.core.catalog import parse_accelerators, recognise
from kimisession.core.launch import LABEL_SESSION, LaunchSpec, deadline_label, edit_argv, flags_to_argv
from kimisession.core.lifecycle import Layer, Observation, SeenResource
from kimisession.core.profile import FlagValue
from kimisession.engines.base import Found
from kimisession.engines.local_machine import Machine, read_json, write_json
from kimisession.engines.payload import lay_out
from kimisession.errors import DoesNotFit, EngineFailed, NotYetGone, Unconfirmed, UsageMistake
from kimisession.node import job, leash
from kimisession.node.journal import read_journal

#: How long a supervisor and its wrapper may take to be there; Python starts in a tenth of a second.
ARM_WITHIN_S = 20.0


class LocalEngine:
    """`home` is the folder of machines: the truth about what exists here, apart from any ledger."""

    name = "local"
    confirm_within_s = 120.0

    def __init__(self, home: Path) -> None:
        self.home = home

    def machine(self, session_id: str) -> Machine:
        """The folder of a session's machine, existing or not."""
        return Machine(self.home / session_id)

    def check(self, spec: LaunchSpec) -> None:
        """Port free, devices there. Raises DoesNotFit."""
        if spec.engine and not port_is_free(spec.engine.port):
            raise DoesNotFit(
                f"port {spec.engine.port} on 127.0.0.1 is in use",
                "choose another with --port, or leave --port out",
            )
        accelerator, count = parse_accelerators(spec.accelerators)
        if accelerator.architecture != "cpu":
            have = [a.name for a in map(recognise, devices()) if a]
            if have.count(accelerator.name) < count:
                there = f"{len(have)} of {', '.join(sorted(set(have)))}" if have else "no GPU that is known here"
                raise DoesNotFit(
                    f"the session wants {spec.accelerators} and this machine has {there}",
                    "run it where the GPUs are, or name what is here with --gpus",
                )

    def launch(self, spec: LaunchSpec, secrets: Mapping[str, str]) -> None:
        """Make the folder, then the supervisor. What exists is left as it is."""
        machine = self.machine(spec.session_id)
        machine.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = job.hold_lock(machine.folder / "launch.lock")
        try:
            if machine.gone or machine.supervised:
                return
            if not machine.record:
                self._make(machine, spec, secrets)
            self._arm(machine)
        finally:
            os.close(lock)

    def _make(self, machine: Machine, spec: LaunchSpec, secrets: Mapping[str, str]) -> None:
        lay_out(machine.folder, spec, secrets)
        # Last, and whole: from here on the machine exists.
        write_json(
            machine.folder / "machine.json",
            {"labels": dict(spec.labels), "began": datetime.now(UTC).isoformat()},
        )

    def _arm(self, machine: Machine) -> None:
        env = {**os.environ, leash.MARK: machine.session_id}
        argv = [sys.executable, "-m", "kimisession.engines.local_supervisor", str(machine.folder)]
        with (machine.run / "supervisor.log").open("ab") as log:
            supervisor = subprocess.Popen(
                argv,
                env=env,
                cwd=machine.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + ARM_WITHIN_S
        while time.monotonic() < until:
            if machine.supervised and (machine.wrapped or machine.identity("wrapper")):
                return
            if machine.gone:
                return
            if supervisor.poll() is not None:
                break
            time.sleep(0.02)
        log_tail = (machine.run / "supervisor.log").read_text(encoding="utf-8", errors="replace")[-300:].strip()
        machine.close("command")
        raise EngineFailed(f"the supervisor did not come up: {log_tail or 'no output'}", "nothing is left running")

    def observe(self, session_id: str) -> Observation:
        """By the folder, the locks and the processes."""
        machine = self.machine(session_id)
        now = datetime.now(UTC)
        if not machine.record:
            # A lost or broken record proves nothing while anything of the machine lives.
            if machine.gone is None and (machine.supervised or machine.wrapped or machine.leftovers()):
                return Observation(now, True, "it runs, and its record cannot be read", unguarded=True)
            return Observation(now, machine.launching or False, "no such machine on this host")
        gone = machine.gone
        ended = datetime.fromisoformat(gone["at"]) if gone else None
        evidence = str(gone["evidence"]) if gone else ""
        journal, _ = read_journal(machine.run / "journal.jsonl")
        resource = SeenResource(f"local/{machine.session_id}", "machine", machine.began, ended, evidence)
        supervised, wrapped = machine.supervised, machine.wrapped
        keeper = leash.alive(machine.identity("keeper"))
        layers = (
            _layer("keeper", keeper, "its process lives", machine),
            _layer("wrapper", wrapped, "holds its lock", machine),
            _layer("supervisor", supervised, "holds its lock", machine),
        )
        unguarded = gone is None and not supervised and not wrapped and not machine.launching
        return Observation(now, gone is None, evidence, (resource,), tuple(journal), layers, unguarded)

    def find(self) -> tuple[Found, ...]:
        """Every machine folder that is not gone."""
        found = []
        for record in sorted(self.home.glob("*/machine.json")):
            machine = Machine(record.parent)
            labels = machine.record.get("labels")
            if labels and labels.get(LABEL_SESSION) and machine.gone is None:
                found.append(Found(labels[LABEL_SESSION], labels, machine.began))
        return tuple(found)

    def logs(self, session_id: str, follow: bool, run: int | None = None) -> Iterator[str]:
        """Steps first, then the engine; kept after the end."""
        machine = self.machine(session_id)
        old = machine.run / f"engine-{run}.log"
        if run is not None and old.exists():
            yield from old.read_text(encoding="utf-8", errors="replace").splitlines()
            return
        offsets: dict[Path, int] = {}
        while True:
            over = machine.gone is not None or not machine.record
            for path in (*sorted(machine.run.glob("step-*.log")), machine.run / "engine.log"):
                try:
                    with path.open("rb") as file:
                        file.seek(offsets.get(path, 0))
                        data = file.read()
                except OSError:
                    data = b""
                end = len(data) if over else data.rfind(b"\n") + 1
                offsets[path] = offsets.get(path, 0) + end
                yield from data[:end].decode("utf-8", "replace").splitlines()
            if not follow or over:
                return
            time.sleep(0.2)

    def base_url(self, session_id: str, port: int) -> str:
        """The engine listens on this host's loopback."""
        return f"http://127.0.0.1:{port}"

    def extend(self, session_id: str, deadline: datetime, added_s: float) -> None:
        """The supervisor's label first, then the keeper."""
        machine = self.machine(session_id)
        if not machine.record or machine.gone:
            raise UsageMistake(f"session {session_id} has no machine to extend", "kimisession status")
        if deadline > machine.deadline:
            machine.relabel(deadline_label(deadline))
        write_json(
            machine.folder / "control" / "extend.json",
            {"hard_cap_utc": deadline.timestamp(), "added_s": added_s},
        )

    def restart(self, session_id: str, sets: Mapping[str, FlagValue] | None) -> None:
        """Hand the keeper the new arguments, worked out from those that run now."""
        machine = self.machine(session_id)
        running = read_json(machine.run / "argv.json") or {}
        if sets is None and not running.get("before"):
            raise UsageMistake("this engine was not restarted: there are no flags of before", "restart it with --set")
        argv = list(running["before"] if sets is None else edit_argv(running["argv"], sets))
        flags = "as before" if sets is None else " ".join(flags_to_argv(sets))
        order = {"id": uuid.uuid4().hex, "argv": argv, "flags": flags}
        write_json(machine.folder / "control" / "restart.json", order)

    def down(self, session_id: str, by: str, reason: str) -> None:
        """Ask the keeper, then its wrapper, then nobody."""
        machine = self.machine(session_id)
        if not machine.record:
            if machine.launching:
                raise NotYetGone("a command is making it")
            if not machine.leftovers():
                machine.forbid(by)
                return
            machine.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not machine.close("command"):
                raise Unconfirmed(f"processes of session {session_id} cannot be killed", "kimisession status")
            return
        if machine.gone:
            return
        try:
            asked_s = machine.ask_to_stop(by, reason)
        except OSError:  # a full disk: what cannot be asked is killed
            asked_s = float("inf")
        # Without a wrapper the job has ended: a supervisor that has not closed the machine by then hangs.
        patience_s = machine.stop_grace_s() + 25 if machine.wrapped else 5
        if asked_s < patience_s and (machine.supervised or machine.wrapped or machine.launching):
            time.sleep(0.1)
            if machine.gone is None:
                raise NotYetGone("its processes are ending")
            return
        # A supervisor that lives but does not act is stopped for good; its job is told by the kernel.
        supervisor = machine.identity("supervisor")
        if machine.supervised and leash.alive(supervisor):
            leash.kill(int(supervisor.partition(":")[0]), signal.SIGKILL)
        try:
            closed = machine.close("command")
        except OSError as error:
            raise Unconfirmed(
                f"machine {session_id} has no process left, but that could not be recorded: {error}"
            ) from None
        if not closed:
            pids = ", ".join(map(str, sorted(machine.leftovers())))
            raise Unconfirmed(
                f"processes {pids} of session {session_id} cannot be killed",
                f"kill -9 {pids.replace(',', '')}",
            )


def _layer(role: str, lives: bool, evidence: str, machine: Machine) -> Layer:
    """A layer as it is. One that lives and was stopped ends nothing, until somebody lets it go on."""
    who = machine.identity(role)
    if lives and leash.stopped(who):
        return Layer(role, False, f"its process is stopped; kill -CONT {who.partition(':')[0]} lets it go on")
    return Layer(role, lives, evidence if lives else "not running")


def port_is_free(port: int) -> bool:
    """Whether an engine could listen on this port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


#: Descriptors of the promises below; they are freed when this process ends.
_PROMISES: list[int] = []


def promise_port(port: int) -> bool:
    """Whether this port is free and no other `start` on this host, of whatever user and ledger, is about to use it: an
    engine listens minutes after its port was chosen. The promise is a lock, held until this process ends."""
    path = Path(tempfile.gettempdir()) / f"kimisession-port-{port}.lock"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except PermissionError:  # it is another user's, in a folder where such files may not be opened for creation
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return False
    _PROMISES.append(fd)
    return port_is_free(port)


def devices() -> list[str]:
    """Names of the GPUs here, one an entry, as the driver's tool prints them; empty without driver or tool."""
    try:
        argv = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
