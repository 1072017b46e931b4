"""Servers on loopback for tests that ask: the real stand-in in a process, and one that answers as a test wants."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kimisession.node.phases import PHASES

ROOT = Path(__file__).parents[1]
KEY = "a-key-for-tests"
DEADLINE_S = 20.0


@contextmanager
def standin(folder: Path, *flags: str) -> Iterator[str]:
    """A stand-in that serves, asking for KEY; yields its base URL."""
    (folder / "one.safetensors").write_bytes(b"0123456789abcdef")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"layer": "one.safetensors"}}))
    instant = ",".join(f"{phase}=0" for phase in PHASES)
    argv = [sys.executable, "-m", "kimisession.node.standin", "--model", str(folder), "--port", "0", *flags]
    log = folder / "log"
    with log.open("wb") as out:
        engine = subprocess.Popen(
            [*argv, "--phase-seconds", instant],
            cwd=ROOT,
            env={**os.environ, "VLLM_API_KEY": KEY},
            stdout=out,
            stderr=out,
        )
    try:
        until = time.monotonic() + DEADLINE_S
        while "Application startup complete" not in log.read_text():
            assert engine.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.01)
        yield re.findall(r"Starting vLLM server on (\S+)", log.read_text())[-1]
    finally:
        engine.kill()
        engine.wait()


class Reply:
    """What a test answers: a status, headers, and the pieces of the body as they are sent."""

    def __init__(self, pieces: list[bytes], status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.pieces, self.status, self.headers = pieces, status, headers or {}


@contextmanager
def answering(answer: Callable[[str, dict[str, str], Any], Reply]) -> Iterator[str]:
    """A server whose every answer is `answer(path, headers, body)`; yields its base URL. The body ends with the
    connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply = answer(self.path, dict(self.headers), json.loads(body) if body else None)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            for piece in reply.pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        do_GET = do_POST

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
