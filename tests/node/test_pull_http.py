"""The puller over HTTP: faults on the wire cost time, never a byte."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kimisession.node import pull_place as pull
from kimisession.node import web, wire
from kimisession.node.manifest import FileEntry, Manifest, Part
from kimisession.node.pull_crew import TRIES, Crew, Job
from kimisession.weights.bucket import FolderBucket
from kimisession.weights.seed import seed
from kimisession.weights.source import FolderSource
from tests.weights.gcs_server import GcsServer, crc_of
from tests.weights.making import PART_BYTES, same_files, weights_folder
from tests.weights.servers import Call, Fault, serving

SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return weights_folder(tmp_path / "weights")


@pytest.fixture
def store(tmp_path: Path, weights: Path) -> Iterator[GcsServer]:
    """A sealed bucket, put into the stand-in store without the seeder's own client."""
    bucket = FolderBucket(tmp_path / "bucket")
    seed(FolderSource(weights), bucket, model="mini", part_bytes=PART_BYTES)
    server = GcsServer(tmp_path / "store")
    for stat in bucket.list():
        server.put("kimi/" + stat.name, bucket.path / stat.name, stat.size, crc_of(bucket.path / stat.name), None)
    with serving(server):
        yield server


def run(store: GcsServer, to: Path, **more: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kimisession.node.pull", "--from", "gs://weights/kimi", "--to", str(to)),
            *("--processes", "2", "--threads", "2"),
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "STORAGE_EMULATOR_HOST": store.url, **more},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_what_was_sealed_arrives(store: GcsServer, weights: Path, tmp_path: Path) -> None:
    code, last, _ = run(store, tmp_path / "to")
    assert (code, last["done"]["fetched"]) == (pull.OK, last["done"]["bytes"])
    assert same_files(weights, tmp_path / "to")


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", 429, retry_after="0.05"),
        Fault("status", 503, retry_after=None),
        Fault("cut"),
        Fault("cut", after=40_000),
        Fault("short", after=40_000),
        Fault("flip", after=40_000),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}-{fault.after}",
)
def test_bad_answers_are_asked_for_again(store: GcsServer, weights: Path, tmp_path: Path, fault: Fault) -> None:
    store.plan = lambda call: fault if call.phase == "gcs.get" and call.number % 3 == 0 and call.number < 12 else None
    code, _, sentence = run(store, tmp_path / "to")
    assert (code, sentence) == (pull.OK, "")
    assert same_files(weights, tmp_path / "to")


def test_a_busy_server_is_asked_by_fewer(store: GcsServer, weights: Path, tmp_path: Path) -> None:
    """A server that bears one request at a time and says 429 to the rest turns away about one for each that it serves;
    it were two and more if the puller went on with as many as before."""

    def hold_the_first(call: Call) -> None:
        until = time.monotonic() + 10
        while call.phase == "gcs.get" and not store.turned_away and time.monotonic() < until:
            time.sleep(0.005)

    store.plan = hold_the_first  # else it may have been served before another asks
    store.slots = threading.Semaphore(1)
    store.per_connection = 1e6
    code, _, _ = run(store, tmp_path / "to")
    parts = sum(-(-path.stat().st_size // PART_BYTES) for path in weights.rglob("*") if path.is_file())
    assert code == pull.OK
    assert 0 < store.turned_away < 1.5 * parts
    assert same_files(weights, tmp_path / "to")


def test_a_byte_that_is_always_wrong_is_exit_4(store: GcsServer, tmp_path: Path) -> None:
    store.plan = lambda call: Fault("flip", after=7) if call.name.endswith(SHARD) else None
    code, last, sentence = run(store, tmp_path / "to")
    assert code == last["failed"]["exit"] == pull.WRONG_BYTES
    assert SHARD in sentence


def test_an_object_that_was_overwritten_is_not_read(store: GcsServer, tmp_path: Path) -> None:
    seal = json.loads(store.objects["kimi/.kimisession/manifest.json"].path.read_text())
    for entry in seal["files"]:
        entry["generation"] = store.objects["kimi/" + entry["path"]].generation
    entry = next(one for one in seal["files"] if one["path"] == SHARD)
    entry["generation"] -= 1
    path = tmp_path / "seal"
    path.write_text(json.dumps(seal))
    store.put("kimi/.kimisession/manifest.json", path, path.stat().st_size, crc_of(path), None)
    code, _, sentence = run(store, tmp_path / "to")
    assert code == pull.OTHER
    assert SHARD in sentence


def test_no_seal_is_exit_3(store: GcsServer, tmp_path: Path) -> None:
    del store.objects["kimi/.kimisession/manifest.json"]
    assert run(store, tmp_path / "to")[0] == pull.NOT_SEALED


def test_a_server_that_is_gone_is_worth_another_try() -> None:
    with pytest.raises(wire.WireError, match="did not answer") as caught:
        wire.HttpWire("http://127.0.0.1:9", "/weights").read("x")
    assert caught.value.kind == "cut"


class _Metadata(BaseHTTPRequestHandler):
    given = 0

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        type(self).given += 1
        body = json.dumps({"access_token": f"token-{self.given}", "expires_in": 3600, "token_type": "Bearer"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_server_that_falls_silent_in_a_body_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        weights = wire.HttpWire(f"http://127.0.0.1:{listening.getsockname()[1]}", "", timeout_s=1)

        def answer() -> socket.socket:
            connection, _ = listening.accept()
            connection.recv(4096)
            head = b"HTTP/1.1 206 Partial\r\nContent-Length: 50000\r\nContent-Range: bytes 0-49999/50000\r\n\r\n"
            connection.sendall(head + bytes(20_000))
            return connection

        with ThreadPoolExecutor(1) as pool:
            server = pool.submit(answer)
            body = weights.open("weights", 0, 50_000, None)
            buffer = memoryview(bytearray(2**20))
            with pytest.raises(wire.WireError, match="the server fell silent") as raised:
                list(iter(lambda: body.readinto(buffer), 0))
            server.result().close()
    assert raised.value.kind == "cut"


def test_a_token_comes_from_the_metadata_server_once_and_again_when_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()
    try:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_address[1]}")
        monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN", raising=False)
        token = web.Token()
        first = token.headers()
        assert first == token.headers() == {"Authorization": "Bearer token-1"}
        assert token.spent(first)
        assert token.headers() == {"Authorization": "Bearer token-2"}
        assert token.spent(first), "an old token that was refused does not cost the new one"
        assert token.headers() == {"Authorization": "Bearer token-2"}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_one_part_that_never_comes_ends_the_pull_soon_however_many_connections_there_are(tmp_path: Path) -> None:
    """It took rounds of as many failures as there are connections: an hour on a rented machine for one part."""
    part = Part(0, 10, "AAAAAA==", "0" * 64)
    job = Job(0, FileEntry("a.safetensors", 10, "0" * 64, "AAAAAA==", None, (part,)), part, kept=False)
    manifest = Manifest("mini", "a" * 40, (job.entry,), PART_BYTES, "me", datetime(2026, 11, 21, tzinfo=UTC))
    crew = Crew("file:///nowhere", tmp_path, manifest, [job] * 64, processes=16, threads=4)
    for turn in range(TRIES - 1):
        job.given_at = time.monotonic()
        crew._failed(job, {"why": "cut", "message": "cut off", "retry_after_s": None})
        assert crew._rounds == turn + 1
        for _ in range(3):  # given out before the server had said anything: the same round
            crew._failed(replace(job, given_at=0.0), {"why": "busy", "message": "busy", "retry_after_s": None})
        assert crew._rounds == turn + 1
    job.given_at = time.monotonic()
    with pytest.raises(pull.PullError, match="goes on where it stopped"):
        crew._failed(job, {"why": "cut", "message": "cut off", "retry_after_s": None})


def test_what_cannot_be_a_token_is_refused_and_never_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "ya29.very\rsecret")
    with pytest.raises(OSError, match="no token") as caught:
        web.Token().headers()
    assert "secret" not in str(caught.value)
