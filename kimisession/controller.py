"""Observe, decide, record, act: the one way in which the ledger and the engines meet.

Intent is on disk before each act. Every function may be run again after a crash between any two of its lines.
"""

import getpass
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from kimisession.core.cost import cents, price_of
from kimisession.core.launch import LABEL_OWNER, LaunchSpec, label_value
from kimisession.core.ledger import (
    AttemptFailed,
    Event,
    Extended,
    ExtendRefused,
    ExtendRequested,
    LaunchFailed,
    LaunchRequested,
    Session,
    SessionRequested,
    State,
    TeardownRequested,
    Unconfirmed,
    apply,
)
from kimisession.core.lifecycle import Observation, must_tear_down, news
from kimisession.core.profile import FlagValue
from kimisession.core.quote import FIRST_MINUTES, Quote, launch_spec
from kimisession.engines.base import Engine, open_engine
from kimisession.errors import BudgetRefused, KimiError, LeakSuspected, NoCapacity, NotYetGone, UsageMistake
from kimisession.errors import Unconfirmed as UnconfirmedError
from kimisession.store import NameTaken, Store

#: A place where the last session ended longer ago than this is no longer asked for what this ledger does not know: the
#: longest session that a shipped profile allows, and a late launch of it, fit in many times.
REMEMBERED = timedelta(days=7)

_PROGRESS = logging.getLogger("kimisession.progress")


def utc_now() -> datetime:
    """Aware wall-clock time."""
    return datetime.now(UTC)


def owner_here() -> str:
    """Who starts sessions here, as a label's value."""
    return label_value(f"{getpass.getuser()}-{socket.gethostname()}")


class Controller:
    """Ledger on one side, engines on the other. `keys` is the folder of API keys, one 0600 file a session; `places` are
    asked for machines of ours even when the ledger has never heard of them."""

    def __init__(
        self,
        store: Store,
        keys: Path,
        engines: Callable[[str], Engine] = open_engine,
        now: Callable[[], datetime] = utc_now,
        sleep: Callable[[float], None] = time.sleep,
        places: tuple[str, ...] = ("local",),
    ) -> None:
        self.store = store
        self.keys = keys
        self.engines = engines
        self.now = now
        self.sleep = sleep
        self.places = places
        self._unsaved: dict[str, list[Event]] = {}
        self._found_on: dict[str, str] = {}

    # -- the ledger, when an end may not wait for it -------------------------------------------------------------------

    def _note(self, session_id: str, make: Callable[[Session], Sequence[Event]]) -> Session:
        """Write down what `make` finds missing. What the ledger does not take is said aloud, kept in memory, and tried again
        with the next event: a full disk must not keep a machine running."""
        waiting = self._unsaved.get(session_id, [])
        try:
            session = self.store.record(
                session_id, lambda current: [*waiting, *make(_with(current, waiting))] if waiting else make(current)
            )
        except NameTaken:
            raise
        except KimiError as error:
            session = self._known(session_id)
            events = list(make(session))
            if events:
                self._unsaved[session_id] = [*waiting, *events]
                _PROGRESS.error("%s; going on without it: %s is only in memory", error.message, _words(events))
            return _with(session, events)
        self._unsaved.pop(session_id, None)
        return session

    def _known(self, session_id: str) -> Session:
        """The session as the ledger has it, and what the ledger did not take."""
        return _with(self.store.session(session_id), self._unsaved.get(session_id, []))

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

    def check(self, quote: Quote, make: Callable[[Quote, str, str], LaunchSpec] = launch_spec) -> LaunchSpec:
        """Refuse what cannot work before anything exists. Raises BudgetRefused, DoesNotFit."""
        budget, dearest = quote.choices.budget_usd, max(quote.usd_per_hour, quote.choices.dearest_usd or Decimal(0))
        if budget is not None and quote.budget_at and quote.budget_at < quote.at + FIRST_MINUTES:
            first = price_of(dearest, quote.at, quote.at + FIRST_MINUTES)
            raise BudgetRefused(
                f"a budget of {cents(budget)} does not reach ten minutes at {cents(dearest)} an hour",
                f"give --budget {first.quantize(Decimal('0.01')) + Decimal('0.01')} or more",
            )
        session_id = f"{quote.choices.name}-{secrets.token_hex(4)}"
        spec = make(quote, session_id, owner_here())
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
            served_name=spec.engine.served_name if spec.engine else "",
            port=spec.engine.port if spec.engine else 0,
            usd_per_hour=spec.usd_per_hour,
            price_ground=spec.price_ground,
            idle_s=quote.idle_s,
            deadline=quote.deadline,
            latest=quote.latest,
            budget_usd=choices.budget_usd,
            budget_at=quote.budget_at,
            engine_flags=" ".join(f"{k}={v}" for k, v in quote.flags.items()),
            stand_in=quote.stand_in and spec.engine is not None,
            pretended=quote.pretended,
            recovers=quote.recovers,
            bucket=choices.bucket_url,
            dearest_usd=choices.dearest_usd,
        )
        self.store.claim(spec.session_id)
        try:
            return self.store.append(spec.session_id, [event])
        except BaseException:
            self.store.unclaim(spec.session_id)
            raise

    def launch(self, session: Session, spec: LaunchSpec, webhook: str | None = None, hf_token: str = "") -> Session:
        """Ask the engine for the machine. Whatever goes wrong is followed by a teardown: something may exist."""
        session = self.store.append(session.id, [LaunchRequested(self.now())])
        try:
            hidden = {"api_key": self._make_key(session.id), "webhook": webhook or "", "hf_token": hf_token}
            self.engines(self._infra(session)).launch(spec, {name: text for name, text in hidden.items() if text})
        except BaseException as error:
            why = error.message if isinstance(error, KimiError) else type(error).__name__
            tried = error.tried if isinstance(error, NoCapacity) else ()
            failed = [*(AttemptFailed(self.now(), "", text) for text in tried), LaunchFailed(self.now(), why)]
            session = self._note(session.id, lambda _: failed)
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
        session = self._known(session.id)  # other commands write as well
        engine = self.engines(self._infra(session))
        seen = engine.observe(session.id)
        session = self._record(session, seen)
        why = must_tear_down(session, seen)
        if why:
            session = self._ask_for_teardown(session, why, "kimisession")
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
        session = self._note(session.id, lambda current: news(current, seen))
        if not session.live:
            (self.keys / session.id).unlink(missing_ok=True)
        return session

    def _unconfirmed(self, session: Session, why: str) -> Session:
        if session.unconfirmed == why:
            return session
        told = Unconfirmed(self.now(), why)
        return self._note(session.id, lambda _: [told])

    def _ask_for_teardown(self, session: Session, reason: str, by: str) -> Session:
        """The intent, before the act."""
        if session.teardown is not None:
            return session
        asked = TeardownRequested(self.now(), reason, by)
        return self._note(session.id, lambda _: [asked])

    def live(self) -> list[tuple[Session, Observation]]:
        """Every session that may cost money, freshly observed: those of the ledger, and what else of ours exists where there
        is reason to look. One whose place cannot be asked is told as such."""
        result = []
        for session in map(self._known, self.open_ids()):
            try:
                result.append(self.refresh(session))
            except KimiError as error:
                unseen = Observation(self.now(), None, error.message)
                # Recorded like every other look: what should have ended and that nobody can see becomes loud.
                result.append((self._record(session, unseen), unseen))
        return result

    def open_ids(self) -> list[str]:
        """Ids of every session that may cost money: open in the ledger, or found by its labels. A place that cannot be asked
        for what the ledger does not know is named on the way: not having looked is not having found nothing."""
        rows = self.store.rows()
        ids = [row.session for row in rows if row.live]
        since = self.now() - REMEMBERED
        recent = {row.infra for row in rows if row.live or (row.ended_at or row.requested_at) > since}
        known = {row.session for row in rows}
        for place in sorted({*self.places, *recent} - {"?"}):
            try:
                found = self.engines(place).find()
            except KimiError as error:
                _PROGRESS.error(
                    "not looked on %s for machines that this ledger does not know: %s", place, error.message
                )
                continue
            for one in found:
                # A cloud project may be shared: what somebody else began is theirs to look after, and the reaper's.
                ours = place == "local" or one.session_id in known or one.labels.get(LABEL_OWNER) == owner_here()
                if ours and one.session_id not in ids:
                    ids.append(one.session_id)
                    self._found_on[one.session_id] = place
        return ids

    def chain(self, session: Session) -> tuple[Session, ...]:
        """A session and those that it went on from, newest first."""
        found = [session]
        while (before := found[-1].request) and before.recovers and before.recovers not in {s.id for s in found}:
            found.append(self.store.session(before.recovers))
        return tuple(found)

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

    def stop(self, session: Session, by: str, reason: str, within_s: float | None = None) -> Session:
        """Tear down and prove it; what is gone is fine. A ledger that cannot be written is no reason not to. Raises
        LeakSuspected when there is no proof in time."""
        if not session.live:
            return session
        session = self._ask_for_teardown(session, reason, by)
        engine = self.engines(self._infra(session))
        within_s, pause_s = engine.confirm_within_s if within_s is None else within_s, 0.1
        until, paused_s = self.now() + timedelta(seconds=within_s), 0.0
        why, told = "it is still being deleted", ""
        while self.now() < until and paused_s < within_s:  # a clock that is set back makes no endless wait
            try:
                engine.down(session.id, by, reason)
            except NotYetGone as error:
                why = str(error)
            except (UnconfirmedError, OSError) as error:
                why = error.message if isinstance(error, UnconfirmedError) else str(error)
                session = self._unconfirmed(session, why)
            else:
                session, _ = self.refresh(session)
            if not session.live:
                return session
            if pause_s >= 2.0 and told != why:
                _PROGRESS.info("%s", told := why)
            self.sleep(pause_s)
            paused_s += pause_s
            pause_s = min(1.5 * pause_s, 2.0)
        session = self._unconfirmed(session, why)
        raise LeakSuspected(
            f"session {session.name} could not be proven gone: {why}", f"run: kimisession stop {session.name}"
        )

    def extend(self, session: Session, added_s: int) -> Session:
        """Move the hard cap of every layer. Raises UsageMistake past the longest that the profile allows, or when the place
        refuses, BudgetRefused past the budget's moment; then nothing has moved."""
        by, turn = owner_here(), f"{session.id}.extend"
        self.store.claim(turn)  # of two commands at once the second one adds to what the first one made of it
        try:
            asked = ExtendRequested(self.now(), _moved(self.store.session(session.id), added_s), by)
            session = self.store.append(session.id, [asked])
            assert session.request is not None
            # Absolute, and as seconds since the first cap: a machine that missed one of two extensions misses nothing.
            in_all_s = (asked.deadline - session.request.deadline).total_seconds()
            try:
                self.engines(self._infra(session)).extend(session.id, asked.deadline, in_all_s)
            except UnconfirmedError:
                raise  # it may have come to be: the machine's own journal will tell
            except KimiError as error:
                refused = ExtendRefused(self.now(), asked.deadline, error.message)
                self._note(session.id, lambda _: [refused])
                raise
            done = Extended(self.now(), asked.deadline, by)
            return self._note(session.id, lambda _: [done])
        finally:
            self.store.unclaim(turn)

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
        """Where it is. What this ledger knows nothing of was found by its labels, or its resources tell."""
        if session.request:
            return session.request.infra
        told = session.resources[0].id.partition("/")[0] if session.resources else "local"
        return self._found_on.get(session.id, told)


def _with(session: Session, events: Sequence[Event]) -> Session:
    for event in events:
        session = apply(session, event)
    return session


def _words(events: Sequence[Event]) -> str:
    return ", ".join(dict.fromkeys(type(event).__name__ for event in events))


def _moved(session: Session, added_s: int) -> datetime:
    """Where an extension moves the hard cap. Raises UsageMistake, BudgetRefused."""
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
    return moved
