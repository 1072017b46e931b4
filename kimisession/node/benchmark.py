"""Measure a served model: latency, tokens per second, time to first token, inter-token latency. Runs alone on a machine.

    OPENAI_API_KEY=... python3 benchmark.py --base-url http://127.0.0.1:8000 --rounds 3 --concurrent 2

Standard library only, Python 3.9 or later, and no other file of ours: scripts/benchmark.py is this file. The key comes
from the environment (OPENAI_API_KEY or VLLM_API_KEY), never from the command line.

After one request that is not counted, passes follow: one request at a time (`rounds` of them), then for each
`--concurrent N` N clients that ask `rounds` questions each, one after the other: `rounds` x N requests, N of them
always under way until the last ones end, as `vllm bench serve --max-concurrency N` keeps them. Definitions, those of
`vllm bench serve` where it has the figure:

    latency             from sending a request to the last event of its stream that carries a choice
    TTFT                from sending a request to the first event that carries text, thought or said. vLLM's tool takes
                        the first event at all: one token earlier where the first one is an unseen `<think>`
    tok/s per request   completion tokens / latency: the figure of the public write-up of February 2026
    output tok/s        completion tokens of all requests / duration; the duration is from the first request sent to
                        the end of the last one
    s per request       duration / requests: at one at a time the latency; the write-up's 0.59 s at two at once
    TPOT                (latency - TTFT) / (completion tokens - 1), of requests with more than one token
    ITL                 gaps between successive events that carry text; a server may put several tokens in one event
    percentiles         linear between the nearest ranks, as numpy's

Tokens are what the server counts in its usage, reasoning included. A request without tokens has no rate and one that
failed has no figures at all: it is counted under errors. Null content (all tokens went into thinking) is counted, and
is no error.

Arrivals are only noted while a pass runs and are read after it, so that reading one answer never delays the clock of
another: some 300 bytes a token are kept until then. Exit codes: 0 ok, 1 an endpoint that does not answer or a request
that failed, 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Callable
from urllib.parse import urlsplit

QUESTION = "Explain step by step, in as much detail as you can, how a mixture of experts answers a question."

#: (requests at once, answered so far, requests of this pass); at once 0 is the request that is not counted.
Told = Callable[[int, int, int], None]


class NoAnswer(Exception):
    """The endpoint did not answer as an OpenAI-compatible server does. One sentence."""


@dataclass(frozen=True)
class Endpoint:
    """Where a model is served: `base_url` with or without /v1. No redirect is followed and no proxy of the environment
    used: the key goes to this origin and nowhere else. `timeout_s` is how long it may stay silent."""

    base_url: str
    key: str = field(default="", repr=False)
    timeout_s: float = 600.0

    def connect(self) -> http.client.HTTPConnection:
        """A new connection, open. Raises OSError; ValueError for what is no http(s) URL."""
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.base_url!r} is not a URL like http://127.0.0.1:8000")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.timeout_s)
        connection.connect()
        return connection

    def send(self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> None:
        """Send one request, path like /v1/models. Raises OSError or http.client.HTTPException."""
        prefix = urlsplit(self.base_url).path.rstrip("/")
        prefix = prefix[: -len("/v1")] if prefix.endswith("/v1") else prefix
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = "Bearer " + self.key
        connection.request(method, prefix + path, body, headers)

    def json(self, method: str, path: str, body: object = None) -> Any:
        """One whole exchange. Raises NoAnswer for anything but 200 with JSON in it."""
        try:
            connection = self.connect()
            try:
                self.send(connection, method, path, None if body is None else json.dumps(body).encode())
                response = connection.getresponse()
                text = response.read()
            finally:
                connection.close()
            if response.status == 200:
                return json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswer(f"{self.base_url} does not answer {path}: {error or type(error).__name__}") from None
        raise NoAnswer(
            f"{self.base_url} answered {path} with {response.status}: {text[:200].decode('utf-8', 'replace')}"
        )

    def first_model(self) -> str:
        """The name of the first model that is served. Raises NoAnswer."""
        try:
            return str(self.json("GET", "/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise NoAnswer(f"{self.base_url} does not say which model it serves: {error!r}") from None


def thinking_switch(thinking: bool | None) -> dict[str, Any]:
    """What a request carries to switch thinking on or off; None leaves it to the model's chat template.

    Kimi's and DeepSeek's templates call it `thinking`, GLM's and Qwen's `enable_thinking`; a template ignores what it
    does not know.
    """
    return {} if thinking is None else {"chat_template_kwargs": {"thinking": thinking, "enable_thinking": thinking}}


@dataclass(frozen=True)
class Load:
    """What is asked for. `ignore_eos` goes on past the end of the model's turn up to max_tokens (vLLM only)."""

    rounds: int = 3
    concurrent: tuple[int, ...] = (2,)
    max_tokens: int = 128
    thinking: bool | None = None
    ignore_eos: bool = False
    question: str = QUESTION

    @property
    def passes(self) -> tuple[int, ...]:
        """How many at once, pass by pass: always one at a time first, and nothing twice."""
        return tuple(dict.fromkeys((1, *self.concurrent)))

    def body(self, model: str, number: str) -> bytes:
        """The JSON of one request. `number` comes first and in no other request: the prefix cache keeps blocks of 16
        tokens and more, and would else answer for the prefill."""
        return json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": f"({number}) {self.question}"}],
                "max_tokens": self.max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                **({"ignore_eos": True} if self.ignore_eos else {}),
                **thinking_switch(self.thinking),
            }
        ).encode()


@dataclass(frozen=True)
class Arrivals:
    """One request as it was seen on the wire. Moments in seconds of the monotonic clock; `parts` are the pieces of its
    body, each with the moment at which it came. `failure` is empty or one sentence."""

    began: float
    ended: float
    parts: tuple[tuple[float, bytes], ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class Sample:
    """One request, read. Durations in seconds; the token counts are the server's own. With a `failure` nothing else
    holds; `ttft_s` is None for an answer without any text."""

    ended: float
    failure: str = ""
    latency_s: float = 0.0
    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    null_content: bool = False

    @property
    def tokens_per_s(self) -> float | None:
        """Completion tokens / latency; None without tokens."""
        return self.completion_tokens / self.latency_s if self.completion_tokens and self.latency_s else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None where there is no second one."""
        if self.ttft_s is None or self.completion_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.completion_tokens - 1)


def ask(endpoint: Endpoint, body: bytes) -> Arrivals:
    """Send one request on a connection of its own, opened before the clock starts, and note what comes when. Never
    raises for what the endpoint does: that is its `failure`."""
    began, parts = time.perf_counter(), []
    connection = None
    try:
        connection = endpoint.connect()
        began = time.perf_counter()
        endpoint.send(connection, "POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        while part := response.read1(1 << 16):
            parts.append((time.perf_counter(), part))
        failure = ""
        if response.status != 200:
            text = b"".join(part for _, part in parts)[:200].decode("utf-8", "replace")
            failure = f"the endpoint answered {response.status}: {text}"
    except Exception as error:  # whatever it is, it is this request's end and not the end of its client
        failure = f"the endpoint does not answer: {error or type(error).__name__}"
    finally:
        if connection is not None:
            connection.close()
    return Arrivals(began, time.perf_counter(), tuple(parts), failure)


def events(parts: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(moment, data) of each server-sent event; the moment is that of the part which completed its line."""
    rest = b""
    for at, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[len(b"data:") :].strip()


def read_sample(seen: Arrivals) -> Sample:
    """Read one request's stream. A stream that breaks off, tells an error or counts no tokens has a `failure`."""
    if seen.failure:
        return Sample(seen.ended, seen.failure)
    try:
        return _read(seen)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return Sample(seen.ended, f"the stream has not the shape of a chat completion: {error!r}")


def _read(seen: Arrivals) -> Sample:
    usage: Mapping[str, Any] = {}
    spoken: list[float] = []
    thoughts, said, done = 0, False, False
    last = seen.began
    for at, data in events(seen.parts):
        if data == b"[DONE]":
            done = True
            break
        event = json.loads(data)
        if "error" in event:
            return Sample(seen.ended, f"the stream told an error: {json.dumps(event['error'])[:200]}")
        usage = event.get("usage") or usage
        if not event.get("choices"):
            continue
        delta = event["choices"][0].get("delta") or {}
        # vLLM up to 0.15 calls the thinking `reasoning_content`, later `reasoning`.
        thought, content = delta.get("reasoning") or delta.get("reasoning_content"), delta.get("content")
        if thought or content or delta.get("tool_calls"):
            spoken.append(at)
        thoughts += bool(thought)
        said = said or bool(content)
        last = at
    if not done:
        return Sample(seen.ended, "the stream broke off before its end")
    if "completion_tokens" not in usage:
        return Sample(seen.ended, "the stream has no usage, so its tokens cannot be counted")
    counted = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return Sample(
        ended=last,
        latency_s=last - seen.began,
        ttft_s=spoken[0] - seen.began if spoken else None,
        gaps_s=tuple(after - before for before, after in zip(spoken, spoken[1:])),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage["completion_tokens"]),
        # vLLM before 0.20 or so does not count them apart; there an event with a thought in it is a token.
        reasoning_tokens=thoughts if counted is None else int(counted),
        null_content=not said,
    )


def ask_all(endpoint: Endpoint, bodies: Sequence[bytes], at_once: int, told: Told) -> tuple[Arrivals, ...]:
    """Ask every question, `at_once` at a time: as soon as one is answered, its client asks the next. `told` hears a
    few times a second how many were answered. Threads wait for the network at the same time; they are daemons, so that
    Ctrl-C does not wait for them."""
    left, seen = iter(bodies), []
    lock, over = threading.Lock(), threading.Event()

    def client() -> None:
        while True:
            with lock:
                body = next(left, None)
            if body is None:
                return
            arrived = ask(endpoint, body)
            with lock:
                seen.append(arrived)
                if len(seen) == len(bodies):
                    over.set()

    for _ in range(at_once):
        threading.Thread(target=client, daemon=True).start()
    while not over.wait(0.2):
        told(at_once, len(seen), len(bodies))
    told(at_once, len(seen), len(bodies))
    return tuple(seen)


def summarise(at_once: int, began: float, samples: Sequence[Sample]) -> dict[str, Any]:
    """The figures of one pass, ready for JSON; see the top of this file for what each means. Durations in seconds. None
    stands where there is nothing to compute a figure from."""
    good = [sample for sample in samples if not sample.failure]
    wall_s = max(sample.ended for sample in samples) - began
    rates = [sample.tokens_per_s for sample in good if sample.tokens_per_s is not None]
    tokens = sum(sample.completion_tokens for sample in good)
    return {
        "at_once": at_once,
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "first_error": next((sample.failure for sample in samples if sample.failure), None),
        "null_contents": sum(sample.null_content for sample in good),
        "wall_s": wall_s,
        "wall_per_request_s": wall_s / len(samples),
        "latency_s": spread([sample.latency_s for sample in good]),
        "tokens_per_s": spread(rates),
        "output_tokens_per_s": tokens / wall_s if tokens and wall_s > 0 else None,
        "ttft_s": spread([sample.ttft_s for sample in good if sample.ttft_s is not None]),
        "tpot_s": spread([sample.tpot_s for sample in good if sample.tpot_s is not None]),
        "itl_s": spread(list(itertools.chain.from_iterable(sample.gaps_s for sample in good))),
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "completion_tokens": tokens,
        "reasoning_tokens": sum(sample.reasoning_tokens for sample in good),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, least, most, median and 99th percentile; None without values."""
    if not values:
        return None
    mean = sum(values) / len(values)
    return {
        "mean": mean,
        "min": min(values),
        "max": max(values),
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile, linear between the two nearest ranks. `values` is not empty."""
    ranked = sorted(values)
    rank = (len(ranked) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (rank - below)


def no_news(at_once: int, answered: int, requests: int) -> None:
    """Tells nobody."""


def measure_pass(endpoint: Endpoint, bodies: Sequence[bytes], at_once: int, told: Told = no_news) -> dict[str, Any]:
    """Ask every question, `at_once` at a time, then read and summarise what came."""
    seen = ask_all(endpoint, bodies, at_once, told)
    return summarise(at_once, min(one.began for one in seen), [read_sample(one) for one in seen])


def measure(endpoint: Endpoint, model: str, load: Load, told: Told = no_news) -> dict[str, Any]:
    """Ask once without counting, then measure pass by pass. Returns what `summarise` makes of each pass, with what was
    asked; ready for JSON. Raises NoAnswer when the first request fails; later failures are counted."""
    run = secrets.token_hex(3)
    began_at = datetime.now(timezone.utc)
    version = engine_version(endpoint)
    told(0, 0, 1)
    first = read_sample(ask(endpoint, load.body(model, f"0-{run}")))
    if first.failure:
        raise NoAnswer(first.failure)
    passes = []
    numbers = itertools.count(1)
    for at_once in load.passes:
        bodies = [load.body(model, f"{next(numbers)}-{run}") for _ in range(load.rounds * at_once)]
        passes.append(measure_pass(endpoint, bodies, at_once, told))
    return {
        "began_at": began_at.isoformat(),
        "model": model,
        "engine_version": version,
        "rounds": load.rounds,
        "max_tokens": load.max_tokens,
        "thinking": load.thinking,
        "ignore_eos": load.ignore_eos,
        "passes": passes,
    }


def engine_version(endpoint: Endpoint) -> str | None:
    """What the server says of its own version at /version, as vLLM does; None where it says nothing."""
    try:
        return str(endpoint.json("GET", "/version")["version"])
    except (NoAnswer, KeyError, TypeError):
        return None


#: What people see, line by line: name, path into a pass, digits after the point, factor.
ROWS: tuple[tuple[str, tuple[str, ...], int, float], ...] = (
    ("requests", ("requests",), 0, 1),
    ("errors", ("errors",), 0, 1),
    ("null content", ("null_contents",), 0, 1),
    ("wall s", ("wall_s",), 2, 1),
    ("s per request", ("wall_per_request_s",), 3, 1),
    ("latency s, mean", ("latency_s", "mean"), 2, 1),
    ("latency s, min", ("latency_s", "min"), 2, 1),
    ("latency s, max", ("latency_s", "max"), 2, 1),
    ("tok/s a request, mean", ("tokens_per_s", "mean"), 1, 1),
    ("tok/s a request, min", ("tokens_per_s", "min"), 1, 1),
    ("tok/s a request, max", ("tokens_per_s", "max"), 1, 1),
    ("output tok/s", ("output_tokens_per_s",), 1, 1),
    ("TTFT ms, mean", ("ttft_s", "mean"), 1, 1000),
    ("TTFT ms, p50", ("ttft_s", "p50"), 1, 1000),
    ("TTFT ms, p99", ("ttft_s", "p99"), 1, 1000),
    ("TPOT ms, mean", ("tpot_s", "mean"), 2, 1000),
    ("ITL ms, mean", ("itl_s", "mean"), 2, 1000),
    ("ITL ms, p99", ("itl_s", "p99"), 2, 1000),
    ("prompt tokens", ("prompt_tokens",), 0, 1),
    ("completion tokens", ("completion_tokens",), 0, 1),
    ("reasoning tokens", ("reasoning_tokens",), 0, 1),
)


def figure(of_pass: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """One figure of a pass, in the unit of the JSON; None where there is none."""
    value: Any = of_pass
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def as_table(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A result as rows of cells: the head says how many were at once, `-` stands where there is no figure."""
    passes: Sequence[Mapping[str, Any]] = result["passes"]
    rows = [("at once", *(str(one["at_once"]) for one in passes))]
    for name, path, digits, factor in ROWS:
        found = [figure(one, path) for one in passes]
        rows.append((name, *("-" if value is None else f"{value * factor:.{digits}f}" for value in found)))
    return rows


def heading(result: Mapping[str, Any]) -> str:
    """What was asked, in one line."""
    thinking = {True: "on", False: "off"}.get(result["thinking"], "as the model has it")
    engine = f", engine {result['engine_version']}" if result["engine_version"] else ""
    return (
        f"{result['model']}{engine}: {result['max_tokens']} tokens at most, thinking {thinking}, "
        f"{result['rounds']} rounds"
    )


def first_errors(result: Mapping[str, Any]) -> list[str]:
    """A sentence for each pass in which requests failed."""
    return [
        f"{one['errors']} of {one['requests']} requests failed at {one['at_once']} at once, the first: "
        f"{one['first_error']}"
        for one in result["passes"]
        if one["errors"]
    ]


def key_of_environment() -> str:
    """The endpoint's key; empty when there is none."""
    return os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY") or ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table (or JSON), and return the exit code."""
    args = _parser().parse_args(argv)
    thinking: bool | None = {"on": True, "off": False, None: None}[args.thinking]
    at_once = tuple(itertools.chain.from_iterable(args.concurrent or [(2,)]))
    load = Load(args.rounds, at_once, args.max_tokens, thinking, args.ignore_eos)
    endpoint = Endpoint(args.base_url, key_of_environment())
    try:
        result = measure(endpoint, args.model or endpoint.first_model(), load, _tell)
    except NoAnswer as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    failed = first_errors(result)
    if args.json:
        print(json.dumps({"schema_version": 1, "kind": "bench", "data": result}))
    else:
        print(heading(result))
        for name, *cells in as_table(result):
            print("  " + name.ljust(24) + "".join(cell.rjust(12) for cell in cells))
    for sentence in failed:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if failed else 0


def _tell(at_once: int, answered: int, requests: int) -> None:
    """Progress, on a terminal only."""
    if sys.stderr.isatty():
        what = f"{at_once} at once: {answered} of {requests} answered" if at_once else "warming up"
        sys.stderr.write(f"\r\x1b[2K{what}" if not at_once or answered < requests else "\r\x1b[2K")
        sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    where = os.environ.get("OPENAI_BASE_URL") or "http://127.0.0.1:8000"
    parser.add_argument("--base-url", default=where, help="default: OPENAI_BASE_URL, else http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the endpoint names")
    parser.add_argument("--rounds", type=_positive, default=3, help="requests of each client (default: %(default)s)")
    parser.add_argument(
        "--concurrent", type=parse_at_once, action="append", help="requests at once, like 2 or 2,16,64 (default: 2)"
    )
    parser.add_argument("--max-tokens", type=_positive, default=128, help="of each answer (default: %(default)s)")
    parser.add_argument("--thinking", choices=("on", "off"), help="default: as the model's chat template has it")
    parser.add_argument("--ignore-eos", action="store_true", help="go on up to --max-tokens in any case (vLLM only)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


def parse_at_once(text: str) -> tuple[int, ...]:
    """Numbers of requests at once, as in 2,16,64. Raises ValueError."""
    return tuple(_positive(part) for part in text.split(","))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{text!r} is not 1 or more")
    return number


if __name__ == "__main__":
    raise SystemExit(main())
