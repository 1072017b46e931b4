"""The ledger on disk: what was reported as written is there after kill -9, two writers lose nothing, one name is one session."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta, timezone
from decimal import Decimal
from pathlib import Path

import pytest
from good_values import NOON, SECOND, requested

from kimisession.core.cost import cost_of
from kimisession.core.ledger import (
    Event,
    Fact,
    LaunchRequested,
    ResourceCreated,
    ResourceGone,
    TeardownConfirmed,
)
from kimisession.errors import KimiError
from kimisession.store import SCHEMA_VERSION, NameTaken, Store, open_store

ROOT = Path(__file__).parents[2]

#: A writer in a process of its own: a line on standard output for each event that the ledger has taken.
WRITER = """
import os, sys
from datetime import UTC, datetime
from pathlib import Path
from kimisession.core.ledger import Fact
from kimisession.store import Store
store = Store(Path(sys.argv[1]))
print("open", flush=True)
for number in range(int(sys.argv[3])):
    store.append(sys.argv[2], [Fact(datetime.now(UTC), "number", str(number))])
    os.write(1, f"{number}\\n".encode())
"""

#: Tries to have a name; says whether it got it.
CLAIMER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from good_values import requested
from kimisession.store import NameTaken, Store
store = Store(Path(sys.argv[1]))
print("there", flush=True)
sys.stdin.readline()
try:
    store.append(sys.argv[2], [requested(name="demo")])
    print("got it")
except NameTaken:
    print("taken")
"""


def python(code: str, *args: str) -> subprocess.Popen[str]:
    """A process that runs this code."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the ledger is."""
    return tmp_path / "state" / "ledger.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """An empty ledger."""
    store = Store(path)
    yield store
    store.close()


def story(name: str, number: int, *, over: bool) -> list[Event]:
    """A session that ran for `number` minutes."""
    began, ended = NOON + number * SECOND, NOON + timedelta(minutes=number)
    events: list[Event] = [
        requested(began, name=name),
        LaunchRequested(began),
        ResourceCreated(began, "m", "machine", Decimal("26.00"), "a test's"),
    ]
    return [*events, ResourceGone(ended, "m", "gone"), TeardownConfirmed(ended, "nothing left")] if over else events


def numbers(store: Store, session: str) -> list[int]:
    """What a writer has written."""
    return [int(value) for name, value in store.session(session).facts if name == "number"]


@pytest.mark.parametrize("kills", [1, 2, 3])
def test_every_event_that_was_reported_as_written_survives_kill_9(path: Path, kills: int) -> None:
    reported = []
    for _ in range(kills):
        writer = python(WRITER, str(path), "demo-1", "100000")
        assert writer.stdout is not None
        for line in writer.stdout:
            reported.append(line.strip())
            if line.strip() == str(12 * kills):
                writer.kill()  # in the middle of its loop, wherever that is
                break
        reported += [line.strip() for line in writer.stdout]
        writer.wait()
        assert writer.returncode == -9
    store = Store(path)
    written = numbers(store, "demo-1")
    assert {int(number) for number in reported if number != "open"} <= set(written)
    assert store.session("demo-1").damage == ()
    assert [row.session for row in store.rows()] == ["demo-1"]
    assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_two_writers_at_once_lose_nothing(path: Path) -> None:
    writers = [python(WRITER, str(path), session, "60") for session in ("a", "b", "shared", "shared")]
    for writer in writers:
        assert writer.wait(timeout=60) == 0
    store = Store(path)
    assert numbers(store, "a") == numbers(store, "b") == list(range(60))
    # A value told twice in a row is told once; one that comes back is told again. The events themselves are all there.
    (count,) = store._db.execute("SELECT count(*) FROM events WHERE session = 'shared'").fetchone()
    assert count == 120
    assert sorted(set(numbers(store, "shared"))) == list(range(60))


def test_a_ledger_that_many_open_first_at_once_is_made_once(path: Path) -> None:
    writers = [python(WRITER, str(path), f"s{number}", "1") for number in range(6)]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 6
    assert len(Store(path).rows()) == 6


def test_of_many_that_want_a_name_at_once_exactly_one_gets_it(path: Path) -> None:
    Store(path).close()
    claimers = [python(CLAIMER, str(path), f"demo-{n}", str(Path(__file__).parents[1])) for n in range(4)]
    for claimer in claimers:
        assert claimer.stdout is not None
        assert claimer.stdout.readline() == "there\n"
    for claimer in claimers:
        assert claimer.stdin is not None
        claimer.stdin.write("go\n")
        claimer.stdin.flush()
    answers = [claimer.communicate(timeout=60)[0].strip() for claimer in claimers]
    assert sorted(answers) == ["got it", "taken", "taken", "taken"]
    store = Store(path)
    assert len(store.rows()) == 1
    (kept,) = store.rows()
    (count,) = store._db.execute("SELECT count(*) FROM events").fetchone()
    assert count == 1  # who lost has left no trace
    assert store.session(kept.session).name == "demo"


def test_a_name_that_is_taken_is_free_again_when_its_session_is_gone(store: Store) -> None:
    store.append("demo-1", story("demo", 1, over=False))
    with pytest.raises(NameTaken):
        store.append("demo-2", [requested(name="demo")])
    assert store.session("demo-2").request is None
    store.append("demo-1", [TeardownConfirmed(NOON, "gone")])
    store.append("demo-2", [requested(name="demo")])
    found = store.by_name("demo")
    assert found is not None
    assert found.id == "demo-2"  # the live one goes before the newest


def test_a_session_is_found_by_name_and_by_id(store: Store) -> None:
    store.append("demo-1", story("demo", 1, over=True))
    for name in ("demo", "demo-1"):
        found = store.by_name(name)
        assert found is not None
        assert found.id == "demo-1"
    assert store.by_name("dem") is None


def test_an_event_and_its_row_are_one_transaction(store: Store) -> None:
    store.append("a", story("demo", 1, over=False))
    before = store.session("a")
    other = Store(store.path)
    with pytest.raises(NameTaken):
        other.append("b", [*story("demo", 2, over=False), Fact(NOON, "never", "kept")])
    assert store.session("a") == before
    assert store.session("b").facts == ()
    other.close()


def test_the_list_says_what_the_fold_says(store: Store) -> None:
    for number in range(1, 8):
        store.append(f"s{number}", story(f"n{number}", number, over=number % 2 == 0))
    rows = {row.session: row for row in store.rows()}
    assert list(rows) == [f"s{number}" for number in range(7, 0, -1)]  # newest first
    for session_id, row in rows.items():
        session = store.session(session_id)
        assert (row.name, row.state, row.live, row.reason) == (
            session.name,
            session.state.value,
            session.live,
            session.reason,
        )
        if session.confirmed:
            cost = cost_of(session, session.confirmed.at)
            assert (row.usd, row.seconds) == (cost.usd, int(cost.lines[0].seconds))
            assert row.ended_at == session.resources[0].ended
        else:
            assert row.ended_at is None
    assert [row.session for row in store.rows(live_only=True)] == ["s7", "s5", "s3", "s1"]
    assert [row.session for row in store.rows(newest=2)] == ["s7", "s6"]


def test_the_list_can_be_dropped_and_built_again_from_the_events(store: Store) -> None:
    for number in range(1, 6):
        store.append(f"s{number}", story(f"n{number}", number, over=True))
    before = store.rows()
    store._db.execute("DELETE FROM sessions")
    assert store.rows() == []
    for (session,) in store._db.execute("SELECT DISTINCT session FROM events").fetchall():
        store.append(session, [])
    assert store.rows() == before


def test_who_waited_for_a_claim_holds_the_one_that_others_see(path: Path) -> None:
    first, second, third = (Store(path) for _ in range(3))
    first.claim("turn")
    waiting = threading.Thread(target=second.claim, args=("turn",), daemon=True)
    waiting.start()
    first.unclaim("turn")
    waiting.join(10)
    assert not waiting.is_alive()
    assert third.claimed("turn")
    second.unclaim("turn")
    assert not third.claimed("turn")


def test_the_buckets_of_all_sessions_are_known_and_a_torn_record_hides_none(store: Store) -> None:
    for number, bucket in enumerate(("gs://b/k2", "file:///here", "gs://a", "gs://b/k2", "")):
        store.append(f"s{number}", [requested(name=f"n{number}", bucket=bucket)])
    store._db.execute(
        "INSERT INTO events (session, at, kind, body) VALUES ('torn', '', 'SessionRequested', '{\"bucket\": \"gs://')"
    )
    assert store.buckets() == ["gs://a", "gs://b/k2"]


def test_a_newer_ledger_is_refused_with_a_sentence_and_left_alone(path: Path) -> None:
    store = Store(path)
    store.append("a", story("demo", 1, over=False))
    store.close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(KimiError) as caught:
        Store(path)
    assert "was written by a newer kimisession (format 2, this one knows 1)" in caught.value.message
    assert "upgrade kimisession" in caught.value.hint
    assert caught.value.exit_code == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize("place", ["a file in the way", "a folder in the way", "no ledger but text"])
def test_a_place_that_cannot_hold_a_ledger_is_told_in_a_sentence(tmp_path: Path, place: str) -> None:
    path = tmp_path / "state" / "ledger.db"
    if place == "a file in the way":
        path.parent.write_text("not a folder")
    elif place == "a folder in the way":
        path.mkdir(parents=True)
    else:
        path.parent.mkdir()
        path.write_text("this is not a database, and long enough to be read as the header of one\n" * 30)
    with pytest.raises(KimiError, match=r"the ledger .* cannot be used: ") as caught:
        Store(path)
    assert "KIMISESSION_STATE_HOME" in caught.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_told_in_a_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(KimiError, match="cannot be used"):
        open_store(tmp_path / "state")


def test_the_ledger_is_its_owners_alone(path: Path, store: Store) -> None:
    assert path.parent.stat().st_mode & 0o077 == 0


def insert(store: Store, kind: object, body: object, session: str = "a") -> None:
    """A record as something else than this program would leave it."""
    store._db.execute(
        "INSERT INTO events (session, at, kind, body) VALUES (?, ?, ?, ?)",
        (session, NOON.isoformat(), kind, body),
    )


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("ResourceGone", '{"at": "2026-11-20T12:00:00+00:00", "resou'),
        ("ResourceGone", ""),
        ("ResourceGone", b"\xff\x00\xfe"),
        ("ResourceGone", 5),
        ("ResourceGone", "[]"),
        ("ResourceMigrated", '{"at": "2026-11-20T12:00:00+00:00"}'),
        (b"\xff\xfe", "{}"),
        (7, "{}"),
        ("", "{}"),
    ],
)
def test_a_torn_or_foreign_record_is_reported_and_harms_nothing(store: Store, kind: object, body: object) -> None:
    store.append("a", story("demo", 1, over=False))
    insert(store, kind, body)
    session = store.append("a", [Fact(NOON, "after", "the damage")])
    assert len(session.damage) == 1
    assert ("after", "the damage") in session.facts
    (row,) = store.rows()
    assert (row.name, row.state) == ("demo", "starting")
    (told,) = store.damaged()
    assert told.startswith("record 4: ")


def test_text_that_is_no_text_is_reported_and_harms_nothing(store: Store) -> None:
    store.append("a", story("demo", 1, over=False))
    store._db.execute(
        "INSERT INTO events (session, at, kind, body) VALUES ('a', ?, 'Fact', CAST(x'7bfffe' AS TEXT))",
        (NOON.isoformat(),),
    )
    assert len(store.session("a").damage) == 1
    assert len(store.damaged()) == 1


def test_records_of_a_session_that_the_list_does_not_know_are_reported(store: Store) -> None:
    insert(store, "ResourceGone", "{", session="nobody")
    assert len(store.damaged()) == 1
    assert store.rows() == []


def test_what_a_newer_writer_of_the_same_format_adds_is_ignored(store: Store) -> None:
    store.append("a", story("demo", 1, over=False))
    insert(store, "Fact", json.dumps({"at": NOON.isoformat(), "name": "gpu", "value": "H100", "unit": "none"}))
    session = store.session("a")
    assert session.damage == ()
    assert ("gpu", "H100") in session.facts


def test_news_is_worked_out_from_the_session_as_it_is_under_the_lock(store: Store) -> None:
    store.append("a", story("demo", 1, over=False))
    other = Store(store.path)
    other.append("a", [Fact(NOON, "who", "the other")])
    seen = []
    store.record("a", lambda session: seen.append(session) or [])  # type: ignore[func-returns-value]
    assert seen[0].facts == (("who", "the other"),)
    other.close()


def test_nothing_is_written_when_working_out_the_news_fails(store: Store) -> None:
    store.append("a", story("demo", 1, over=False))

    def fail(session: object) -> list[Event]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.record("a", fail)
    assert store.append("a", [Fact(NOON, "still", "writable")]).facts == (("still", "writable"),)


def test_a_claim_is_seen_by_others_and_ends_with_its_process(path: Path) -> None:
    store = Store(path)
    assert not store.claimed("demo-1")
    code = "import sys; from pathlib import Path; from kimisession.store import Store\n"
    code += "s = Store(Path(sys.argv[1])); s.claim('demo-1'); print('held', flush=True); sys.stdin.readline()"
    holder = python(code, str(path))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert store.claimed("demo-1")
    holder.kill()
    holder.wait()
    assert not store.claimed("demo-1")


def test_times_are_kept_in_utc_whatever_zone_they_came_in(store: Store) -> None:
    event = replace(requested(), at=NOON.astimezone(timezone(timedelta(hours=9))))
    store.append("a", [event])
    (at,) = store._db.execute("SELECT at FROM events").fetchone()
    assert at == "2026-11-20T12:00:00+00:00"


def test_a_ledger_that_cannot_be_opened_is_read_from_a_copy_and_says_so_when_written(path: Path, store: Store) -> None:
    store.append("a", [requested()])  # still in the write-ahead log, for the store is open
    full = path.parent.with_name("full") / path.name
    full.parent.mkdir()
    for name in (path.name, f"{path.name}-wal"):
        full.with_name(name).write_bytes(path.with_name(name).read_bytes())
    full.with_name(f"{path.name}-shm").mkdir()  # what a full disk or a read-only one does to SQLite
    there = Store(full)
    assert there.session("a").request == requested()
    assert [row.session for row in there.rows(live_only=True)] == ["a"]
    with pytest.raises(KimiError, match="cannot be written"):
        there.append("a", [LaunchRequested(NOON)])
    there.close()
