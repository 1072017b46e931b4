"""Observe, decide, record, act: the one way in which the ledger and the engines meet.

Intent is on disk before each act. Every function may be run again after a crash between any two of its lines.
"""

import getpass
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from kimisession.core.cost import cents, price_of
from kimisession.core.launch import LaunchSpec, label_value
from kimisession.core.ledger import (
    Extended,
    LaunchFailed,
    LaunchRequested,
    Session,
    SessionRequested,
    State,
    TeardownRequested,
    Unconfirmed,
)
from kimisession.core.lifecycle import Observation, must_tear_down, news
from kimisession.core.profile import FlagValue
from kimisession.core.quote import FIRST_MINUTES, Quote, launch_spec
from kimisession.engines.base import Engine, open_engine
from kimisession.errors import BudgetRefused, KimiError, LeakSuspected, NotYetGone, UsageMistake
from kimisession.errors import Unconfirmed as UnconfirmedError
from kimisession.store import Store

#: How long `stop` waits for a proof before it says that there is none yet.
CONFIRM_WITHIN_S = 120.0


def utc_now() -> datetime:
    """Aware wall-clock time."""
    return datetime.now(UTC)


def owner_here() -> str:
    """Who starts sessions here, as a label's value."""
    return label_value(f"{getpass.getuser()}-{socket.gethostname()}")


class Controller:
    """Ledger on one side, engines on the other. `keys` is the folder of API keys, one 0600 file a session."""

    def __init__(
        self,
        store: Store,
        keys: Path,
        engines: Callable[[str], Engine] = open_engine,
        now: Callable[[], datetime] = utc_now,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self.keys = keys
        self.engines = engines
        self.now = now
        self.sleep = sleep

    # -- start ---------------------------------------------------------------------------------------------------------

    def resume(self, name: str) -> Session | None:
        """The live session of this name, freshly observed; None when there is none."""
        session = self.store.by_name(name)
        if session is None or not session.live:
            return None
        session, _ = self.refresh(session)
        if session.live and not session.resources and not self.store.claimed(session.id):
            # The command that wanted it died before anything was made. The tombstone of `stop` keeps it that way.
            session = self.stop(session, "start", "launch-failed")
        return session if session.live else None

    def check(self, quote: Quote) -> LaunchSpec:
        """Refuse what cannot work before anything exists. Raises BudgetRefused, DoesNotFit."""
        first = price_of(quote.usd_per_hour, quote.at, quote.at + FIRST_MINUTES)
        budget = quote.choices.budget_usd
        if budget is not None and budget < first:
            raise BudgetRefused(
                f"a budget of {cents(budget)} does not reach ten minutes at {cents(quote.usd_per_hour)} an hour",
                f"give --budget {first.quantize(Decimal('0.01')) + Decimal('0.01')} or more",
            )
        session_id = f"{quote.choices.name}-{secrets.token_hex(4)}"
        spec = launch_spec(quote, session_id, owner_here())
        self.engines(quote.choices.infra).check(spec)
        return spec

    def request(self, quote: Quote, spec: LaunchSpec) -> Session:
        """Write down what was agreed. Raises NameTaken when another command was quicker."""
        choices = quote.choices
        event = SessionRequested(
            at=self.now(),
            name=spec.name,
            owner=spec.owner,
            profile=spec.profile,
            checkpoint=choices.checkpoint.name,
            infra=choices.infra,
            accelerators=spec.accelerators,
            served_name=spec.engine.served_name,
            port=spec.engine.port,
            usd_per_hour=spec.usd_per_hour,
            price_ground=spec.price_ground,
            idle_s=quote.idle_s,
            deadline=quote.deadline,
            latest=quote.latest,
            budget_usd=choices.budget_usd,
            budget_at=quote.budget_at,
            engine_flags=" ".join(f"{k}={v}" for k, v in quote.flags.items()),
            stand_in=quote.stand_in,
            pretended=quote.pretended,
        )
        self.store.claim(spec.session_id)
        try:
            return self.store.append(spec.session_id, [event])
        except BaseException:
            self.store.unclaim(spec.session_id)
            raise

    def launch(self, session: Session, spec: LaunchSpec, webhook: str | None = None) -> Session:
        """Ask the engine for the machine. Whatever goes wrong is followed by a teardown: something may exist."""
        session = self.store.append(session.id, [LaunchRequested(self.now())])
        try:
            hidden = {"api_key": self._make_key(session.id)} | ({"webhook": webhook} if webhook else {})
            self.engines(self._infra(session)).launch(spec, hidden)
        except BaseException as error:
            why = error.message if isinstance(error, KimiError) else type(error).__name__
            session = self.store.append(session.id, [LaunchFailed(self.now(), why)])
            with suppress(KeyboardInterrupt):  # a second Ctrl-C is the caller's to handle
                self.stop(session, "command", "launch-failed")
            raise
        finally:
            self.store.unclaim(session.id)
        return self.refresh(session)[0]

    def _make_key(self, session_id: str) -> str:
        """A random key for the endpoint, readable by this user alone."""
        key = secrets.token_urlsafe(24)
        self.keys.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.keys / session_id, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, key.encode())
        finally:
            os.close(fd)
        return key

    def key_of(self, session: Session) -> str:
        """The endpoint's key. Raises KimiError when this machine does not have it."""
        try:
            return (self.keys / session.id).read_text(encoding="ascii").strip()
        except OSError:
            raise KimiError(
                f"the key of session {session.name} is not on this machine", "connect from where it began"
            ) from None

    # -- observe -------------------------------------------------------------------------------------------------------

    def refresh(self, session: Session) -> tuple[Session, Observation]:
        """Observe a session, record what is new, and end what nobody else will end."""
        session = self.store.session(session.id)  # other commands write as well
        engine = self.engines(self._infra(session))
        seen = engine.observe(session.id)
        session = self._record(session, seen)
        why = must_tear_down(session, seen)
        if why and session.teardown is None:
            session = self.store.append(session.id, [TeardownRequested(self.now(), why, "kimisession")])
        if why:
            try:
                engine.down(session.id, "kimisession", why)
            except NotYetGone:
                return session, seen
            except UnconfirmedError as error:
                return self._unconfirmed(session, error.message), seen
            seen = engine.observe(session.id)
            session = self._record(session, seen)
        return session, seen

    def _record(self, session: Session, seen: Observation) -> Session:
        if not news(session, seen):
            return session
        session = self.store.record(session.id, lambda current: news(current, seen))
        if not session.live:
            (self.keys / session.id).unlink(missing_ok=True)
        return session

    def _unconfirmed(self, session: Session, why: str) -> Session:
        if session.unconfirmed == why:
            return session
        return self.store.append(session.id, [Unconfirmed(self.now(), why)])

    def live(self) -> list[tuple[Session, Observation]]:
        """Every session that may cost money, freshly observed: those of the ledger, and what else carries our labels on
        this host. One whose place cannot be asked is told as such."""
        ids = [row.session for row in self.store.rows(live_only=True)]
        with suppress(KimiError):  # a place that cannot be asked is told of by its sessions
            ids += [found.session_id for found in self.engines("local").find() if found.session_id not in ids]
        result = []
        for session in map(self.store.session, ids):
            try:
                result.append(self.refresh(session))
            except KimiError as error:
                result.append((session, Observation(self.now(), None, error.message)))
        return result

    def ports_in_use(self) -> set[int]:
        """Ports that live sessions were promised, listening already or not."""
        sessions = (self.store.session(row.session) for row in self.store.rows(live_only=True))
        return {session.request.port for session in sessions if session.request}

    def follow(self, session: Session, every_s: float = 0.25) -> Iterator[tuple[Session, Observation]]:
        """The session again and again until it is gone."""
        while True:
            session, seen = self.refresh(session)
            yield session, seen
            if not session.live:
                return
            self.sleep(every_s)

    # -- end -----------------------------------------------------------------------------------------------------------

    def stop(self, session: Session, by: str, reason: str, within_s: float = CONFIRM_WITHIN_S) -> Session:
        """Tear down and prove it; what is gone is fine. Raises LeakSuspected when there is no proof in time."""
        if not session.live:
            return session
        if session.teardown is None:
            session = self.store.append(session.id, [TeardownRequested(self.now(), reason, by)])
        until = self.now() + timedelta(seconds=within_s)
        why = "it is still being deleted"
        while self.now() < until:
            try:
                self.engines(self._infra(session)).down(session.id, by, reason)
            except NotYetGone as error:
                why = str(error)
            except UnconfirmedError as error:
                why = error.message
                session = self._unconfirmed(session, why)
            else:
                session, _ = self.refresh(session)
            if not session.live:
                return session
            self.sleep(0.1)
        session = self._unconfirmed(session, why)
        raise LeakSuspected(
            f"session {session.name} could not be proven gone: {why}", f"run: kimisession stop {session.name}"
        )

    def extend(self, session: Session, added_s: int) -> Session:
        """Move the hard cap of every layer. Raises UsageMistake past the longest that the profile allows,
        BudgetRefused past the budget's moment."""
        request, deadline = session.request, session.deadline
        if request is None or deadline is None or session.state not in (State.STARTING, State.READY):
            raise UsageMistake(f"session {session.name} is {session.state.value}: there is nothing to extend")
        moved = deadline + timedelta(seconds=added_s)
        if moved > request.latest:
            raise UsageMistake(
                f"that is past {request.latest:%H:%M} UTC, the longest that profile {request.profile} allows",
                "stop this session and start another one",
            )
        if request.budget_at is not None and moved > request.budget_at:
            raise BudgetRefused(
                f"the budget of {cents(request.budget_usd or Decimal(0))} is spent at {request.budget_at:%H:%M:%S} UTC, "
                "before that",
                "a budget never moves; start another session with a larger one",
            )
        session = self.store.append(session.id, [Extended(self.now(), moved, owner_here())])
        self.engines(self._infra(session)).extend(session.id, moved, added_s)
        return session

    def restart(self, session: Session, sets: Mapping[str, FlagValue] | None) -> Iterator[tuple[Session, Observation]]:
        """Start the engine again with other flags (None: those of before) and follow it until it is ready again. Raises
        UsageMistake when it is not ready now; `Session.run` of what is yielded last tells which start answered."""
        if session.state is not State.READY:
            raise UsageMistake(
                f"session {session.name} is {session.state.value}, not ready", f"kimisession status {session.name}"
            )
        self.engines(self._infra(session)).restart(session.id, sets)
        for current, seen in self.follow(session, 0.1):
            yield current, seen
            if current.run > session.run and current.ready_at:
                return

    def _infra(self, session: Session) -> str:
        # A machine that this ledger knows nothing of was found by its labels, which only the local engine looks for yet.
        return session.request.infra if session.request else "local"
