"""A bucket in Google Cloud Storage.

Listing, metadata, small objects, deletes and credentials are google-cloud-storage's. Only what must be fast is
ours: the body of a resumable upload goes straight from the caller's buffer into one PUT, because the library's
writer keeps whole chunks in memory and alternates between reading and sending.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from kimisession.errors import INSTALL_CLOUD, UsageMistake
from kimisession.node.web import BUSY, Site, retry_after_s
from kimisession.node.wire import HttpWire, Range, WireError
from kimisession.weights.bucket import Reader, Stat, Upload
from kimisession.weights.errors import (
    BucketDenied,
    BucketFull,
    BucketTaken,
    Conflict,
    Missing,
    NoBucket,
    SessionGone,
    TryAgain,
    WeightsError,
)

CONNECT_S = 60.0
ASK_S = 15.0
GRAIN_BYTES = 256 * 2**10
"""A resumable upload keeps whole multiples of this (Cloud Storage documentation, resumable uploads)."""


class GcsBucket:
    """A bucket, or the part of one below a prefix. `name` is the whole of it without `gs://`."""

    pins_generations = True

    def __init__(self, client: Any, bucket: str, prefix: str = "", *, retry: Any = None) -> None:
        """`client` is a google.cloud.storage.Client; `retry` a google.api_core Retry for all but uploads."""
        self.name = f"{bucket}/{prefix}".rstrip("/")
        self.url = f"gs://{self.name}"
        self.client = client
        self.bucket_name = bucket
        self._bucket = client.bucket(bucket)
        self._prefix = prefix
        self._retry = retry

    @classmethod
    def at(cls, url: str) -> GcsBucket:
        """The bucket of `gs://bucket/prefix`, with the machine's own credentials. Raises WeightsError."""
        parts = urlsplit(url)
        prefix = parts.path.strip("/")
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", parts.netloc):
            raise NoBucket(f"{url!r} names no bucket", "give gs://bucket or gs://bucket/prefix")
        if not re.fullmatch(r"[A-Za-z0-9_.+=@,/-]*", prefix) or parts.query or parts.fragment:
            raise NoBucket(
                f"{url!r} has characters in its prefix that not every reader takes", "use A-Z a-z 0-9 _.+=@,-/"
            )
        try:
            storage = importlib.import_module("google.cloud.storage")
            retries = importlib.import_module("google.cloud.storage.retry")
        except ImportError:
            raise WeightsError(
                "Google Cloud Storage needs the package google-cloud-storage",
                INSTALL_CLOUD,
            ) from None
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            credentials = importlib.import_module("google.auth.credentials")
            client = storage.Client(
                project="emulated",
                credentials=credentials.AnonymousCredentials(),
                client_options={"api_endpoint": os.environ["STORAGE_EMULATOR_HOST"]},
            )
        else:
            try:
                client = storage.Client()
            except Exception as error:  # google.auth raises several unrelated types; each means the same here
                raise BucketDenied(
                    f"there are no usable Google Cloud credentials here: {str(error).partition('. ')[0]}",
                    "gcloud auth application-default login",
                ) from None
        retry = retries.DEFAULT_RETRY.with_timeout(60.0)
        return cls(client, parts.netloc, prefix + "/" if prefix else "", retry=retry)

    def exists(self) -> bool:
        """Whether there is such a bucket that this account may see. Raises WeightsError."""
        with self._translated(""):
            return self.client.lookup_bucket(self.bucket_name, retry=_asking()) is not None

    def location(self) -> str:
        """Where the bucket is, in lower case; "" when there is none. Raises WeightsError."""
        return self.place()[0]

    def place(self) -> tuple[str, str]:
        """Where the bucket is, in lower case, and the storage class that new objects get; "" and "" when there is none.
        Raises WeightsError."""
        with self._translated(""):
            found = self.client.lookup_bucket(self.bucket_name, retry=_asking())
        return (
            ("", "") if found is None else (str(found.location or "").lower(), str(found.storage_class or "STANDARD"))
        )

    def billed(self) -> tuple[str, Sequence[Any], Sequence[Any]]:
        """Of the whole bucket: its location, every generation of every object, and what is soft-deleted, as the library's
        blobs; no location when there is no bucket. Raises WeightsError."""
        with self._translated(""):
            found = self.client.lookup_bucket(self.bucket_name)
            if found is None:
                return "", (), ()
            every = tuple(self.client.list_blobs(self.bucket_name, versions=True, retry=self._retry))
            deleted: tuple[Any, ...] = ()
            if found.soft_delete_policy.retention_duration_seconds:  # else Google refuses the question
                deleted = tuple(self.client.list_blobs(self.bucket_name, soft_deleted=True, retry=self._retry))
        return str(found.location or "").lower(), every, deleted

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """See Bucket.list."""
        with self._translated(prefix):
            for blob in self.client.list_blobs(
                self.bucket_name,
                prefix=self._prefix + prefix,
                retry=self._retry,
                fields="items(name,size,generation,crc32c),nextPageToken",
            ):
                yield self._stat(blob)

    def stat(self, name: str) -> Stat | None:
        """See Bucket.stat."""
        with self._translated(name):
            blob = self._bucket.get_blob(self._prefix + name, retry=self._retry)
        return None if blob is None else self._stat(blob)

    def read(self, name: str) -> tuple[bytes, int]:
        """See Bucket.read."""
        with self._translated(name):
            blob = self._bucket.get_blob(self._prefix + name, retry=self._retry)
            if blob is None:
                raise Missing(f"{self.url} holds no {name}")
            generation = int(blob.generation)
            fixed = self._bucket.blob(self._prefix + name, generation=generation)
            return fixed.download_as_bytes(retry=self._retry, raw_download=True), generation

    def open(self, name: str, offset: int, size: int, generation: int | None = None) -> Reader:
        """See Bucket.open."""
        wire = HttpWire(self._origin(), self._prefix, self.bucket_name, _Auth(self.client))
        try:
            return _Reader(wire, wire.open(name, offset, size, generation))
        except WireError as error:
            wire.drop()
            raise _of_wire(error) from None

    def write(self, name: str, content: bytes, *, replaces: int | None) -> int:
        """See Bucket.write."""
        blob = self._bucket.blob(self._prefix + name)
        with self._translated(name):
            blob.upload_from_string(
                content,
                content_type="application/json",
                if_generation_match=replaces or 0,
                checksum="crc32c",
                retry=self._retry,
            )
        return int(blob.generation)

    def start_upload(self, name: str, size: int) -> Upload:
        """See Bucket.start_upload."""
        blob = self._bucket.blob(self._prefix + name)
        with self._translated(name):
            uri = blob.create_resumable_upload_session(
                content_type="application/octet-stream",
                size=size,
                client=self.client,
                if_generation_match=0,
                checksum=None,
                retry=self._retry,
            )
        return GcsUpload(self.url, name, size, uri, at=0)

    def resume_upload(self, name: str, size: int, uri: str) -> Upload:
        """See Bucket.resume_upload."""
        return GcsUpload(self.url, name, size, uri)

    def delete(self, name: str, generation: int | None = None) -> None:
        """See Bucket.delete."""
        with contextlib.suppress(Missing), self._translated(name):
            self._bucket.blob(self._prefix + name).delete(if_generation_match=generation, retry=self._retry)

    def delete_leavings(self) -> None:
        """See Bucket.delete_leavings. Unfinished sessions hold no object and end by themselves within a week."""

    def _origin(self) -> str:
        return str(self.client._connection.API_BASE_URL).rstrip("/")

    def _stat(self, blob: Any) -> Stat:
        return Stat(blob.name[len(self._prefix) :], int(blob.size), int(blob.generation), blob.crc32c)

    @contextlib.contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """What the library raises, as what a person can act on."""
        errors = importlib.import_module("google.api_core.exceptions")
        where = f"{name} in {self.url}" if name else self.url
        with _sentences(where):
            try:
                yield
            except errors.NotFound as error:
                text = str(error).lower()
                if not name or ("bucket" in text and "object" not in text):
                    raise WeightsError(
                        f"there is no bucket {self.bucket_name}", "create it with --region, or correct the name"
                    ) from None
                raise Missing(f"{where} is not there") from None


def _asking() -> Any:
    """How long a question is asked again before anything has begun: somebody looks on, and nothing is lost by an answer."""
    return importlib.import_module("google.cloud.storage.retry").DEFAULT_RETRY.with_timeout(ASK_S)


@contextlib.contextmanager
def _sentences(where: str) -> Iterator[None]:
    """What the library raises about `where`, whatever was asked, as what a person can act on."""
    errors = importlib.import_module("google.api_core.exceptions")
    auth = importlib.import_module("google.auth.exceptions")
    requests = importlib.import_module("requests.exceptions")
    try:
        yield
    except errors.PreconditionFailed:
        raise Conflict(f"{where} was written by someone else") from None
    except errors.RetryError as error:
        raise TryAgain(f"{where}: Cloud Storage did not answer ({_last_words(error.cause or error)})") from None
    except errors.GoogleAPICallError as error:
        raise _of_status(int(error.code or 0), where, str(error), _header(error, "Retry-After")) from None
    except auth.GoogleAuthError as error:
        raise BucketDenied(
            f"Google Cloud refuses the credentials ({error})",
            "run 'gcloud auth application-default login'",
        ) from None
    except (requests.ConnectionError, requests.Timeout, requests.ChunkedEncodingError) as error:
        raise TryAgain(f"{where}: Cloud Storage did not answer ({_last_words(error)})") from None


def _last_words(error: BaseException) -> str:
    """The innermost of the reasons that requests and urllib3 put into one line."""
    return str(error).rpartition(": ")[2].strip("\"'() ") or type(error).__name__


def create_bucket(
    client: Any, name: str, *, location: str, labels: Mapping[str, str], storage_class: str = "STANDARD"
) -> bool:
    """Create a bucket for weights near the GPUs, or find it there; whether it was created.

    Uniform access and no public access; no soft delete, because deleted weights would go on costing for seven days.
    Raises BucketTaken when it exists in another location, BucketDenied when it is somebody else's.
    """
    errors = importlib.import_module("google.api_core.exceptions")
    bucket = client.bucket(name)
    bucket.storage_class = storage_class
    bucket.labels = dict(labels)
    bucket.iam_configuration.uniform_bucket_level_access_enabled = True
    bucket.iam_configuration.public_access_prevention = "enforced"
    bucket.soft_delete_policy.retention_duration_seconds = 0
    with _sentences(f"gs://{name}"):
        try:
            client.create_bucket(bucket, location=location, retry=_asking())
            return True
        except errors.Conflict:
            try:
                found = client.get_bucket(name, retry=_asking())
            except (errors.Forbidden, errors.NotFound):
                raise BucketDenied(f"the bucket name {name} is taken by somebody else", "choose another name") from None
        except errors.BadRequest as error:
            raise UsageMistake(
                f"Cloud Storage makes no bucket {name} in {location} ({_last_words(error)})",
                "check --region and the bucket's name",
            ) from None
    if str(found.location).lower() != location.lower():
        raise BucketTaken(
            f"gs://{name} is in {str(found.location).lower()}, the GPUs will be in {location}",
            "every pull would cross regions, slow and billed; use another bucket, or start in that region",
        )
    return False


class GcsUpload:
    """A resumable upload: what is missing goes out as the body of one PUT."""

    def __init__(self, url: str, name: str, size: int, uri: str, at: int | None = None) -> None:
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise SessionGone(f"{uri!r} is no upload of {url}")
        self.uri = uri
        self._where = f"{name} in {url}"
        self._name = name
        self._size = size
        self._site = Site(f"{parts.scheme}://{parts.netloc}", CONNECT_S)
        self._target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        self._connection: http.client.HTTPConnection | None = None
        self._at = at
        self._made: Stat | None = None

    def offset(self) -> int:
        """See Upload.offset."""
        self.close()
        try:
            self._begin(f"bytes */{self._size}", 0)
            self._answer()
        except (OSError, http.client.HTTPException) as error:
            raise self._cut(error) from None
        assert self._at is not None
        return self._at

    def send(self, chunk: memoryview) -> None:
        """See Upload.send."""
        if not chunk:
            return
        if self._at is None:
            self.offset()
        try:
            if self._connection is None:
                start = self._at or 0
                self._begin(f"bytes {start}-{self._size - 1}/{self._size}", self._size - start)
            assert self._connection is not None
            self._connection.send(chunk)
        except OSError as error:
            # A server that refuses closes before it has read everything; what it said may still be there.
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._connection is not None:
                    self._connection.sock.settimeout(1.0)
                    self._answer()
            raise self._cut(error) from None

    def commit(self) -> Stat:
        """See Upload.commit."""
        if self._made is None:
            try:
                if self._connection is None:
                    # Nothing is left to send: an empty file, or all bytes came in an earlier life.
                    self._begin(f"bytes */{self._size}", 0)
                self._answer()
            except (OSError, http.client.HTTPException) as error:
                raise self._cut(error) from None
        if self._made is None:
            raise TryAgain(f"{self._where} has not all of its {self._size} bytes yet")
        return self._made

    def cancel(self) -> None:
        """See Upload.cancel."""
        self.close()
        try:
            connection, _ = self._site.connection()
            connection.request("DELETE", self._target, headers={"Content-Length": "0"})
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            pass  # it ends by itself within a week
        self.close()

    def close(self) -> None:
        """See Upload.close."""
        self._site.drop()
        self._connection = None

    def _begin(self, span: str, length: int) -> None:
        connection, _ = self._site.connection()
        connection.putrequest("PUT", self._target, skip_accept_encoding=True)
        connection.putheader("Content-Length", str(length))
        connection.putheader("Content-Range", span)
        connection.endheaders()
        self._connection = connection

    def _answer(self) -> None:
        """Read what the store says: done (200), so far (308), or why not."""
        assert self._connection is not None
        answer = self._connection.getresponse()
        text = answer.read(2**20)
        self.close()
        if answer.status == 308:
            last = re.fullmatch(r"bytes=0-(\d+)", answer.getheader("Range") or "")
            # What is kept comes in whole grains, and bytes sent again are ignored: so less than a grain is none.
            self._at = (int(last.group(1)) + 1) // GRAIN_BYTES * GRAIN_BYTES if last else 0
        elif answer.status in (200, 201):
            try:
                found = json.loads(text)
                self._made = Stat(self._name, int(found["size"]), int(found["generation"]), str(found["crc32c"]))
            except (ValueError, KeyError, TypeError):
                raise TryAgain(f"{self._where}: the store's answer cannot be read") from None
            self._at = self._size
        elif answer.status in (404, 410, 499):
            raise SessionGone(f"{self._where}: the store no longer knows this upload")
        elif answer.status == 412:
            raise Conflict(f"{self._where} already exists")
        else:
            message = text[:300].decode("utf-8", "replace")
            raise _of_status(answer.status, self._where, message, answer.getheader("Retry-After"))

    def _cut(self, error: Exception) -> TryAgain:
        self.close()
        return TryAgain(f"{self._where}: the connection was cut ({error or type(error).__name__})")


class _Auth:
    """The library's credentials as the wire's token."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def headers(self) -> dict[str, str]:
        found: dict[str, str] = {}
        transport = importlib.import_module("google.auth.transport.requests")
        self.client._credentials.before_request(transport.Request(), "GET", "", found)
        return {key.title(): value for key, value in found.items()}

    def spent(self, headers: Mapping[str, str]) -> bool:
        return False


class _Reader:
    def __init__(self, wire: HttpWire, inner: Range) -> None:
        self._wire, self._inner = wire, inner

    def readinto(self, buffer: memoryview) -> int:
        try:
            return self._inner.readinto(buffer)
        except WireError as error:
            raise _of_wire(error) from None

    def close(self) -> None:
        self._inner.close()
        self._wire.drop()


def _of_wire(error: WireError) -> WeightsError:
    if error.kind == "missing":
        return Missing(error.message)
    if error.kind == "denied":
        return BucketDenied(error.message)
    return TryAgain(error.message, error.retry_after_s)


def _header(error: Any, name: str) -> str | None:
    response = getattr(error, "response", None)
    value = getattr(response, "headers", {}).get(name)
    return None if value is None else str(value)


def _of_status(status: int, where: str, message: str, retry_after: str | None) -> WeightsError:
    """An answer of the store, as what a person can act on."""
    text = message.lower()
    if status == 507 or (status in (403, 429) and ("quotaexceeded" in text or "quota exceeded" in text)):
        return BucketFull(f"{where}: the store's quota is used up", "raise the quota or free space, then go on")
    if status in BUSY:
        return TryAgain(f"{where}: the store is busy ({status})", retry_after_s(retry_after))
    if status in (401, 403):
        return BucketDenied(
            f"{where} may not be written or read ({status})",
            "give the account the role roles/storage.objectAdmin on the bucket",
        )
    return WeightsError(f"{where}: the store answered {status}", message[:200].replace("\n", " "))
