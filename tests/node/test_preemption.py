"""The cloud's notice, from a metadata server of our own, to a keeper that ends in order."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from test_keeper import Machine, wait_for

from kimisession.node import preemption
from kimisession.node.policy import EXIT_CODES, Reason
from kimisession.rehearsal.standin_model import make_standin_model


class Metadata(ThreadingHTTPServer):
    """`instance/preempted` with its ETag, as Google's server has it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.changed = threading.Condition()
        self.preempted = False
        self.tells = True  # whoever waits for a change; a new question is always answered
        self.waiting = 0
        self.flavor = "Google"

    def take_back(self) -> None:
        with self.changed:
            self.preempted = True
            self.changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    """GET, with wait_for_change."""

    server: Metadata

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        with self.server.changed:
            if "wait_for_change" in query:
                seen = query.get("last_etag", [str(self.server.preempted)])[0]
                until = time.monotonic() + float(query["timeout_sec"][0])
                self.server.waiting += 1
                while (not self.server.tells or str(self.server.preempted) == seen) and time.monotonic() < until:
                    self.server.changed.wait(0.1)
                self.server.waiting -= 1
            told = self.server.preempted
        body = str(told).upper().encode()
        self.send_response(200)
        self.send_header("Metadata-Flavor", self.server.flavor)
        self.send_header("ETag", str(told))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    """A server, named in the environment as Google's own libraries want it."""
    server = Metadata()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def test_a_machine_of_google_is_known_by_its_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    (tmp_path / "dmi").write_text("Google Compute Engine\n")
    assert preemption.on_google(tmp_path / "dmi")
    (tmp_path / "dmi").write_text("ThinkPad\n")
    assert not preemption.on_google(tmp_path / "dmi")
    assert not preemption.on_google(tmp_path / "none")


def test_the_notice_is_heard_at_once_and_also_when_it_came_before_the_question(metadata: Metadata) -> None:
    assert preemption.wait_for_notice(1) is False
    threading.Timer(0.3, metadata.take_back).start()
    began = time.monotonic()
    assert preemption.wait_for_notice(30) is True
    assert time.monotonic() - began < 5
    assert preemption.wait_for_notice(30) is True


def test_somebody_else_on_that_address_is_not_believed(metadata: Metadata) -> None:
    metadata.flavor, metadata.preempted = "nobody", True
    with pytest.raises(OSError, match="not Google's metadata server"):
        preemption.wait_for_notice(1)


def test_a_keeper_ends_in_order_when_the_machine_is_taken_back_and_journals_when(
    metadata: Metadata, tmp_path: Path
) -> None:
    make_standin_model(tmp_path / "model", shards=1, shard_bytes=1000)
    machine = Machine(tmp_path / "taken", tmp_path / "model", {}, {})
    wait_for(lambda: machine.journal("ready"))
    metadata.take_back()
    assert machine.job.wait(timeout=30) == EXIT_CODES[Reason.PREEMPTED]
    (ended,) = machine.journal("ended")
    assert ended["reason"] == "preempted"
    assert "takes this spot machine back" in ended["evidence"]


def test_a_shutdown_that_is_quicker_than_the_notice_is_a_preemption_all_the_same(
    metadata: Metadata, tmp_path: Path
) -> None:
    make_standin_model(tmp_path / "model", shards=1, shard_bytes=1000)
    machine = Machine(tmp_path / "quick", tmp_path / "model", {}, {})
    wait_for(lambda: machine.journal("ready") and metadata.waiting)
    with metadata.changed:
        metadata.preempted, metadata.tells = True, False
    (keeper,) = [line["pid"] for line in machine.journal("started")]
    os.kill(keeper, signal.SIGTERM)
    assert machine.job.wait(timeout=30) == EXIT_CODES[Reason.PREEMPTED]
    assert machine.journal("ended")[0]["reason"] == "preempted"
