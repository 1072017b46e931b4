"""What every bucket promises: a folder, and Google Cloud Storage as our strict stand-in plays it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kimisession.weights.bucket import Bucket, FolderBucket, open_bucket
from kimisession.weights.errors import Conflict, Missing, NoBucket, SessionGone, TryAgain, WeightsError
from kimisession.weights.gcs import GcsBucket, create_bucket
from kimisession.weights.manifest import Hashing
from tests.weights.gcs_server import GcsServer, client_for
from tests.weights.servers import serving


@pytest.fixture(params=["folder", "gcs", "gcs/prefix"])
def bucket(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    if request.param == "folder":
        yield FolderBucket(tmp_path / "bucket")
        return
    pytest.importorskip("google.cloud.storage")
    server = GcsServer(tmp_path / "store", grain=2)
    with serving(server):
        yield GcsBucket(client_for(server.url), "weights", "a/prefix/" if "/" in request.param else "")
    assert server.seen.refused == []


def put(bucket: Bucket, name: str, content: bytes) -> None:
    upload = bucket.start_upload(name, len(content))
    upload.send(memoryview(content))
    upload.commit()
    upload.close()


def get(bucket: Bucket, name: str, offset: int, size: int) -> bytes:
    reader = bucket.open(name, offset, size)
    found = b""
    buffer = memoryview(bytearray(7))
    while count := reader.readinto(buffer):
        found += bytes(buffer[:count])
    reader.close()
    return found


def test_an_object_comes_into_being_at_commit_and_not_before(bucket: Bucket) -> None:
    upload = bucket.start_upload("a/shard", 6)
    upload.send(memoryview(b"abc"))
    upload.close()
    assert bucket.stat("a/shard") is None
    upload = bucket.resume_upload("a/shard", 6, upload.uri)
    assert upload.offset() <= 3
    upload.send(memoryview(b"abcdef"[upload.offset() :]))
    assert upload.commit().size == 6
    assert get(bucket, "a/shard", 2, 3) == b"cde"


def test_what_the_store_says_is_stored_is_the_crc32c_of_the_bytes(bucket: Bucket) -> None:
    put(bucket, "x", b"hello world" * 1000)
    hashing = Hashing(1 << 20)
    hashing.update(memoryview(b"hello world" * 1000))
    found = bucket.stat("x")
    assert found is not None
    assert (found.size, found.crc32c) == (11000, hashing.crc32c)


def test_a_second_object_of_one_name_is_a_conflict_and_the_first_stays(bucket: Bucket) -> None:
    put(bucket, "x", b"first")
    with pytest.raises(Conflict):
        put(bucket, "x", b"other")
    assert get(bucket, "x", 0, 5) == b"first"


def test_a_write_holds_its_precondition(bucket: Bucket) -> None:
    first = bucket.write("c.json", b"1", replaces=None)
    with pytest.raises(Conflict):
        bucket.write("c.json", b"2", replaces=None)
    second = bucket.write("c.json", b"3", replaces=first)
    with pytest.raises(Conflict):
        bucket.write("c.json", b"4", replaces=first)
    assert bucket.read("c.json") == (b"3", second)
    with pytest.raises(Conflict):
        bucket.delete("c.json", first)
    bucket.delete("c.json", second)
    with pytest.raises(Missing):
        bucket.read("c.json")


def test_deleting_what_is_gone_is_fine(bucket: Bucket) -> None:
    bucket.delete("nothing/here")
    put(bucket, "x", b"1")
    bucket.delete("x")
    bucket.delete("x")
    assert list(bucket.list()) == []


def test_a_listing_has_names_and_sizes(bucket: Bucket) -> None:
    put(bucket, "b/2", b"22")
    put(bucket, "a", b"1")
    put(bucket, "b/1", b"")
    assert [(stat.name, stat.size) for stat in bucket.list()] == [("a", 1), ("b/1", 0), ("b/2", 2)]
    assert [stat.name for stat in bucket.list("b/")] == ["b/1", "b/2"]


def test_a_cancelled_upload_is_gone(bucket: Bucket) -> None:
    upload = bucket.start_upload("x", 10)
    upload.send(memoryview(b"abc"))
    upload.cancel()
    upload.cancel()
    with pytest.raises(SessionGone):
        bucket.resume_upload("x", 10, upload.uri).offset()


def test_reading_what_is_not_there_says_so(bucket: Bucket) -> None:
    with pytest.raises(Missing):
        bucket.open("x", 0, 1).readinto(memoryview(bytearray(1)))


@pytest.mark.parametrize("url", ["", "s3://x", "file://host/x", "ftp://x/y"])
def test_what_is_no_bucket_is_told_what_is(url: str) -> None:
    with pytest.raises(WeightsError) as caught:
        open_bucket(url)
    assert "file:///" in caught.value.hint


def test_a_folder_without_write_permission_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    if (tmp_path / "locked").stat().st_uid == 0:
        pytest.skip("root may write everywhere")
    with pytest.raises(WeightsError):
        open_bucket(str(tmp_path / "locked" / "bucket")).write("x", b"", replaces=None)


def test_a_bare_word_is_neither_a_folder_nor_a_bucket() -> None:
    """It would put hundreds of gigabytes onto the disk of somebody who forgot gs://."""
    with pytest.raises(NoBucket) as caught:
        open_bucket("weights")
    assert (caught.value.exit_code, "gs://weights" in caught.value.hint) == (2, True)


@pytest.mark.parametrize("url", ["gs://weights/a?b", "gs://weights/a#b", "gs://weights/a%20b", "gs://weights/a b"])
def test_a_prefix_that_the_puller_would_read_otherwise_is_refused(url: str) -> None:
    with pytest.raises(NoBucket):
        open_bucket(url)


@pytest.mark.parametrize("ask", ["create_bucket", "get_bucket"])
def test_a_store_that_does_not_answer_when_a_bucket_is_made_is_one_sentence(ask: str) -> None:
    errors = pytest.importorskip("google.api_core.exceptions")
    cause = ConnectionError(
        "HTTPConnectionPool(host='x'): Max retries (Caused by E('y: [Errno 111] Connection refused'))"
    )

    class Client:
        def bucket(self, name: str) -> Any:
            return SimpleNamespace(iam_configuration=SimpleNamespace(), soft_delete_policy=SimpleNamespace())

        def create_bucket(self, *args: object, **more: object) -> None:
            raise (
                errors.RetryError("Timeout of 120.0s exceeded", cause)
                if ask == "create_bucket"
                else errors.Conflict("")
            )

        def get_bucket(self, *args: object, **more: object) -> None:
            raise errors.RetryError("Timeout of 120.0s exceeded", cause)

    with pytest.raises(TryAgain) as caught:
        create_bucket(Client(), "weights", location="us-central1", labels={})
    assert caught.value.message == "gs://weights: Cloud Storage did not answer ([Errno 111] Connection refused)"


def test_a_bucket_that_is_not_there_is_called_so(tmp_path: Path) -> None:
    pytest.importorskip("google.cloud.storage")
    server = GcsServer(tmp_path / "store")
    with serving(server), pytest.raises(WeightsError, match="there is no bucket nowhere"):
        list(GcsBucket(client_for(server.url), "nowhere").list())
