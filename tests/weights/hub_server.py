"""A stand-in for the hub with one model at one commit, as a folder holds it. Loopback only."""

from __future__ import annotations

import hashlib
import re
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.weights.servers import Handler, Plan, Rate, Served, Server

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(Server):
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


class _HubHandler(Handler):
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
