"""`kimisession seed` from the hub and into a bucket: the real program against a hub and a store on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command_line import Home, Said
from tests.weights.gcs_emulator import gcs_emulator
from tests.weights.making import same_files, weights_folder
from tests.weights.servers import COMMIT, HubServer, serving

pytest.importorskip("google.cloud.storage")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer(weights_folder(tmp_path / "weights"))
    with serving(server):
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


def seed(home: Home, hub: HubServer, *words: str, **env: str) -> Said:
    return home.type("seed", "kimi-k2.5", "--from", "hub:owner/mini", *words, HF_ENDPOINT=hub.url, **env)


def test_the_hub_is_streamed_into_a_folder_at_a_commit(home: Home, hub: HubServer, tmp_path: Path) -> None:
    said = seed(home, hub, "--bucket", f"file://{tmp_path}/bucket", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["data"]["revision"] == COMMIT
    assert same_files(hub.folder, tmp_path / "bucket")


def test_the_hub_is_streamed_into_a_new_bucket_and_its_cost_told(home: Home, hub: HubServer) -> None:
    with gcs_emulator() as store:
        to_gcs = ("--here", "--bucket", "gs://kimi-weights-of-mine")
        said = seed(home, hub, *to_gcs, STORAGE_EMULATOR_HOST=store)
        assert (said.code, "does not exist" in said.sentence, "--region" in said.hint) == (2, True, True)
        said = seed(home, hub, *to_gcs, "--region", "us-central1", STORAGE_EMULATOR_HOST=store)
        assert said.code == 0, said.err
        assert "made gs://kimi-weights-of-mine in us-central1" in said.err
        assert "a month" in said.out or "not priced" in said.out
        bodies = hub.seen.calls["hub.body"]
        assert seed(home, hub, *to_gcs, STORAGE_EMULATOR_HOST=store).code == 0
        assert hub.seen.calls["hub.body"] == bodies, "a sealed bucket moves no bytes"
        checked = home.type("seed", "--verify", "--bucket", "gs://kimi-weights-of-mine", STORAGE_EMULATOR_HOST=store)
        assert (checked.code, COMMIT[:16] in checked.out) == (0, True)


def test_a_gated_model_takes_its_token_from_the_environment(home: Home, hub: HubServer, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    to = ("--bucket", f"file://{tmp_path}/bucket")
    refused = seed(home, hub, *to)
    assert refused.code != 0
    assert "HF_TOKEN" in refused.err
    said = seed(home, hub, *to, HF_TOKEN="hf_secret")
    assert said.code == 0, said.err
    assert "hf_secret" not in said.out + said.err
    assert hub.leaked_tokens == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--checkpoint", "nvfp9"), "--checkpoint"),
        (("--from", "hub:not a model"), "owner/name"),
        (("--from", "/nowhere"), "--from"),
        (("--from", "/tmp", "--revision", COMMIT), "leave --revision out"),
        (("--revision", "f" * 40), "--revision"),
    ],
)
def test_words_that_cannot_be_meant_make_nothing(
    home: Home, hub: HubServer, tmp_path: Path, words: tuple[str, ...], hint: str
) -> None:
    where = ("--bucket", f"file://{tmp_path}/bucket")
    source = () if "--from" in words else ("--from", "hub:owner/mini")
    said = home.type("seed", "kimi-k2.5", *source, *where, *words, HF_ENDPOINT=hub.url)
    assert (said.code, hint in said.hint) == (2, True), said.err
    assert not (tmp_path / "bucket").exists()
