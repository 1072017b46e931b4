"""What cannot be read over the wire is told once, without a secret in it, and asked for again only where that may help."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kimisession.node.wire import FolderWire, HttpWire, WireError, open_wire


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that gives this answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "denied"), (403, "denied"), (404, "missing"), (412, "denied"), (416, "denied"), (429, "busy"), (507, "cut")],
)
def test_only_what_may_pass_is_asked_for_again(status: int, kind: str) -> None:
    with answering(status) as origin, pytest.raises(WireError) as told:
        HttpWire(origin, "", "weights").open("a.safetensors", 0, 10, None)
    assert told.value.kind == kind


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(WireError) as told:
        open_wire("http://somebody:secret@127.0.0.1/weights")
    assert "secret" not in told.value.message


class Broken:
    """Its token cannot stand in a header."""

    def headers(self) -> dict[str, str]:
        return {"Authorization": "Bearer sec\nret"}

    def spent(self, headers: object) -> bool:
        return False


def test_a_token_that_cannot_be_sent_is_not_repeated() -> None:
    with answering(200) as origin, pytest.raises(WireError) as told:
        HttpWire(origin, "", "weights", Broken()).open("a.safetensors", 0, 10, None)
    assert "ret" not in told.value.message.replace("retr", "")


def test_a_folder_that_is_a_file_is_told_as_something_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(WireError, match="may not be read"):
        FolderWire(tmp_path / "file").open("a.safetensors", 0, 10, None)
