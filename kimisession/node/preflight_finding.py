"""What a probe of the preflight may say, and how it runs another program without waiting for it for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Optional


class Failed(Exception):
    """A probe found something wrong. `incident` is its number and name (notes/incidents.md) or a plain name, `cause`
    what was seen, `fix` what to do about it: clauses that make one sentence together."""

    def __init__(self, incident: str, cause: str, fix: str) -> None:
        super().__init__(cause)
        self.incident = incident
        self.cause = cause
        self.fix = fix

    @property
    def sentence(self) -> str:
        """Incident, cause and fix on one line."""
        return " ".join(f"{self.incident}: {self.cause}; {self.fix}".split())


class Skipped(Exception):
    """A probe has nothing to look at here; its text says why."""


@dataclass(frozen=True)
class Done:
    """How another program ended. `code` is None when it was stopped because it took too long."""

    code: Optional[int]  # noqa: UP045 - evaluated by dataclasses in Python 3.9 otherwise
    text: str

    @property
    def last_line(self) -> str:
        """The last line that says something."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


class Child:
    """A program in its own session with stdout and stderr in memory, never on a disk that may be full."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start it. Raises OSError when there is no such program."""
        self._output: BinaryIO = _memory_file()
        self._process = subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> Done:
        """Wait for the end, at most `timeout_s`, then stop the whole session of it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_s))
        return self.stop()

    def stop(self) -> Done:
        """Make sure that it is over; one stuck in the driver (uninterruptible) is left, not waited for."""
        code = self._process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
        return Done(code, self.text())

    def text(self) -> str:
        """What it has printed so far."""
        # pread: the file position belongs to the writer.
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode("utf-8", "replace")


def _memory_file() -> BinaryIO:
    try:
        return os.fdopen(os.memfd_create("preflight"), "wb+")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile("wb+")


def run(argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Done:
    """Run a program to its end or for `timeout_s` seconds. A program that is not there raises Skipped."""
    try:
        return Child(argv, env).wait(timeout_s)
    except OSError as error:
        raise Skipped(f"{argv[0]} cannot be run here: {error.strerror}") from None
