"""What happened on the machine, as JSON lines that anyone can tail.

One line is one `os.write` to a file opened for appending, so lines of two writers never mix. A line that cannot be
written (a full disk) is counted and dropped: telling the story must never stop the one who tells it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def utc_now() -> str:
    """The wall clock in UTC with milliseconds, ISO 8601."""
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"


class Journal:
    """Append-only. `echo` repeats the lines that people care about on standard output (the job's log)."""

    def __init__(self, path: Path, source: str, echo: bool = False) -> None:
        self.path = path
        self.source = source
        self.echo = echo
        self.dropped = 0

    def write(self, kind: str, **fields: Any) -> None:
        """Write one line. Never raises."""
        record = {"at": utc_now(), "kind": kind, "by": self.source, **fields}
        line = json.dumps(record, separators=(",", ":"), default=str) + "\n"
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # After a line that a full disk tore, by whichever process, this one begins anew: only one is lost.
                size = os.fstat(fd).st_size
                torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                os.write(fd, (b"\n" if torn else b"") + line.encode())
            finally:
                os.close(fd)
        except OSError:
            self.dropped += 1
        if self.echo and kind not in ("beat", "progress"):
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except (OSError, ValueError):
                self.dropped += 1


def read_journal(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Lines from byte `offset` on, and the offset after the last whole line. A torn or foreign line becomes
    `{"kind": "damaged"}`: reported, never fatal. A missing file is an empty one."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError:
        return [], offset
    end = data.rfind(b"\n") + 1
    records = []
    for raw in data[:end].splitlines():
        try:
            record = json.loads(raw)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            records.append(record)
        else:
            records.append({"kind": "damaged", "text": raw[:80].decode("utf-8", "replace")})
    return records, offset + end
