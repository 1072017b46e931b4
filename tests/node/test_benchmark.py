"""Measuring and asking, which also run alone on a machine: on streams made by hand and on the real stand-in."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import KEY, ROOT, Reply, answering, standin

from kimisession.node import benchmark, inference
from kimisession.node.benchmark import (
    Arrivals,
    Endpoint,
    Load,
    NoAnswer,
    Sample,
    as_table,
    ask,
    events,
    figure,
    first_errors,
    measure,
    measure_pass,
    percentile,
    read_sample,
    summarise,
)
from kimisession.node.traffic import read_metrics

USAGE = {"prompt_tokens": 7, "completion_tokens": 4}


def event(delta: dict[str, Any] | None, usage: dict[str, Any] | None = None, **more: Any) -> bytes:
    """One server-sent event of a chat completion; without a delta the last one, which carries the usage."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    return (
        b"data: " + json.dumps({"choices": choices, **({"usage": usage} if usage else {}), **more}).encode() + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"
OPENING = event({"role": "assistant", "content": ""})


def seen(*parts: tuple[float, bytes]) -> Arrivals:
    """A request sent at second 10."""
    return Arrivals(10.0, parts[-1][0] if parts else 10.0, parts)


GOOD = (
    (10.1, OPENING),
    (10.5, event({"reasoning": "Hm"})),
    (10.6, event({"reasoning": " well"})),
    (10.8, event({"content": "Yes"})),
    (11.2, event({"content": ""}, usage=None)),
    (11.3, event(None, USAGE) + DONE),
)


def test_a_stream_is_read_with_the_moment_of_each_event() -> None:
    sample = read_sample(seen(*GOOD))
    assert sample.failure == ""
    assert sample.ttft_s == pytest.approx(0.5), "the opening without text is no token"
    assert sample.gaps_s == pytest.approx((0.1, 0.2))
    assert sample.latency_s == pytest.approx(1.2), "up to the last event with a choice, as vllm bench serve has it"
    assert (sample.prompt_tokens, sample.completion_tokens, sample.reasoning_tokens) == (7, 4, 2)
    assert sample.tokens_per_s == pytest.approx(4 / 1.2)
    assert sample.tpot_s == pytest.approx((1.2 - 0.5) / 3)
    assert not sample.null_content


@given(st.lists(st.integers(1, 400), max_size=12))
def test_however_the_network_cuts_a_stream_the_same_is_read(cuts: list[int]) -> None:
    whole, edges = b"".join(part for _, part in GOOD), sorted({0, *cuts})
    pieces = [whole[a:b] for a, b in zip(edges, [*edges[1:], None], strict=True)]
    assert [data for _, data in events((1.0, piece) for piece in pieces)] == [data for _, data in events(GOOD)]


def test_an_event_counts_from_the_piece_that_completes_its_line() -> None:
    first, last = GOOD[1][1][:20], GOOD[1][1][20:]
    assert [at for at, _ in events([(1.0, first), (2.0, last)])] == [2.0]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thinking_without_an_answer_is_still_thinking_and_no_error(field: str) -> None:
    sample = read_sample(seen((10.5, event({field: "Hm"})), (11.0, event(None, USAGE) + DONE)))
    assert (sample.failure, sample.null_content, sample.reasoning_tokens) == ("", True, 1)


def test_reasoning_tokens_are_the_servers_own_count_where_it_has_one() -> None:
    usage = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 3}}
    assert (
        read_sample(seen((10.5, event({"reasoning": "Hm"})), (11.0, event(None, usage) + DONE))).reasoning_tokens == 3
    )


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((), "broke off"),
        (GOOD[:-1], "broke off"),
        (((10.1, OPENING), (10.2, DONE)), "no usage"),
        (((10.1, b'data: {"error": {"message": "out of memory"}}\n\n'), (10.2, DONE)), "out of memory"),
        (((10.1, b"data: <html>\n\n"), (10.2, DONE)), "not the shape"),
        (((10.1, b'data: {"choices": [1]}\n\n'), (10.2, DONE)), "not the shape"),
        (((10.1, b"data: 7\n\n"), (10.2, DONE)), "not the shape"),
    ],
)
def test_a_stream_that_is_not_whole_has_no_figures(parts: tuple[tuple[float, bytes], ...], says: str) -> None:
    sample = read_sample(seen(*parts))
    assert says in sample.failure
    assert sample.tokens_per_s is sample.ttft_s is sample.tpot_s is None


def test_a_request_without_tokens_has_no_rate() -> None:
    silent = read_sample(seen((10.5, event({"content": ""})), (11.0, event(None, {"completion_tokens": 0}) + DONE)))
    assert silent.failure == ""
    figures = summarise(1, 10.0, [silent])
    assert figures["tokens_per_s"] is figures["output_tokens_per_s"] is figures["ttft_s"] is figures["itl_s"] is None
    assert figures["latency_s"]["mean"] == pytest.approx(0.5)


def test_a_request_that_failed_is_an_error_and_moves_no_mean() -> None:
    good, bad = Sample(11.0, latency_s=1.0, ttft_s=0.1, completion_tokens=100), Sample(12.0, "it broke")
    figures = summarise(2, 10.0, [bad, good])
    assert (figures["requests"], figures["errors"], figures["first_error"]) == (2, 1, "it broke")
    assert figures["tokens_per_s"]["mean"] == 100
    assert figures["output_tokens_per_s"] == 50, "the duration goes on to the end of the last request, failed or not"
    assert first_errors({"passes": [figures]}) == ["1 of 2 requests failed at 2 at once, the first: it broke"]


def test_nothing_but_failures_is_a_row_of_blanks() -> None:
    figures = summarise(1, 10.0, [Sample(10.0, "it broke")])
    names = {row[0]: row[1] for row in as_table({"passes": [figures]})}
    assert (names["errors"], names["output tok/s"], names["TTFT ms, mean"], names["latency s, mean"]) == ("1", *"---")


def test_the_table_of_the_public_write_up_follows_from_the_definitions() -> None:
    """8xH100, February 2026: 112.2 tok/s and 1.14 s a request alone; 107.6 tok/s each and 0.59 s two at once."""
    alone = summarise(1, 0.0, [Sample(1.1408 * n, latency_s=1.1408, completion_tokens=128) for n in (1, 2, 3)])
    assert (round(alone["tokens_per_s"]["mean"], 1), round(alone["wall_per_request_s"], 2)) == (112.2, 1.14)
    two = summarise(2, 0.0, [Sample(1.1896 * n, latency_s=1.1896, completion_tokens=128) for n in (1, 1, 2, 2, 3, 3)])
    assert (round(two["tokens_per_s"]["mean"], 1), round(two["wall_per_request_s"], 2)) == (107.6, 0.59)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0], 99, 3.0), ([1.0, 2.0], 50, 1.5), ([4.0, 1.0, 3.0, 2.0], 50, 2.5), ([0.0, 10.0], 99, 9.9)],
)
def test_percentiles_are_those_of_numpy(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_between_the_least_and_the_most(values: list[float], percent: float) -> None:
    assert min(values) <= percentile(values, percent) * (1 + 1e-12) + 1e-12
    assert percentile(values, percent) <= max(values) * (1 + 1e-12)


def test_one_at_a_time_comes_first_and_nothing_twice() -> None:
    assert Load(concurrent=(16, 1, 2, 16)).passes == (1, 16, 2)


def test_no_two_requests_begin_alike() -> None:
    bodies = [json.loads(Load().body("m", f"{n}"))["messages"][0]["content"] for n in range(3)]
    assert len({text[:4] for text in bodies}) == 3


@pytest.mark.parametrize(("thinking", "switch"), [(None, None), (True, True), (False, False)])
def test_thinking_is_switched_under_the_names_of_each_family(thinking: bool | None, switch: bool | None) -> None:
    kwargs = json.loads(Load(thinking=thinking).body("m", "1")).get("chat_template_kwargs")
    assert kwargs == (None if switch is None else {"thinking": switch, "enable_thinking": switch})


def test_what_both_files_say_of_an_endpoint_is_the_same() -> None:
    """Each runs alone, so neither may import the other."""
    for name in ("NoAnswer", "Endpoint", "thinking_switch", "key_of_environment"):
        assert inspect.getsource(getattr(benchmark, name)) == inspect.getsource(getattr(inference, name)), name


def test_the_key_is_in_no_representation() -> None:
    assert "secret" not in repr(Endpoint("http://127.0.0.1:1", "secret"))


# --- over real sockets ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--served-model-name", "kimi-k2.5", "--tokens-per-second", "1000", "--ttft-s", "0.01")
    with standin(tmp_path_factory.mktemp("weights"), *flags) as base:
        yield base


def generated(url: str) -> float:
    """The tokens that the server has generated, by its own count."""
    endpoint = Endpoint(url)
    connection = endpoint.connect()
    endpoint.send(connection, "GET", "/metrics")
    counters = read_metrics("vllm", connection.getresponse().read().decode())
    connection.close()
    return counters.generation_tokens


def test_every_token_of_the_server_is_counted_once_but_those_of_the_first_request(url: str) -> None:
    before, told = generated(url), []
    load = Load(rounds=2, concurrent=(2, 8), max_tokens=20, ignore_eos=True)
    result = measure(Endpoint(url, KEY), "kimi-k2.5-stand-in", load, lambda *what: told.append(what))
    passes = result["passes"]
    assert [(one["at_once"], one["requests"], one["errors"]) for one in passes] == [(1, 2, 0), (2, 4, 0), (8, 16, 0)]
    assert [one["completion_tokens"] for one in passes] == [40, 80, 320]
    assert generated(url) - before == 20 + 40 + 80 + 320
    assert all(one["null_contents"] == one["requests"] for one in passes), "20 tokens are all thinking here"
    assert result["engine_version"] == "stand-in"
    assert told[0] == (0, 0, 1)
    assert told[-1] == (8, 16, 16)
    json.dumps(result)


def test_no_figure_is_quicker_than_the_server(url: str) -> None:
    load = Load(rounds=2, concurrent=(4,), max_tokens=30, ignore_eos=True)
    for one in measure(Endpoint(url, KEY), "kimi-k2.5-stand-in", load)["passes"]:
        slowest = 0.01 + 29 / 1000
        assert one["ttft_s"]["min"] >= 0.01
        assert one["latency_s"]["min"] >= slowest
        assert one["tokens_per_s"]["max"] <= 30 / slowest
        assert one["output_tokens_per_s"] <= one["at_once"] * 30 / slowest
        assert one["wall_s"] >= one["latency_s"]["max"]
        assert one["ttft_s"]["mean"] <= one["latency_s"]["mean"]


def test_thinking_off_leaves_no_reasoning_tokens(url: str) -> None:
    load = Load(rounds=1, concurrent=(1,), max_tokens=50, thinking=False)
    one = measure(Endpoint(url, KEY), "kimi-k2.5-stand-in", load)["passes"][0]
    assert (one["reasoning_tokens"], one["null_contents"]) == (0, 0)


WHOLE = [OPENING, event({"content": "Yes"}), event(None, USAGE), DONE]


def test_as_many_as_asked_for_are_under_way_at_once() -> None:
    together = threading.Barrier(5)

    def answer(path: str, headers: dict[str, str], body: Any) -> Reply:
        together.wait(10)  # nobody is answered before five ask
        return Reply(WHOLE)

    with answering(answer) as base:
        one = measure_pass(Endpoint(base), [Load().body("m", str(n)) for n in range(10)], 5)
    assert (one["requests"], one["errors"]) == (10, 0)


def test_never_more_than_asked_for_are_under_way_at_once() -> None:
    lock, together = threading.Lock(), threading.Barrier(3)
    now = most = 0

    def answer(path: str, headers: dict[str, str], body: Any) -> Reply:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait(10)  # so that they do overlap
        with lock:
            now -= 1
        return Reply(WHOLE)

    with answering(answer) as base:
        one = measure_pass(Endpoint(base), [Load().body("m", str(n)) for n in range(12)], 3)
    assert (one["errors"], most) == (0, 3)


def test_a_server_that_fails_now_and_then_is_measured_on_the_rest() -> None:
    numbers = iter(range(100))

    def answer(path: str, headers: dict[str, str], body: Any) -> Reply:
        return [Reply(WHOLE), Reply([b"overloaded"], 503), Reply(WHOLE[:2])][next(numbers) % 3]

    with answering(answer) as base:
        one = measure_pass(Endpoint(base), [Load().body("m", str(n)) for n in range(6)], 1)
    assert (one["requests"], one["errors"], one["completion_tokens"]) == (6, 4, 8)
    assert one["first_error"] == "the endpoint answered 503: overloaded"


def test_a_server_that_refuses_the_first_request_is_told_in_one_sentence() -> None:
    with (
        answering(lambda path, headers, body: Reply([b'{"error": "no"}'], 401)) as base,
        pytest.raises(NoAnswer, match="401"),
    ):
        measure(Endpoint(base, "wrong"), "m", Load())


def test_the_key_follows_no_redirect() -> None:
    keys = []

    def elsewhere(path: str, headers: dict[str, str], body: Any) -> Reply:
        keys.append(headers.get("Authorization"))
        return Reply(WHOLE)

    with (
        answering(elsewhere) as other,
        answering(lambda path, headers, body: Reply([], 307, {"Location": other + path})) as base,
    ):
        assert "307" in ask(Endpoint(base, "secret"), b"{}").failure
        with pytest.raises(inference.NoAnswer, match="307"):
            inference.ask(inference.Endpoint(base, "secret"), "m", "hello")
    assert keys == []


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_base_url_may_end_in_v1_or_not(url: str, suffix: str) -> None:
    assert Endpoint(url + suffix, KEY).first_model() == "kimi-k2.5-stand-in"


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:8000", "ftp://127.0.0.1", "http://127.0.0.1:port", "http://127.0.0.1:1"]
)
def test_an_address_where_nothing_answers_is_one_sentence(address: str) -> None:
    with pytest.raises(NoAnswer, match="does not answer"):
        Endpoint(address).first_model()
    assert "does not answer" in ask(Endpoint(address), b"{}").failure


def test_a_figure_that_is_not_there_is_none() -> None:
    assert figure({"a": {"b": 1}}, ("a", "b")) == 1
    assert figure({"a": None}, ("a", "b")) is figure({}, ("a",)) is None


# --- alone on a machine ---------------------------------------------------------------------------------------------


def pythons() -> list[str]:
    """This Python, and the node's oldest where there is one that runs."""
    found = [sys.executable]
    oldest = sorted(Path("~/.pyenv/versions").expanduser().glob("3.9.*/bin/python3.9"))
    for candidate in (*map(str, oldest), shutil.which("python3.9")):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return [*found, candidate]
    return found


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What `scp -r scripts/` puts on a machine: the content of links, not links."""
    for name in ("benchmark.py", "test_inference.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / name)
        assert not (tmp_path / name).is_symlink()
    return tmp_path


def run(python: str, script: Path, *words: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    """Run a copied script with the standard library and nothing else."""
    env = {"PATH": os.environ["PATH"], "OPENAI_API_KEY": key}
    argv = [python, "-I", "-S", str(script), *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60, cwd=script.parent)


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_the_benchmark_runs_alone(url: str, copied: Path, python: str) -> None:
    words = ("--base-url", url, "--rounds", "1", "--concurrent", "2,4", "--concurrent", "3", "--max-tokens", "10")
    done = run(python, copied / "benchmark.py", *words, "--thinking", "off", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["schema_version"], told["kind"]) == (1, "bench")
    assert [one["at_once"] for one in told["data"]["passes"]] == [1, 2, 4, 3]
    assert told["data"]["thinking"] is False
    assert KEY not in done.stdout


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_the_test_questions_run_alone_and_null_content_is_no_crash(url: str, copied: Path, python: str) -> None:
    done = run(python, copied / "test_inference.py", "--base-url", url, "--max-tokens", "8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("still thinking when its tokens ran out") == 3
    done = run(python, copied / "test_inference.py", "--base-url", url, "--thinking", "off", "--json")
    assert [one["answer"]["content"][:11] for one in json.loads(done.stdout)["data"]] == ["This answer"] * 3


@pytest.mark.parametrize("script", ["benchmark.py", "test_inference.py"])
def test_an_endpoint_that_does_not_answer_is_exit_code_1_and_one_sentence(url: str, copied: Path, script: str) -> None:
    for address, key in (("http://127.0.0.1:1", KEY), (url, "wrong")):
        done = run(sys.executable, copied / script, "--base-url", address, key=key)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert "wrong" not in done.stderr


@pytest.mark.parametrize("script", ["benchmark.py", "test_inference.py"])
def test_a_script_takes_no_key_on_its_command_line(copied: Path, script: str) -> None:
    assert "key" not in run(sys.executable, copied / script, "--help").stdout.lower()
    assert run(sys.executable, copied / script, "--api-key", "x").returncode == 2


def test_a_table_for_people_has_a_column_for_each_pass(url: str, copied: Path) -> None:
    done = run(sys.executable, copied / "benchmark.py", "--base-url", url, "--rounds", "1", "--max-tokens", "5")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["at", "once", "1", "2"]
    assert len(lines) == len(benchmark.ROWS) + 2
    assert max(map(len, lines)) <= 100
