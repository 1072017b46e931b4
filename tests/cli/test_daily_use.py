"""What a person does to a session on a bad day: settings that are torn, folders that are gone, layers that stand still."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from command_line import Home
from good_values import requested

from kimisession.cli.restarting import overtaken
from kimisession.cli.sessions import LATE_S, ends_text, restarts_text
from kimisession.core.ledger import (
    EndedOnNode,
    LaunchRequested,
    Ready,
    ResourceCreated,
    ResourceGone,
    Restarted,
    TeardownConfirmed,
    fold,
)
from kimisession.core.lifecycle import Observation

BEGAN = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
UP = (
    requested(BEGAN, infra="local", profile="rehearsal"),
    LaunchRequested(BEGAN),
    ResourceCreated(BEGAN, "local/demo-1", "machine", Decimal("26.00"), "a test's"),
    Ready(BEGAN + timedelta(seconds=2)),
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A ledger with one session that the ledger knows only by its labels, and that is gone."""
    home = Home(tmp_path)
    store, end = home.store(), BEGAN + timedelta(seconds=9)
    lost = [
        ResourceCreated(BEGAN, "local/demo-1", "machine", None, ""),
        EndedOnNode(end, "idle", "", 10),
        ResourceGone(end, "local/demo-1", "test"),
        TeardownConfirmed(end, "test"),
    ]
    store.append("demo-1", lost)
    store.close()
    yield home
    assert home.machines() == []


@pytest.mark.parametrize("words", [("status",), ("stop", "demo-1"), ("cost",)], ids=str)
def test_settings_that_cannot_be_read_keep_nobody_from_seeing_and_ending_sessions(
    home: Home, words: tuple[str, ...]
) -> None:
    (home.folder / "kimisession.toml").write_text('idel = "2m', encoding="utf-8")
    said = home.type(*words)
    assert said.code == 0, said.err
    assert "warning: " in said.err
    assert "kimisession.toml cannot be read" in said.err


def test_settings_that_cannot_be_read_keep_a_session_from_being_started(home: Home) -> None:
    (home.folder / "kimisession.toml").write_text('idel = "2m', encoding="utf-8")
    said = home.type("start", "rehearsal", "-y")
    assert said.code == 2
    assert "kimisession.toml cannot be read" in said.sentence


def test_a_session_can_be_stopped_from_a_folder_that_was_removed(home: Home) -> None:
    here = home.folder / "here"
    here.mkdir()
    remove_and_stop = f"rmdir {here}; exec {sys.executable} -m kimisession stop demo-1"
    done = subprocess.run(
        [str(shutil.which("sh")), "-c", remove_and_stop],
        cwd=here,
        env=home.env(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "is gone already" in done.stderr


def test_a_price_that_the_ledger_has_lost_is_never_shown_as_nothing(home: Home) -> None:
    said = home.type("cost")
    assert said.code == 0, said.err
    (line,) = [line for line in said.out.splitlines() if line.startswith("demo-1")]
    assert "$" not in line
    assert "?" in line
    assert "the ledger has lost the price" in said.out


@pytest.mark.parametrize("words", [("20m", "nope"), ("nope", "20m")], ids=str)
def test_extend_takes_the_name_before_or_after_what_is_added(home: Home, words: tuple[str, str]) -> None:
    said = home.type("extend", *words)
    assert said.code == 2
    assert said.sentence == "there is no session 'nope'"


def test_an_end_that_did_not_come_is_called_overdue() -> None:
    session, due = fold("demo-1", UP), BEGAN + timedelta(minutes=5)
    beat = {"at": BEGAN.isoformat(), "kind": "beat", "phase": "ready", "ends_utc": due.timestamp(), "evidence": "idle"}
    seen = Observation(due, True, "", journal=(beat,))
    assert ends_text(session, seen, due + timedelta(seconds=LATE_S)) == "in 0s: idle"
    late = ends_text(session, seen, due + timedelta(seconds=LATE_S + 10))
    assert late == f"OVERDUE by 55s: its keeper did not end it; kimisession stop {session.name}"


def test_a_restart_back_reads_as_a_sentence() -> None:
    session = fold("demo-1", (*UP, Restarted(BEGAN + timedelta(seconds=9), 2, "as before")))
    assert restarts_text(session, BEGAN + timedelta(seconds=20)).endswith(" with the flags of before")


def test_a_restart_that_another_one_overtook_is_not_called_done() -> None:
    session = fold("demo-1", (*UP, Restarted(BEGAN + timedelta(seconds=9), 2, "--max-model-len 1024")))
    assert not overtaken(session, {"max-model-len": 1024})
    assert overtaken(session, {"max-model-len": 2048})


def test_stopping_twice_is_fine_also_without_a_name(tmp_path: Path) -> None:
    said = Home(tmp_path).type("stop")
    assert (said.code, said.out) == (0, "no session is running\n")


def test_a_closed_standard_error_breaks_nothing(tmp_path: Path) -> None:
    home, words = Home(tmp_path), f"exec {sys.executable} -m kimisession status 2>&-"
    done = subprocess.run(
        [str(shutil.which("sh")), "-c", words],
        cwd=tmp_path,
        env=home.env(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "no session is running\n")
