"""Reading ranges of sealed weights on the rented machine; `open_wire` knows the schemes."""

from __future__ import annotations

import functools
import http.client
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote, urlsplit

from kimisession.node.web import BUSY, TIMEOUT_S, Site, Token, retry_after_s, storage_origin


class WireError(Exception):
    """A range that could not be read: one sentence.

    `kind` is `missing` (no such object), `denied` (the same request would be refused again), `busy` (429 or 503: come back
    later, with fewer) or `cut`.
    """

    def __init__(self, kind: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s


class Auth(Protocol):
    """Whatever knows the Authorization header."""

    def headers(self) -> dict[str, str]:
        """The header, or nothing. May raise OSError, HTTPException, ValueError or KeyError."""

    def spent(self, headers: Mapping[str, str]) -> bool:
        """Tell that these headers were refused; whether another try makes sense."""


class Range(Protocol):
    """Bytes of one range, read into the caller's buffer."""

    def readinto(self, buffer: memoryview) -> int:
        """Fill some of `buffer`; 0 means the end. Raises WireError."""

    def close(self) -> None:
        """Give the connection or file back."""


class Wire(Protocol):
    """Where weights come from; one per thread."""

    def open(self, name: str, offset: int, size: int, generation: int | None) -> Range:
        """The bytes [offset, offset + size) of an object, of this generation if given. Raises WireError."""

    def read(self, name: str) -> bytes:
        """A small object as a whole. Raises WireError."""


class FolderRange(Range):
    """A range of a local file."""

    def __init__(self, path: Path, offset: int, size: int) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WireError("missing", f"{path} is not there") from None
        except OSError as error:
            raise WireError("denied", f"{path} may not be read ({error.strerror})") from None
        self._at = offset
        self._end = offset + size

    def readinto(self, buffer: memoryview) -> int:
        """See Range.readinto."""
        try:
            count = os.preadv(self._file, [buffer[: self._end - self._at]], self._at)
        except OSError as error:
            raise WireError("cut", f"reading failed: {error.strerror}") from error
        self._at += count
        return count

    def close(self) -> None:
        """See Range.close."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class FolderWire(Wire):
    """A bucket in a local folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, name: str, offset: int, size: int, generation: int | None) -> Range:
        """See Wire.open. A folder has no generations; checksums say whether the bytes are the right ones."""
        return FolderRange(self._path / name, offset, size)

    def read(self, name: str) -> bytes:
        """See Wire.read."""
        path = self._path / name
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise WireError("missing", f"{path} is not there") from None
        except OSError as error:
            raise WireError("denied", f"{path} may not be read ({error.strerror})") from None


class HttpRange(Range):
    """The body of one answer. A body that was not read to its end costs the connection.

    What http.client has buffered behind the head comes first; after it a plain connection is received from directly,
    one call for all that the caller wants: fewer turns of threads that wait for one interpreter.
    """

    def __init__(self, wire: HttpWire, answer: http.client.HTTPResponse, size: int, name: str) -> None:
        self._wire = wire
        self._answer = answer
        self._left = size
        self._name = name
        self._plain = wire.plain_socket()
        self._buffered = -1

    def readinto(self, buffer: memoryview) -> int:
        """See Range.readinto."""
        wanted = buffer[: self._left]
        try:
            if self._plain is None:
                count = self._answer.readinto(wanted)
            elif self._buffered:
                if self._buffered < 0:
                    self._buffered = len(self._answer.fp.peek())
                    self._plain.settimeout(None)  # Python's own is one more call to the kernel before each receive
                count = self._answer.readinto(wanted[: self._buffered])
                self._buffered -= count
            else:
                count = self._plain.recv_into(wanted, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise WireError("cut", f"{self._name} was cut off (the server fell silent)") from None
        except (OSError, http.client.HTTPException) as error:
            raise WireError("cut", f"{self._name} was cut off ({error or type(error).__name__})") from None
        self._left -= count
        return count

    def close(self) -> None:
        """See Range.close."""
        if self._left:
            self._wire.drop()
        else:
            if self._plain is not None:
                self._plain.settimeout(self._wire.timeout_s)
            self._answer.close()


class HttpWire(Wire):
    """Objects over HTTP(S): a plain web server, or the JSON API of Google Cloud Storage (`bucket` given).

    Where `bucket` is given, names are looked up in it below `prefix`, reads are pinned to a generation, and
    requests carry `token`.
    """

    def __init__(
        self, origin: str, prefix: str, bucket: str = "", token: Auth | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._site = Site(origin, timeout_s)
        self.timeout_s = timeout_s
        self._origin = origin
        self._prefix = prefix
        self._bucket = bucket
        self._token = token

    def open(self, name: str, offset: int, size: int, generation: int | None) -> Range:
        """See Wire.open."""
        answer = self._get(name, generation, {"Range": f"bytes={offset}-{offset + size - 1}"})
        length = answer.getheader("Content-Length")
        span = (answer.getheader("Content-Range") or "").partition("/")[0]
        asked = answer.status == 206 and span == f"bytes {offset}-{offset + size - 1}"
        whole = answer.status == 200 and offset == 0
        if not (asked or whole) or length != str(size):
            self.drop()
            raise WireError("cut", f"{name}: asked for {size} bytes from {offset} on, was offered {span or length}")
        return HttpRange(self, answer, size, name)

    def read(self, name: str) -> bytes:
        """See Wire.read."""
        answer = self._get(name, None, {})
        try:
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.drop()
            raise WireError("cut", f"{name} was cut off ({error})") from None
        return text

    def drop(self) -> None:
        """Close the connection; the next request opens another."""
        self._site.drop()

    def plain_socket(self) -> socket.socket | None:
        """The socket of a connection without TLS."""
        return self._site.plain_socket()

    def _target(self, name: str, generation: int | None) -> str:
        if not self._bucket:
            return quote(f"{self._prefix}/{name}")
        target = f"/download/storage/v1/b/{self._bucket}/o/{quote(self._prefix + name, safe='')}?alt=media"
        return target + (f"&generation={generation}" if generation is not None else "")

    def _get(self, name: str, generation: int | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        for last in (False, True):
            try:
                auth = self._token.headers() if self._token else {}
                answer = self._site.get(self._target(name, generation), {**headers, **auth})
            except (OSError, http.client.HTTPException) as error:
                raise WireError("cut", f"{self._origin} did not answer ({error or type(error).__name__})") from None
            except (ValueError, KeyError) as error:  # may quote a header, and so a token
                self.drop()
                raise WireError("cut", f"{self._origin} could not be asked ({type(error).__name__})") from None
            if answer.status in (200, 206):
                return answer
            self.drop()
            if answer.status == 401 and not last and self._token and self._token.spent(auth):
                continue
            break
        where = f"{name} at {self._origin}"
        if answer.status == 404:
            raise WireError("missing", f"{where} is not there")
        if answer.status in (401, 403):
            raise WireError(
                "denied",
                f"{where} may not be read ({answer.status}): that takes storage.objects.get; give "
                "this machine's service account the role roles/storage.objectViewer on the bucket",
            )
        if answer.status in BUSY:
            wait_s = retry_after_s(answer.getheader("Retry-After"))
            raise WireError("busy", f"{where}: the server is busy ({answer.status})", wait_s)
        if 400 <= answer.status < 500:
            raise WireError("denied", f"{where}: the server refuses the request ({answer.status})")
        raise WireError("cut", f"{where}: the server answered {answer.status}")


@functools.lru_cache(maxsize=1)
def _token() -> Token:
    """One token for all threads of a process."""
    return Token()


def open_wire(url: str) -> Wire:
    """The wire behind `file:///path`, `http(s)://host/path` or `gs://bucket/prefix`. Raises WireError."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise WireError("denied", "a place to pull from may not hold a user or a password: every error would tell it")
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FolderWire(Path(unquote(parts.path)))
    if parts.scheme in ("http", "https") and parts.netloc:
        return HttpWire(f"{parts.scheme}://{parts.netloc}", unquote(parts.path).rstrip("/"))
    if parts.scheme == "gs" and parts.netloc:
        prefix = unquote(parts.path).strip("/")
        return HttpWire(storage_origin(), prefix + "/" if prefix else "", parts.netloc, _token())
    raise WireError(
        "denied",
        f"{url!r} is no place to pull from: give file:///path, gs://bucket/prefix or http(s)://host/path",
    )
