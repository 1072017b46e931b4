"""A ledger, an in-memory provider and a clock that only moves when it is told to; and controllers that can be killed."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from good_values import NOON, PROFILE, choices

from kimisession.controller import Controller
from kimisession.core.ledger import Session
from kimisession.core.lifecycle import Observation
from kimisession.core.quote import Quote, make_quote
from kimisession.engines.memory import MemoryCloud, MemoryEngine
from kimisession.store import Store

#: Ends by itself ten minutes after it was last used, and an hour after it began.
MINUTES = replace(PROFILE, limits=replace(PROFILE.limits, idle="10m", unused="10m", duration="1h", longest="2h"))


class Killed(BaseException):
    """What a killed process would have done next."""


class Mortal:
    """A part of a process that can be killed with -9 between any two of its calls: after that, nothing happens."""

    def __init__(self, inner: Any, life: "Life") -> None:
        self._inner = inner
        self._life = life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._life.step()
            return found(*args, **kwargs)

        return call


class Life:
    """How many calls a process makes before it is killed; None: it lives."""

    def __init__(self, calls: int | None = None) -> None:
        self.calls = calls
        self.store: Store | None = None

    def step(self) -> None:
        """One more call. A dead process makes none, not in its except branches either."""
        if self.calls is not None:
            if self.calls <= 0:
                self.end()
                raise Killed
            self.calls -= 1

    def end(self) -> None:
        """The kernel frees what the process held."""
        if self.store is not None:
            for descriptor in self.store._claims.values():
                os.close(descriptor)
            self.store._claims.clear()
            self.store.close()
            self.store = None


class World:
    """See the module's text."""

    def __init__(self) -> None:
        self.moment: datetime = NOON
        self.cloud = MemoryCloud(lambda: self.moment)
        # In memory where that can be: thousands of commits, each waiting for a disk, are not what is tried here.
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.TemporaryDirectory(prefix="kimisession-test-", dir=shm)
        self.ledger = Path(self.folder.name) / "ledger.db"
        self.lives: list[Life] = []
        self.store = Store(self.ledger)

    def close(self) -> None:
        """Let go of everything."""
        for life in self.lives:
            life.end()
        self.store.close()
        self.folder.cleanup()

    def now(self) -> datetime:
        """The only clock."""
        return self.moment

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.moment += timedelta(seconds=max(seconds, 1))

    def controller(self, life: Life | None = None) -> Controller:
        """A new process."""
        life = life or Life()
        engine = Mortal(MemoryEngine(self.cloud), life)
        store = self.store
        if life.calls is not None:  # a process of its own, with descriptors of its own
            life.store = store = Store(self.ledger)
            self.lives.append(life)
        keys = Path(self.folder.name) / "keys"
        return Controller(Mortal(store, life), keys, lambda infra: engine, self.now, self.sleep)  # type: ignore[arg-type]

    def quote(self, **changes: Any) -> Quote:
        """What a user agrees to now."""
        return make_quote(MINUTES, choices(**changes), self.moment)

    def start(self, controller: Controller | None = None, **changes: Any) -> Session:
        """What `kimisession start` does after the question: resume, or check, request and launch."""
        controller = controller or self.controller()
        quote = self.quote(**changes)
        resumed = controller.resume(quote.choices.name)
        if resumed is not None:
            return resumed
        spec = controller.check(quote)
        return controller.launch(controller.request(quote, spec), spec)

    def until(self, what: Callable[[], Any], every_s: float = 5, within_s: float = 8 * 3600) -> Any:
        """Let time pass until a condition holds."""
        ends = self.moment + timedelta(seconds=within_s)
        while not (found := what()):
            assert self.moment < ends, "it did not come"
            self.sleep(every_s)
        return found

    def look(self) -> list[tuple[Session, Observation]]:
        """`kimisession status`, in a new process."""
        return self.controller().live()
