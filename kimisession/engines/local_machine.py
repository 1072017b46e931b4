"""A machine of the local engine: a folder that plays the part of a cloud's instance record.

machine.json   labels and when it began; present without gone.json = it exists
spec.json      what the keeper is told        api_key   for the engine, mode 0600
control/       stop.json, extend.json         run/      journal, logs, locks, identities
disk/          the session's disk             lib/      the copy of kimisession.node that runs here
gone.json      when it was found to be gone, and by whom
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kimisession.core.launch import LABEL_DEADLINE, LABEL_SESSION, parse_deadline_label
from kimisession.node import config, job, leash
from kimisession.node.journal import read_journal


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write whole and rename into place: a reader sees the old file or the new one. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None when it is missing or not an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def lock_is_held(path: Path) -> bool:
    """Whether a living process holds this lock. Pids lie after reuse; locks do not."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


class Machine:
    """One machine folder. Nothing here keeps state in memory: any process may look at, or close, any machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"

    @property
    def record(self) -> dict[str, Any]:
        """machine.json; empty when the machine was never made, or when the file is none any more."""
        record = read_json(self.folder / "machine.json") or {}
        try:
            datetime.fromisoformat(record["began"])
            parse_deadline_label(record["labels"][LABEL_DEADLINE])
        except (KeyError, TypeError, ValueError):
            return {}
        return record

    @property
    def session_id(self) -> str:
        """Whose machine it is."""
        return str(self.record.get("labels", {}).get(LABEL_SESSION, self.folder.name))

    @property
    def began(self) -> datetime:
        """When it began to exist."""
        return datetime.fromisoformat(self.record["began"])

    @property
    def deadline(self) -> datetime:
        """The absolute deadline in its labels."""
        return parse_deadline_label(self.record["labels"][LABEL_DEADLINE])

    @property
    def gone(self) -> dict[str, Any] | None:
        """gone.json, when it is gone; a file that is none proves nothing."""
        record = read_json(self.folder / "gone.json")
        try:
            if record is not None:
                datetime.fromisoformat(record["at"])
        except (KeyError, TypeError, ValueError):
            return None
        return record

    @property
    def supervised(self) -> bool:
        """Whether its supervisor lives."""
        return lock_is_held(self.run / "supervisor.lock")

    @property
    def wrapped(self) -> bool:
        """Whether its job's wrapper lives."""
        return lock_is_held(self.run / "job.lock")

    @property
    def launching(self) -> bool:
        """Whether a command is making it right now."""
        return lock_is_held(self.folder / "launch.lock")

    def identity(self, role: str) -> str:
        """`PID:TICKS` of supervisor, wrapper, keeper or engine; empty when it never started."""
        try:
            return (self.run / f"pid.{role}").read_text(encoding="ascii").strip()
        except OSError:
            return ""

    def relabel(self, deadline_label: str) -> None:
        """Move the deadline in the labels."""
        record = self.record
        record["labels"][LABEL_DEADLINE] = deadline_label
        write_json(self.folder / "machine.json", record)

    def ask_to_stop(self, by: str, reason: str) -> float:
        """Leave the request to stop, once. Returns its age in seconds."""
        path = self.folder / "control" / "stop.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"by": by, "reason": reason})
        return max(0.0, time.time() - path.stat().st_mtime)

    def stop_grace_s(self) -> float:
        """How long the engine may take to end in order."""
        try:
            return config.load(self.folder).stop_grace_s
        except (OSError, ValueError, KeyError, TypeError):
            return 5.0

    def leftovers(self) -> set[int]:
        """Living processes of this machine, found by mark, by control group, by the engine's session and by descent."""
        found = set(leash.marked(self.session_id))
        found.update(self._group().pids())
        found.update(leash.in_session(self.identity("engine")))
        for pid in tuple(found):
            found.update(leash.descendants(pid))
        return found - {os.getpid()}

    def forbid(self, by: str) -> None:
        """Leave a tombstone where no machine is, so that a launch that is still on its way finds it and makes none."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A command may have died while it laid the folder out: no key and no disk stays behind.
        for secret in ("api_key", "webhook", "hf_token"):
            (self.folder / secret).unlink(missing_ok=True)
        shutil.rmtree(self.folder / "disk", ignore_errors=True)
        now = datetime.now(UTC).isoformat()
        write_json(self.folder / "gone.json", {"at": now, "by": by, "evidence": "it was never made"})

    def _group(self) -> leash.Cgroup:
        try:
            path = (self.run / "cgroup").read_text(encoding="utf-8").strip()
        except OSError:
            path = ""
        return leash.Cgroup(Path(path) if path else None)

    def _closed_by_wrapper(self) -> datetime | None:
        """When the wrapper wrote, as the last word of all, that nothing is left; None when it never came to that."""
        for line in read_journal(self.run / "journal.jsonl")[0][-1:]:
            if line["kind"] == "closed" and line.get("left") == 0:
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    return datetime.fromisoformat(line["at"])
        return None

    def close(self, by: str, within_s: float = 10.0) -> bool:
        """Kill what is left, give the disk back, and record that it is gone. Repeatable. False: something is left."""
        if self.gone:
            return True
        until = time.monotonic() + within_s
        ended = None if by == "supervisor" else self._closed_by_wrapper()
        while left := self.leftovers():
            ended = None
            if time.monotonic() >= until:
                return False
            self._group().kill()
            for pid in left:
                leash.kill(pid, signal.SIGKILL)
            leash.reap()
            time.sleep(0.02)
        self._group().remove()
        seen_by = f"seen by the {by}" if ended is None else f"recorded by the wrapper, confirmed by the {by}"
        ended = ended or datetime.now(UTC)
        # A machine without a readable spec never had a disk of its own.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            job.release_disk(self.folder, config.load(self.folder))
        job.release_scratch(self.folder)
        for secret in ("api_key", "webhook", "hf_token"):
            (self.folder / secret).unlink(missing_ok=True)
        # No process of it is left; what remains to be written takes no machine time.
        write_json(
            self.folder / "gone.json",
            {"at": ended.isoformat(), "by": by, "evidence": f"no process left, {seen_by}"},
        )
        return True
