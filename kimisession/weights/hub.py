"""Weights on the Hugging Face hub, as a Source: one commit, streamed, nothing cached on disk.

Needs only what the hub's own client needs of the API: the commit behind a name, the tree of that commit with the
sha256 of each large file and the git id of each small one, and ranged reads of a file at that commit.
"""

from __future__ import annotations

import functools
import http.client
import os
import re
from fnmatch import fnmatch
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpx

from kimisession.node.web import BUSY, Site, retry_after_s
from kimisession.weights.bucket import Reader
from kimisession.weights.errors import BadSource, SourceChanged, SourceDenied, TryAgain, WeightsError
from kimisession.weights.manifest import is_commit
from kimisession.weights.source import SourceFile

LEFT_OUT = (".*", "*/.*", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.mp4", "*.pdf")
"""Files of a repository that no engine reads."""
_REDIRECTS = 5


class HubSource:
    """A model on the hub at one commit. `revision` may be a branch or tag: it is resolved once, and never again.

    The token comes from HF_TOKEN (or the file that HF_TOKEN_PATH names), never from a command line, and is sent to the
    hub only, not to where the hub redirects.
    """

    def __init__(
        self, model: str, revision: str = "main", *, endpoint: str | None = None, token: str | None = None
    ) -> None:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            raise BadSource(f"{model!r} is no model on the hub", "give it as owner/name")
        self.name = model
        self._asked = revision
        self._endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        if "@" in urlsplit(self._endpoint).netloc:  # it is named in errors, and they are printed
            raise BadSource(
                "the hub's address carries a name or a password", "leave it out of HF_ENDPOINT; export HF_TOKEN"
            )
        if urlsplit(self._endpoint).scheme not in ("http", "https"):
            raise BadSource(f"HF_ENDPOINT is {self._endpoint!r}, which is no web address", "begin it with https://")
        self._token = token if token is not None else token_here()
        self._commit = revision if is_commit(revision) else ""
        self._files: tuple[SourceFile, ...] | None = None

    def revision(self) -> str:
        """See Source.revision. Raises BadSource, SourceDenied, TryAgain."""
        if not self._commit:
            answer = self._ask(f"/api/models/{self.name}/revision/{quote(self._asked, safe='')}")
            commit = str(_of_hub(answer, dict).get("sha", ""))
            if not is_commit(commit):
                raise BadSource(f"the hub names no commit for {self.name} at {self._asked}", "check --revision")
            self._commit = commit
        return self._commit

    def files(self) -> tuple[SourceFile, ...]:
        """See Source.files."""
        if self._files is None:
            url = f"/api/models/{self.name}/tree/{self.revision()}?recursive=true"
            found: list[SourceFile] = []
            while url:
                answer = self._ask(url)
                try:
                    found += [_file(item) for item in _of_hub(answer, list) if item.get("type") == "file"]
                except (AttributeError, KeyError, TypeError, ValueError):
                    raise _no_hub(answer) from None
                url = answer.links.get("next", {}).get("url", "")
            self._files = tuple(file for file in found if not any(fnmatch(file.path, pattern) for pattern in LEFT_OUT))
            if not self._files:
                raise BadSource(f"{self.name} at {self._commit} holds no files", "check the model's name")
        return self._files

    def open(self, file: SourceFile, offset: int) -> Reader:
        """See Source.open."""
        site, answer = self._get(file, {"Range": f"bytes={offset}-"} if offset else {})
        return _Body(site, answer, file, offset)

    def beginning(self, file: SourceFile, length: int) -> bytes:
        """The first `length` bytes of a file, fewer where it ends before. A server that ignores ranges is cut off after
        them: nothing else is downloaded. Raises SourceChanged, SourceDenied, TryAgain."""
        site, answer = self._get(file, {"Range": f"bytes=0-{length - 1}"})
        try:
            return answer.read(length)
        except (OSError, http.client.HTTPException) as error:
            raise TryAgain(f"{file.path} was cut off ({error or type(error).__name__})") from None
        finally:
            site.drop()

    def _get(self, file: SourceFile, headers: dict[str, str]) -> tuple[Site, http.client.HTTPResponse]:
        """The answer for a file, wherever the hub redirects to."""
        url = f"{self._endpoint}/{self.name}/resolve/{self.revision()}/{quote(file.path)}"
        for hop in range(_REDIRECTS):
            parts = urlsplit(url)
            site = Site(f"{parts.scheme}://{parts.netloc}")
            ours = url.startswith(self._endpoint + "/")
            auth = {"Authorization": f"Bearer {self._token}"} if self._token and ours else {}
            target = f"{parts.path}?{parts.query}" if parts.query else parts.path
            try:
                answer = site.get(target, {"User-Agent": "kimisession", **headers, **auth})
            except (OSError, http.client.HTTPException) as error:
                site.drop()
                raise TryAgain(f"{file.path}: {parts.netloc} did not answer ({error})") from None
            if answer.status in (301, 302, 303, 307, 308):
                self._check_commit(file, answer.getheader("X-Repo-Commit"))
                url = urljoin(url, answer.getheader("Location") or "")
                site.drop()
                continue
            if answer.status in (200, 206):
                if not hop:
                    self._check_commit(file, answer.getheader("X-Repo-Commit"))
                return site, answer
            site.drop()
            raise self._refused(answer.status, file.path, answer.getheader("Retry-After"))
        raise TryAgain(f"{file.path}: the hub redirects without end")

    def _check_commit(self, file: SourceFile, commit: str | None) -> None:
        if commit is not None and commit != self._commit:
            raise SourceChanged(
                f"the hub answers for {file.path} with commit {commit}, asked for {self._commit}",
                "type the same command again",
            )

    @functools.cached_property
    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=30, follow_redirects=True)  # one: its TLS context takes 40 ms to make

    def _ask(self, url: str) -> httpx.Response:
        auth = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            answer = self._client.get(urljoin(self._endpoint + "/", url), headers=auth)
        except httpx.TransportError as error:
            raise TryAgain(f"{self._endpoint} did not answer ({error or type(error).__name__})") from None
        if answer.status_code != 200:
            raise self._refused(answer.status_code, self.name, answer.headers.get("Retry-After"))
        return answer

    def _refused(self, status: int, what: str, retry_after: str | None) -> WeightsError:
        if status in BUSY:
            return TryAgain(f"{what}: the hub is busy ({status})", retry_after_s(retry_after))
        if status in (401, 403):
            return SourceDenied(
                f"the hub does not let you read {self.name} ({status})",
                "accept the model's terms on its page, then export HF_TOKEN with a token that may read it",
            )
        if status == 404:
            return BadSource(
                f"the hub has no {what} at {self._commit or self._asked}",
                "check the model's name and --revision",
            )
        if status == 416:
            return SourceChanged(f"{what} is shorter than the hub's own listing says", "type the same command again")
        return TryAgain(f"{what}: the hub answered {status}")


class _Body:
    """The body of a file, checked for the size that the listing promised."""

    def __init__(self, site: Site, answer: http.client.HTTPResponse, file: SourceFile, offset: int) -> None:
        self._site = site
        self._answer = answer
        self._path = file.path
        span, total = answer.getheader("Content-Range"), answer.getheader("Content-Length")
        if offset and (answer.status != 206 or not (span or "").startswith(f"bytes {offset}-")):
            site.drop()
            raise TryAgain(f"{file.path}: the hub ignores ranges; the file is read from its start next time")
        if total is not None and int(total) != file.size - offset:
            site.drop()
            raise SourceChanged(
                f"{file.path} has {int(total) + offset} bytes on the hub, its listing says {file.size}",
                "type the same command again",
            )

    def readinto(self, buffer: memoryview) -> int:
        try:
            return self._answer.readinto(buffer)
        except (OSError, http.client.HTTPException) as error:
            raise TryAgain(f"{self._path} was cut off ({error or type(error).__name__})") from None

    def close(self) -> None:
        self._site.drop()


def _file(item: dict[str, Any]) -> SourceFile:
    large = item.get("lfs")
    if large:
        return SourceFile(str(item["path"]), int(large["size"]), str(large["oid"]).removeprefix("sha256:"))
    return SourceFile(str(item["path"]), int(item["size"]), None, str(item["oid"]))


def _of_hub(answer: httpx.Response, kind: type[Any]) -> Any:
    """The JSON of an answer. Raises BadSource for what no hub says: a login page in between, another server."""
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise _no_hub(answer)
    return value


def _no_hub(answer: httpx.Response) -> BadSource:
    return BadSource(
        f"what answers at {answer.url.host} does not speak as the hub does",
        "check HF_ENDPOINT, and that no login page or proxy is in between",
    )


def token_here() -> str:
    """HF_TOKEN, or the content of the file that HF_TOKEN_PATH names, without white space around it; empty where there is
    neither. Raises SourceDenied for what cannot be a token: what refuses it later would print it."""
    path = os.environ.get("HF_TOKEN_PATH")
    token, name = os.environ.get("HF_TOKEN", ""), "HF_TOKEN"
    if not token and path:
        name = "HF_TOKEN_PATH"
        try:
            with open(path) as file:  # noqa: PTH123
                token = file.read()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise SourceDenied(f"HF_TOKEN_PATH cannot be read ({why})", "export HF_TOKEN instead") from None
    token = token.strip()
    if not re.fullmatch(r"[!-~]*", token):
        raise SourceDenied(
            f"{name} holds something that is no token: it has spaces or other characters in it",
            "export HF_TOKEN with the token alone",
        )
    return token
