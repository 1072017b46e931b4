"""STAND-IN for Google's metadata server and the little of Compute Engine that a machine needs to end itself; loopback only."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INSTANCE = "/compute/v1/projects/demo-project/zones/us-central1-a/instances/gpu-1"
ABOUT = {
    "project/project-id": "demo-project",
    "instance/zone": "projects/123/zones/us-central1-a",
    "instance/name": "gpu-1",
    "instance/service-accounts/default/token": json.dumps({"access_token": "t0ken", "expires_in": 3599}),
}


class _Server(ThreadingHTTPServer):
    """Callers are killed in the middle of a call: that is what these tests are about."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class Cloud:
    """One machine in one project. `script` holds what DELETE answers, the last one for ever:
    a status, or a list of operations that are handed out one after the other."""

    def __init__(self) -> None:
        self.script: list[Any] = [["RUNNING"]]
        self.metadata_faults: list[int] = []
        self.permissions = ["compute.instances.delete"]
        self.calls: list[str] = []
        self.silent = threading.Event()
        self.changed = threading.Condition()
        self._operation: list[str] = []
        self.server = _Server(("127.0.0.1", 0), self._handler())
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def deletions(self) -> int:
        return sum(call.partition("?")[0] == f"DELETE {INSTANCE}" for call in self.calls)

    def request_ids(self) -> list[str]:
        """Of its deletions, in order; empty where one had none."""
        asked = [call for call in self.calls if call.startswith("DELETE")]
        return [call.partition("requestId=")[2] for call in asked]

    def wait_for_deletions(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.deletions() >= count, timeout=20), self.calls

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, str]:
        if path.startswith("/computeMetadata/v1/"):
            if headers.get("Metadata-Flavor") != "Google":
                return 403, "no header"
            if self.metadata_faults:
                return self.metadata_faults.pop(0), "not now"
            return (200, ABOUT[path[20:]]) if path[20:] in ABOUT else (404, "no such value")
        if headers.get("Authorization") != "Bearer t0ken":
            return 401, "{}"
        if path == f"{INSTANCE}/testIamPermissions":
            asked = json.loads(body)["permissions"]
            return 200, json.dumps({"permissions": [p for p in asked if p in self.permissions]})
        if method == "DELETE" and path.partition("?")[0] == INSTANCE:
            now = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            if isinstance(now, int):
                return now, json.dumps({"error": {"message": "said the stand-in"}})
            self._operation = list(now)
            return 200, self._next()
        if method == "GET" and path == f"{INSTANCE.rpartition('/instances/')[0]}/operations/op-1":
            return 200, self._next()
        return 404, json.dumps({"error": {"message": f"no {method} {path}"}})

    def _next(self) -> str:
        word = self._operation.pop(0) if len(self._operation) > 1 else self._operation[0]
        found: dict[str, Any] = {"name": "op-1", "status": "RUNNING"}
        if word != "RUNNING":
            found["status"] = "DONE"
        if word == "BAD":
            found["error"] = {"errors": [{"code": "RESOURCE_NOT_READY", "message": "not yet"}]}
        return json.dumps(found)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def _do(self) -> None:
                if cloud.silent.is_set():
                    time.sleep(5)  # longer than the script waits for one answer
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, text = cloud.answer(self.command, self.path, self.headers, body)
                with cloud.changed:
                    cloud.calls.append(f"{self.command} {self.path}")
                    cloud.changed.notify_all()
                self.send_response(status)
                self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = do_DELETE = _do

            def log_message(self, *_: object) -> None:
                pass

        return Handler
