"""Ask the engine over loopback, without ever holding up the keeper's loop."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from typing import Any, Callable, Generic, TypeVar

from kimisession.node.traffic import Counters, read_metrics

T = TypeVar("T")

#: A metrics page of vLLM with 8 ranks is below 200 kB; anything near this is not one.
_PAGE_BYTES = 8 << 20

#: A webhook that has not answered by then is given up on.
TELL_S = 5.0


class Background(Generic[T]):
    """One question at a time in a thread. A question that hangs is simply not answered: the loop goes on, no second
    one is started, and the policy's limit for "unknown" does the rest."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._answer: tuple[T | None, Exception | None] | None = None

    @property
    def asking(self) -> bool:
        """Whether a question is under way or its answer not yet taken."""
        return self._thread is not None

    def ask(self, question: Callable[[], T]) -> None:
        """Start one. Does nothing while another is under way. Raises RuntimeError when no thread can be started."""
        if self.asking:
            return

        def run() -> None:
            try:
                self._answer = (question(), None)
            except Exception as error:  # whatever it is, it is an answer: unknown
                self._answer = (None, error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()  # may raise where no more threads are allowed; then none is under way
        self._thread = thread

    def take(self) -> tuple[T | None, Exception | None] | None:
        """The answer, once; None while there is none."""
        answer = self._answer
        if answer is None:
            return None
        self._answer = self._thread = None
        return answer


def _request(port: int, method: str, path: str, key: str, body: bytes | None, timeout_s: float) -> bytes:
    """One HTTP exchange with a deadline for the whole of it. Raises OSError or http.client.HTTPException."""
    until = time.monotonic() + timeout_s
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        data = b""
        # A server that drips a byte at a time never trips a socket's timeout.
        while chunk := response.read1(1 << 16):
            data += chunk
            if time.monotonic() > until or len(data) > _PAGE_BYTES:
                raise OSError(f"{path} was not complete within {timeout_s:g}s")
        if response.status != 200:
            raise OSError(f"{path} answered {response.status}: {data[:200]!r}")
        return data
    finally:
        connection.close()


def listening(port: int) -> bool:
    """Whether anything accepts a connection on loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except OSError:
        return False
    return True


def tell(url: str, text: str) -> None:
    """Send one sentence to the user's webhook as JSON `{"text": ...}`. Raises on any failure; the URL is in no message."""
    from urllib.request import Request, urlopen  # half a second and megabytes that most sessions never need

    if not url.startswith(("https://", "http://")):
        raise ValueError("the webhook is not an http address")
    request = Request(url, json.dumps({"text": text}).encode(), {"Content-Type": "application/json"})  # noqa: S310
    urlopen(request, timeout=TELL_S).close()  # noqa: S310 - the scheme was checked above


def scrape(kind: str, port: int, key: str, timeout_s: float) -> Counters:
    """The traffic counters now. Raises OSError or ValueError: then traffic is unknown."""
    return read_metrics(kind, _request(port, "GET", "/metrics", key, None, timeout_s).decode("utf-8", "replace"))


def first_completion(kind: str, port: int, key: str, model: str, timeout_s: float) -> tuple[int, Counters | None]:
    """Ask for one short completion, which is what READY means, then wait until the counters show it, so that the
    keeper's own question is never taken for a user's. Returns the tokens that came and the counters after it, None
    when those cannot be read: then traffic is unknown, which has a deadline of its own."""
    question = {
        "model": model,
        "messages": [{"role": "user", "content": "Say ready."}],
        "max_tokens": 4,
        "temperature": 0,
    }
    data = _request(port, "POST", "/v1/chat/completions", key, json.dumps(question).encode(), timeout_s)
    answer: Any = json.loads(data)
    tokens = int(answer["usage"]["completion_tokens"])
    if not answer["choices"] or tokens < 1:
        raise OSError("the first completion came back empty")
    until = time.monotonic() + 3
    while True:
        counters: Counters | None = None
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            counters = scrape(kind, port, key, 2)
        shown = counters is not None and counters.finished >= 1 and not counters.running
        if shown or time.monotonic() > until:
            return tokens, counters
        time.sleep(0.05)
