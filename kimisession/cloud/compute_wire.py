"""Questions to Compute Engine's REST API: asked again while it is busy, page by page, over all zones at once.

Through `google-cloud-compute`, imported on first use. Asked again after answers 429, 500, 502, 503, 504 and broken
connections, `TRIES` times and for `PATIENCE_S` at most. Every error that leaves is one of google_errors.py.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar

from kimisession.cloud.compute_items import last_part
from kimisession.cloud.google_errors import Denied, Missing, busy, first_line, translated
from kimisession.core.clocks import ahead_of
from kimisession.errors import INSTALL_CLOUD, EngineMissing, Unconfirmed

T = TypeVar("T")

TRIES = 6
PATIENCE_S = 60.0
CALL_S = 30.0
PAGE = 500  # the most that a list of Compute Engine returns at once (its documentation, maxResults)

#: So many zones are asked at a time where they have to be asked one by one.
AT_ONCE = 8


class Wire:
    """One project's. `credentials` are google.auth's; `sleep` is between two tries, `clock` tells monotonic seconds. Every
    method may raise NoCredentials, Denied, QuotaExceeded or Unconfirmed."""

    def __init__(
        self,
        project: str,
        credentials: Any,
        endpoint: str,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        """Raises EngineMissing without the library."""
        try:
            self.library: Any = importlib.import_module("google.cloud.compute_v1")
        except ImportError:
            raise EngineMissing("Compute Engine needs the package google-cloud-compute", INSTALL_CLOUD) from None
        self.project = project
        self.endpoint = endpoint.rstrip("/")
        self.sleep = sleep
        self.clock = clock
        self._credentials = credentials
        self._clients: dict[str, Any] = {}
        self._session: Any = None
        self._ahead = timedelta(0)

    def call(self, what: str, client: str, method: str, **words: Any) -> Any:
        """One method of one of the library's clients. `what` is what an error says could not be done. Raises Missing, Exists
        and Moved as well."""
        made = getattr(self._client(client), method)
        request = {"project": self.project, **words}
        return self._ask(what, lambda: made(request=request, retry=None, timeout=CALL_S))

    def call_or_none(self, what: str, client: str, method: str, **words: Any) -> Any:
        """The same; None where there is no such thing."""
        try:
            return self.call(what, client, method, **words)
        except Missing:
            return None

    def post(self, what: str, path: str, body: Mapping[str, Any]) -> Any:
        """What Cloud Resource Manager answers, which has no client in the library."""
        requests = importlib.import_module("google.auth.transport.requests")
        exceptions = importlib.import_module("google.api_core.exceptions")
        self._session = self._session or requests.AuthorizedSession(self._credentials)
        url = f"{self.endpoint or 'https://cloudresourcemanager.googleapis.com'}/{path}"

        def once() -> Any:
            answer = self._session.post(url, json=body, timeout=CALL_S)
            if answer.status_code != 200:
                raise exceptions.from_http_response(answer)
            return answer.json()

        return self._ask(what, once)

    def items(self, client: str, what: str, **words: str) -> Iterator[Any]:
        """What a list of one place holds."""
        for page in self._pages(client, "list", what, {"project": self.project, **words}):
            yield from page.items

    def everywhere(self, client: str, items: str, silent: set[str], **words: str) -> list[Any]:
        """The items of all zones. Zones that did not answer are added to `silent`."""
        request = {"project": self.project, **words}
        try:
            pages = list(self._pages(client, "aggregated_list", f"list {items}", request))
        except Unconfirmed as error:
            # One zone that cannot be reached may fail the list of all of them.
            return self._one_by_one(client, items, silent, words, error)
        found = []
        for page in pages:
            silent.update(last_part(name) for name in page.unreachables)
            for place, scoped in page.items.items():
                if scoped.warning.code == "UNREACHABLE":
                    silent.add(last_part(place))
                found += getattr(scoped, items)
        return found

    def _one_by_one(
        self, client: str, items: str, silent: set[str], words: Mapping[str, str], error: Unconfirmed
    ) -> list[Any]:
        """The same, each zone (for addresses each region) asked by itself. Raises `error` when none of them answers."""
        room = "region" if client == "Addresses" else "zone"
        alone = {"GlobalOperations": "ZoneOperations"}.get(client, client)
        places = self._client(f"{room.capitalize()}s")
        try:
            names = [place.name for place in places.list(project=self.project, retry=None, timeout=CALL_S)]
        except Exception as other:
            known = translated(other, f"list {room}s", self.project)
            if isinstance(known, Denied):
                raise Denied(f"{error.message}; {known.message}", known.hint, known.permission) from None
            raise error from None

        def ask(name: str) -> list[Any] | None:
            try:
                return list(self.items(alone, f"list {items} in {name}", **{**words, room: name}))
            except Unconfirmed:
                return None

        self._client(alone)  # made once, before the crew asks for it
        with ThreadPoolExecutor(AT_ONCE) as crew:
            answers = dict(zip(names, crew.map(ask, names), strict=True))
        silent.update(name for name, answer in answers.items() if answer is None)
        if silent >= set(names):
            raise error
        return [item for answer in answers.values() for item in answer or ()]

    def _pages(self, client: str, method: str, what: str, words: Mapping[str, Any]) -> Iterator[Any]:
        token, call = "", getattr(self._client(client), method)

        def one(token: str) -> Any:
            pager = call(request={**words, "max_results": PAGE, "page_token": token}, retry=None, timeout=CALL_S)
            return next(iter(pager.pages))

        while True:
            # One page by hand and not the library's pager: a page that failed is asked again, not the whole list.
            page = self._ask(what, partial(one, token))
            yield page
            token = page.next_page_token
            if not token:
                return

    def _client(self, name: str) -> Any:
        if name not in self._clients:
            options = {"api_endpoint": self.endpoint} if self.endpoint else None
            maker = getattr(self.library, f"{name}Client")
            made = maker(credentials=self._credentials, client_options=options)
            if (session := getattr(made.transport, "_session", None)) is not None:  # the one way to an answer's headers
                session.hooks["response"].append(self._hear)
            self._clients[name] = made
        return self._clients[name]

    def _hear(self, answer: Any, *_: Any, **__: Any) -> None:
        """Compare the clocks by an answer's Date."""
        with contextlib.suppress(KeyError, TypeError, ValueError):  # none, or none that can be read
            there = parsedate_to_datetime(answer.headers["Date"])
            if answer.ok and there.tzinfo is not None:
                self._ahead = ahead_of(datetime.now(UTC), there)

    def by_cloud(self, moment: datetime) -> datetime:
        """A moment of this machine's clock by the cloud's, as its last answer told it."""
        return moment + self._ahead

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        until, pause = self.clock() + PATIENCE_S, 0.5
        for attempt in range(1, TRIES + 1):
            try:
                return call()
            except Exception as error:
                if not busy(error):
                    known = translated(error, what, self.project)
                    if known is None:
                        raise  # a mistake of ours, not an answer
                    raise known from error
                if attempt == TRIES or self.clock() + pause > until:
                    raise Unconfirmed(
                        f"could not {what}: Compute Engine does not answer ({first_line(error)}; asked {attempt} times)",
                        "try again in a minute",
                    ) from error
            self.sleep(pause)
            pause = min(2 * pause, 16.0)
        raise AssertionError  # the last attempt returned or raised
