"""Weights, driver and stack come side by side: measured on a real keeper with steps that really work (downloads from
loopback at limited rates, unpacking, copies), through the local engine."""

import contextlib
import io
import json
import os
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from good_values import PROFILE, an_id, choices

from kimisession.core.launch import LaunchSpec, Step
from kimisession.core.quote import launch_spec, make_quote
from kimisession.engines.local import LocalEngine
from kimisession.engines.local_machine import Machine
from kimisession.node import leash
from kimisession.node.journal import read_journal
from kimisession.rehearsal.standin_model import make_standin_model

STEP = str(Path(__file__).with_name("overlap_step.py"))
MB = 1_000_000


class Shelf:
    """STAND-IN for the outside: `/NAME` is a tar file, sent at so many bytes a second, up to a point if it stalls."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, float, int | None]] = {}
        shelf = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, rate, stalls_at = shelf.files[self.path[1:]]
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                began, sent, block = time.monotonic(), 0, 50_000
                with contextlib.suppress(OSError):
                    while sent < len(body):
                        if stalls_at is not None and sent >= stalls_at:
                            shelf.closing.wait(60)
                            return
                        self.wfile.write(body[sent : sent + block])
                        sent += block
                        time.sleep(max(0.0, began + sent / rate - time.monotonic()))

            def log_message(self, *_: object) -> None:
                pass

        self.closing = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def put(self, name: str, size: int, bytes_per_s: float, stalls_at: int | None = None) -> str:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            info = tarfile.TarInfo(f"{name}.bin")
            info.size = size
            archive.addfile(info, io.BytesIO(os.urandom(size)))
        self.files[name] = (packed.getvalue(), bytes_per_s, stalls_at)
        return f"http://127.0.0.1:{self.server.server_port}/{name}"

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


@dataclass
class Start:
    """One cold start on the local engine."""

    engine: LocalEngine
    spec: LaunchSpec
    took: dict[str, float] = field(default_factory=dict)

    def journal(self) -> list[dict[str, Any]]:
        return read_journal(self.engine.home / self.spec.session_id / "run" / "journal.jsonl")[0]

    def until(self, kind: str, within_s: float = 120) -> dict[str, Any]:
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            for line in self.journal():
                if line["kind"] == kind:
                    return line
            time.sleep(0.05)
        raise AssertionError(f"no {kind!r} in {self.journal()[-5:]}")

    def phases(self, state: str) -> dict[str, float]:
        return {
            line["phase"]: line.get("took_s", 0.0)
            for line in self.journal()
            if line["kind"] == "phase" and line["state"] == state
        }


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "machines"
    folder.mkdir()
    yield folder
    for machine in map(Machine, folder.iterdir()):
        machine.close("test")


def begin(home: Path, tmp_path: Path, *steps: Step, stall: str = "20s") -> Start:
    """Launch a session whose steps are these."""
    make_standin_model(tmp_path / "model", shards=1, shard_bytes=1000)
    flags = {"phase-seconds": "boot=0.1,load=0.3,compile=0.1,memory=0.1,graphs=0.1,serve=0", "ttft-s": 0}
    profile = replace(
        PROFILE,
        engine=replace(PROFILE.engine, flags=flags),
        load="in-place",
        limits=replace(PROFILE.limits, tick=0.05, scrape=0.2, stop_grace="1s", silent="10s", coldstart_stall=stall),
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    where = choices(infra="local", bucket_url=f"file://{tmp_path / 'model'}", port=port)
    spec = launch_spec(make_quote(profile, where, datetime.now(UTC)), an_id("demo"), "someone")
    start = Start(LocalEngine(home), replace(spec, steps=steps))
    start.engine.launch(start.spec, {"api_key": "key"})
    return start


def step(name: str, url: str, *words: str, after: tuple[str, ...] = ()) -> Step:
    return Step(name, (sys.executable, STEP, url, f"@{{machine}}/run/{name}", *words), after)


def test_start_to_ready_is_at_most_065_of_the_phases_sum(home: Path, tmp_path: Path, shelf: Shelf) -> None:
    start = begin(
        home,
        tmp_path,
        step("weights", shelf.put("weights", 9 * MB, 3 * MB)),
        step("driver", shelf.put("driver", 2 * MB, 2 * MB), str(4 * MB)),
        step("stack", shelf.put("stack", 4 * MB, 2 * MB), str(8 * MB)),
        step("preflight", shelf.put("preflight", MB // 5, MB), after=("driver", "stack")),
    )
    ready_s = float(start.until("ready")["after_s"])
    phases = start.phases("ended")
    assert {"weights", "driver", "stack", "preflight", "load"} <= phases.keys()
    total_s = sum(phases.values())
    print(f"start to ready {ready_s:.2f}s, the phases' sum {total_s:.2f}s: {ready_s / total_s:.2f}", phases)
    assert ready_s <= 0.65 * total_s, phases
    assert phases["weights"] > 2.5, "the work was real: no phase was faster than its rate allows"


def test_a_step_that_fails_is_told_in_its_own_words_and_the_others_are_ended(
    home: Path, tmp_path: Path, shelf: Shelf
) -> None:
    sentence = (
        "incident 3 (names are not versions): no apt package provides a driver of at least 600; take another image."
    )
    told = json.dumps({"failed": {"exit": 5, "message": sentence}})
    script = f"echo working; sleep 0.5; echo '{told}'; echo 'driver: {sentence}'; exit 5"
    start = begin(
        home,
        tmp_path,
        step("weights", shelf.put("weights", 60 * MB, MB)),
        Step("driver", ("sh", "-c", script)),
    )
    ended = start.until("ended")
    assert (ended["reason"], ended["evidence"], ended["exit_code"]) == ("setup-failed", f"driver: {sentence}", 20)
    assert start.phases("failed").keys() == {"driver"}
    assert start.until("closed")["left"] == 0
    assert not [pid for pid in leash.marked(start.spec.session_id) if b"overlap_step" in _cmdline(pid)]


def test_a_step_that_overruns_is_told_as_such_while_the_others_ended(home: Path, tmp_path: Path, shelf: Shelf) -> None:
    start = begin(
        home,
        tmp_path,
        step("weights", shelf.put("weights", 4 * MB, 4 * MB, stalls_at=MB)),
        step("driver", shelf.put("driver", MB // 2, 2 * MB)),
        stall="2s",
    )
    ended = start.until("ended")
    assert (ended["reason"], ended["exit_code"]) == ("never-ready", 22)
    assert start.phases("ended").keys() == {"driver"}, "weights began and never ended"
    assert start.phases("began").keys() == {"weights", "driver"}
    assert "no progress in phase weights" in ended["evidence"]


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
