"""A strict stand-in for the JSON API of Google Cloud Storage.

Stricter than the real thing where that catches mistakes of ours: every write must carry ifGenerationMatch, every
body its Content-Length, unknown paths and parameters are refused. A cut resumable PUT keeps whole multiples of
256 KiB (or of `grain`), as Google's does. Loopback only.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import re
import secrets
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from crc32c import crc32c

from tests.weights.servers import Fault, Handler, Plan, Rate, Served, Server


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


class GcsServer(Server):
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


class _GcsHandler(Handler):
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
            # Pages go on behind a name, as Google's do: what is deleted between two of them hides nothing else.
            items = [item for item in items if str(item["name"]) > query.get("pageToken", "")]
            more = {"nextPageToken": items[4]["name"]} if len(items) > 5 else {}
            self.json({"kind": "storage#objects", "items": items[:5], **more})
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


def client_for(url: str) -> Any:
    """A google-cloud-storage client for an emulator, without credentials."""
    credentials = importlib.import_module("google.auth.credentials").AnonymousCredentials()
    storage = importlib.import_module("google.cloud.storage")
    return storage.Client(project="emulated", credentials=credentials, client_options={"api_endpoint": url})
