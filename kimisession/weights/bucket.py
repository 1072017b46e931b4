"""Where weights are kept: the small interface that a local folder and Google Cloud Storage both have.

Objects have names, bytes and a generation that changes with every write. Large objects are written through a
resumable upload whose `uri` can be stored, so that another process on another machine goes on with it; they
come into being at once, at commit, and never replace an object that exists. Small control objects are written
whole, under a precondition on the generation they replace (None: it must not exist).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from crc32c import crc32c

from kimisession.weights.errors import (
    BucketDenied,
    BucketFull,
    Conflict,
    Missing,
    NoBucket,
    SessionGone,
    TryAgain,
)
from kimisession.weights.manifest import CONTROL, encode_crc32c

READ_BYTES = 2**20


@dataclass(frozen=True)
class Stat:
    """An object: size in bytes, generation, and crc32c (as GCS writes it; None in listings of a folder)."""

    name: str
    size: int
    generation: int
    crc32c: str | None


class Reader(Protocol):
    """Bytes from an offset on. Raises TryAgain where another try is worth it."""

    def readinto(self, buffer: memoryview) -> int:
        """Fill some of `buffer`; 0 means the end."""
        ...

    def close(self) -> None:
        """Let go of the connection or file; may be called twice."""
        ...


class Upload(Protocol):
    """One object being written from front to end, to be gone on with from anywhere by its `uri`."""

    uri: str

    def offset(self) -> int:
        """How many bytes the store has for good; `send` goes on there. Raises SessionGone, TryAgain."""
        ...

    def send(self, chunk: memoryview) -> None:
        """Send the next bytes. After TryAgain, ask `offset` again."""
        ...

    def commit(self) -> Stat:
        """Make the object, all bytes being sent. Raises Conflict if an object of that name exists."""
        ...

    def cancel(self) -> None:
        """Drop the upload and its bytes; fine if it is gone."""
        ...

    def close(self) -> None:
        """Let go of the connection; the upload stays resumable. May be called twice."""
        ...


class Bucket(Protocol):
    """A place for weights. `name` is what `delete` asks for; `url` is what commands and errors show."""

    name: str
    url: str
    pins_generations: bool
    """Whether a generation outlives a copy of the bucket, so that a manifest may pin it."""

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """All objects whose names start with `prefix`, control objects too; no uploads in progress."""
        ...

    def stat(self, name: str) -> Stat | None:
        """The object with its crc32c, or None."""
        ...

    def read(self, name: str) -> tuple[bytes, int]:
        """A small object and its generation. Raises Missing."""
        ...

    def open(self, name: str, offset: int, size: int, generation: int | None = None) -> Reader:
        """The bytes [offset, offset + size) of this generation. Raises Missing, TryAgain."""
        ...

    def write(self, name: str, content: bytes, *, replaces: int | None) -> int:
        """Write a small object over generation `replaces` (None: it must not exist); its new generation.

        Raises Conflict when the precondition does not hold.
        """
        ...

    def start_upload(self, name: str, size: int) -> Upload:
        """Begin a resumable upload of a new object of `size` bytes."""
        ...

    def resume_upload(self, name: str, size: int, uri: str) -> Upload:
        """Go on with an upload by its uri; `offset` says whether it still exists."""
        ...

    def delete(self, name: str, generation: int | None = None) -> None:
        """Delete an object (only this generation, if given); fine if it is gone. Raises Conflict."""
        ...

    def delete_leavings(self) -> None:
        """Delete what is left of uploads that nobody will finish."""
        ...


def open_bucket(url: str) -> Bucket:
    """The bucket behind `file:///path`, a path with a slash in it, or `gs://bucket/prefix`. Raises WeightsError.

    A bare word is refused: it is a folder to one reader and the name of a bucket to the next, and the difference is
    hundreds of gigabytes on a disk.
    """
    parts = urlsplit(url)
    if parts.scheme == "gs":
        from kimisession.weights.gcs import GcsBucket

        return GcsBucket.at(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FolderBucket(Path(unquote(parts.path)))
    if not parts.scheme and "/" in url:
        return FolderBucket(Path(url).expanduser())
    if re.fullmatch(r"[\w.-]+", url):
        raise NoBucket(f"{url!r} may be a folder or a bucket", f"say gs://{url}, or ./{url} for a folder")
    raise NoBucket(f"{url!r} is no bucket", "give file:///path/to/folder or gs://bucket/prefix")


class FolderBucket:
    """A bucket in a local folder: objects are files, names are paths below it. Needs hard links and flock.

    The crc32c of `stat` is read from the disk each time: it says what is stored, not what was meant.
    """

    pins_generations = False

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.name = self.path.name
        self.url = self.path.as_uri()
        self._uploads = self.path / CONTROL / "uploads"

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """See Bucket.list."""
        for folder, folders, names in os.walk(self.path):
            folders[:] = sorted(folder_name for folder_name in folders if Path(folder, folder_name) != self._uploads)
            for name in sorted(names):
                path = Path(folder, name)
                found = path.relative_to(self.path).as_posix()
                if found.startswith(prefix) and found != CONTROL + "lock":
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        yield Stat(found, status.st_size, status.st_mtime_ns, None)

    def stat(self, name: str) -> Stat | None:
        """See Bucket.stat. Reads the whole object."""
        try:
            with (self.path / name).open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                buffer = memoryview(bytearray(READ_BYTES))
                value = 0
                while count := file.readinto(buffer):
                    value = crc32c(buffer[:count], value)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            return None
        return Stat(name, status.st_size, status.st_mtime_ns, encode_crc32c(value))

    def read(self, name: str) -> tuple[bytes, int]:
        """See Bucket.read."""
        try:
            with (self.path / name).open("rb") as file:
                return file.read(), os.fstat(file.fileno()).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"{self.url} holds no {name}") from None

    def open(self, name: str, offset: int, size: int, generation: int | None = None) -> Reader:
        """See Bucket.open."""
        return FileRange(self.path / name, offset, size)

    def write(self, name: str, content: bytes, *, replaces: int | None) -> int:
        """See Bucket.write."""
        with _translated(self.url), self._locked():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            now = path.stat().st_mtime_ns if path.exists() else None
            if now != replaces:
                raise Conflict(f"{name} in {self.url} was written by someone else")
            fresh = self._uploads / secrets.token_hex(8)
            with fresh.open("wb") as file:
                file.write(content)
                file.flush()
                if now is not None and os.fstat(file.fileno()).st_mtime_ns <= now:
                    os.utime(file.fileno(), ns=(now + 1, now + 1))
                os.fsync(file.fileno())
                generation = os.fstat(file.fileno()).st_mtime_ns
            fresh.replace(path)
            _sync_folder(path.parent)
            return generation

    def start_upload(self, name: str, size: int) -> Upload:
        """See Bucket.start_upload."""
        with _translated(self.url):
            self._uploads.mkdir(parents=True, exist_ok=True)
            uri = "upload-" + secrets.token_hex(8)
            (self._uploads / uri).touch()
        return FolderUpload(self, name, size, uri)

    def resume_upload(self, name: str, size: int, uri: str) -> Upload:
        """See Bucket.resume_upload."""
        return FolderUpload(self, name, size, uri)

    def delete(self, name: str, generation: int | None = None) -> None:
        """See Bucket.delete. Folders left empty go too."""
        with _translated(self.url), self._locked():
            path = self.path / name
            with contextlib.suppress(FileNotFoundError):
                if generation is not None and path.stat().st_mtime_ns != generation:
                    raise Conflict(f"{name} in {self.url} was written by someone else")
                path.unlink()
            for folder in path.parents:
                if folder == self.path or any(folder.iterdir() if folder.is_dir() else ()):
                    break
                with contextlib.suppress(FileNotFoundError):
                    folder.rmdir()

    def delete_leavings(self) -> None:
        """See Bucket.delete_leavings."""
        if not self._uploads.is_dir():
            return
        with _translated(self.url), self._locked():
            for path in self._uploads.iterdir():
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer of control objects at a time, over processes; the kernel lets go when one dies."""
        self._uploads.mkdir(parents=True, exist_ok=True)
        with (self.path / CONTROL / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class FolderUpload:
    """An upload into a folder: a file among the uploads that is linked to its name at commit.

    A link never replaces a file, so that of two writers of one name the second gets Conflict.
    """

    def __init__(self, bucket: FolderBucket, name: str, size: int, uri: str) -> None:
        self.uri = uri
        self._bucket = bucket
        self._name = name
        self._size = size
        if not uri.startswith("upload-") or "/" in uri:
            raise SessionGone(f"{uri!r} is no upload of {bucket.url}")
        self._path = bucket.path / CONTROL / "uploads" / uri
        self._file = -1
        self._at = 0

    def offset(self) -> int:
        """See Upload.offset."""
        self.close()
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SessionGone(f"{self._bucket.url} no longer has the upload of {self._name}") from None
        self._at = os.fstat(self._file).st_size
        return self._at

    def send(self, chunk: memoryview) -> None:
        """See Upload.send."""
        if self._file < 0:
            self.offset()
        with _translated(self._bucket.url):
            while chunk:
                count = os.pwrite(self._file, chunk, self._at)
                self._at += count
                chunk = chunk[count:]

    def commit(self) -> Stat:
        """See Upload.commit."""
        if self._file < 0:
            self.offset()
        if os.fstat(self._file).st_size != self._size:
            raise TryAgain(f"{self._name} has not all of its {self._size} bytes yet")
        with _translated(self._bucket.url):
            os.fsync(self._file)
            target = self._bucket.path / self._name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(self._path, target)
            except FileExistsError:
                raise Conflict(f"{self._bucket.url} already holds {self._name}") from None
            except FileNotFoundError:
                raise SessionGone(f"{self._bucket.url} no longer has the upload of {self._name}") from None
            _sync_folder(target.parent)
        self.cancel()
        found = self._bucket.stat(self._name)
        if found is None:
            raise TryAgain(f"{self._name} vanished from {self._bucket.url} while it was being written")
        return found

    def cancel(self) -> None:
        """See Upload.cancel."""
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """See Upload.close."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class FileRange:
    """A range of a local file as a Reader."""

    def __init__(self, path: Path, offset: int, size: int | None = None) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"{path} is not there") from None
        self._at = offset
        self._end = os.fstat(self._file).st_size if size is None else offset + size

    def readinto(self, buffer: memoryview) -> int:
        """See Reader.readinto."""
        count = os.preadv(self._file, [buffer[: max(0, self._end - self._at)]], self._at)
        self._at += count
        return count

    def close(self) -> None:
        """See Reader.close."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _sync_folder(path: Path) -> None:
    """Make the names in a folder outlive a crash of the machine."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    """Turn what the file system says into what a person can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BucketFull(f"{url} has no room left", "free some space, then type the same command again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise BucketDenied(f"{url} cannot be written", "choose a folder that you may write") from error
        raise
