"""Ask a served model the three test questions: does it answer, and how fast? Runs alone on a machine.

    OPENAI_API_KEY=... python3 test_inference.py --base-url http://127.0.0.1:8000

Standard library only, Python 3.9 or later, and no other file of ours: scripts/test_inference.py is this file. The key
comes from the environment (OPENAI_API_KEY or VLLM_API_KEY), never from the command line. Null content is "still
thinking", not an error. Exit codes: 0 all three were answered, 1 one was not, 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

#: Short, medium, long: the kinds of question that the public write-up of February 2026 timed.
PROMPTS = (
    ("arithmetic", "What is 84 * 3 / 2? Answer with the number."),
    ("code", "Write a Python function that merges two sorted lists."),
    ("explanation", "Explain in five sentences why a mixture of experts is cheaper to run than a dense model."),
)

#: A reasoning model spends its first hundreds of tokens on thinking: with fewer than this, `content` is often null
#: (incident 10 of notes/incidents.md).
ENOUGH_TOKENS = 1024


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
class Answer:
    """`content` is None while the model is still thinking when its tokens ran out: that is an answer, not an error."""

    content: str | None
    reasoning: str
    completion_tokens: int
    finish_reason: str
    model: str

    @property
    def still_thinking(self) -> bool:
        """The budget ended inside reasoning."""
        return self.content is None


@dataclass(frozen=True)
class Check:
    """One question, its answer and how long it took in seconds."""

    name: str
    prompt: str
    answer: Answer
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Completion tokens over the whole request, prefill included; None without tokens."""
        return self.answer.completion_tokens / self.seconds if self.answer.completion_tokens and self.seconds else None


def ask(
    endpoint: Endpoint, model: str, prompt: str, max_tokens: int = ENOUGH_TOKENS, thinking: bool | None = None
) -> Answer:
    """One chat completion, not streamed. Raises NoAnswer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        **thinking_switch(thinking),
    }
    return parse_answer(endpoint.json("POST", "/v1/chat/completions", body))


def parse_answer(raw: Any) -> Answer:
    """The answer in a chat completion. vLLM up to 0.15 calls the thinking `reasoning_content`, later `reasoning`."""
    try:
        message = raw["choices"][0]["message"]
        return Answer(
            content=message.get("content"),
            reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
            completion_tokens=int(raw["usage"]["completion_tokens"]),
            finish_reason=str(raw["choices"][0].get("finish_reason")),
            model=str(raw.get("model", "")),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise NoAnswer(f"the endpoint's answer has not the shape of a completion: {error!r}") from None


def run_checks(
    endpoint: Endpoint, model: str, max_tokens: int = ENOUGH_TOKENS, thinking: bool | None = None
) -> Iterator[Check]:
    """Ask each prompt once, in turn. Raises NoAnswer at the first that is not answered."""
    for name, prompt in PROMPTS:
        began = time.perf_counter()
        answer = ask(endpoint, model, prompt, max_tokens, thinking)
        yield Check(name, prompt, answer, time.perf_counter() - began)


def key_of_environment() -> str:
    """The endpoint's key; empty when there is none."""
    return os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY") or ""


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, print a line an answer (or JSON), and return the exit code."""
    args = _parser().parse_args(argv)
    endpoint = Endpoint(args.base_url, key_of_environment())
    found = []
    try:
        model = args.model or endpoint.first_model()
        for check in run_checks(
            endpoint, model, args.max_tokens, {"on": True, "off": False, None: None}[args.thinking]
        ):
            found.append({**asdict(check), "tokens_per_second": check.tokens_per_second})
            if not args.json:
                print(line_of(check), flush=True)
    except NoAnswer as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if args.json:
        print(json.dumps({"schema_version": 1, "kind": "inference", "data": found}))
    return 0


def line_of(check: Check) -> str:
    """An answer as a line: name, seconds, tokens, tokens per second, the beginning of its text."""
    answer, rate = check.answer, check.tokens_per_second
    text = "still thinking when its tokens ran out" if answer.content is None else answer.content
    speed = "-" if rate is None else f"{rate:.1f}"
    short = textwrap.shorten(text, 60, placeholder=" ...")
    return f"{check.name:<12} {check.seconds:7.2f} s {answer.completion_tokens:6} tokens {speed:>7} tok/s  {short}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    where = os.environ.get("OPENAI_BASE_URL") or "http://127.0.0.1:8000"
    parser.add_argument("--base-url", default=where, help="default: OPENAI_BASE_URL, else http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the endpoint names")
    parser.add_argument("--max-tokens", type=int, default=ENOUGH_TOKENS, help="of each answer (default: %(default)s)")
    parser.add_argument("--thinking", choices=("on", "off"), help="default: as the model's chat template has it")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
