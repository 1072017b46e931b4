"""`kimisession seed` on a machine of its own: a seeding as a session. The machine is this one; the hub and the store are on
loopback."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kimisession.cli.seeding_away import hub_address
from kimisession.errors import UsageMistake
from tests.cli.command_line import Home, Said
from tests.weights.gcs_emulator import gcs_emulator
from tests.weights.hub_server import COMMIT, HubServer
from tests.weights.making import weights_folder
from tests.weights.servers import Fault, serving

pytest.importorskip("google.cloud.storage")
pytestmark = pytest.mark.slow

NAME = "seed-kimi-k2-5"
BUCKET = "gs://weights/kimi"
WORDS = ("seed", "kimi-k2.5", "--from", "hub:owner/mini", "--infra", "local", "--bucket", BUCKET)


class Place:
    """A home, a hub and a store."""

    def __init__(self, home: Home, hub: HubServer, store: str) -> None:
        self.home, self.hub, self.store = home, hub, store

    @property
    def env(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.hub.url, "STORAGE_EMULATOR_HOST": self.store, "HF_TOKEN": ""}

    def seed(self, *words: str, **env: str) -> Said:
        return self.home.type(*WORDS, *words, **{**self.env, **env})

    def begin(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "kimisession", *WORDS, "-y"],
            cwd=self.home.folder,
            env=self.home.env(**self.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def eventually(self, true: Callable[[], bool], within_s: float = 40) -> None:
        until = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < until, "it did not come true in time"
            time.sleep(0.1)

    def journal(self) -> str:
        return "".join(p.read_text() for p in self.home.state.glob("machines/*/run/journal.jsonl"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "home").mkdir()
    hub, home = HubServer(weights_folder(tmp_path / "weights")), Home(tmp_path / "home")
    with serving(hub), gcs_emulator() as store:
        here = Place(home, hub, store)
        yield here
        with contextlib.suppress(OSError):
            if home.live():
                home.type("stop", "--all")


def test_a_seeding_is_a_session_that_ends_by_itself_when_the_bucket_is_sealed(place: Place) -> None:
    said = place.seed("-y")
    assert said.code == 0, said.err
    assert "Sealed manifest" in said.out
    assert "done: every step ended well" in said.out
    assert f"next: kimisession start kimi-k2.5 --bucket {BUCKET}" in said.err
    assert not place.home.live()
    assert "seeder:" in place.home.type("logs", NAME).out
    (row,) = json.loads(place.home.type("cost", "--json").out)["data"]["sessions"]
    assert (row["name"], row["reason"], row["state"]) == (NAME, "done", "gone")
    bodies = place.hub.seen.calls["hub.body"]
    again = place.seed("-y", "--json")
    assert json.loads(again.out)["data"]["revision"] == COMMIT
    assert "nothing is rented" in again.err
    assert (place.hub.seen.calls["hub.body"], len(place.home.machines())) == (bodies, 1)


def test_a_quote_comes_first_and_without_a_yes_nothing_is_rented(place: Place) -> None:
    shown = place.seed("--dry-run")
    assert shown.code == 0, shown.err
    for word in ("800.3 kB", "hard cap", "worst case", "expected", COMMIT[:16]):
        assert word in shown.err, word
    refused = place.seed()
    assert (refused.code, "--yes" in refused.hint) == (2, True)
    assert place.home.machines() == []


@pytest.mark.parametrize(
    "words",
    [
        ("--revision", "f" * 40),
        ("--from", "hub:owner/other"),
        ("--from", "/tmp"),
        ("--bucket", "gs://nobody-made-this"),
        ("--infra", "slurm"),
        ("--duration", "30h"),
        ("--budget", "much"),
    ],
    ids=" ".join,
)
def test_a_mistake_rents_nothing(place: Place, words: tuple[str, ...]) -> None:
    said = place.seed("-y", *words)
    assert (said.code, said.hint != "") == (2, True), said.err
    assert place.home.machines() == []
    assert place.home.live() == []


def test_ctrl_c_leaves_it_running_and_the_same_command_comes_back_to_it(place: Place) -> None:
    place.hub.per_connection = 30_000  # seven seconds a shard
    command = place.begin()
    place.eventually(lambda: '"phase":"weights"' in place.journal().replace(" ", ""))
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=20)
    assert command.returncode == 130, err
    assert f"{NAME} runs on" in err
    assert "same command again" in err
    other = place.seed("-y", "--bucket", "gs://weights/other")
    assert (other.code, BUCKET in other.sentence) == (2, True)
    place.hub.per_connection = 0
    back = place.seed("-y", "--revision", "main")  # a branch was resolved to the commit that the session names
    assert back.code == 0, back.err
    assert "following it" in back.err
    assert len(place.home.machines()) == 1
    assert not place.home.live()


def test_a_gated_model_gets_its_token_as_a_file_that_goes_with_the_session(place: Place) -> None:
    place.hub.token = "hf_secret"
    refused = place.seed("-y")
    assert (refused.code != 0, "HF_TOKEN" in refused.hint) == (True, True)
    assert place.home.machines() == []
    place.hub.per_connection = 100_000
    said = place.seed("-y", HF_TOKEN="hf_secret")
    assert said.code == 0, said.err
    assert place.hub.leaked_tokens == 0
    kept = [p for p in place.home.folder.rglob("*") if p.is_file() and b"hf_secret" in p.read_bytes()]
    assert kept == []


def test_a_seeding_that_cannot_go_on_says_why_and_what_was_sent_stays(place: Place) -> None:
    place.hub.plan = lambda call: Fault("status", 403) if call.phase == "hub.body" else None
    said = place.seed("-y")
    assert said.code == 6, said.err
    assert "does not let you read" in said.sentence
    assert "the same command again goes on" in said.hint
    assert not place.home.live()
    place.hub.plan = None
    assert place.seed("-y").code == 0


def test_without_skypilot_it_says_what_to_install_and_how_to_do_without(place: Place) -> None:
    if any(Path(folder, "sky", "__init__.py").exists() for folder in sys.path if folder):
        pytest.skip("SkyPilot is installed here")
    said = place.home.type(*WORDS[:4], "--bucket", BUCKET, "-y", **place.env)
    assert said.code == 1
    assert "--here" in said.hint
    assert not place.hub.seen.calls


def test_a_password_in_the_hubs_address_never_becomes_a_word_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example/a@b")
    assert hub_address() == "https://hub.example/a@b"
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret@hub.example")
    with pytest.raises(UsageMistake) as caught:
        hub_address()
    assert "secret" not in caught.value.message + caught.value.hint
