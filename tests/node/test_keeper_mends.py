"""What the keeper does with requests and starts that go wrong, each in a real machine's folder."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from test_keeper import WAITS, Machine, wait_for

from kimisession.core.launch import Step
from kimisession.node import asking, leash
from kimisession.node.config import load
from kimisession.node.keeper import Keeper
from kimisession.node.task import without_secrets
from kimisession.rehearsal.standin_model import make_standin_model

SPEAKS = """
print('{"progress": {"kind": "not ours"}}')
print('{"failed": {"message": "part 7 is damaged"}}', end="")
raise SystemExit(5)
"""


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
        "restarted twice": Machine(home / "again", model, {}, {"unused_s": 600.0}),
        "restarted without room": Machine(home / "room", model, {}, {"unused_s": 600.0}),
        "no room for a step": Machine(
            home / "step", model, {}, {"steps": (WAITS,), "in_the_way": "run/step-weights.log"}
        ),
        "a step that speaks": Machine(
            home / "speaks", model, {}, {"steps": (Step("weights", ("@{python}", "-c", SPEAKS)),)}
        ),
        "told outside": Machine(home / "told", model, {}, {"steps": (WAITS,)}),
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


def test_a_step_that_cannot_be_started_ends_the_session_at_once(machines: dict[str, Machine]) -> None:
    machine = machines["no room for a step"]
    assert machine.job.wait(timeout=30) == 20
    (ended,) = machine.journal("ended")
    assert ended["evidence"].startswith("weights: it could not be started")
    assert len([line for line in machine.journal("phase") if line["state"] == "began"]) == 1


def test_a_step_that_prints_a_journals_own_words_and_no_end_of_line_is_quoted_all_the_same(
    machines: dict[str, Machine],
) -> None:
    machine = machines["a step that speaks"]
    assert machine.job.wait(timeout=30) == 20
    assert [line["evidence"] for line in machine.journal("ended")] == ["weights: part 7 is damaged"]
    assert machine.journal("note") == []


def test_the_webhook_is_told_of_an_end_that_takes_no_time(machines: dict[str, Machine]) -> None:
    told: list[str] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Webhook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    machine = machines["told outside"]
    (machine.folder / "webhook").write_text(f"http://127.0.0.1:{server.server_port}/hook")
    machine.tell("stop.json", by="a test", reason="user")
    assert machine.job.wait(timeout=30) == 0
    server.shutdown()
    server.server_close()
    assert [text for text in told if "is ending (user)" in text]


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


def test_after_two_restarts_in_a_row_it_goes_back_to_the_flags_that_came_up(machines: dict[str, Machine]) -> None:
    machine = machines["restarted twice"]
    wait_for(lambda: machine.journal("ready"))
    good = _argv(machine.folder)
    slow = [arg.replace("load=0", "load=600") for arg in good]
    machine.tell("restart.json", id="1", argv=slow, flags="load=600")
    wait_for(lambda: _argv(machine.folder) == slow)
    machine.tell("restart.json", id="2", argv=[*slow, "--no-such-flag"], flags="--no-such-flag")
    wait_for(lambda: [line["run"] for line in machine.journal("ready")] == [1, 4])
    assert _argv(machine.folder) == good


def test_going_back_where_nothing_can_be_started_ends_the_session_in_order(machines: dict[str, Machine]) -> None:
    machine = machines["restarted without room"]
    wait_for(lambda: machine.journal("ready"))
    run = machine.folder / "run"
    (run / "engine-2.log" / "in-the-way").mkdir(parents=True)
    slow = [arg.replace("load=0", "load=600") for arg in _argv(machine.folder)]
    machine.tell("restart.json", id="1", argv=slow, flags="load=600")
    wait_for(lambda: _argv(machine.folder) == slow)
    (run / "engine.log").unlink()
    (run / "engine.log").mkdir()
    leash.kill(int((run / "pid.engine").read_text().partition(":")[0]), signal.SIGKILL)
    assert machine.job.wait(timeout=30) == 20
    assert [line["by"] for line in machine.journal("ended")] == ["keeper"]


def _argv(folder: Path) -> list[str]:
    running = json.loads((folder / "run" / "argv.json").read_text())
    return [str(arg) for arg in running["argv"]]


def test_the_engine_gets_none_of_a_persons_tokens() -> None:
    secrets = {"HF_TOKEN": "1", "HF_TOKEN_PATH": "2", "OPENAI_API_KEY": "3", "AWS_SECRET_ACCESS_KEY": "4"}
    needed = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "GOOGLE_APPLICATION_CREDENTIALS": "/file", "HF_HOME": "/hf"}
    assert without_secrets({**secrets, **needed}) == needed


@pytest.fixture
def keeper(machines: dict[str, Machine], tmp_path: Path) -> Keeper:
    """One that is asked by its parts: with the first cap in 100 s and a budget for 1000, and nothing that runs."""
    config = load(machines["extended for ever"].folder)
    (tmp_path / "run").mkdir()
    (tmp_path / "api_key").write_text("a-key")
    began = config.hard_cap_utc - config.duration_s
    config = replace(config, hard_cap_utc=began + 100, duration_s=100.0, budget_utc=began + 1000)
    with (tmp_path / "lifeline").open("wb") as lifeline:
        return Keeper(tmp_path, config, lifeline.fileno(), os.getppid())


def test_a_budget_that_reaches_further_than_the_first_cap_lets_the_cap_be_extended(keeper: Keeper) -> None:
    assert keeper.limits.budget_at is not None
    assert keeper.limits.budget_at - keeper.limits.hard_cap_at == pytest.approx(900)


def test_a_signal_that_comes_while_the_loop_notes_what_it_saw_is_not_lost(keeper: Keeper) -> None:
    noted = replace(keeper.seen, running=3)
    keeper.on_signal(signal.SIGTERM, None)
    keeper.seen = noted
    keeper._wait(0.0)
    assert (keeper.seen.running, keeper.seen.stop_by) == (3, "SIGTERM")


def test_a_question_that_got_no_thread_can_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    question: asking.Background[int] = asking.Background()
    with monkeypatch.context() as world:
        world.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            question.ask(lambda: 1)
    question.ask(lambda: 2)
    assert wait_for(question.take) == (2, None)


def test_a_webhook_that_cannot_be_told_is_never_what_ends_a_keeper(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    (tmp_path / "webhook").write_text("http://127.0.0.1:1/")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    keeper._tell_outside("it is ending")
    (tmp_path / "webhook").write_bytes(b"\xff")
    keeper._tell_outside("it is ending")
