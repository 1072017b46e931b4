"""The keeper and its wrapper, the real files in real processes: one machine for each reason to end, all at once.

Every machine is a folder as a launcher lays it out, its engine the stand-in. Which layer ends what when something is
killed is in tests/rehearsal; here nothing dies that was not told to.
"""

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from good_values import PROFILE, an_id, choices

from kimisession.core.launch import Step
from kimisession.core.quote import launch_spec, make_quote
from kimisession.engines.payload import lay_out
from kimisession.node import leash
from kimisession.node.journal import read_journal
from kimisession.node.policy import EXIT_CODES, Reason
from kimisession.node.task import Log
from kimisession.rehearsal.standin_model import make_standin_model

FLAGS = {"phase-seconds": "boot=0,load=0,compile=0,memory=0,graphs=0,serve=0", "tokens-per-second": 1000, "ttft-s": 0}
KEY = "a-key-for-tests"


def wait_for(what: Callable[[], Any], within_s: float = 30) -> Any:
    """The first truthy answer; fails the test when none comes in time."""
    until = time.monotonic() + within_s
    while not (answer := what()):
        assert time.monotonic() < until, "it did not come in time"
        time.sleep(0.02)
    return answer


DRAWN: set[int] = set()


def a_port() -> int:
    """One that no other machine here has, and that the kernel gives to nobody meanwhile: below those that it gives away itself."""
    while True:
        port = random.randint(20000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            if port not in DRAWN:
                DRAWN.add(port)
                return port


class Machine:
    """A machine folder with its job."""

    def __init__(self, folder: Path, model: Path, flags: dict[str, Any], changes: dict[str, Any]) -> None:
        """`changes`: limits, `steps`, and `in_the_way`, a folder where a file is wanted."""
        self.folder = folder = folder.with_name(an_id(folder.name))
        self.port = a_port()
        profile = replace(PROFILE, load="in-place")
        chosen = choices(infra="local", bucket_url=f"file://{model}", port=self.port, sets={**FLAGS, **flags})
        spec = launch_spec(make_quote(profile, chosen, datetime.now(UTC)), folder.name, "me")
        quick = {"tick_s": 0.1, "scrape_s": 0.2, "stop_grace_s": 2.0, "silent_s": 20.0, "warn_s": 0.5}
        steps = changes.pop("steps", ())
        in_the_way = changes.pop("in_the_way", "")
        limits = replace(spec.limits, **{**quick, **changes})
        folder.mkdir(mode=0o700)
        lay_out(folder, replace(spec, limits=limits, steps=steps), {"api_key": KEY})
        if in_the_way:
            (folder / in_the_way).mkdir()
        self.served_name = spec.engine.served_name
        self.job = subprocess.Popen(
            [sys.executable, "-m", "kimisession.node.job", str(folder)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder / "lib"), leash.MARK: folder.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def journal(self, *kinds: str) -> list[dict[str, Any]]:
        """What it has written, of these kinds."""
        lines, _ = read_journal(self.folder / "run" / "journal.jsonl")
        return [line for line in lines if not kinds or line["kind"] in kinds]

    def tell(self, name: str, **content: object) -> None:
        """A request to the keeper."""
        part = self.folder / "control" / f".{name}"
        part.write_text(json.dumps(content))
        part.rename(self.folder / "control" / name)

    def ask(self) -> None:
        """One completion, as a user's."""
        question = {"model": self.served_name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(question).encode(), headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1

    def ask_in_vain(self) -> None:
        """... that the engine never answers."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.ask()


@dataclass(frozen=True)
class Case:
    """A reason to end, and what brings it about."""

    reason: str
    exit_code: int
    limits: dict[str, Any]
    flags: dict[str, Any]
    play: str = ""  # what the test does once it is ready
    evidence: str = ""


def case(reason: Reason, limits: dict[str, Any], flags: dict[str, Any] | None = None, **more: Any) -> Case:
    """A case that ends with the code documented for its reason."""
    return Case(reason.value, EXIT_CODES[reason], limits, flags or {}, **more)


FAILING = Step("weights", ("@{python}", "-c", "import sys; print('checksum of part 7 is wrong'); sys.exit(5)"))
WAITS = Step("weights", ("@{python}", "-c", "import time; time.sleep(600)"))
CASES = {
    "never used": case(Reason.UNUSED, {"unused_s": 1.0}, evidence="no request yet"),
    "idle": case(Reason.IDLE, {"idle_s": 1.0}, play="ask", evidence="last request"),
    "hard cap while loading": case(Reason.HARD_CAP, {"duration_s": 1.5, "steps": (WAITS,)}, evidence="hard cap"),
    "hard cap of a wrong clock": case(Reason.HARD_CAP, {"duration_s": 1.5, "hard_cap_utc": 4e9}, evidence="hard cap"),
    "budget": case(Reason.BUDGET, {"budget_utc": -1.0}, evidence="the budget is spent"),
    "a step that fails": case(Reason.SETUP_FAILED, {"steps": (FAILING,)}, evidence="checksum of part 7 is wrong"),
    "an engine that dies": case(Reason.ENGINE_DEAD, {}, {"fault": "crash@load"}, evidence="exited with code"),
    "a program that is not there": case(Reason.SETUP_FAILED, {"steps": (Step("weights", ("/no/such/program",)),)}),
    "nothing moves": case(Reason.NEVER_READY, {"coldstart_stall_s": 1.0, "steps": (WAITS,)}, evidence="no progress"),
    "too late": case(Reason.NEVER_READY, {"ready_within_s": 1.5}, {"fault": "hang@load"}, evidence="not ready"),
    "deaf metrics": case(Reason.UNKNOWN, {"unknown_s": 1.0}, {"fault": "metrics-500"}, evidence="cannot be read"),
    "no token": case(Reason.STALLED, {"stall_s": 1.0}, {"fault": "stall"}, play="ask and wait", evidence="no token"),
    "stop": case(Reason.USER, {}, play="stop", evidence="stop asked by a test"),
    "SIGTERM": case(Reason.USER, {}, play="sigterm", evidence="stop asked by SIGTERM"),
}
CONTROLS = {"extended": {"duration_s": 20.0, "unused_s": 60.0}}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Machine]]:
    """All at once: waiting takes no processor."""
    folder, model = tmp_path_factory.mktemp("machines"), tmp_path_factory.mktemp("model")
    make_standin_model(model, shards=1, shard_bytes=1000)
    found = {}
    for number, (name, one) in enumerate(CASES.items()):
        limits = dict(one.limits)
        if limits.get("budget_utc") == -1.0:
            limits["budget_utc"] = time.time() + 1.5
        found[name] = Machine(folder / f"case{number}", model, one.flags, limits)
    for name, limits in CONTROLS.items():
        found[name] = Machine(folder / name, model, {}, dict(limits))
    yield found
    for machine in found.values():
        machine.job.kill()
        machine.job.wait()
        for pid in list(leash.marked(machine.folder.name)):
            leash.kill(pid, signal.SIGKILL)


def play(machine: Machine, what: str) -> None:
    """Do what the case wants done once it is ready."""
    if what:
        wait_for(lambda: machine.journal("ready"))
    if what == "ask":
        machine.ask()
    elif what == "ask and wait":
        threading.Thread(target=machine.ask_in_vain, daemon=True).start()
    elif what == "stop":
        machine.tell("stop.json", by="a test", reason="user")
    elif what == "sigterm":
        (keeper,) = [line["pid"] for line in machine.journal("started")]
        os.kill(keeper, signal.SIGTERM)


def test_an_extension_moves_the_cap_by_no_more_than_was_asked_for(machines: dict[str, Machine]) -> None:
    """First, for its cap is near: the file names a far moment, and the seconds beside it bound that."""
    machine = machines["extended"]
    wait_for(lambda: machine.journal("beat"))
    (before,) = machine.journal("beat")[:1]
    machine.tell("extend.json", hard_cap_utc=time.time() + 9e6, added_s=30.0)
    wait_for(lambda: machine.journal("extended"))
    wait_for(lambda: machine.journal("beat")[-1]["cap_utc"] > before["cap_utc"] + 29)
    assert machine.journal("beat")[-1]["cap_utc"] < before["cap_utc"] + 31
    machine.tell("stop.json", by="a test", reason="user")
    assert machine.job.wait(timeout=30) == 0


@pytest.mark.parametrize("name", CASES)
def test_a_session_ends_with_the_documented_code_of_its_reason(machines: dict[str, Machine], name: str) -> None:
    machine, one = machines[name], CASES[name]
    play(machine, one.play)
    code = machine.job.wait(timeout=30)
    (ended,) = machine.journal("ended")
    assert (ended["reason"], code, ended["exit_code"]) == (one.reason, one.exit_code, one.exit_code)
    assert one.evidence in ended["evidence"]
    (closed,) = machine.journal("closed")
    assert closed["left"] == 0
    assert list(leash.marked(machine.folder.name)) == []


def test_every_beat_says_what_ends_the_session_next_and_when(machines: dict[str, Machine]) -> None:
    beats = machines["idle"].journal("beat")
    assert beats
    for beat in beats:
        assert beat["next"] in set(Reason)
        assert beat["evidence"]
        assert beat["ends_utc"] <= beat["cap_utc"]


def test_the_keepers_own_question_is_not_taken_for_a_users(machines: dict[str, Machine]) -> None:
    lines = machines["never used"].journal()
    after = [line for line in lines[[line["kind"] for line in lines].index("ready") :] if line["kind"] == "beat"]
    assert {beat["activity"] for beat in after} == {"quiet"}


def test_an_end_is_warned_of_once(machines: dict[str, Machine]) -> None:
    for name in ("idle", "never used"):
        warnings = [line for line in machines[name].journal("warn") if line["reason"] == CASES[name].reason]
        assert len(warnings) == 1, name


def test_a_keeper_writes_beats_by_its_tick_and_never_in_a_rush(machines: dict[str, Machine]) -> None:
    """A policy that were to say "look again at once" would fill the journal, hundreds of lines a second."""
    for name, machine in machines.items():
        beats = [datetime.fromisoformat(line["at"]) for line in machine.journal("beat")]
        lasted_s = (beats[-1] - beats[0]).total_seconds() if beats else 0.0
        assert len(beats) <= 20 + 12 * lasted_s, name


def test_phases_follow_each_other_and_end(machines: dict[str, Machine]) -> None:
    phases = [(line["phase"], line["state"]) for line in machines["idle"].journal("phase")]
    assert phases[0] == ("boot", "began")
    began = [phase for phase, state in phases if state == "began"]
    assert began == [phase for phase, state in phases if state == "ended"]
    assert len(set(began)) == len(began)


def test_no_key_is_in_the_journal_nor_in_any_log(machines: dict[str, Machine]) -> None:
    for machine in machines.values():
        for path in (machine.folder / "run").iterdir():
            assert KEY not in path.read_text(errors="replace"), path


def test_a_log_is_read_line_by_line_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    log = Log(path)
    assert log.new_lines() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert log.new_lines() == ["one"]
        file.write(b"o\r 10%\r 20%\n\n  \nthr\xffee\n")
        assert log.new_lines() == ["two", " 10%", " 20%", "thr\ufffdee"]
        assert log.new_lines() == []


def test_a_flood_of_log_is_read_from_its_newest_megabyte(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    log = Log(path)
    path.write_bytes(b"x" * 5_000_000 + b"\n" + b"y" * 500_000 + b"\nlast\n")
    lines = log.new_lines()
    assert lines[-1] == "last"
    assert sum(map(len, lines)) <= 1 << 20
