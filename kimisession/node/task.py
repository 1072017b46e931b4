"""A step or the engine: a process of the keeper's on a leash, the log that it writes, and the line of it to quote."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kimisession.node import leash

_NAMES_AN_ERROR = re.compile(r"[A-Za-z]Error\b|\b[Ee]rror:|\bfailed\b")
_SECRET = re.compile(r"(TOKEN|TOKEN_PATH|SECRET|PASSWORD|_KEY|CREDENTIAL)$")
_TAIL_BYTES = 1 << 20  # an engine that floods its log is read from its newest megabyte


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """What the engine may have of an environment: it runs the model's own code, and needs none of a person's tokens."""
    return {name: value for name, value in environment.items() if not _SECRET.search(name)}


class Log:
    """New whole lines of a growing file, a carriage return being a line's end as well (progress bars)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self, last: bool = False) -> list[str]:
        """What has come since the last call. `last`: nobody writes any more, so what lacks its end is a line as well."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size - self._offset > _TAIL_BYTES:
                    self._offset, self._rest = size - _TAIL_BYTES, b""
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        self._offset += len(data)
        parts = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = b"" if last else parts.pop()[-_TAIL_BYTES:]
        return [part.decode("utf-8", "replace") for part in parts if part.strip()]


class Task:
    """A step or the engine: a process in its own session, on a leash, with nothing of the job's descriptors."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = Log(log)
        self.telling = ""  # the line to quote when it fails: the last that names an error, else the last
        self._named = self._quoted = False
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.process = subprocess.Popen(
                leash.leashed(argv),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                start_new_session=True,
            )
        finally:
            os.close(fd)

    def quote(self, sentence: str) -> None:
        """Its own words for what went wrong outrank what its log looks like."""
        self.telling, self._named = sentence[:300], True
        self._quoted = True

    def lines(self, last: bool = False) -> list[str]:
        """New lines of its log; `last` once it has ended."""
        lines = self.log.new_lines(last)
        for line in lines:
            named = _NAMES_AN_ERROR.search(line) is not None
            if not self._quoted and (named or not self._named):
                self.telling, self._named = line.strip()[:300], self._named or named
        return lines
