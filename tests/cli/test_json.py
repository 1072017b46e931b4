"""`--json`: one document a line on standard output, each with its schema version; progress stays on standard error.

One real session on the stand-in engine, started, asked, looked at and stopped with the commands themselves.
"""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from command_line import Home, Said
from json_schema import mistakes

from kimisession.cli.schemas import folder
from kimisession.cli.show import SCHEMA_VERSION
from kimisession.rehearsal.standin_model import make_standin_model

QUICK = ("--set", "phase-seconds=boot=0,load=0,compile=0,memory=0,graphs=0,serve=0", "--set", "tokens-per-second=1000")


def documents(said: Said) -> list[dict[str, Any]]:
    """Every document of the output, each on a line of its own, each with its version, each as its schema has it."""
    found = [json.loads(line) for line in said.out.splitlines()]
    command = "config-show" if said.words[0] == "config" else said.words[0]
    schema = json.loads((folder() / f"{command}.json").read_text(encoding="utf-8"))
    for document in found:
        assert document["schema_version"] == SCHEMA_VERSION
        assert set(document) == {"schema_version", "kind", "data"}
        assert mistakes(document, schema, schema) == []
    return found


def document(said: Said, kind: str, code: int = 0) -> Any:
    """The data of the one document of this kind."""
    assert said.code == code, said.err
    (found,) = documents(said)
    assert found["kind"] == kind
    return found["data"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home with seeded weights."""
    home = Home(tmp_path_factory.mktemp("home"))
    make_standin_model(home.folder / "model", shards=1, shard_bytes=5000)
    yield home
    home.type("stop", "--all")


def test_seeding_prints_the_sealed_manifest(home: Home) -> None:
    sealed = document(home.type("seed", "rehearsal", "--from", str(home.folder / "model"), "--json"), "manifest")
    assert {"config.json"} < {file["path"] for file in sealed["files"]}
    assert sealed["bytes"] == sum(file["bytes"] for file in sealed["files"])
    verified = document(home.type("seed", "rehearsal", "--verify", "--json"), "manifest")
    assert verified == sealed


@pytest.mark.parametrize(
    ("words", "kind", "data"),
    [
        (("profiles",), "profiles", list),
        (("profiles", "kimi-k2.5-int4"), "profile", dict),
        (("status",), "sessions", list),
        (("cost",), "costs", dict),
        (("config", "show"), "config", dict),
        (("plan", "kimi-k2.5"), "plan", dict),
        (("plan", "--compare", "kimi-k2.5", "kimi-k2.5-kt"), "plans", list),
        (("plan", "--from", "serve.sh"), "script", dict),
        (("bench", "--list"), "benches", list),
        (("start", "rehearsal", "--dry-run", "--budget", "10"), "quote", dict),
        (("seed", "rehearsal", "--delete", "--dry-run"), "dry-run", dict),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_prints_data_prints_it_as_json(home: Home, words: tuple[str, ...], kind: str, data: type) -> None:
    (home.folder / "serve.sh").write_text("vllm serve moonshotai/Kimi-K2.5 --tensor-parallel-size 8\n")
    assert isinstance(document(home.type(*words, "--json"), kind), data)


def test_stopping_nothing_prints_no_text_that_is_not_json(home: Home) -> None:
    said = home.type("stop", "--all", "--json")
    assert (said.code, documents(said)) == (0, [])


@pytest.fixture(scope="module")
def started(home: Home) -> Any:
    """A session that was started."""
    said = home.type("start", "rehearsal", "--name", "demo", "--idle", "60s", "--budget", "10", "-y", "--json", *QUICK)
    return document(said, "session")


def test_a_started_session_is_ready_and_its_figures_are_typed(started: Any) -> None:
    assert (started["name"], started["state"], started["pretended"]) == ("demo", "ready", True)
    assert Decimal(started["usd_per_hour"]) == 26
    assert isinstance(started["usd"], str)
    assert isinstance(Decimal(started["usd"]), Decimal)
    for key in ("began_at", "ready_at", "deadline", "budget_at"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", started[key]), key
        assert datetime.fromisoformat(started[key]).tzinfo
    assert started["model"].endswith("stand-in")
    assert started["endpoint"].startswith("http://127.0.0.1:")


def test_looking_at_it_asking_it_and_starting_it_again_all_speak_of_the_same_session(home: Home, started: Any) -> None:
    (row,) = document(home.type("status", "--json"), "sessions")
    assert row["session"] == started["session"]
    assert {layer["name"]: layer["armed"] for layer in row["layers"]} == {
        "keeper": True,
        "wrapper": True,
        "supervisor": True,
    }
    endpoint = document(home.type("connect", "--json"), "endpoint")
    assert endpoint["base_url"] == started["endpoint"]
    answers = document(home.type("test", "--json"), "test")
    assert len(answers) == 3
    assert {answer["model"] for answer in answers} == {started["model"]}
    again = document(home.type("start", "rehearsal", "--name", "demo", "-y", "--json"), "session")
    assert again["session"] == started["session"]
    assert endpoint["api_key"] not in json.dumps([row, answers, again])


def test_measuring_moving_and_restarting_it_speak_json_too(home: Home, started: Any) -> None:
    quick = ("--rounds", "1", "--concurrent", "2", "--max-tokens", "8")
    first = document(home.type("bench", "demo", *quick, "--json"), "bench")
    document(home.type("bench", "demo", *quick, "--json"), "bench")
    compared = document(home.type("bench", "--compare", "1", "2", "--json"), "bench-compare")
    assert compared["a"] == first
    moved = document(home.type("extend", "1m", "demo", "--json"), "extended")
    assert (moved["session"], moved["added_s"]) == (started["session"], 60)
    assert moved["deadline"] > started["deadline"]
    assert "would" in document(home.type("extend", "1m", "--dry-run", "--json"), "dry-run")
    assert "restart" in document(home.type("restart", "--undo", "--dry-run", "--json"), "dry-run")["would"]
    again = document(home.type("restart", "demo", "--set", "max-model-len=4096", "--json"), "session")
    assert (again["session"], again["state"]) == (started["session"], "ready")
    assert "stop demo" in document(home.type("stop", "demo", "--dry-run", "--json"), "dry-run")["would"]


def test_stopping_it_prints_its_receipt_and_twice_the_same(home: Home, started: Any) -> None:
    receipt = document(home.type("stop", "demo", "--json"), "receipt")
    assert (receipt["state"], receipt["reason"], receipt["final"]) == ("gone", "user", True)
    assert Decimal(receipt["usd"]) == sum(Decimal(line["usd"]) for line in receipt["lines"]) > 0
    assert document(home.type("stop", "demo", "--json"), "receipt") == receipt
    assert document(home.type("cost", "demo", "--json"), "receipt") == receipt
    costs = document(home.type("cost", "--json"), "costs")
    assert costs["sessions"] == [receipt]
    assert (costs["count"], costs["usd"]) == (0, "0.00")  # what is pretended is not in the sum
    assert document(home.type("status", "--json"), "sessions") == []
    (row,) = document(home.type("status", "--all", "--json"), "sessions")
    assert (row["session"], row["state"]) == (started["session"], "gone")
    watched = documents(home.type("status", "demo", "--watch", "--json"))
    assert [line["data"]["state"] for line in watched] == ["gone"]


def test_a_start_that_fails_prints_its_receipt_and_an_error_that_are_both_json(home: Home, started: Any) -> None:
    said = home.type("start", "rehearsal", "--name", "fails", "-y", "--json", "--set", "fault=cuda-init")
    receipt = document(said, "receipt", code=6)
    assert (receipt["name"], receipt["reason"], receipt["final"]) == ("fails", "engine-dead", True)
    error = json.loads(said.err.splitlines()[-1])
    assert error["exit_code"] == 6
    assert "session fails ended before it was ready" in error["error"]
    assert error["hint"]


def test_a_start_that_says_nothing_more_is_ended_in_time_and_has_an_exit_code_of_its_own(
    home: Home, started: Any
) -> None:
    text = (Path(__file__).parents[2] / "kimisession" / "profiles" / "rehearsal.toml").read_text(encoding="utf-8")
    mine = home.config / "profiles" / "mine.toml"
    mine.parent.mkdir(parents=True, exist_ok=True)
    text = text.replace('coldstart_stall = "20s"', 'coldstart_stall = "1s"').replace('"rehearsal"', '"mine"', 1)
    mine.write_text(text, encoding="utf-8")
    bucket = ("--bucket", f"file://{home.data}/buckets/rehearsal")
    said = home.type("start", "mine", "--name", "mute", "-y", "--json", "--set", "fault=hang@load", *bucket)
    receipt = document(said, "receipt", code=124)
    assert (receipt["reason"], receipt["state"]) == ("never-ready", "gone")
    assert json.loads(said.err.splitlines()[-1])["exit_code"] == 124


def test_a_key_is_printed_where_it_was_asked_for_and_written_nowhere_that_outlives_the_session(
    home: Home, started: Any
) -> None:
    store = home.store()
    bodies = " ".join(row[0] for row in store._db.execute("SELECT body FROM events"))
    store.close()
    assert "api_key" not in bodies
    assert not list(home.state.rglob("api_key*"))
    assert list((home.state / "keys").iterdir()) == []
