"""What the keeper does with requests and starts that go wrong, each in a real machine's folder."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_keeper import Machine, wait_for

from kimisession.node import leash
from kimisession.node.keeper import without_secrets
from kimisession.rehearsal.standin_model import make_standin_model


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Machine]]:
    """All of them at once: they wait for clocks, not for the processor."""
    home = tmp_path_factory.mktemp("mends")
    model = home / "model"
    make_standin_model(model, shards=1, shard_bytes=1000)
    made = {
        "extended twice": Machine(home / "twice", model, {}, {"duration_s": 600.0, "tick_s": 1.0}),
        "extended for ever": Machine(home / "forever", model, {}, {"duration_s": 600.0}),
        "restarted in vain": Machine(home / "vain", model, {}, {"ready_within_s": 6.0}),
        "no room for a log": Machine(home / "log", model, {}, {"in_the_way": "run/engine.log"}),
    }
    yield made
    for machine in made.values():
        machine.job.terminate()
        machine.job.wait(timeout=30)
        assert list(leash.marked(machine.folder.name)) == []


def cap(machine: Machine) -> float:
    """The hard cap that the keeper last told."""
    return float(machine.journal("beat")[-1]["cap_utc"])


def test_an_engine_whose_log_cannot_be_opened_ends_the_session_as_a_failed_set_up(machines: dict[str, Machine]) -> None:
    machine = machines["no room for a log"]
    assert machine.job.wait(timeout=30) == 20
    (ended,) = machine.journal("ended")
    assert ended["reason"] == "setup-failed"
    assert "could not be started" in ended["evidence"]


def test_of_two_extensions_within_one_tick_none_is_lost(machines: dict[str, Machine]) -> None:
    machine = machines["extended twice"]
    wait_for(lambda: machine.journal("beat"))
    before = cap(machine)
    machine.tell("extend.json", hard_cap_utc=before + 30, added_s=30.0)
    machine.tell("extend.json", hard_cap_utc=before + 60, added_s=60.0)
    wait_for(lambda: cap(machine) > before + 59)
    assert cap(machine) < before + 61
    machine.tell("extend.json", hard_cap_utc=before + 30, added_s=30.0)  # the slower of two commands
    seen = len(machine.journal("beat"))
    wait_for(lambda: len(machine.journal("beat")) > seen + 1)
    assert cap(machine) > before + 59


def test_an_extension_to_no_moment_is_noted_and_moves_nothing(machines: dict[str, Machine]) -> None:
    machine = machines["extended for ever"]
    wait_for(lambda: machine.journal("beat"))
    before = cap(machine)
    machine.tell("extend.json", hard_cap_utc=float("inf"), added_s=float("inf"))
    note = wait_for(lambda: machine.journal("note"))[0]
    assert "names no moment" in note["text"]
    assert abs(cap(machine) - before) < 1


def test_a_restart_that_never_gets_ready_goes_back_to_the_flags_of_before(machines: dict[str, Machine]) -> None:
    machine = machines["restarted in vain"]
    wait_for(lambda: machine.journal("ready"))
    argv = [arg.replace("load=0", "load=600") for arg in _argv(machine.folder)]
    machine.tell("restart.json", id="1", argv=argv, flags="load=600")
    wait_for(lambda: [line["run"] for line in machine.journal("ready")] == [1, 3], within_s=40)
    assert [line["flags"] for line in machine.journal("restarted")] == ["load=600", "as before"]
    assert any("did not get ready" in line["text"] for line in machine.journal("warn"))
    assert machine.job.poll() is None
    machine.ask()


def _argv(folder: Path) -> list[str]:
    running = json.loads((folder / "run" / "argv.json").read_text())
    return [str(arg) for arg in running["argv"]]


def test_the_engine_gets_none_of_a_persons_tokens() -> None:
    secrets = {"HF_TOKEN": "1", "HF_TOKEN_PATH": "2", "OPENAI_API_KEY": "3", "AWS_SECRET_ACCESS_KEY": "4"}
    needed = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "GOOGLE_APPLICATION_CREDENTIALS": "/file", "HF_HOME": "/hf"}
    assert without_secrets({**secrets, **needed}) == needed
