"""Starting real vLLM on mini-kimi as the rehearsal does, and seeing what runs of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimisession.rehearsal.vllm_cpu import VLLM_CPU_ENV, vllm_cpu_argv

PYTHON = Path(__file__).resolve().parents[3] / ".venv-vllm" / "bin" / "python"
READY_WITHIN_S = 240  # 13 s are usual on 2 idle cores, 20 s with an empty cache, 100 s seen with a load of 14


def until(holds: Callable[[], bool], within_s: float) -> bool:
    """Whether the condition came to hold within the time; asked twenty times a second."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def living_in_session(session: int) -> set[int]:
    """Pids of the processes of a session that are not zombies."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state not in "ZX":
            found.add(int(stat.parent.name))
    return found


@dataclass
class Server:
    """A running vLLM: its process, which leads a session of its own, its log, and its port and key."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    key: str

    def request(self, path: str, body: Mapping[str, Any] | None = None, key: str | None = None) -> Any:
        """An open response. Raises urllib.error.HTTPError for a refusal."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        url = f"http://127.0.0.1:{self.port}{path}"
        return urllib.request.urlopen(urllib.request.Request(url, content, headers), timeout=60)

    def healthy(self) -> bool:
        """Whether /health says 200. Raises RuntimeError with the end of the log when the server has died."""
        if self.process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
        try:
            return bool(self.request("/health").status == 200)
        except OSError:
            return False

    def processes(self) -> set[int]:
        """Its living processes."""
        return living_in_session(self.process.pid)


def start(model: Path, scratch: Path) -> Server:
    """Start vLLM as the rehearsal does; it is not ready yet. What it leaves in TMPDIR lands in `scratch`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment = {**inherited, **VLLM_CPU_ENV, "VLLM_API_KEY": "rig-key", "TMPDIR": str(scratch)}
    log = scratch / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            vllm_cpu_argv(PYTHON, model, port, "mini-kimi", 4096),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(process, log, port, "rig-key")
