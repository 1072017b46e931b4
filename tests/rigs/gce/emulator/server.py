"""The sockets: Google's APIs, the metadata server and the admin port, over HTTP/1.1 with keep-alive."""

import json
import ssl
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from .admin import Admin
from .emulator import Emulator
from .errors import LostReply
from .metadata import Metadata, Resolver, by_address, etag_of

Address = tuple[str, int]


class _Handler(BaseHTTPRequestHandler):
    """What the three have in common. Nagle would cost 40 ms per answer on a kept connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout: ClassVar[float] = 900
    clock: ClassVar[Callable[[], float]]

    def date_time_string(self, timestamp: float | None = None) -> str:
        """The Date of an answer, by the emulator's own clock."""
        return super().date_time_string(int(type(self).clock() if timestamp is None else timestamp))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the emulator keeps its own list of calls."""

    def body(self) -> bytes:
        """All of it, counted or chunked."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, status: int, text: bytes, kind: str, **headers: str) -> None:
        """Send it."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(text)

    def handle_any(self) -> None:
        raise AssertionError("each of the three says what it does")

    def do_GET(self) -> None:
        self.handle_any()

    def do_POST(self) -> None:
        self.handle_any()

    def do_PUT(self) -> None:
        self.handle_any()

    def do_PATCH(self) -> None:
        self.handle_any()

    def do_DELETE(self) -> None:
        self.handle_any()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up when they like; that is no event here."""


class Servers:
    """All sockets of an emulator. Ports may be 0; `ports` has the real ones in the order that they were asked for."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._servers: list[_Server] = []
        self.ports: list[int] = []

    def api(self, address: Address, certificate: Path | None = None, key: Path | None = None) -> int:
        """Google's APIs; with TLS when there is a certificate (its file may have the whole chain)."""
        emulator = self._emulator

        class Api(_Handler):
            def handle_any(self) -> None:
                raw, header = self.body(), self.headers.get
                try:
                    reply = emulator.answer(
                        self.command, header("Host", ""), self.path, header("Authorization", ""), raw
                    )
                except LostReply:
                    self.close_connection = True
                    self.connection.close()
                    return
                self.reply(reply.status, json.dumps(reply.body).encode(), "application/json; charset=UTF-8")

        return self._serve(address, Api, certificate, key)

    def metadata(self, address: Address, resolve: Resolver | None = None) -> int:
        """The metadata server; `resolve` says which VM an address is."""
        metadata = Metadata(self._emulator.state, resolve or by_address(self._emulator.state))

        class Meta(_Handler):
            def handle_any(self) -> None:
                header = self.headers.get
                forwarded = "X-Forwarded-For" in self.headers
                status, kind, text = metadata.answer(
                    self.client_address[0], self.path, header("Metadata-Flavor", ""), forwarded
                )
                self.reply(status, text.encode(), kind, Metadata_Flavor="Google", ETag=etag_of(text))

        return self._serve(address, Meta)

    def admin(self, address: Address) -> int:
        """The back door for tests."""
        admin = Admin(self._emulator)

        class Back(_Handler):
            def handle_any(self) -> None:
                status, answer = admin.answer(self.command, self.path, json.loads(self.body() or b"{}"))
                self.reply(status, json.dumps(answer, indent=1).encode(), "application/json")

        return self._serve(address, Back)

    def close(self) -> None:
        """Stop listening. Requests that are being answered end by themselves."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _serve(
        self, address: Address, handler: type[_Handler], certificate: Path | None = None, key: Path | None = None
    ) -> int:
        state = self._emulator.state
        handler.clock = lambda: float(state.clock())  # tests move it later
        server = _Server(address, handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            # The handshake happens in the connection's own thread, at its first read: a slow client blocks nobody.
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True, name=f"port {address[1]}").start()
        self._servers.append(server)
        self.ports.append(int(server.server_address[1]))
        return self.ports[-1]


def address_of(text: str) -> Address:
    """127.0.0.1:443 as a pair. Raises ValueError."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def serve(
    emulator: Emulator,
    listen: Sequence[Address],
    admin: Address | None = None,
    metadata: Address | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
) -> Servers:
    """Start the emulator and all its sockets."""
    servers = Servers(emulator)
    for address in listen:
        servers.api(address, certificate, key)
    if admin:
        servers.admin(admin)
    if metadata:
        servers.metadata(metadata)
    emulator.start()
    return servers
