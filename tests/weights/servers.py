"""What the stand-ins of the hub and of the store share: faults on demand, rates, and what was asked of them. Loopback only."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """What to do to one request: answer `status` instead, or spoil the transfer after `after` bytes of its body.

    `kind`: status | cut | short | flip | lost (do it, then close without an answer) | stall
    """

    kind: str
    status: int = 503
    after: int = 0
    retry_after: str | None = "0"
    message: str = "injected"


@dataclass(frozen=True)
class Call:
    """One request as the fault plan sees it: phase is such as `hub.body`, `gcs.session`, `gcs.put`, `gcs.get`."""

    phase: str
    name: str
    number: int


Plan = Callable[[Call], "Fault | None"]


class Rate:
    """Bytes per second, shared by all who `take` from it; a burst of 20 ms is free."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            wait_s = self._free_at - now - 0.02
        if wait_s > 0:
            time.sleep(wait_s)


@dataclass
class Served:
    """What the servers saw: bytes of large bodies by name, requests by phase, the most connections at once."""

    body_in: dict[str, int] = field(default_factory=dict)
    body_out: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    lock: threading.Lock
    seen: Served
    plan: Plan | None

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no news; anything else is a mistake in this file."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError | ValueError):
            traceback.print_exc()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def fault(self, phase: str, name: str) -> Fault | None:
        with self.server.lock:
            number = self.server.seen.calls[phase] = self.server.seen.calls.get(phase, 0) + 1
        return self.server.plan(Call(phase, name, number)) if self.server.plan else None

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def json(self, value: object, code: int = 200, **headers: str) -> None:
        self.answer(code, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def error(self, status: int, message: str, **headers: str) -> None:
        self.json({"error": {"code": status, "message": message}}, status, **headers)

    def refuse(self, why: str) -> None:
        """A request that breaks our own rules: the tests look at this list."""
        self.server.seen.refused.append(f"{self.command} {self.path}: {why}")
        self.close_connection = True
        self.error(400, why)

    def hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def early(self, fault: Fault | None) -> bool:
        """Handle the faults that come before anything is done."""
        if fault is not None and fault.kind == "status":
            self.close_connection = True  # the body, if any, is not read
            headers = {"Retry_After": fault.retry_after} if fault.retry_after is not None else {}
            self.error(fault.status, fault.message, **headers)
            return True
        if fault is not None and fault.kind == "cut" and not fault.after:
            self.hang_up()
            return True
        return False

    def body(self) -> bytes:
        """The whole body; a client that was killed in the middle has asked for nothing."""
        length = int(self.headers.get("Content-Length") or 0)
        found = self.rfile.read(length)
        if len(found) < length:
            raise ConnectionError("the client has gone")
        return found

    def send_bytes(self, path: Path, start: int, size: int, fault: Fault | None, rate: list[Rate], name: str) -> None:
        """The body of an answer from a file, at a rate, spoiled by the fault."""
        sent = 0
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            buffer = memoryview(bytearray(min(262144, max(1, size))))
            while sent < size:
                count = file.readinto(buffer[: size - sent])
                chunk = buffer[:count]
                if fault is not None and sent <= fault.after < sent + count:
                    if fault.kind == "flip":
                        chunk[fault.after - sent] ^= 4
                    elif fault.kind in ("cut", "short"):
                        self.wfile.write(chunk[: fault.after - sent])
                        self.close_connection = True
                        if fault.kind == "cut":
                            self.hang_up()
                        return
                for one in rate:
                    one.take(count)
                self.wfile.write(chunk)
                sent += count
                with self.server.lock:
                    self.server.seen.body_out[name] = self.server.seen.body_out.get(name, 0) + count


@contextlib.contextmanager
def serving(server: Server) -> Iterator[None]:
    """Serve in a thread until the block ends."""
    thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
