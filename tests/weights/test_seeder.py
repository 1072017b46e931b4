"""The seeder as a rented machine runs it: a process that speaks JSON to the keeper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimisession.weights.seal import Progress
from kimisession.weights.seeder import EVERY_S, Telling
from tests.weights.hub_server import COMMIT, HubServer
from tests.weights.making import same_files, weights_folder
from tests.weights.servers import serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer(weights_folder(tmp_path / "weights"))
    with serving(server):
        yield server


def seeder(hub: HubServer, tmp_path: Path, **env: str) -> tuple[int, list[dict[str, Any]], str]:
    words = ["--model", "owner/mini", "--from", "owner/mini", "--revision", COMMIT]
    done = subprocess.run(
        [sys.executable, "-m", "kimisession.weights.seeder", *words, "--bucket", f"file://{tmp_path}/bucket"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stdout + done.stderr


def test_it_seals_the_bucket_and_its_last_progress_is_all_of_it(hub: HubServer, tmp_path: Path) -> None:
    code, lines, _ = seeder(hub, tmp_path)
    assert code == 0
    assert same_files(hub.folder, tmp_path / "bucket")
    progress = [line["progress"] for line in lines if "progress" in line][-1]
    assert progress["done"] == progress["total"] > 800_000
    assert lines[-1]["done"]["files"] == 8


def test_a_gated_model_without_a_token_fails_with_one_sentence_for_the_keeper(hub: HubServer, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    code, lines, _ = seeder(hub, tmp_path)
    assert code != 0
    assert lines[-1]["failed"]["message"].startswith("the hub does not let you read owner/mini")
    assert not (tmp_path / "bucket" / ".kimisession" / "manifest.json").exists()


def test_its_token_comes_from_a_file_and_is_in_nothing_that_it_says(hub: HubServer, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    (tmp_path / "hf_token").write_text("hf_secret")
    code, _, said = seeder(hub, tmp_path, HF_TOKEN_PATH=str(tmp_path / "hf_token"), HF_TOKEN="")
    assert (code, "hf_secret" in said) == (0, False)


def test_standing_still_is_no_progress_and_not_every_step_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    telling = Telling()
    for done in (0, 0, 1, 2, 3):
        telling(Progress(done, 9, 0, 1))
    moved_at = telling.moved_at
    telling(Progress(3, 9, 0, 1))
    assert telling.moved_at == moved_at
    assert len(capsys.readouterr().out.splitlines()) == 1, f"within {EVERY_S} s"
    telling(Progress(9, 9, 1, 1))
    assert '"done": 9' in capsys.readouterr().out
