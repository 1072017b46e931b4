"""The hub as a source: one commit, checked bytes, a token that goes nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kimisession.weights.bucket import FolderBucket
from kimisession.weights.errors import BadSource, SourceChanged, SourceDenied, TryAgain
from kimisession.weights.hub import HubSource
from kimisession.weights.manifest import Manifest
from kimisession.weights.seed import seed
from tests.weights.hub_server import COMMIT, HubServer
from tests.weights.making import HASTY, PART_BYTES, same_files, weights_folder
from tests.weights.servers import Call, Fault, serving


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    folder = weights_folder(tmp_path / "weights")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / "logo.png").write_bytes(b"png")
    server = HubServer(folder)
    with serving(server):
        yield server


def bring(hub: HubServer, tmp_path: Path, **more: str) -> Manifest:
    source = HubSource("owner/mini", endpoint=hub.url, **more)
    return seed(source, FolderBucket(tmp_path / "bucket"), model="mini", part_bytes=PART_BYTES, patience=HASTY)


def test_a_branch_is_pinned_to_its_commit(hub: HubServer, tmp_path: Path) -> None:
    manifest = bring(hub, tmp_path)
    assert manifest.revision == COMMIT
    assert {entry.path for entry in manifest.files}.isdisjoint({".gitattributes", "logo.png"})
    (hub.folder / ".gitattributes").unlink()
    (hub.folder / "logo.png").unlink()
    assert same_files(hub.folder, tmp_path / "bucket")


def test_a_gated_model_wants_a_token_and_says_how(hub: HubServer, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    with pytest.raises(SourceDenied) as caught:
        bring(hub, tmp_path)
    assert "HF_TOKEN" in caught.value.hint
    bring(hub, tmp_path, token="hf_secret")
    assert hub.leaked_tokens == 0, "the token is for the hub, not for where it redirects"


def test_the_token_comes_from_the_environment_or_a_file(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    (tmp_path / "secret").write_text("hf_secret\n")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "secret"))
    assert HubSource("owner/mini", endpoint=hub.url).revision() == COMMIT
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(SourceDenied):
        HubSource("owner/mini", endpoint=hub.url).revision()


def test_a_small_file_is_checked_against_its_git_id(hub: HubServer, tmp_path: Path) -> None:
    hub.plan = lambda call: Fault("flip", after=3) if call.name == "config.json" else None
    with pytest.raises(SourceChanged, match="git blob id"):
        bring(hub, tmp_path)
    assert not (tmp_path / "bucket" / "config.json").exists()


def test_retry_after_is_waited_for(hub: HubServer, tmp_path: Path) -> None:
    waits: list[Call] = []

    def plan(call: Call) -> Fault | None:
        waits.append(call)
        return Fault("status", 429, retry_after="0.2") if call.phase == "hub.body" and call.number == 1 else None

    hub.plan = plan
    bring(hub, tmp_path)
    assert len(waits) > 9


@pytest.mark.parametrize("model", ["mini", "owner/nothing", "a/b/c", "owner/mini?x"])
def test_a_model_that_the_hub_does_not_have_is_one_sentence(hub: HubServer, model: str) -> None:
    with pytest.raises(BadSource):
        HubSource(model, endpoint=hub.url).revision()


def test_a_file_that_is_longer_than_its_listing_is_told(hub: HubServer, tmp_path: Path) -> None:
    shard = next(hub.folder.glob("*00003*.safetensors"))
    shard.write_bytes(shard.read_bytes() + b"x")
    with pytest.raises(SourceChanged, match="its listing says"):
        bring(hub, tmp_path)


def test_a_hub_that_is_not_there_is_worth_another_try() -> None:
    with pytest.raises(TryAgain):
        HubSource("owner/mini", endpoint="http://127.0.0.1:9").revision()


def test_a_password_in_the_hubs_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(BadSource) as raised:
        HubSource("owner/mini", endpoint="http://user:hunter2@127.0.0.1:1")
    assert "hunter2" not in f"{raised.value} {raised.value.hint}"


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HF_TOKEN_PATH"])
def test_what_cannot_be_a_token_is_refused_and_never_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """The libraries below quote a header that they refuse; a carriage return out of an edited file is enough."""
    secret = "hf_very\rsecret"
    (tmp_path / "token").write_text(secret, newline="")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv(variable, secret if variable == "HF_TOKEN" else str(tmp_path / "token"))
    with pytest.raises(SourceDenied, match=variable) as caught:
        HubSource("owner/mini", endpoint="http://127.0.0.1:9").revision()
    assert "secret" not in caught.value.message + caught.value.hint


def test_white_space_around_a_token_is_no_part_of_it(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", " hf_secret\r\n")
    assert HubSource("owner/mini", endpoint=hub.url).revision() == COMMIT


def test_an_address_without_a_scheme_is_told_at_once() -> None:
    with pytest.raises(BadSource, match="no web address"):
        HubSource("owner/mini", endpoint="localhost:9")


@pytest.mark.parametrize("page", [b"<html>please log in</html>", b"[1]", b'"x"'])
def test_a_login_page_in_place_of_the_hub_is_one_sentence(page: bytes) -> None:
    class Page(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        for revision in ("main", COMMIT):
            with pytest.raises(BadSource, match="does not speak as the hub does"):
                HubSource("owner/mini", revision, endpoint=address).files()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
