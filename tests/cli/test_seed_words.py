"""`kimisession seed` from the hub and into a bucket: the real program against a hub and a store on loopback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimisession.cli.seeding import keeping
from tests.cli.command_line import Home, Said
from tests.weights.gcs_emulator import gcs_emulator
from tests.weights.hub_server import COMMIT, HubServer
from tests.weights.making import same_files, weights_folder
from tests.weights.servers import serving

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


def test_a_log_shows_that_it_moves_by_a_line_for_a_tenth(home: Home, hub: HubServer) -> None:
    hub.per_connection = 400_000
    said = seed(home, hub, "--bucket", str(home.folder / "to"))
    moved = [line for line in said.err.splitlines() if line.startswith("  seeded ")]
    assert 1 <= len(moved) <= 9, said.err
    assert "/s, " in moved[-1]


def test_a_bare_word_for_a_bucket_puts_nothing_onto_this_disk(home: Home, hub: HubServer) -> None:
    said = seed(home, hub, "--bucket", "weights-of-mine")
    assert (said.code, "gs://weights-of-mine" in said.hint) == (2, True)
    assert not (home.folder / "weights-of-mine").exists()


def test_deleting_a_folder_that_is_no_bucket_deletes_nothing(home: Home, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    said = home.type("seed", "--delete", "--bucket", str(tmp_path / "thesis"), "--name", "thesis")
    assert (said.code, "nothing was deleted" in said.sentence) == (5, True)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["thesis.txt"]


def test_ctrl_c_says_what_stays_and_how_to_go_on(home: Home, hub: HubServer) -> None:
    hub.per_connection = 20_000
    words = ("seed", "kimi-k2.5", "--from", "hub:owner/mini", "--bucket", str(home.folder / "to"))
    command = subprocess.Popen(
        [sys.executable, "-m", "kimisession", *words],
        env=home.env(HF_ENDPOINT=hub.url),
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 20
    while not hub.seen.body_out:
        assert time.monotonic() < until
        time.sleep(0.02)
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=20)
    assert (command.returncode, "keeps what was sent" in err, "the same command" in err) == (130, True, True)


def test_a_class_of_storage_with_another_price_is_not_priced_as_standard() -> None:
    assert (
        keeping(10**12, "us-central1", "NEARLINE")
        == "not priced: no price is known here for us-central1, nearline class"
    )
    assert keeping(10**12, "us-central1", "STANDARD") == "$18.63 a month in us-central1, standard class"
