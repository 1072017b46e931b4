"""The durable ledger: append-only events in SQLite (WAL), with a projection that is kept in the same transaction.

`events` is the truth. `sessions` holds one row a session so that lists never fold everything; it can be dropped and
built again from `events`. Two writers are fine: a transaction takes the write lock before it reads.
"""

import fcntl
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

from kimisession.core.cost import TOKENS, cost_of, tokens_of
from kimisession.core.ledger import Benched, Damaged, Event, Fact, Session, SessionRequested, decode, encode, fold
from kimisession.errors import KimiError

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    session TEXT NOT NULL,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX events_session ON events (session, seq);
CREATE TABLE sessions (
    session TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    live INTEGER NOT NULL,
    profile TEXT NOT NULL,
    infra TEXT NOT NULL,
    requested_at TEXT NOT NULL,
    ended_at TEXT,
    reason TEXT NOT NULL,
    usd TEXT NOT NULL,
    seconds INTEGER NOT NULL,
    pretended INTEGER NOT NULL
);
CREATE UNIQUE INDEX one_live_name ON sessions (name) WHERE live = 1;
CREATE INDEX sessions_live ON sessions (live, requested_at);
"""


class NameTaken(KimiError):
    """A live session has this name already."""


@dataclass(frozen=True)
class Row:
    """One line of a list. `usd` is final for a session that is gone, and as of its last event for a live one."""

    session: str
    name: str
    state: str
    live: bool
    profile: str
    infra: str
    requested_at: datetime
    ended_at: datetime | None
    reason: str
    usd: Decimal
    seconds: int
    pretended: bool


class Store:
    """The ledger in one file. Opening makes it; a newer one is refused. One that is there and cannot be opened, on a full
    disk say, is read from a copy, so that sessions can still be seen and ended; writing then raises KimiError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._claims: dict[str, int] = {}
        self._broken = ""
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(path, timeout=20, isolation_level=None)
            self._db.text_factory = lambda raw: raw.decode("utf-8", "replace")  # torn text is damage, not an error
            self._db.execute("PRAGMA busy_timeout = 20000")
            version = self._version()
            if version == 0:
                self._create()
            elif version > SCHEMA_VERSION:
                raise KimiError(
                    f"the ledger {path} was written by a newer kimisession (format {version}, this one knows "
                    f"{SCHEMA_VERSION})",
                    "upgrade kimisession, or set KIMISESSION_STATE_HOME to another folder",
                )
            self._db.execute("PRAGMA synchronous = FULL")  # intent must be on disk before the act
        except (sqlite3.Error, OSError) as error:
            if not self._read_a_copy(str(error)):
                why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                raise KimiError(
                    f"the ledger {path} cannot be used: {why}",
                    "free space or make the folder writable, or set KIMISESSION_STATE_HOME to another one",
                ) from None

    def _read_a_copy(self, why: str) -> bool:
        """Open a copy of what is there, in memory where that can be. False: there is nothing to read."""
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a random name in it, for this user alone
        try:
            self._copy = tempfile.TemporaryDirectory(prefix="kimisession-ledger-", dir=shm)
            for suffix in ("", "-wal"):  # what was not yet moved into the file itself is in the second one
                part = self.path.with_name(self.path.name + suffix)
                if not suffix or part.exists():
                    (Path(self._copy.name) / part.name).write_bytes(part.read_bytes())
            self._db = sqlite3.connect(Path(self._copy.name) / self.path.name, isolation_level=None)
            self._db.text_factory = lambda raw: raw.decode("utf-8", "replace")
            readable = self._version() == SCHEMA_VERSION
        except (sqlite3.Error, OSError):
            return False
        self._broken = why
        return readable

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _create(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        with self._writing():
            if self._version() == 0:  # another process may have been quicker
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def append(self, session_id: str, events: Sequence[Event]) -> Session:
        """Write events and the session's projection in one transaction; on disk when this returns. Raises NameTaken
        when the name belongs to another live session, KimiError when the disk does not take it."""
        return self.record(session_id, lambda session: events)

    def record(self, session_id: str, make: Callable[[Session], Sequence[Event]]) -> Session:
        """`append` of the events that `make` finds missing in the session as it is under the write lock."""
        if self._broken:
            raise KimiError(f"the ledger {self.path} cannot be written: {self._broken}", "free some disk space")
        try:
            with self._writing():
                for event in make(self.session(session_id)):
                    kind, body = encode(event)
                    self._db.execute(
                        "INSERT INTO events (session, at, kind, body) VALUES (?, ?, ?, ?)",
                        (session_id, event.at.astimezone(UTC).isoformat(), kind, body),
                    )
                session = self.session(session_id)
                self._project(session)
        except sqlite3.IntegrityError:
            raise NameTaken("a live session of that name exists already") from None
        except sqlite3.Error as error:
            raise KimiError(f"the ledger {self.path} cannot be written: {error}", "free some disk space") from None
        return session

    def _project(self, session: Session) -> None:
        request = session.request
        ends = [r.ended for r in session.resources if r.ended]
        now = session.confirmed.at if session.confirmed else datetime.now(UTC)
        cost = cost_of(session, now)
        row = (
            session.id,
            session.name,
            session.state.value,
            int(session.live),
            request.profile if request else "?",
            request.infra if request else "?",
            (request.at if request else now).astimezone(UTC).isoformat(),
            max(ends).astimezone(UTC).isoformat() if ends and not session.live else None,
            session.reason,
            str(cost.usd),
            round(max((line.seconds for line in cost.lines), default=Decimal(0))),
            int(bool(request and request.pretended)),
        )
        marks = ",".join("?" * len(row))
        self._db.execute(
            f"INSERT OR FAIL INTO sessions VALUES ({marks}) ON CONFLICT (session) DO UPDATE SET "  # noqa: S608
            "name=excluded.name, state=excluded.state, live=excluded.live, profile=excluded.profile, "
            "infra=excluded.infra, requested_at=excluded.requested_at, ended_at=excluded.ended_at, "
            "reason=excluded.reason, usd=excluded.usd, seconds=excluded.seconds, "
            "pretended=excluded.pretended",
            row,
        )

    def claim(self, session_id: str) -> None:
        """Hold a lock that says: this process is about to make that session's machine. Any death frees it."""
        path = self._claim_path(session_id)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Whoever held it has removed the file, and another may be there by now: a lock on the old one guards nothing.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    break
            os.close(fd)
        self._claims[session_id] = fd

    def unclaim(self, session_id: str) -> None:
        """It is made, or never will be. Repeatable."""
        if session_id in self._claims:
            self._claim_path(session_id).unlink(missing_ok=True)
            os.close(self._claims.pop(session_id))

    def claimed(self, session_id: str) -> bool:
        """Whether a living process is making that session's machine."""
        try:
            fd = os.open(self._claim_path(session_id), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(fd)

    def _claim_path(self, session_id: str) -> Path:
        return self.path.parent / "making" / session_id

    def session(self, session_id: str) -> Session:
        """The fold of one session's events. A session without events is an empty one."""
        rows = self._db.execute("SELECT kind, body FROM events WHERE session = ? ORDER BY seq", (session_id,))
        return fold(session_id, (decode(kind, body) for kind, body in rows))

    def rows(self, *, live_only: bool = False, newest: int | None = None) -> list[Row]:
        """The list, newest first."""
        where = "WHERE live = 1" if live_only else ""
        limit = f"LIMIT {int(newest)}" if newest is not None else ""
        found = self._db.execute(f"SELECT * FROM sessions {where} ORDER BY requested_at DESC {limit}")  # noqa: S608
        return [
            Row(
                session,
                name,
                state,
                bool(live),
                profile,
                infra,
                datetime.fromisoformat(requested_at),
                datetime.fromisoformat(ended_at) if ended_at else None,
                reason,
                Decimal(usd),
                seconds,
                bool(pretended),
            )
            for (
                session, name, state, live, profile, infra, requested_at, ended_at, reason, usd, seconds, pretended,
            ) in found
        ]  # fmt: skip

    def by_name(self, name: str) -> Session | None:
        """The live session of this name, else the newest that had it, else the one with this id."""
        found = self._db.execute(
            "SELECT session FROM sessions WHERE name = ? OR session = ? ORDER BY live DESC, requested_at DESC LIMIT 1",
            (name, name),
        ).fetchone()
        return self.session(found[0]) if found else None

    def benches(self) -> list[tuple[str, Benched | Damaged]]:
        """(session, bench) of all sessions, oldest first. One that cannot be read keeps its place, so that the number
        by which people know a bench never changes."""
        rows = self._db.execute("SELECT session, body FROM events WHERE kind = ? ORDER BY seq", (Benched.__name__,))
        read = ((session, decode(Benched.__name__, str(body))) for session, body in rows)
        return [(session, event) for session, event in read if isinstance(event, Benched | Damaged)]

    def tokens(self) -> dict[str, int]:
        """Tokens generated by session, as far as they were heard. Read from the facts alone: no session is folded."""
        rows = self._db.execute(
            "SELECT session, body FROM events WHERE kind = ? AND body LIKE ? ORDER BY seq",
            (Fact.__name__, f'%"name": "{TOKENS}%'),
        )
        facts: dict[str, list[tuple[str, str]]] = {}
        for session, body in rows:
            event = decode(Fact.__name__, str(body))
            if isinstance(event, Fact):
                facts.setdefault(str(session), []).append((event.name, event.value))
        return {session: tokens for session, told in facts.items() if (tokens := tokens_of(told))}

    def buckets(self) -> list[str]:
        """The buckets in the cloud that sessions read from or were seeded into, by name."""
        # Neither decoded nor looked at where there is none: `cost` asks this of ten thousand sessions.
        rows = self._db.execute(
            "SELECT body FROM events WHERE kind = ? AND body LIKE ?",
            (SessionRequested.__name__, '%"bucket": "gs://%'),
        )
        found = set()
        for (body,) in rows:
            with suppress(ValueError, KeyError, TypeError):
                found.add(str(json.loads(body)["bucket"]))
        return sorted(found)

    def damaged(self, newest: int = 20) -> list[str]:
        """What could not be read, newest first, among the events of live sessions and foreign rows."""
        rows = self._db.execute(
            "SELECT seq, kind, body FROM events WHERE session IN (SELECT session FROM sessions WHERE live = 1) "
            "OR session NOT IN (SELECT session FROM sessions) ORDER BY seq DESC"
        )
        found = []
        for seq, kind, body in rows:
            event = decode(str(kind), str(body))
            if not isinstance(event, Event):
                found.append(f"record {seq}: {event.why}")
            if len(found) >= newest:
                break
        return found


def open_store(home: Path) -> Store:
    """The ledger of a state home."""
    return Store(home / "ledger.db")
