"""A strict stand-in for the JSON API of Google Cloud Storage, and one for the hub, with faults on demand.

Stricter than the real thing where that catches mistakes of ours: every write must carry ifGenerationMatch, every
body its Content-Length, unknown paths and parameters are refused. A cut resumable PUT keeps whole multiples of
256 KiB (or of `grain`), as Google's does. Loopback only.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from crc32c import crc32c

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Fault:
    """What to do to one request: answer `status` instead, or spoil the transfer after `after` bytes of its body.

    `kind`: status | cut | short | flip | lost (do it, then close without an answer) | stall
    """

    kind: str
    status: int = 503
    after: int = 0
    retry_after: str | None = "0"
    message: str = "injected"


@dataclass(frozen=True)
class Call:
    """One request as the fault plan sees it: phase is such as `hub.body`, `gcs.session`, `gcs.put`, `gcs.get`."""

    phase: str
    name: str
    number: int


Plan = Callable[[Call], "Fault | None"]


class Rate:
    """Bytes per second, shared by all who `take` from it; a burst of 20 ms is free."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            wait_s = self._free_at - now - 0.02
        if wait_s > 0:
            time.sleep(wait_s)


@dataclass
class Served:
    """What the servers saw: bytes of large bodies by name, requests by phase, the most connections at once."""

    body_in: dict[str, int] = field(default_factory=dict)
    body_out: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    lock: threading.Lock
    seen: Served
    plan: Plan | None

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no news; anything else is a mistake in this file."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError | ValueError):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def fault(self, phase: str, name: str) -> Fault | None:
        with self.server.lock:
            number = self.server.seen.calls[phase] = self.server.seen.calls.get(phase, 0) + 1
        return self.server.plan(Call(phase, name, number)) if self.server.plan else None

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def json(self, value: object, code: int = 200, **headers: str) -> None:
        self.answer(code, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def error(self, status: int, message: str, **headers: str) -> None:
        self.json({"error": {"code": status, "message": message}}, status, **headers)

    def refuse(self, why: str) -> None:
        """A request that breaks our own rules: the tests look at this list."""
        self.server.seen.refused.append(f"{self.command} {self.path}: {why}")
        self.close_connection = True
        self.error(400, why)

    def hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def early(self, fault: Fault | None) -> bool:
        """Handle the faults that come before anything is done."""
        if fault is not None and fault.kind == "status":
            self.close_connection = True  # the body, if any, is not read
            headers = {"Retry_After": fault.retry_after} if fault.retry_after is not None else {}
            self.error(fault.status, fault.message, **headers)
            return True
        if fault is not None and fault.kind == "cut" and not fault.after:
            self.hang_up()
            return True
        return False

    def body(self) -> bytes:
        """The whole body; a client that was killed in the middle has asked for nothing."""
        length = int(self.headers.get("Content-Length") or 0)
        found = self.rfile.read(length)
        if len(found) < length:
            raise ConnectionError("the client has gone")
        return found

    def send_bytes(self, path: Path, start: int, size: int, fault: Fault | None, rate: list[Rate], name: str) -> None:
        """The body of an answer from a file, at a rate, spoiled by the fault."""
        sent = 0
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            buffer = memoryview(bytearray(min(262144, max(1, size))))
            while sent < size:
                count = file.readinto(buffer[: size - sent])
                chunk = buffer[:count]
                if fault is not None and sent <= fault.after < sent + count:
                    if fault.kind == "flip":
                        chunk[fault.after - sent] ^= 4
                    elif fault.kind in ("cut", "short"):
                        self.wfile.write(chunk[: fault.after - sent])
                        self.close_connection = True
                        if fault.kind == "cut":
                            self.hang_up()
                        return
                for one in rate:
                    one.take(count)
                self.wfile.write(chunk)
                sent += count
                with self.server.lock:
                    self.server.seen.body_out[name] = self.server.seen.body_out.get(name, 0) + count


@dataclass
class _Object:
    path: Path
    size: int
    generation: int
    crc32c: str


@dataclass
class _Session:
    name: str
    size: int
    path: Path
    kept: int = 0
    made: _Object | None = None
    dead: bool = False
    crc: int = 0
    must_be: str | None = "0"
    lock: threading.Lock = field(default_factory=threading.Lock)


class GcsServer(_Server):
    """One bucket, `weights`, in a folder. `objects` is the truth for tests."""

    def __init__(
        self,
        folder: Path,
        plan: Plan | None = None,
        *,
        per_connection: float = 0,
        in_all: float = 0,
        keep: bool = True,
        grain: int = 262144,
        at_once: int = 1000,
        strict: bool = True,
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        super().__init__(address, _GcsHandler)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.plan = plan
        self.per_connection = per_connection
        self.in_all = Rate(in_all) if in_all else None
        self.keep = keep
        self.grain = grain
        self.md5_of: dict[
            str, str
        ] = {}  # by crc32c: what the store is to know beforehand, as Google's computes it aside
        self.slots = threading.Semaphore(at_once)  # reads of objects at once; more are told 429
        self.turned_away = 0
        self.strict = strict  # False lets other people's clients in, for benchmarks
        self.lock = threading.Lock()
        self.seen = Served()
        self.objects: dict[str, _Object] = {}
        self.sessions: dict[str, _Session] = {}
        self._generation = 1_700_000_000_000_000
        self.url = f"http://{address[0]}:{self.server_address[1]}"

    def generation(self) -> int:
        self._generation += 1
        return self._generation

    def put(self, name: str, path: Path, size: int, crc: str, must_be: str | None) -> _Object | None:
        """Make an object under its precondition; None when that does not hold."""
        with self.lock:
            now = self.objects.get(name)
            if must_be is not None and int(must_be) != (now.generation if now else 0):
                return None
            self.objects[name] = _Object(path, size, self.generation(), crc)
            return self.objects[name]


def crc_of(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            value = crc32c(chunk, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


class _GcsHandler(_Handler):
    server: GcsServer

    def route(self) -> tuple[str, str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        found = re.fullmatch(r"(?:/resumable)?(/upload|/download)?/storage/v1/b/weights(?:/o(?:/(.+))?)?", parts.path)
        if found is None:
            return "", "", query
        return found.group(1) or "/json", unquote(found.group(2) or ""), query

    def describe(self, name: str, found: _Object) -> dict[str, object]:
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": "weights",
            "size": str(found.size),
            "generation": str(found.generation),
            "metageneration": "1",
            "etag": "CAE=",
            "id": f"weights/{name}/{found.generation}",
            "selfLink": f"{self.server.url}/storage/v1/b/weights/o/{quote(name, safe='')}",
            "mediaLink": f"{self.server.url}/download/storage/v1/b/weights/o/{quote(name, safe='')}?alt=media",
            "storageClass": "STANDARD",
            "timeCreated": "2026-11-21T00:00:00.000Z",
            "updated": "2026-11-21T00:00:00.000Z",
            "crc32c": found.crc32c,
            **({"md5Hash": self.server.md5_of[found.crc32c]} if found.crc32c in self.server.md5_of else {}),
        }

    def do_GET(self) -> None:
        kind, name, query = self.route()
        if not kind:
            self.error(404, "Not Found")
            return
        if not name and not urlsplit(self.path).path.endswith("/o"):
            self.json({"kind": "storage#bucket", "id": "weights", "name": "weights", "location": "US"})
            return
        if not name:
            if self.early(self.fault("gcs.list", "")):
                return
            prefix = query.get("prefix", "")
            with self.server.lock:
                found = sorted(self.server.objects.items())
            items = [self.describe(key, one) for key, one in found if key.startswith(prefix)]
            start = int(query.get("pageToken") or 0)
            more = {"nextPageToken": str(start + 5)} if len(items) > start + 5 else {}
            self.json({"kind": "storage#objects", "items": items[start : start + 5], **more})
            return
        media = query.get("alt") == "media"
        if not media or "/.kimisession/" in "/" + name:
            self.give("gcs.control", name, query, media)
        elif self.server.slots.acquire(blocking=False):
            try:
                self.give("gcs.get", name, query, media)
            finally:
                self.server.slots.release()
        else:
            self.server.turned_away += 1
            self.error(429, "too many at once", Retry_After="0.02")

    def give(self, phase: str, name: str, query: dict[str, str], media: bool) -> None:
        fault = self.fault(phase, name)
        if self.early(fault):
            return
        one = self.server.objects.get(name)
        if one is None or query.get("generation", str(one.generation)) != str(one.generation):
            self.error(404, f"No such object: weights/{name}")
            return
        if not media:
            self.json(self.describe(name, one))
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(span.group(1)) if span else 0
        end = min(one.size - 1, int(span.group(2))) if span and span.group(2) else one.size - 1
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(end - start + 1))
        if span:
            self.send_header("Content-Range", f"bytes {start}-{end}/{one.size}")
        self.send_header("x-goog-generation", str(one.generation))
        self.send_header("x-goog-hash", f"crc32c={one.crc32c}")
        self.end_headers()
        rate = [Rate(self.server.per_connection)] if self.server.per_connection else []
        self.send_bytes(one.path, start, end - start + 1, fault, rate, name)

    def do_POST(self) -> None:
        kind, _, query = self.route()
        if kind != "/upload":
            self.refuse("unknown POST")
            return
        if "ifGenerationMatch" not in query and self.server.strict:
            self.refuse("a write without ifGenerationMatch")
            return
        body = self.body()
        if query.get("uploadType") == "resumable":
            value = json.loads(body or b"{}")
            name = query.get("name") or value.get("name", "")
            fault = self.fault("gcs.session", name)
            if self.early(fault):
                return
            if query.get("ifGenerationMatch", "0") != "0":
                self.refuse("an upload that may replace an object")
                return
            number = secrets.token_hex(8)
            size = int(self.headers.get("X-Upload-Content-Length") or -1)
            path = self.server.folder / f"session-{number}"
            path.touch()
            self.server.sessions[number] = _Session(name, size, path, must_be=query.get("ifGenerationMatch"))
            if fault is not None and fault.kind == "lost":
                self.hang_up()
                return
            location = f"{self.server.url}/upload/storage/v1/b/weights/o?uploadType=resumable&upload_id={number}"
            self.answer(200, Location=location)
            return
        fields = re.fullmatch(r'multipart/related; boundary=["\']?([^"\']+)["\']?', self.headers["Content-Type"])
        if fields is None:
            self.refuse("neither resumable nor multipart")
            return
        pieces = body.split(b"--" + fields.group(1).encode())
        meta = json.loads(re.split(rb"\r?\n\r?\n", pieces[1], maxsplit=1)[1])
        content = re.split(rb"\r?\n\r?\n", pieces[2], maxsplit=1)[1].removesuffix(b"\n").removesuffix(b"\r")
        name = meta["name"]
        fault = self.fault("gcs.control", name)
        if self.early(fault):
            return
        path = self.server.folder / f"small-{secrets.token_hex(8)}"
        path.write_bytes(content)
        crc = crc_of(path)
        if meta.get("crc32c", crc) != crc:
            self.error(400, "Provided CRC32C does not match")
            return
        made = self.server.put(name, path, len(content), crc, query.get("ifGenerationMatch"))
        if fault is not None and fault.kind == "lost":
            self.hang_up()
        elif made is None:
            self.error(412, "At least one of the pre-conditions you specified did not hold.")
        else:
            self.json(self.describe(name, made))

    def session(self) -> _Session | None:
        found = self.server.sessions.get(self.route()[2].get("upload_id", ""))
        return None if found is None or found.dead else found

    def do_PUT(self) -> None:
        session = self.session()
        span = self.headers.get("Content-Range") or ""
        length = self.headers.get("Content-Length")
        if length is None or not span:
            self.refuse("a PUT without Content-Length or Content-Range")
            return
        if session is None:
            self.close_connection = True
            self.error(404, "no such upload")
            return
        status = re.fullmatch(r"bytes \*/(\d+|\*)", span)
        fault = self.fault("gcs.status" if status else "gcs.put", session.name)
        if self.early(fault):
            return
        if not session.lock.acquire(timeout=5):
            self.close_connection = True
            self.error(503, "another request holds this upload")
            return
        try:
            self.go_on(session, span, int(length), bool(status), fault)
        finally:
            session.lock.release()

    def go_on(self, session: _Session, span: str, length: int, status: bool, fault: Fault | None) -> None:
        if not status and session.made is None:
            found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", span)
            if found and session.size < 0 and found[3] != "*":
                session.size = int(found[3])
            whole = found and (found[3] == str(session.size) or not self.server.strict)
            if found is None or not whole or int(found[2]) - int(found[1]) + 1 != length:
                self.refuse(f"a span that does not fit: {span} of {session.size}, {length} long")
                return
            if int(found[1]) > session.kept:
                self.close_connection = True
                self.error(503, f"a hole: have {session.kept}, got {found[1]}")
                return
            if not self.receive(session, int(found[1]), length, fault):
                return
        if session.made is None and session.kept == session.size:
            raw = session.crc.to_bytes(4, "big")
            crc = crc_of(session.path) if self.server.keep else base64.b64encode(raw).decode()
            session.made = self.server.put(session.name, session.path, session.size, crc, session.must_be)
            if session.made is None:
                session.dead = True
                self.error(412, "At least one of the pre-conditions you specified did not hold.")
                return
        if fault is not None and fault.kind == "lost":
            self.hang_up()
        elif session.made is not None:
            self.json(self.describe(session.name, session.made))
        elif session.kept:
            self.answer(308, Range=f"bytes=0-{session.kept - 1}")
        else:
            self.answer(308)

    def receive(self, session: _Session, start: int, length: int, fault: Fault | None) -> bool:
        """Take the body; False when the connection broke, and then only whole grains are kept."""
        rate = [Rate(self.server.per_connection)] if self.server.per_connection else []
        rate += [self.server.in_all] if self.server.in_all else []
        buffer = memoryview(bytearray(min(1 << 20, max(1, length))))
        got = 0
        file = os.open(session.path, os.O_WRONLY)
        try:
            while got < length:
                limit = length - got
                if fault is not None and fault.kind in ("cut", "flip") and got <= fault.after:
                    limit = min(limit, max(1, fault.after - got + 1))
                count = self.rfile.readinto1(buffer[:limit])
                if not count:
                    break
                if fault is not None and fault.kind == "flip" and got <= fault.after < got + count:
                    buffer[fault.after - got] ^= 4
                for one in rate:
                    one.take(count)
                if self.server.keep:
                    os.pwrite(file, buffer[:count], start + got)
                else:
                    session.crc = crc32c(buffer[:count], session.crc)
                got += count
                with self.server.lock:
                    seen = self.server.seen.body_in
                    seen[session.name] = seen.get(session.name, 0) + count
                if fault is not None and fault.kind == "cut" and got > fault.after:
                    break
        except OSError:
            pass
        finally:
            os.close(file)
        if got == length:
            session.kept = max(session.kept, start + got)
            return True
        session.kept = max(session.kept, (start + got) // self.server.grain * self.server.grain)
        self.hang_up()
        return False

    def do_DELETE(self) -> None:
        kind, name, query = self.route()
        if kind == "/upload":
            session = self.session()
            if session is not None and session.made is None:
                session.dead = True
            self.answer(499 if session else 404)
            return
        fault = self.fault("gcs.control", name)
        if self.early(fault):
            return
        with self.server.lock:
            found = self.server.objects.get(name)
            if found is not None and query.get("ifGenerationMatch", str(found.generation)) == str(found.generation):
                del self.server.objects[name]
                status = 204
            else:
                status = 412 if found else 404
        if fault is not None and fault.kind == "lost":
            self.hang_up()
        elif status == 204:
            self.send_response(204)
            self.end_headers()
        else:
            self.error(status, f"No such object: weights/{name}" if status == 404 else "pre-condition")


class HubServer(_Server):
    """A hub with one model, `owner/mini`, whose files are those of a folder. Large files redirect, as the hub's do."""

    def __init__(
        self,
        folder: Path,
        plan: Plan | None = None,
        *,
        commit: str = COMMIT,
        token: str = "",
        per_connection: float = 0,
        large: int = 10_000,
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        super().__init__(address, _HubHandler)
        self.folder = folder
        self.plan = plan
        self.commit = commit
        self.token = token
        self.per_connection = per_connection
        self.large = large
        self.lock = threading.Lock()
        self.seen = Served()
        self.url = f"http://{address[0]}:{self.server_address[1]}"
        self.leaked_tokens = 0
        self.tree = [self._item(path) for path in sorted(folder.rglob("*")) if path.is_file()]

    def _item(self, path: Path) -> dict[str, Any]:
        size = path.stat().st_size
        name = path.relative_to(self.folder).as_posix()
        if size < self.large:
            content = path.read_bytes()
            oid = hashlib.sha1(b"blob %d\0" % size + content, usedforsecurity=False).hexdigest()
            return {"type": "file", "path": name, "size": size, "oid": oid}
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {
            "type": "file",
            "path": name,
            "size": size,
            "oid": "0" * 40,
            "lfs": {"oid": digest, "size": size, "pointerSize": 134},
        }


class _HubHandler(_Handler):
    server: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        auth = self.headers.get("Authorization")
        commit = self.server.commit
        if path.startswith("/cdn/"):
            if auth:
                self.server.leaked_tokens += 1
            self.serve(path.removeprefix("/cdn/"))
            return
        if self.server.token and auth != f"Bearer {self.server.token}":
            self.error(401, "Access to model owner/mini is restricted")
            return
        if path.startswith("/api/models/owner/mini"):
            self.api(path)
            return
        found = re.fullmatch(r"/owner/mini/resolve/([^/]+)/(.+)", path)
        if found is None or found.group(1) not in (commit, "main"):
            self.error(404, "Entry not found")
            return
        item = next((one for one in self.server.tree if one["path"] == found.group(2)), None)
        if item is None:
            self.error(404, "Entry not found")
        elif "lfs" in item:
            if self.early(self.fault("hub.resolve", item["path"])):
                return
            self.answer(
                302,
                Location=f"{self.server.url.replace('127.0.0.1', 'localhost')}/cdn/{item['path']}",
                X_Repo_Commit=commit,
                X_Linked_Size=str(item["size"]),
                X_Linked_Etag='"' + item["lfs"]["oid"] + '"',
                ETag='"' + item["lfs"]["oid"] + '"',
            )
        else:
            self.serve(item["path"], X_Repo_Commit=commit, ETag='"' + item["oid"] + '"')

    def api(self, path: str) -> None:
        commit = self.server.commit
        if self.early(self.fault("hub.api", path)):
            return
        rest = path.removeprefix("/api/models/owner/mini")
        if rest in ("", "/revision/main", f"/revision/{commit}"):
            siblings = [{"rfilename": item["path"]} for item in self.server.tree]
            self.json({"id": "owner/mini", "sha": commit, "siblings": siblings, "private": False})
        elif rest == f"/tree/{commit}":
            start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
            page = self.server.tree[start : start + 3]
            more = f'<{self.server.url}{path}?recursive=true&cursor={start + 3}>; rel="next"'
            headers = {"Link": more} if start + 3 < len(self.server.tree) else {}
            self.json([{"type": "directory", "path": "sub", "size": 0, "oid": "0" * 40}, *page], 200, **headers)
        else:
            self.error(404, "Revision Not Found")

    def serve(self, name: str, **headers: str) -> None:
        path = self.server.folder / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            self.error(404, "Entry not found")
            return
        if self.command == "HEAD":
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            return
        fault = self.fault("hub.body", name)
        if self.early(fault):
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(span.group(1)) if span else 0
        end = min(size - 1, int(span.group(2))) if span and span.group(2) else size - 1
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(end - start + 1))
        if span:
            self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        rate = [Rate(self.server.per_connection)] if self.server.per_connection else []
        self.send_bytes(path, start, end - start + 1, fault, rate, name)


@contextlib.contextmanager
def serving(server: _Server) -> Iterator[None]:
    """Serve in a thread until the block ends."""
    thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def client_for(url: str) -> Any:
    """A google-cloud-storage client for an emulator, without credentials."""
    credentials = importlib.import_module("google.auth.credentials").AnonymousCredentials()
    storage = importlib.import_module("google.cloud.storage")
    return storage.Client(project="emulated", credentials=credentials, client_options={"api_endpoint": url})
