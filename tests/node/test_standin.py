"""The stand-in engine, run as the real file in a real process, over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kimisession.node.phases import PHASES, Mark, log_reader
from kimisession.node.traffic import Counters, read_metrics

ROOT = Path(__file__).parents[2]
KEY = "a-key-for-tests"
INSTANT = ",".join(f"{phase}=0" for phase in PHASES)
DEADLINE_S = 15.0


def python39() -> str | None:
    """A Python 3.9 that runs: the node's oldest."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob("3.9.*/bin/python3.9"))
    for candidate in (*map(str, pyenv), shutil.which("python3.9")):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def wait_for(what: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """The first truthy answer of `what`; fails the test when none comes in time."""
    until = time.monotonic() + deadline_s
    while not (answer := what()):
        assert time.monotonic() < until, "nothing came in time"
        time.sleep(0.01)
    return answer


class Engine:
    """A stand-in in a process, its log read as it comes."""

    def __init__(self, model: Path, *flags: str, python: str = sys.executable, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [python, "-m", "kimisession.node.standin", "--model", str(model), "--port", str(port), *flags],
            cwd=ROOT,
            env={**os.environ, "VLLM_API_KEY": KEY},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.log = bytearray()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while part := self.process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            self.log += part

    @property
    def text(self) -> str:
        return self.log.decode()

    @property
    def marks(self) -> list[Mark]:
        reader = log_reader("vllm")
        return [mark for line in self.text.split("\n") if (mark := reader.read(line)) is not None]

    def exit_code(self) -> int:
        """Wait for the end of the process and of its log."""
        code = self.process.wait(DEADLINE_S)
        self._reading.join(DEADLINE_S)
        return code

    def find(self, pattern: str) -> str:
        """Wait until the log has the pattern; return its first group, or all of it."""
        found = wait_for(lambda: re.search(pattern, self.text) or self.process.poll() is not None)
        found = re.search(pattern, self.text) if found is True else found
        assert found, f"ended without saying {pattern!r}:\n{self.text[-2000:]}"
        return str(found.group(found.lastindex or 0))

    @property
    def port(self) -> int:
        """The port, once the server is open."""
        self.find("Application startup complete")
        return int(self.find(r"Starting vLLM server on http://127\.0\.0\.1:(\d+)"))

    @property
    def reach(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def ask(self, path: str, body: object = None, key: str | None = KEY) -> tuple[int, Any, http.client.HTTPMessage]:
        """One request on a connection of its own: status, JSON or text, headers."""
        connection = http.client.HTTPConnection(*self.reach, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request(
                "GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers
            )
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.headers["Content-Type"] == "application/json"
            return response.status, json.loads(text) if is_json else text, response.headers

    def chat(self, **more: Any) -> dict[str, Any]:
        status, answer, _ = self.ask("/v1/chat/completions", chat(**more))
        assert status == 200, answer
        return dict(answer)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a streamed answer but the last, which must say that it is the last."""
        status, text, _ = self.ask(path, {**body, "stream": True})
        assert status == 200, text
        *events, done = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    def counters(self) -> Counters:
        return read_metrics("vllm", self.ask("/metrics", key=None)[1])


def chat(content: str = "hello there", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


Start = Callable[..., Engine]


def model_folder(folder: Path, shards: int) -> Path:
    """A folder that looks like weights: shards of a few bytes, and their index."""
    folder.mkdir()
    names = [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    for name in names:
        (folder / name).write_bytes(b"0123456789abcdef")
    index = {"weight_map": {f"layer.{n}": name for n, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("weights") / "mini", shards=5)


@contextlib.contextmanager
def started(model: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def start(*flags: str, python: str = sys.executable, instant: bool = True) -> Engine:
        speed = ("--phase-seconds", INSTANT) if instant else ()
        engines.append(Engine(model, *speed, *flags, python=python))
        return engines[-1]

    try:
        yield start
    finally:
        for engine in engines:
            engine.process.kill()
            engine.exit_code()


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    with started(model) as start:
        yield start


@pytest.fixture(scope="module", params=["this python", "python 3.9"])
def served(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    """A ready engine for tests that only ask, on this Python and on the node's oldest."""
    python = sys.executable if request.param == "this python" else python39()
    if python is None:
        pytest.skip("no Python 3.9 here: the node's oldest Python is not tested")
    with started(model) as start:
        yield start(
            *("--served-model-name", "kimi-k2.5", "--max-model-len", "512", "--tokens-per-second", "2000"),
            *("--ttft-s", "0", "--trust-remote-code", "--tensor-parallel-size", "8"),
            python=python,
        )


# -- the cold start ----------------------------------------------------------------------------------------------------


def test_the_log_of_a_cold_start_reads_as_every_phase_in_order(start: Start) -> None:
    engine = start("--max-model-len", "4096")
    assert engine.port
    marks = engine.marks
    assert list(dict.fromkeys(mark.phase for mark in marks)) == list(PHASES)
    shards = [(mark.done, mark.total) for mark in marks if mark.unit == "shards"]
    assert shards == [(n, 5) for n in range(6)]
    assert [mark.done for mark in marks if mark.unit == "graphs"][-1] == 11
    facts = {name: value for mark in marks for name, value in mark.facts.items()}
    assert {"max_model_len": "4096", "kv_tokens": "16384", "weights_gib": "0.00"}.items() <= facts.items()


def test_phases_take_the_seconds_they_are_given(start: Start) -> None:
    engine = start("--phase-seconds", "boot=0,load=1,compile=0,memory=0,graphs=0,serve=0", instant=False)
    engine.find("Starting to load model")
    begun = time.monotonic()
    engine.find("init engine")
    assert 0.5 < time.monotonic() - begun < 3


def test_the_port_refuses_connections_until_the_server_starts(start: Start) -> None:
    port = free_port()
    engine = start("--port", str(port), "--fault", "hang@serve")
    engine.find("init engine")
    assert not listens(port)


def test_a_port_in_use_is_said_before_anything_is_loaded(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        engine = start("--port", str(taken.getsockname()[1]))
        assert engine.exit_code() == 1
    assert "Address already in use" in engine.text
    assert "Starting to load" not in engine.text


@pytest.mark.parametrize("gone", ["model.safetensors.index.json", "model-00002-of-00003.safetensors"])
def test_a_folder_without_all_its_weights_is_refused(tmp_path: Path, gone: str) -> None:
    folder = model_folder(tmp_path / "broken", shards=3)
    (folder / gone).unlink()
    engine = Engine(folder)
    assert engine.exit_code() == 1
    assert gone in engine.text
    assert "Traceback" not in engine.text


@pytest.mark.parametrize(
    "flags", [("--swap-spice", "4"), ("--api-key", "x"), ("--fault", "gremlins"), ("--fault", "crash")]
)
def test_an_unknown_flag_or_fault_is_refused_as_argparse_does(start: Start, flags: Sequence[str]) -> None:
    engine = start(*flags)
    assert engine.exit_code() == 2
    assert "error:" in engine.text


def test_sigterm_ends_it_within_a_second_with_exit_code_zero_even_while_loading(start: Start) -> None:
    loading = start("--phase-seconds", "boot=0,load=60", instant=False)
    serving = start("--workers", "2")
    loading.find("Starting to load model")
    assert serving.port
    for engine in (loading, serving):
        begun = time.monotonic()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.exit_code() == 0
        assert time.monotonic() - begun < 1
        assert "Traceback" not in engine.text


# -- answers -----------------------------------------------------------------------------------------------------------


def test_without_the_key_only_health_and_metrics_answer(served: Engine) -> None:
    for path, status in (("/health", 200), ("/metrics", 200), ("/v1/models", 401)):
        assert served.ask(path, key=None)[0] == status
    for key in (None, "wrong"):
        assert served.ask("/v1/chat/completions", chat(), key=key)[:2] == (401, {"error": "Unauthorized"})


def test_everything_says_that_it_is_a_stand_in(served: Engine) -> None:
    _, models, headers = served.ask("/v1/models")
    assert [card["id"] for card in models["data"]] == ["kimi-k2.5-stand-in"]
    assert models["data"][0]["max_model_len"] == 512
    assert headers["X-Kimisession-Stand-In"] == "1"
    answer = served.chat()
    assert answer["model"] == "kimi-k2.5-stand-in"
    assert answer["system_fingerprint"] == "stand-in"
    assert "no model was run" in answer["choices"][0]["message"]["content"]
    assert 'model_name="kimi-k2.5-stand-in"' in served.ask("/metrics")[1]


def test_an_answer_is_the_same_every_time(served: Engine) -> None:
    assert served.chat()["choices"] == served.chat()["choices"]


def test_reasoning_comes_first_and_content_is_null_when_the_budget_ends_inside_it(served: Engine) -> None:
    answer = served.chat(max_tokens=5)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] != ""
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}


def test_thinking_can_be_switched_off_for_a_request(served: Engine) -> None:
    (choice,) = served.chat(chat_template_kwargs={"thinking": False})["choices"]
    assert choice["message"]["reasoning"] is None
    assert choice["message"]["content"].startswith("This answer comes from kimisession's stand-in engine")
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("max_tokens", [1, 24, 25, 30, 300])
def test_usage_counts_exactly_the_deltas_that_a_stream_carries(served: Engine, max_tokens: int) -> None:
    asked = chat(max_tokens=max_tokens, stream_options={"include_usage": True})
    *chunks, usage = served.stream("/v1/chat/completions", asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    pieces = [delta.get("reasoning") or delta.get("content") for delta in deltas[1:]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(pieces)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(pieces) == min(max_tokens, 35)
    whole = served.chat(max_tokens=max_tokens)
    message = whole["choices"][0]["message"]
    assert "".join(pieces) == (message["reasoning"] or "") + (message["content"] or "")
    assert whole["usage"] == usage["usage"]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["length" if max_tokens < 35 else "stop"]


def test_ignore_eos_runs_to_the_budget_and_min_tokens_to_the_minimum(served: Engine) -> None:
    assert served.chat(max_tokens=100, ignore_eos=True)["usage"]["completion_tokens"] == 100
    assert served.chat(max_tokens=100, min_tokens=60)["usage"]["completion_tokens"] == 60


def test_a_plain_completion_has_text_and_no_reasoning(served: Engine) -> None:
    _, answer, _ = served.ask("/v1/completions", {"prompt": "once upon a time", "max_tokens": 4})
    assert answer["choices"][0]["text"] == "This answer comes from"
    assert answer["usage"]["prompt_tokens"] == 4
    chunks = served.stream("/v1/completions", {"prompt": "once upon a time", "max_tokens": 4})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "This answer comes from"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", chat(model="gpt-5"), 404, "The model `gpt-5` does not exist."),
        ("/v1/chat/completions", {"prompt": "no messages"}, 400, "messages"),
        ("/v1/chat/completions", [], 400, "messages"),
        ("/v1/chat/completions", {"messages": "hi"}, 400, ""),
        ("/v1/completions", chat(), 400, "prompt"),
        ("/v1/chat/completions", chat(max_tokens=0.5), 400, "max_tokens must be"),
        ("/v1/chat/completions", chat(max_tokens=511), 400, "maximum context length is 512 tokens"),
        ("/v1/chat/completions", chat("word " * 600), 400, "maximum context length is 512 tokens"),
        ("/v1/chat/completions", chat(n=2), 400, "n=1"),
        ("/v1/nothing", None, 404, "Not Found"),
        ("/v1/chat/completions", None, 405, "Method Not Allowed"),
    ],
)
def test_a_wrong_request_gets_vllms_status_and_a_reason(
    served: Engine, path: str, body: object, status: int, says: str
) -> None:
    got, answer, _ = served.ask(path, body)
    assert got == status
    assert says in json.dumps(answer)


def test_one_connection_serves_many_requests(served: Engine) -> None:
    connection = http.client.HTTPConnection(*served.reach, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        for body in (chat(stream=True, max_tokens=3), chat(max_tokens=3), chat(model="no"), chat(stream=True)):
            headers = {"Authorization": f"Bearer {KEY}"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.read()
            assert response.headers["Connection"] == "keep-alive"


# -- traffic -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_stream(engine: Engine, max_tokens: int) -> Iterator[socket.socket]:
    """A stream that has sent its request; closing it is hanging up."""
    body = json.dumps(chat(max_tokens=max_tokens, ignore_eos=True, stream=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(engine.reach, timeout=DEADLINE_S) as connection:
        connection.sendall(head.encode() + body)
        yield connection


def test_metrics_follow_requests_that_run_wait_finish_and_are_abandoned(start: Start) -> None:
    engine = start("--max-num-seqs", "2", "--tokens-per-second", "100", "--ttft-s", "0")
    assert engine.counters() == Counters(0, 0, 0, 0, 0, 0, 0)
    assert engine.chat(max_tokens=5)["usage"]["completion_tokens"] == 5
    with open_stream(engine, 4000), open_stream(engine, 4000), open_stream(engine, 4000):
        wait_for(lambda: (now := engine.counters()).running == 2 and now.waiting == 1)
        before = engine.counters().generation_tokens
        wait_for(lambda: engine.counters().generation_tokens > before)
        assert (engine.counters().kv_usage or 0) > 0
    after = wait_for(lambda: (now := engine.counters()).aborted == 3 and now)
    assert (after.running, after.waiting, after.finished, after.kv_usage) == (0, 0, 1, 0)
    assert engine.chat(max_tokens=5)["usage"]["completion_tokens"] == 5, "the slots are free again"


def test_a_client_that_hangs_up_before_a_whole_answer_aborts_it(start: Start) -> None:
    engine = start("--tokens-per-second", "1")
    connection = http.client.HTTPConnection(*engine.reach, timeout=DEADLINE_S)
    connection.request("POST", "/v1/chat/completions", json.dumps(chat()), {"Authorization": f"Bearer {KEY}"})
    wait_for(lambda: engine.counters().running == 1)
    connection.close()
    wait_for(lambda: engine.counters().aborted == 1)


def test_sixty_four_streams_at_once_each_keep_the_pace(start: Start) -> None:
    engine = start("--tokens-per-second", "50", "--ttft-s", "0.1", "--reasoning-tokens", "0")
    address = engine.reach

    def follow(drifts_s: list[float]) -> None:
        connection = http.client.HTTPConnection(*address, timeout=DEADLINE_S)
        body = json.dumps(chat(max_tokens=76, ignore_eos=True, stream=True))
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}"})
        texts = (line for line in connection.getresponse() if b'"content": "' in line and b"role" not in line)
        late = [time.monotonic() - i / 50 for i, _ in enumerate(texts)]
        # A busy machine delays single tokens; only a pace that is off shifts the least late of ten.
        drifts_s.append(min(late[-10:]) - min(late[:10]))

    allowed_s = 0.02 * 75 / 50
    for _ in range(3):  # a pace that is off is off each time, a machine that is busy elsewhere is not
        drifts_s: list[float] = []
        clients = [threading.Thread(target=follow, args=(drifts_s,)) for _ in range(64)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(DEADLINE_S)
        assert len(drifts_s) == 64
        worst_s = max(map(abs, drifts_s))
        if worst_s < allowed_s:
            break
    assert worst_s < allowed_s, "within 2% of the pace asked for"


def test_a_reader_of_the_log_that_goes_away_changes_nothing(model: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "kimisession.node.standin", "--model", str(model), "--port", str(port)]
    ours, theirs = os.pipe()
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        assert os.read(ours, 1)
        os.close(ours)
        wait_for(lambda: process.poll() is not None or listens(port))
        assert process.poll() is None
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


def test_a_long_prompt_from_curl_waits_for_a_hundred_continue(served: Engine) -> None:
    body = json.dumps(chat("word " * 300, max_tokens=1)).encode()
    head = f"POST /v1/chat/completions?x=1 HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nExpect: 100-continue\r\n"
    with socket.create_connection(served.reach, timeout=DEADLINE_S) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(body)
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("page", sorted((ROOT / "tests/fixtures/metrics").glob("vllm*")), ids=lambda page: page.name)
def test_every_metric_has_a_name_and_a_type_of_the_real_vllm(served: Engine, page: Path) -> None:
    def types(text: str) -> set[str]:
        return {line for line in text.splitlines() if line.startswith("# TYPE vllm:")}

    assert types(served.ask("/metrics")[1]) <= types(page.read_text())


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "phase", "texts"),
    [
        ("cuda-init", "boot", ["RuntimeError: The NVIDIA driver on your system is too old"]),
        (
            "ptx",
            "load",
            [
                "PTX JIT compilation failed",
                "RuntimeError: PTX compilation failed",
                "CompressedTensorsWNA16MarlinMoEMethod",
            ],
        ),
        ("gib", "memory", ["ncclInternalError: Internal check failed.", "Failed to initialize any NET plugin"]),
        ("oom-sampler", "memory", ["CUDA out of memory occurred when warming up sampler with 1024 dummy requests."]),
        (
            "no-kv",
            "memory",
            ["Available KV cache memory: -3.32 GiB", "ValueError: No available memory for the cache blocks."],
        ),
        (
            "kv-too-small",
            "memory",
            [
                "To serve at least one request with max seq len (16384), 1.07 GiB KV cache is needed.",
                "Estimated maximum model length is 9664.",
            ],
        ),
        *((f"crash@{phase}", phase, ["Engine core initialization failed"]) for phase in PHASES),
    ],
)
def test_a_failing_start_says_the_literal_words_in_its_phase_and_exits_with_one(
    start: Start, fault: str, phase: str, texts: Sequence[str]
) -> None:
    engine = start("--fault", fault)
    assert engine.exit_code() == 1
    for text in texts:
        assert text in engine.text
    assert "Traceback (most recent call last):" in engine.text
    assert engine.marks[-1].phase == phase
    assert "Application startup complete" not in engine.text


@pytest.mark.parametrize(("fault", "last"), [("hang@load", "load"), ("gib-hang", "memory")])
def test_a_hanging_start_lives_on_in_silence(start: Start, fault: str, last: str) -> None:
    engine = start("--fault", fault)
    wait_for(lambda: engine.marks and engine.marks[-1].phase == last)
    said = engine.text
    with pytest.raises(subprocess.TimeoutExpired):
        engine.process.wait(0.5)
    assert engine.marks[-1].phase == last
    assert len(engine.text) - len(said) < 1000, "silence, but for what was under way"


def test_a_stalled_engine_runs_requests_that_get_no_tokens(start: Start) -> None:
    engine = start("--fault", "stall", "--tokens-per-second", "1000", "--ttft-s", "0")
    assert engine.chat(max_tokens=4)["usage"]["completion_tokens"] == 4, "the first completion still comes"
    with open_stream(engine, 50):
        wait_for(lambda: engine.counters().running == 1)
        assert engine.counters().generation_tokens == 4
        assert engine.ask("/health")[0] == 200
    wait_for(lambda: engine.counters().aborted == 1)


def test_an_engine_that_dies_while_serving_exits_with_one(start: Start) -> None:
    engine = start("--fault", "die-after=0.2")
    assert engine.port
    assert engine.exit_code() == 1
    assert "EngineCore encountered a fatal error." in engine.text


def test_broken_and_slow_metrics_leave_the_rest_alone(start: Start) -> None:
    broken, slow = start("--fault", "metrics-500"), start("--fault", "slow-metrics=0.3")
    assert broken.ask("/metrics")[0] == 500
    assert broken.chat(max_tokens=2)["usage"]["completion_tokens"] == 2
    assert slow.port
    begun = time.monotonic()
    assert slow.counters().running == 0
    assert time.monotonic() - begun > 0.29


def test_a_flood_of_log_does_not_keep_it_from_starting(start: Start) -> None:
    engine = start("--fault", "flood-log")
    assert engine.port
    assert len(engine.log) > 9_000_000
    assert engine.marks[-1].phase == "serve"


def test_a_deaf_engine_ignores_sigterm(start: Start) -> None:
    engine = start("--fault", "deaf")
    assert engine.port
    engine.process.send_signal(signal.SIGTERM)
    assert engine.ask("/health")[0] == 200


def test_an_orphan_has_its_own_session_no_environment_and_no_descriptors(start: Start) -> None:
    engine = start("--fault", "orphan")
    pid = int(engine.find(r"orphan pid=(\d+)"))
    try:
        wait_for(lambda: b"kimisession-stand-in-orphan" in Path(f"/proc/{pid}/cmdline").read_bytes())
        proc = Path(f"/proc/{pid}")
        assert (proc / "environ").read_bytes() == b""
        wait_for(lambda: not list((proc / "fd").iterdir()))  # a Python that begins reads its own files first
        assert os.getsid(pid) != os.getsid(engine.process.pid)
        engine.process.kill()
        engine.exit_code()
        assert alive(pid), "nothing but a wrapper ends it"
    finally:
        os.kill(pid, signal.SIGKILL)


def test_workers_end_with_the_engine_however_it_ends_and_take_it_with_them(start: Start) -> None:
    killed, bereft = start("--workers", "2"), start("--workers", "2")
    assert killed.port
    workers = children(killed.process.pid)
    assert len(workers) == 2
    killed.process.kill()
    wait_for(lambda: not any(map(alive, workers)))
    assert bereft.port
    os.kill(children(bereft.process.pid)[0], signal.SIGKILL)
    assert bereft.exit_code() == 1


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and waits for its parent does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
