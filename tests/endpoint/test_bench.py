"""A bench as an event of the ledger, two of them side by side, and the commands over a ledger that has some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from good_values import NOON, requested
from serving import KEY, ROOT, standin

from kimisession.core.ledger import Benched, Damaged, Restarted, Session, decode, encode, fold
from kimisession.endpoint.bench import bench, conditions, flags_now, result_of, side_by_side
from kimisession.errors import EngineFailed
from kimisession.node.benchmark import Load, Sample, no_news, summarise
from kimisession.store import Store, open_store

REQUEST = requested()
SESSION = Session("demo-1", request=REQUEST)


def result(rate: float = 100.0, at_once: tuple[int, ...] = (1, 2), **changes: Any) -> dict[str, Any]:
    """A measurement in which each request took a second."""
    samples = [Sample(1.0, latency_s=1.0, ttft_s=0.1, gaps_s=(0.01,), completion_tokens=int(rate))]
    good = {
        "began_at": NOON.isoformat(),
        "model": "kimi-k2.5-stand-in",
        "engine_version": "stand-in",
        "rounds": 1,
        "max_tokens": 128,
        "thinking": None,
        "ignore_eos": False,
        "passes": [summarise(number, 0.0, samples * number) for number in at_once],
    }
    return {**good, **changes}


def benched(number: int = 1, **changes: Any) -> Benched:
    """A good bench, varied."""
    good: dict[str, Any] = {
        "label": "demo",
        "result": json.dumps(result()),
        "profile": "good",
        "flags": "max-model-len=8192",
        "engine_version": "stand-in",
        "accelerators": "CPU:1",
        "stand_in": True,
    }
    return Benched(NOON + timedelta(minutes=number), **{**good, **changes})


def test_a_measurement_becomes_an_event_that_says_what_it_was_measured_on(tmp_path: Path) -> None:
    load = Load(rounds=1, concurrent=(2,), max_tokens=5)
    with standin(tmp_path, "--served-model-name", "kimi-k2.5", "--tokens-per-second", "2000", "--ttft-s", "0") as url:
        event = bench(url, KEY, SESSION, REQUEST, load, "first", NOON, no_news)
    assert (event.label, event.profile, event.flags) == ("first", "good", "max-model-len=8192")
    assert (event.engine_version, event.accelerators, event.stand_in) == ("stand-in", "CPU:1", True)
    assert KEY not in event.result
    measured = result_of(event)
    assert measured is not None
    assert [one["completion_tokens"] for one in measured["passes"]] == [5, 10]
    assert decode(*encode(event)) == event


def test_an_endpoint_that_does_not_answer_is_an_engine_that_failed() -> None:
    with pytest.raises(EngineFailed, match="does not answer"):
        bench("http://127.0.0.1:1", KEY, SESSION, REQUEST, Load(), "first", NOON, no_news)


def test_a_bench_changes_nothing_in_its_session() -> None:
    assert fold("demo-1", [REQUEST, benched()]) == fold("demo-1", [REQUEST])


def test_the_flags_are_those_of_the_start_that_answers() -> None:
    assert flags_now(SESSION) == "max-model-len=8192"
    again = fold("demo-1", [REQUEST, Restarted(NOON, 2, "--max-model-len 4096")])
    assert flags_now(again) == "max-model-len=8192; restarted with --max-model-len 4096"


@pytest.mark.parametrize("text", ["", "{}", "7", '{"passes": []}', '{"passes": [{}]}', '{"passes": [{"at_once": 0}]}'])
def test_a_record_without_figures_is_told_and_not_compared(text: str) -> None:
    assert result_of(benched(result=text)) is None


def test_side_by_side_has_the_passes_of_both_and_the_ratio_of_the_second_to_the_first() -> None:
    lines = side_by_side(result(100), result(150, (2, 16)))
    assert {line.at_once for line in lines} == {2}
    found = {line.name: line for line in lines}
    assert (found["output tok/s"].a, found["output tok/s"].b, found["output tok/s"].ratio) == (200, 300, 1.5)
    assert found["TTFT ms, mean"].a == pytest.approx(100)
    assert found["errors"].ratio is None, "nothing is a multiple of no errors"


def test_what_differs_in_the_conditions_can_be_told() -> None:
    a, b = conditions(benched(), result()), conditions(benched(flags="x"), result(thinking=False))
    assert [one[0] for one, other in zip(a, b, strict=True) if one != other] == ["flags", "thinking"]


def test_a_bench_that_cannot_be_read_keeps_its_number(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.append("demo-1", [REQUEST, benched(1), benched(2)])
    store._db.execute("UPDATE events SET body = '{' WHERE seq = 2")
    (_, first), (session, second) = store.benches()
    assert isinstance(first, Damaged)
    assert (session, second) == ("demo-1", benched(2))
    store.close()


# --- the commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A ledger with three benches of one session; the last has a label of its own."""
    store = open_store(tmp_path)
    fast = json.dumps(result(200))
    later = benched(3, label="longer", result=fast, flags="max-model-len=8192; restarted with --max-model-len 4096")
    store.append("demo-1", [REQUEST, benched(1), benched(2), later])
    return store


def command(store: Store, *words: str) -> subprocess.CompletedProcess[str]:
    """`kimisession bench WORDS` over this ledger."""
    env = {**os.environ, "KIMISESSION_STATE_HOME": str(store.path.parent), "NO_COLOR": "1"}
    argv = [sys.executable, "-m", "kimisession", "bench", *words]
    return subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_the_list_has_a_line_for_each_bench(store: Store) -> None:
    done = command(store, "--list")
    head, *lines = done.stdout.splitlines()
    assert head.split()[:2] == ["BENCH", "UTC"]
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert lines[2].split()[3:] == ["200.0", "400.0", "at", "2", "stand-in", "longer"]


@pytest.mark.parametrize(
    ("names", "numbers"), [(("1", "longer"), (1, 3)), (("demo", "3"), (2, 3)), (("demo-1", "2"), (3, 2))]
)
def test_a_bench_is_meant_by_number_label_or_session(
    store: Store, names: tuple[str, str], numbers: tuple[int, int]
) -> None:
    done = command(store, "--compare", *names, "--json")
    data = json.loads(done.stdout)["data"]
    assert (data["a"]["bench"], data["b"]["bench"]) == numbers


def test_a_comparison_says_what_differs_and_by_how_much(store: Store) -> None:
    done = command(store, "--compare", "1", "3")
    assert done.returncode == 0, done.stderr
    assert "flags DIFFERS" in done.stdout
    rate = next(line for line in done.stdout.splitlines() if "output tok/s" in line)
    assert rate.split()[-3:] == ["100.0", "200.0", "2.000"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--compare", "1", "9"), "no bench '9'"),
        (("--concurrent", "2,x"), "--concurrent"),
        (("--concurrent", "0"), "--concurrent"),
        (("--thinking", "maybe"), "maybe"),
        (("--rounds", "0"), "rounds"),
    ],
)
def test_a_mistake_on_the_command_line_is_exit_code_2(store: Store, words: tuple[str, ...], says: str) -> None:
    done = command(store, *words)
    assert done.returncode == 2
    assert says in done.stderr
