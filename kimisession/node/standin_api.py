"""The stand-in engine's HTTP side: OpenAI's routes as vLLM serves them, at an exact pace.

Token i of a request leaves at the absolute time t0 + ttft + i / rate, so lateness never adds up. A connection that
its client closes cancels the request on it, as in vLLM.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from kimisession.node.standin_answer import CONTENT, REASONING, Answer, Piece, plan_answer
from kimisession.node.standin_metrics import Meters

FINGERPRINT = "stand-in"
HEADER = "X-Kimisession-Stand-In"

_JSON, _TEXT, _SSE = "application/json", "text/plain; version=0.0.4; charset=utf-8", "text/event-stream; charset=utf-8"
_MAX_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Served:
    """What is served and how fast. `api_key` None means that nobody is asked for one, as in vLLM."""

    model_id: str
    model_root: str
    api_key: str | None
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    tokens_per_second: float
    ttft_s: float
    reasoning_tokens: int
    stalls: bool = False
    """After the first completion no token moves any more, while requests still run."""
    metrics_broken: bool = False
    metrics_delay_s: float = 0.0


@dataclass(frozen=True)
class Request:
    """One HTTP request, read whole."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Refusal(Exception):
    """An answer that is an error: a status, and the JSON object that vLLM would send with it."""

    def __init__(self, status: HTTPStatus, body: object) -> None:
        super().__init__(status)
        self.status, self.body = status, body


def _error(status: HTTPStatus, message: str, kind: str, param: str | None = None) -> Refusal:
    return Refusal(status, {"error": {"message": message, "type": kind, "param": param, "code": int(status)}})


class Reply:
    """The writing half of one exchange: a status line once, then a body, whole or in chunks."""

    def __init__(self, writer: asyncio.StreamWriter, keep_alive: bool, say: Callable[[str], None]) -> None:
        self._writer, self._keep_alive, self._say = writer, keep_alive, say

    def start(self, status: HTTPStatus, content_type: str, length: int | None) -> None:
        """Send status and headers; `length` None announces chunks."""
        size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        connection = "keep-alive" if self._keep_alive else "close"
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nserver: kimisession-stand-in\r\n{HEADER}: 1\r\n"
            f"Content-Type: {content_type}\r\nConnection: {connection}\r\n{size}\r\n\r\n"
        )
        self._writer.write(head.encode())
        self._say(f"{status.value} {status.phrase}")

    def whole(self, status: HTTPStatus, body: object, content_type: str = _JSON) -> None:
        """Send a complete answer; anything but text is sent as JSON."""
        encoded = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.start(status, content_type, len(encoded))
        self._writer.write(encoded)

    def event(self, data: str) -> None:
        """Send one server-sent event. Never waits: like vLLM, the engine does not slow down for a slow reader."""
        payload = f"data: {data}\n\n".encode()
        self._writer.write(b"%x\r\n%b\r\n" % (len(payload), payload))

    def end_events(self) -> None:
        """End a chunked body."""
        self._writer.write(b"0\r\n\r\n")


class Api:
    """Serves the routes. One per process; must be made inside a running event loop."""

    def __init__(self, served: Served, say: Callable[[str], None]) -> None:
        self.served = served
        self.meters = Meters()
        self._say = say
        self._slots = asyncio.Semaphore(served.max_num_seqs)
        self._moving = asyncio.Event()
        self._moving.set()
        self._ids = count(1)
        self._started = int(time.time())

    def connection(self) -> asyncio.Protocol:
        """A protocol for one client, for `loop.create_server`."""
        return _Connection(self._converse)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests on one connection until either side ends it."""
        peer = ":".join(str(part) for part in writer.get_extra_info("peername")[:2])
        try:
            keep_alive = True
            while keep_alive:
                request = await _read_request(reader, writer)
                keep_alive = request.headers.get("connection", "").lower() != "close"
                reply = Reply(writer, keep_alive, partial(self._log_access, peer, request))
                try:
                    await self._route(request, reply)
                except Refusal as no:
                    reply.whole(no.status, no.body)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
            pass  # the client went away between requests, or does not speak HTTP
        finally:
            writer.close()

    def _log_access(self, peer: str, request: Request, status: str) -> None:
        self._say(f'{peer} - "{request.method} {request.path} HTTP/1.1" {status}')

    async def _route(self, request: Request, reply: Reply) -> None:
        if request.path.startswith("/v1") and not self._knows(request.headers.get("authorization", "")):
            raise Refusal(HTTPStatus.UNAUTHORIZED, {"error": "Unauthorized"})
        methods = _ROUTES.get(request.path)
        if methods is None:
            raise Refusal(HTTPStatus.NOT_FOUND, {"detail": "Not Found"})
        if request.method not in methods:
            raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, {"detail": "Method Not Allowed"})
        await methods[request.method](self, request, reply)

    def _knows(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        wanted = self.served.api_key
        return wanted is None or (scheme.lower() == "bearer" and hmac.compare_digest(key.encode(), wanted.encode()))

    async def _health(self, request: Request, reply: Reply) -> None:
        reply.whole(HTTPStatus.OK, "", _TEXT)

    async def _version(self, request: Request, reply: Reply) -> None:
        reply.whole(HTTPStatus.OK, {"version": FINGERPRINT})

    async def _metrics(self, request: Request, reply: Reply) -> None:
        if self.served.metrics_broken:
            return reply.whole(HTTPStatus.INTERNAL_SERVER_ERROR, "Internal Server Error", _TEXT)
        await asyncio.sleep(self.served.metrics_delay_s)
        return reply.whole(HTTPStatus.OK, self.meters.page(self.served.model_id, self.served.kv_tokens), _TEXT)

    async def _models(self, request: Request, reply: Reply) -> None:
        card = {
            "id": self.served.model_id,
            "object": "model",
            "created": self._started,
            "owned_by": "kimisession-stand-in",
            "root": self.served.model_root,
            "parent": None,
            "max_model_len": self.served.max_model_len,
        }
        reply.whole(HTTPStatus.OK, {"object": "list", "data": [card]})

    async def _generate(self, request: Request, reply: Reply) -> None:
        chat = request.path.endswith("/chat/completions")
        body = self._checked(request.body, "messages" if chat else "prompt")
        try:
            answer = plan_answer(
                body,
                chat=chat,
                max_model_len=self.served.max_model_len,
                reasoning_tokens=self.served.reasoning_tokens,
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise _error(HTTPStatus.BAD_REQUEST, str(error), "BadRequestError") from error
        shape = _Shape(chat, self.served.model_id, next(self._ids))
        if not body.get("stream"):
            await self._run(answer, lambda piece, finish: None)
            return reply.whole(HTTPStatus.OK, shape.whole(answer))

        def emit(piece: Piece, finish: str | None) -> None:
            reply.event(shape.chunk(piece, finish))

        reply.start(HTTPStatus.OK, _SSE, None)
        if chat:
            reply.event(shape.opening())
        await self._run(answer, emit)
        if (body.get("stream_options") or {}).get("include_usage"):
            reply.event(shape.closing(answer))
        reply.event("[DONE]")
        return reply.end_events()

    def _checked(self, raw: bytes, needed: str) -> dict[str, Any]:
        try:
            body = json.loads(raw)
        except ValueError as error:
            raise _error(HTTPStatus.BAD_REQUEST, f"The body is not JSON: {error}", "BadRequestError") from error
        if not isinstance(body, dict) or not body.get(needed):
            raise _error(HTTPStatus.BAD_REQUEST, f"{needed}: Field required", "BadRequestError", needed)
        if body.get("model") not in (None, self.served.model_id):
            text = f"The model `{body['model']}` does not exist."
            raise _error(HTTPStatus.NOT_FOUND, text, "NotFoundError", "model")
        return body

    async def _run(self, answer: Answer, emit: Callable[[Piece, str | None], None]) -> None:
        """Wait for a slot, then let the tokens out one by one, each at its time; count what happens."""
        loop, meters = asyncio.get_running_loop(), self.meters
        arrived = loop.time()
        finish, held = "abort", 0
        try:
            meters.waiting += 1
            try:
                await self._slots.acquire()
            finally:
                meters.waiting -= 1
            meters.running += 1
            try:
                begun = loop.time()
                last = len(answer.pieces) - 1
                for i, piece in enumerate(answer.pieces):
                    due = begun + self.served.ttft_s + i / self.served.tokens_per_second
                    await asyncio.sleep(max(0.0, due - loop.time()))
                    await self._moving.wait()
                    if i == 0:
                        meters.ttft_s.observe(loop.time() - arrived)
                        meters.prompt_tokens += answer.prompt_tokens
                        held = answer.prompt_tokens
                        meters.held_tokens += held
                    meters.generation_tokens += 1
                    held, meters.held_tokens = held + 1, meters.held_tokens + 1
                    emit(piece, answer.finish_reason if i == last else None)
                finish = answer.finish_reason
            finally:
                meters.running -= 1
                meters.held_tokens -= held
                self._slots.release()
        finally:
            meters.finished[finish] += 1
            meters.latency_s.observe(loop.time() - arrived)
        if self.served.stalls:
            self._moving.clear()


class _Shape:
    """The JSON of one answer, whole or streamed, as a chat or as a plain completion."""

    def __init__(self, chat: bool, model_id: str, number: int) -> None:
        self._chat = chat
        self._object = "chat.completion" if chat else "text_completion"
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-stand-in-{number}",
            "created": int(time.time()),
            "model": model_id,
            "system_fingerprint": FINGERPRINT,
        }

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": answer.finish_reason}
        if self._chat:
            reasoning = answer.text(REASONING)
            # Newer vLLM says `reasoning`, older `reasoning_content`, 0.15 both.
            message: dict[str, Any] = {"role": "assistant", "content": answer.text(CONTENT), "tool_calls": []}
            choice["message"] = {**message, "reasoning": reasoning, "reasoning_content": reasoning}
        else:
            choice["text"] = answer.text(CONTENT)
        return {**self._common, "object": self._object, "choices": [choice], "usage": answer.usage}

    def opening(self) -> str:
        return self._event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def chunk(self, piece: Piece, finish: str | None) -> str:
        if not self._chat:
            return self._event({"text": piece.text, "finish_reason": finish})
        fields = (CONTENT,) if piece.field == CONTENT else ("reasoning", "reasoning_content")
        return self._event({"delta": dict.fromkeys(fields, piece.text), "finish_reason": finish})

    def closing(self, answer: Answer) -> str:
        return self._event(None, usage=answer.usage)

    def _event(self, choice: dict[str, Any] | None, **more: object) -> str:
        choices = [] if choice is None else [{"index": 0, "logprobs": None, **choice}]
        kind = "chat.completion.chunk" if self._chat else self._object
        return json.dumps({**self._common, "object": kind, "choices": choices, **more})


_ROUTES: dict[str, dict[str, Callable[[Api, Request, Reply], Any]]] = {
    "/health": {"GET": Api._health},
    "/version": {"GET": Api._version},
    "/metrics": {"GET": Api._metrics},
    "/v1/models": {"GET": Api._models},
    "/v1/chat/completions": {"POST": Api._generate},
    "/v1/completions": {"POST": Api._generate},
}


class _Connection(asyncio.StreamReaderProtocol):
    """A connection whose conversation is cancelled as soon as the client hangs up."""

    def __init__(self, converse: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> None:
        self._converse = converse
        self._talk: asyncio.Task[None] | None = None
        super().__init__(asyncio.StreamReader(limit=2**16), self._begin)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._talk = asyncio.get_running_loop().create_task(self._converse(reader, writer))

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # close our side too: a client that has said its last word is gone, as uvicorn sees it

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._talk is not None:
            self._talk.cancel()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
    """Read one request; ValueError for what is no HTTP or has a body of unknown or absurd length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *fields = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    length = int(headers.get("content-length", "0"))
    if "transfer-encoding" in headers or not 0 <= length <= _MAX_BODY_BYTES:
        raise ValueError("the stand-in reads bodies with a Content-Length only")
    if headers.get("expect", "").lower() == "100-continue":  # curl asks before it sends a long prompt
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return Request(method, urlsplit(target).path, headers, await reader.readexactly(length))
