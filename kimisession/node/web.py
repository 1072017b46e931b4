"""One kept-alive HTTP(S) connection, and where the token for Google Cloud Storage comes from.

http.client sends requests and reads the heads of answers. Bodies of plain connections are received by whoever reads them
from the socket itself (wire.py): with 2 processes x 4 threads into fresh files in memory that took 0.36 instead of 0.54 CPU
seconds per GiB, crc32c on (own runs on 2 cores, 2026-11-21, `benchmarks/pull.py --only kimisession`, 7 and 5 runs).
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

TIMEOUT_S = 60.0
BUSY = (408, 429, 500, 502, 503, 504)
"""Answers that mean: come back later. 401 and 403 are not among them."""


class Site:
    """A kept-alive connection to one origin, for one thread at a time."""

    def __init__(self, origin: str, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(origin)
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._used = False

    def get(self, target: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Send a GET and read the head of the answer. Raises OSError or http.client.HTTPException.

        A kept connection that the server has closed meanwhile is replaced once, unnoticed.
        """
        while True:
            connection, kept = self.connection()
            try:
                connection.request("GET", target, headers={"Accept-Encoding": "identity", **headers})
                return connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.drop()
                if not kept or isinstance(error, TimeoutError):
                    raise

    def connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """The connection, opened if need be, and whether it has been used before."""
        if self._connection is None:
            self._connection = (
                http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=ssl.create_default_context()
                )
                if self._tls
                else http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            )
            self._connection.connect()
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # for whoever receives from the socket itself: silence ends as it does in http.client
            wait = struct.pack("@ll", int(self._timeout_s), 0)
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
            self._used = False
        kept, self._used = self._used, True
        return self._connection, kept

    def plain_socket(self) -> socket.socket | None:
        """The socket of an open connection that has no TLS, else None."""
        return None if self._tls or self._connection is None else self._connection.sock

    def drop(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def retry_after_s(value: str | None) -> float | None:
    """The seconds of a Retry-After header; None where there is none or it is a date (clocks may be wrong)."""
    try:
        return max(0.0, float(value)) if value else None
    except ValueError:
        return None


def storage_origin() -> str:
    """Where the JSON API of Google Cloud Storage answers: STORAGE_EMULATOR_HOST, or Google."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if not emulator:
        return "https://storage.googleapis.com"
    return emulator.rstrip("/") if "://" in emulator else "http://" + emulator.rstrip("/")


class Token:
    """The bearer token of this machine: from CLOUDSDK_AUTH_ACCESS_TOKEN, else from the metadata server.

    Refreshed five minutes before its end, by the monotonic clock, so that a clock that jumps changes nothing.
    Where there is no metadata server, or an emulator is named without one, requests carry no token (public
    buckets).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = ""
        self._until = 0.0
        host = os.environ.get("GCE_METADATA_HOST", "")
        self._metadata = "http://" + (host or "metadata.google.internal")
        self._fixed = os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN", "").strip()
        self._none = bool(os.environ.get("STORAGE_EMULATOR_HOST")) and not host

    def headers(self) -> dict[str, str]:
        """The Authorization header, or nothing. Raises OSError, HTTPException or ValueError while refreshing."""
        if self._fixed:
            if not re.fullmatch("[!-~]+", self._fixed):  # http.client would quote it in its refusal
                raise OSError("CLOUDSDK_AUTH_ACCESS_TOKEN holds something that is no token")
            return {"Authorization": "Bearer " + self._fixed}
        with self._lock:
            if not self._none and time.monotonic() >= self._until:
                self._refresh()
            return {"Authorization": "Bearer " + self._value} if self._value else {}

    def spent(self, headers: Mapping[str, str]) -> bool:
        """Tell that these headers were refused (401); whether another token may be had."""
        with self._lock:
            if self._fixed or self._none:
                return False
            if headers.get("Authorization") == "Bearer " + self._value:
                self._until = 0.0
            return True

    def _refresh(self) -> None:
        site = Site(self._metadata, timeout_s=5)
        target = "/computeMetadata/v1/instance/service-accounts/default/token"
        try:
            answer = site.get(target, {"Metadata-Flavor": "Google"})
            text = answer.read(65536)
        except socket.gaierror:
            self._none = True  # not on Google Cloud
            return
        finally:
            site.drop()
        if answer.status != 200:
            raise OSError(f"the metadata server answered {answer.status}")
        found = json.loads(text)
        self._value = str(found["access_token"])
        self._until = time.monotonic() + max(10.0, float(found["expires_in"]) - 300)
