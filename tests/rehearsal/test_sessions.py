"""What people do to sessions: two at once, the same name twice, stop twice, Ctrl-C once and twice, a closed laptop."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from matrix import current_phase
from processes import Watch, look, signal_exactly, wait_until
from stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

Play = Callable[[Stage], None]
PLAYS: list[tuple[Play, dict[str, str | float]]] = []


def played(**limits: str | float) -> Callable[[Play], Play]:
    """A play on a stage of its own. All begin together, since they mostly wait; each test then asks for its own."""

    def add(play: Play) -> Play:
        PLAYS.append((play, limits))
        return play

    return add


@pytest.fixture(scope="module")
def plays(watch: Watch, bucket: str) -> Iterator[dict[str, Future[None]]]:
    def on_stage(play: Play, limits: dict[str, str | float]) -> None:
        stage = Stage(watch, bucket, limits=limits)
        try:
            play(stage)
        finally:
            stage.close()

    with ThreadPoolExecutor(5) as pool:
        yield {play.__name__: pool.submit(on_stage, play, limits) for play, limits in PLAYS}


def slowly(phase: str, seconds: float = 1.5) -> tuple[str, str]:
    return "--set", f"phase-seconds=boot=0.1,load=0.1,compile=0.1,memory=0.1,graphs=0.1,{phase}={seconds}"


def in_phase(stage: Stage, phase: str) -> None:
    assert wait_until(lambda: current_phase(stage.journal()) == phase, 40), stage.journal()


def nothing_left(stage: Stage, within_s: float = 8) -> None:
    assert wait_until(lambda: stage.nothing_runs(time.time() - 1) is not None, within_s), stage.watch.living(stage.mark)


def get(port: int, key: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
    status = connection.getresponse().status
    connection.close()
    return status


# -- plays -------------------------------------------------------------------------------------------------------------


@played()
def two_at_once(stage: Stage) -> None:
    other_port = stage.port + 9
    first, second = stage.start(name="one"), stage.start(name="two", port=other_port)
    assert (first.wait(60), second.wait(60)) == (0, 0), stage.told(first) + stage.told(second)
    one, two = stage.ask("connect", "one"), stage.ask("connect", "two")
    assert (one["base_url"], two["base_url"]) == (
        f"http://127.0.0.1:{stage.port}/v1",
        f"http://127.0.0.1:{other_port}/v1",
    )
    assert get(stage.port, one["api_key"]) == get(other_port, two["api_key"]) == 200
    assert get(stage.port, two["api_key"]) == get(other_port, one["api_key"]) == 401
    code, text = stage.run("stop")
    assert code == 2, text
    assert "name the one" in text
    code, text = stage.run("stop", "one")
    assert code == 0, text
    assert [row["name"] for row in stage.ask("status")] == ["two"]
    assert get(other_port, two["api_key"]) == 200
    one_gone = next(folder for folder in stage.machines() if folder.name.startswith("one-"))
    two_runs = next(folder for folder in stage.machines() if folder.name.startswith("two-"))
    for folder in (one_gone, two_runs):
        assert {line["session"] for line in stage.journal(folder) if line["kind"] == "started"} == {folder.name}
    assert not stage.gone(two_runs)
    assert [line["kind"] for line in stage.journal(two_runs)].count("ending") == 0
    assert stage.run("stop", "two")[0] == 0
    receipts = {name: stage.ask("cost", name) for name in ("one", "two")}
    assert [len(r["lines"]) for r in receipts.values()] == [1, 1]
    assert float(receipts["two"]["lines"][0]["seconds"]) > float(receipts["one"]["lines"][0]["seconds"])
    nothing_left(stage)


@played()
def started_while_loading(stage: Stage) -> None:
    first = stage.start(*slowly("load"))
    in_phase(stage, "load")
    second = stage.start()
    assert (first.wait(60), second.wait(60)) == (0, 0), stage.told(first) + stage.told(second)
    assert "exists already: going on with it" in stage.told(second)
    third = stage.start()
    assert third.wait(60) == 0, stage.told(third)
    assert len(stage.machines()) == len(stage.ask("status", "--all")) == 1
    assert [line["kind"] for line in stage.journal()].count("started") == 1
    for _ in range(2):
        code, text = stage.run("stop", "cell")
        assert code == 0, text
    assert "gone already" in text
    assert len({json.dumps(stage.ask("cost", "cell")) for _ in range(2)}) == 1
    nothing_left(stage)


@played()
def killed_before_anything_was_made(stage: Stage) -> None:
    for _ in range(5):
        first = stage.start()
        assert wait_until(lambda: bool(stage.machines()), 30, every_s=0.0005)
        held = look(first.pid)
        assert held
        signal_exactly(held, signal.SIGSTOP)
        too_late = bool(list(stage.machines()[-1].glob("machine.json")))
        signal_exactly(held, signal.SIGKILL)
        first.wait()
        if not too_late:
            break
        assert stage.run("stop", "cell")[0] == 0
    second = stage.start()
    assert second.wait(60) == 0, stage.told(second)
    assert len(stage.ask("status")) == 1
    assert [bool(stage.gone(folder)) for folder in stage.machines()].count(False) == 1
    assert stage.run("stop", "cell")[0] == 0
    nothing_left(stage)


@played()
def killed_just_after_it_began(stage: Stage) -> None:
    first = stage.start()
    assert wait_until(lambda: bool(list(stage.root.glob("state/machines/*/machine.json"))), 30, every_s=0.001)
    first.kill()
    first.wait()
    second = stage.start()
    assert second.wait(60) == 0, stage.told(second)
    assert len(stage.ask("status")) == 1
    assert [bool(stage.gone(folder)) for folder in stage.machines()].count(False) == 1
    assert stage.run("stop", "cell")[0] == 0
    nothing_left(stage)


@played()
def started_twice_at_one_moment(stage: Stage) -> None:
    both = [stage.start(), stage.start()]
    assert [process.wait(60) for process in both] == [0, 0], [stage.told(process) for process in both]
    assert len(stage.machines()) == 1
    assert len(stage.ask("status", "--all")) == 1
    assert stage.run("stop", "cell")[0] == 0
    nothing_left(stage)


@played()
def interrupted_once(stage: Stage) -> None:
    start = stage.start(*slowly("load"))
    in_phase(stage, "load")
    start.send_signal(signal.SIGINT)
    assert start.wait(20) == 130, stage.told(start)
    text = stage.told(start)
    assert "Receipt" in text
    assert "stopped by you" in text
    assert "nothing is left" in text
    assert stage.nothing_runs(0) is not None or not stage.watch.living(stage.mark)
    assert [(row["state"], row["reason"]) for row in stage.ask("status", "--all")] == [("gone", "user")]


@played(stop_grace="4s")
def interrupted_twice(stage: Stage) -> None:
    start = stage.start(*slowly("graphs", 3), "--set", "fault=deaf")
    in_phase(stage, "graphs")
    start.send_signal(signal.SIGINT)
    assert wait_until(lambda: "tearing down" in stage.told(start), 10)
    in_phase(stage, "ending")
    began = time.monotonic()
    start.send_signal(signal.SIGINT)
    assert start.wait(10) == 130
    assert time.monotonic() - began < 1.5
    text = stage.told(start)
    assert f"local/{stage.machine.name}" in text
    assert "it ends by itself at" in text
    assert "kimisession stop cell" in text
    assert stage.watch.living(stage.mark), "it left at once, while the machine was still ending"
    nothing_left(stage)
    assert [(row["state"], row["reason"]) for row in stage.ask("status", "--all")] == [("gone", "user")]


@played()
def stopped_while_launching(stage: Stage) -> None:
    start = stage.start()
    assert wait_until(lambda: stage.child(start.pid, "supervisor") is not None, 30, every_s=0.002)
    code, text = stage.run("stop", "cell")
    assert code == 0, text
    assert start.wait(20) == 1, stage.told(start)
    assert [(row["state"], row["reason"]) for row in stage.ask("status", "--all")] == [("gone", "user")]
    nothing_left(stage)


@played(idle="2s")
def laptop_closed(stage: Stage) -> None:
    start = stage.start(*slowly("load"))
    in_phase(stage, "load")
    start.send_signal(signal.SIGHUP)
    assert start.wait(10) == -signal.SIGHUP
    assert stage.wait_ready(), stage.journal()
    stage.keep_asking()
    assert wait_until(lambda: any(x.get("activity") == "busy" for x in stage.journal()), 10)
    stage.hang_up()
    nothing_left(stage, 15)
    assert [(row["state"], row["reason"]) for row in stage.ask("status", "--all")] == [("gone", "idle")]


# -- promises ----------------------------------------------------------------------------------------------------------


def test_two_sessions_at_once_do_not_mix(plays: dict[str, Future[None]]) -> None:
    plays["two_at_once"].result()


def test_start_of_a_name_that_exists_goes_on_with_it_and_stop_twice_is_fine(plays: dict[str, Future[None]]) -> None:
    plays["started_while_loading"].result()


def test_a_start_that_died_before_anything_was_made_is_started_again(plays: dict[str, Future[None]]) -> None:
    plays["killed_before_anything_was_made"].result()


def test_a_start_that_died_at_once_is_resumed_by_the_next(plays: dict[str, Future[None]]) -> None:
    plays["killed_just_after_it_began"].result()


def test_two_starts_at_the_same_moment_make_one_machine(plays: dict[str, Future[None]]) -> None:
    plays["started_twice_at_one_moment"].result()


def test_ctrl_c_while_starting_tears_down_and_prints_the_receipt(plays: dict[str, Future[None]]) -> None:
    plays["interrupted_once"].result()


def test_a_second_ctrl_c_leaves_at_once_and_the_machine_still_goes(plays: dict[str, Future[None]]) -> None:
    plays["interrupted_twice"].result()


def test_stop_while_launching_stops_it(plays: dict[str, Future[None]]) -> None:
    plays["stopped_while_launching"].result()


def test_a_closed_laptop_leaves_a_session_that_ends_idle(plays: dict[str, Future[None]]) -> None:
    plays["laptop_closed"].result()
