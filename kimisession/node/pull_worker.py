"""One process of the puller: threads that fetch parts, verify them inline and write them in place.

Talks in JSON lines: a configuration, then jobs, on stdin; results on stdout. It ends when stdin does, however
the parent died, so no orphan writes into files that a later puller owns. Standard library only, Python 3.9+,
plus the PyPI package crc32c where it is installed; without it the manifest's sha256 is checked instead, never
nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import queue
import select
import sys
import threading
from pathlib import Path
from typing import Any, Callable

from kimisession.node.manifest import encode_crc32c
from kimisession.node.wire import FolderWire, Wire, WireError, open_wire

try:
    from crc32c import crc32c
except ImportError:
    crc32c = None  # type: ignore[assignment]

BUFFER_BYTES = 2**20
REPORT_S = 0.4


class Crc32c:
    """The running crc32c of a part."""

    key = "crc32c"

    def __init__(self) -> None:
        self._value = 0

    def update(self, chunk: memoryview) -> None:
        """Take the next bytes."""
        self._value = crc32c(chunk, self._value)

    def result(self) -> str:
        """As the manifest writes it."""
        return encode_crc32c(self._value)


class Sha256:
    """The running sha256 of a part."""

    key = "sha256"

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, chunk: memoryview) -> None:
        """Take the next bytes."""
        self._hash.update(chunk)

    def result(self) -> str:
        """As the manifest writes it."""
        return self._hash.hexdigest()


def best_check() -> Any:
    """The class of checksum that this machine verifies with: crc32c where installed, else sha256."""
    return Sha256 if crc32c is None else Crc32c


class Worker:
    """The threads of one process and what they share."""

    def __init__(self, url: str, folder: Path, say: Callable[[dict[str, Any]], None]) -> None:
        self._url = url
        self._folder = folder
        self._say = say
        self._jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._moving: dict[int, int] = {}
        self._check = best_check()

    def start(self, threads: int) -> None:
        """Start the threads; they live as long as the process."""
        for number in range(threads):
            threading.Thread(target=self._work, name=f"pull-{number}", daemon=True).start()

    def put(self, job: dict[str, Any]) -> None:
        """Queue a job for the next free thread."""
        self._jobs.put(job)

    def moving_bytes(self) -> int:
        """Bytes of parts under way that have arrived but are not verified yet."""
        return sum(list(self._moving.values()))

    def _work(self) -> None:
        wire: Wire | None = None
        buffer = memoryview(bytearray(BUFFER_BYTES))
        while True:
            job = self._jobs.get()
            try:
                wire = wire or open_wire(self._url)
                source = FolderWire(self._folder) if job["kept"] else wire
                result = self._bring(job, source, buffer)
            except WireError as error:
                result = {"why": error.kind, "message": error.message, "retry_after_s": error.retry_after_s}
            except OSError as error:
                why = "space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "disk"
                result = {"why": why, "message": f"{job['path']} cannot be written: {error.strerror}"}
            except Exception as error:  # a bug must reach the parent as a sentence, not as a silent thread
                result = {"why": "bug", "message": f"{type(error).__name__}: {error}"}
            self._moving.pop(job["job"], None)
            self._say({"job": job["job"], **result})

    def _bring(self, job: dict[str, Any], source: Wire, buffer: memoryview) -> dict[str, Any]:
        """Fetch one part into its place, or read back what an earlier run wrote, and verify it."""
        size, offset = job["size"], job["offset"]
        check = self._check()
        done = 0
        target = -1
        reader = source.open(job["path"], offset, size, job["generation"])
        try:
            if not job["kept"]:
                target = os.open(self._folder / job["path"], os.O_WRONLY | os.O_CLOEXEC)
            while done < size:
                count = reader.readinto(buffer[: min(BUFFER_BYTES, size - done)])
                if not count:
                    raise WireError("cut", f"{job['path']} ended {size - done} bytes early")
                chunk = buffer[:count]
                check.update(chunk)
                while chunk and target >= 0:
                    written = os.pwrite(target, chunk, offset + done)
                    done += written
                    chunk = chunk[written:]
                if target < 0:
                    done += count
                self._moving[job["job"]] = done
        finally:
            reader.close()
            if target >= 0:
                os.close(target)
        if check.result() != job[check.key]:
            return {"why": "checksum", "what": check.key, "expected": job[check.key], "got": check.result()}
        return {}


def main() -> int:
    """Serve jobs until stdin ends. Leaves by os._exit, so that no thread writes a byte after that."""
    lock = threading.Lock()

    def say(value: dict[str, Any]) -> None:
        text = (json.dumps(value) + "\n").encode()
        with lock:
            try:
                while text:
                    text = text[os.write(1, text) :]
            except OSError:
                os._exit(1)

    lines = Lines(0)
    config = lines.first()
    worker = Worker(config["url"], Path(config["to"]), say)
    worker.start(config["threads"])
    told = 0
    while True:
        jobs = lines.take(REPORT_S)
        if jobs is None:
            os._exit(0)
        for job in jobs:
            worker.put(job)
        moving = worker.moving_bytes()
        if moving != told:
            told = moving
            say({"moving": moving})


class Lines:
    """JSON lines from a descriptor, with a time to wait."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._rest = b""

    def first(self) -> dict[str, Any]:
        """The first line; leaves the process if there is none."""
        while True:
            found = self.take(60)
            if found is None:
                os._exit(0)
            if found:
                self._rest = b"".join(json.dumps(item).encode() + b"\n" for item in found[1:]) + self._rest
                return found[0]

    def take(self, wait_s: float) -> list[dict[str, Any]] | None:
        """Whole lines that came within `wait_s`; None at the end of the stream."""
        if b"\n" not in self._rest:
            if not select.select([self.file], [], [], wait_s)[0]:
                return []
            more = os.read(self.file, 2**16)
            if not more:
                return None
            self._rest += more
        whole, newline, self._rest = self._rest.rpartition(b"\n")
        return [json.loads(line) for line in whole.split(b"\n")] if newline else []


if __name__ == "__main__":
    sys.exit(main())
