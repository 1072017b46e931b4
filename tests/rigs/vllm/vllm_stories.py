"""Sessions on real vLLM, each a story with its own limits: who asks how, what the keeper says of it, why it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from processes import Watch, look, same, signal_exactly, wait_until
from vllm_stage import CONTEXT, VllmStage, moment, nothing_left, staged

from kimisession.rehearsal.mini_kimi import ANSWER, THOUGHT

Story = Callable[[Watch, str], None]
STORIES: dict[str, Story] = {}

MAX_NUM_SEQS = 8  # of the shipped profile


def story(tale: Story) -> Story:
    """One of `STORIES`, under its name."""
    STORIES[tale.__name__] = tale
    return tale


def last_beat(stage: VllmStage) -> dict[str, Any]:
    """The keeper's newest heartbeat."""
    return stage.beats()[-1]


def is_quiet(stage: VllmStage) -> bool:
    """Whether the keeper says that nobody asks."""
    return bool(last_beat(stage)["activity"] == "quiet")


def metric(stage: VllmStage, name: str) -> float:
    """A gauge or counter of the engine's own page, read by a reader of the test's own."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{stage.port}/metrics", timeout=10).read().decode()
    return sum(float(value) for value in re.findall(rf"^vllm:{name}{{.*}} (\S+)$", page, re.MULTILINE))


def read_events(connection: http.client.HTTPConnection, events: int) -> int:
    """Read so many events of a stream, or up to its end; how many came."""
    response = connection.getresponse()
    assert response.status == 200, response.read()
    came = 0
    while came < events and (line := response.readline()):
        came += line.startswith(b"data:")
    return came


def ended(stage: VllmStage) -> dict[str, Any]:
    """The journal's line that says why it ended; empty while it has not."""
    return next((line for line in stage.journal() if line["kind"] == "ended"), {})


def end_of(stage: VllmStage, within_s: float) -> dict[str, Any]:
    """Wait for the end: nothing runs, nothing is left, and the ledger gives the keeper's reason."""
    assert wait_until(lambda: bool(stage.gone()), within_s), stage.journal()[-3:]
    nothing_left(stage)
    line = ended(stage)
    assert stage.reason() == line["reason"]
    return line


@story
def more_requests_than_it_takes_at_once_is_busy_and_not_stalled(watch: Watch, bucket: str) -> None:
    """24 streams, of which 8 run: some wait longer than the 5 s after which an engine without tokens is stalled."""
    with staged(VllmStage(watch, bucket, limits={"idle": "3s"})) as stage:
        stage.start_ready()
        asked_at = time.time()
        streams = [stage.stream(500) for _ in range(3 * MAX_NUM_SEQS)]
        answers: list[bytes] = []
        readers = [threading.Thread(target=lambda s=s: answers.append(s.getresponse().read())) for s in streams]
        for reader in readers:
            reader.start()
        assert wait_until(lambda: metric(stage, "num_requests_waiting") >= MAX_NUM_SEQS, 10)
        assert metric(stage, "num_requests_running") == MAX_NUM_SEQS
        for reader in readers:
            reader.join()
        answered_at = time.time()
        assert len(answers) == len(streams), "every one of them was answered in the end"
        assert all(answer.rstrip().endswith(b"[DONE]") and b'"completion_tokens":500' in answer for answer in answers)
        beats = [beat for beat in stage.beats(asked_at) if beat["running"] > MAX_NUM_SEQS]
        assert moment(beats[-1]) - moment(beats[0]) > 5, "or nobody waited for longer than `stall`"
        assert {beat["activity"] for beat in beats} == {"busy"}
        line = end_of(stage, 20)
        assert line["reason"] == "idle"
        assert 3 <= moment(line) - answered_at < 3 + 6


@story
def a_client_that_hangs_up_was_there_until_then_and_not_longer(watch: Watch, bucket: str) -> None:
    """Clients leave in the middle of streams, and before their first token. vLLM counts no such request as ended."""
    with staged(VllmStage(watch, bucket, limits={"idle": "8s"})) as stage:
        stage.start_ready()
        _read_slowly(stage)
        ended_before = metric(stage, "request_success_total")
        for events_read in (100, 100, 0):
            streams = [stage.stream(CONTEXT - 200) for _ in range(3)]
            assert wait_until(lambda: last_beat(stage)["running"] == 3, 10)
            for stream in streams:
                read_events(stream, events_read) if events_read else None
                stream.close()
            left_at = time.time()
            assert wait_until(lambda: metric(stage, "num_requests_running") == 0, 5)
            assert wait_until(lambda: is_quiet(stage) and last_beat(stage)["running"] == 0, 5), last_beat(stage)
        assert metric(stage, "request_success_total") == ended_before
        line = end_of(stage, 25)
        assert line["reason"] == "idle"
        assert 8 <= moment(line) - left_at < 8 + 6


def _read_slowly(stage: VllmStage) -> None:
    """vLLM computes at its own pace and keeps the answer: for the keeper such a client is gone before it has read it."""
    response = stage.stream(1500).getresponse()
    lines_read = 0
    assert wait_until(lambda: last_beat(stage)["running"] == 1, 5)
    until = time.monotonic() + 60
    while metric(stage, "num_requests_running") and time.monotonic() < until:
        lines_read += bool(response.readline())
        time.sleep(0.1)
    assert wait_until(lambda: is_quiet(stage), 3)
    rest = response.read()
    assert b'"completion_tokens":1500' in rest
    assert lines_read < rest.count(b"data:") / 2, "it had read little of what was computed"


@story
def a_stream_that_never_ends_is_busy_and_ends_at_the_hard_cap(watch: Watch, bucket: str) -> None:
    """One client reads as fast as it can and asks again at once, one reads four events a second of a stream that is as
    long as the model's context; they begin 15 s before the cap, to leave the machine to the other tests until then."""
    for duration_s in (60, 180):  # the second for a machine that is not ready within the first
        limits = {"duration": f"{duration_s}s", "idle": "2m", "unused": "4m"}
        with staged(VllmStage(watch, bucket, limits=limits)) as stage:
            started = stage.start()
            if started.wait(200) != 0 and ended(stage).get("reason") == "hard-cap":
                continue
            assert stage.wait_ready(10), stage.told(started)
            cap_utc = last_beat(stage)["cap_utc"]
            time.sleep(max(0.0, cap_utc - time.time() - 15))
            _stream_until(stage, cap_utc)
            return
    raise AssertionError(f"not ready within {duration_s} s")


def _stream_until(stage: VllmStage, cap_utc: float) -> None:
    over = threading.Event()

    def greedy() -> None:
        with suppress(OSError, http.client.HTTPException, AssertionError):
            while not over.is_set():
                read_events(stage.stream(1000), 2000)

    def slow() -> None:
        with suppress(OSError, http.client.HTTPException):
            response = stage.stream(CONTEXT - 200).getresponse()
            while response.readline() and not over.wait(0.25):
                pass

    asked_at = time.time()
    clients = [threading.Thread(target=client) for client in (greedy, slow)]
    for client in clients:
        client.start()
    assert wait_until(lambda: bool(last_beat(stage)["activity"] == "busy"), 5)
    line = end_of(stage, cap_utc - time.time() + 15)
    over.set()
    for client in clients:
        client.join(20)
        assert not client.is_alive(), "the end of the session must end its clients' streams"
    beats = [beat for beat in stage.beats(asked_at + 1) if beat["kind"] == "beat"]
    assert {beat["activity"] for beat in beats} == {"busy"}, "busy to the end"
    assert line["reason"] == "hard-cap"
    assert -0.5 < moment(line) - cap_utc < 8, "3 s of grace for the engine, and the tick"


@story
def two_benches_of_one_session_are_compared_by_what_differs(watch: Watch, bucket: str) -> None:
    """`bench`, `restart --set max-num-seqs=1`, `bench`, `bench --compare`, and the lines that `connect` prints."""
    with staged(VllmStage(watch, bucket, limits={"idle": "60s"})) as stage:
        stage.start_ready()
        _connect_as_printed(stage)
        options = ("--rounds", "2", "--concurrent", "4", "--max-tokens", "96")
        first = stage.ask("bench", "cell", *options, "--label", "eight")
        assert [(one["at_once"], one["requests"], one["errors"]) for one in first["passes"]] == [(1, 2, 0), (4, 8, 0)]
        assert [one["completion_tokens"] for one in first["passes"]] == [2 * 96, 8 * 96]
        assert (first["engine_version"], first["stand_in"], first["model"]) == ("0.32.0", False, "mini-kimi")
        assert stage.run("restart", "cell", "--set", "max-num-seqs=1", within_s=200)[0] == 0
        second = stage.ask("bench", "cell", *options, "--label", "one")
        assert second["flags"].endswith("restarted with --max-num-seqs 1")
        listed = stage.ask("bench", "--list")
        assert [(one["bench"], one["label"]) for one in listed] == [(1, "eight"), (2, "one")]
        compared = stage.ask("bench", "--compare", "eight", "2")
        ratios = {(line["at_once"], line["name"]): line["ratio"] for line in compared["lines"]}
        # One after the other instead of four at a time: three of four wait, so the first token comes much later.
        assert ratios[4, "TTFT ms, mean"] > 2
        assert ratios[4, "completion tokens"] == 1
        by_hand = second["passes"][1]["output_tokens_per_s"] / first["passes"][1]["output_tokens_per_s"]
        assert abs(ratios[4, "output tok/s"] - by_hand) < 1e-9
        code, text = stage.run("bench", "--compare", "1", "2")
        assert code == 0, text
        differing = re.findall(r"^\s*(\w+) DIFFERS", text, re.MULTILINE)
        assert differing == ["flags"], text
        assert stage.run("stop", "cell")[0] == 0
        nothing_left(stage)


def _connect_as_printed(stage: VllmStage) -> None:
    """The curl line of `connect`, with `--thinking off` and without it, does what it says when it is sent."""
    exports = stage.out(_done(stage, "connect", "cell", "--export"))
    key = re.findall(r"^export OPENAI_API_KEY=(\S+)$", exports, re.MULTILINE)[0]
    for words, thought in ((("--thinking", "off"), None), ((), THOUGHT)):
        text = stage.out(_done(stage, "connect", "cell", *words))
        curl = re.findall(r"curl +(curl .*\\\n.*)$", text, re.MULTILINE)[0]
        line = shlex.split(curl)
        url, body = urlsplit(line[1]), line[line.index("-d") + 1]
        connection = http.client.HTTPConnection(url.netloc, timeout=60)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", url.path, body, headers)
        message = json.loads(connection.getresponse().read())["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (thought, ANSWER), words


def _done(stage: VllmStage, *words: str) -> Any:
    command = stage.command(*words)
    assert command.wait(60) == 0, stage.told(command)
    return command


@story
def with_all_guards_dead_and_no_control_group_the_next_command_ends_it(watch: Watch, bucket: str) -> None:
    """The kernel ends the API server. EngineCore does not notice, and has written its title over its environment, mark
    and all: it is found by the engine's session."""
    with staged(VllmStage(watch, bucket)) as stage:
        stage.start_ready()
        core = stage.process("core")
        assert core is not None
        mark = b"KIMISESSION_MACHINE=" + stage.machine.name.encode()
        assert mark not in Path(f"/proc/{core.pid}/environ").read_bytes(), "then the mark would do"
        _leave_control_group(stage)
        guards = [stage.process(role) for role in ("supervisor", "wrapper", "keeper")]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none acts on the death of another
            for guard in guards:
                assert guard is not None
                signal_exactly(guard, number)
        assert wait_until(lambda: stage.process("api") is None, 5), "the kernel ends what the keeper started"
        assert same(core), "vLLM's own EngineCore outlives its API server"
        assert stage.reason() == "unguarded"
        assert wait_until(lambda: look(core.pid) is None, 5)
        assert wait_until(lambda: stage.nothing_runs(time.time() - 1) is not None, 5)


def _leave_control_group(stage: VllmStage) -> None:
    """As for a user who may make none."""
    record = stage.machine / "run" / "cgroup"
    group = Path(record.read_text().strip() or "/")
    if group != Path("/"):
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        os.rmdir(group)  # noqa: PTH106 - a control group's files stay
        record.write_text("")
