"""Sessions that are gone, that were restarted, that are busy: what people read, and hints that lead somewhere."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from command_line import Home
from good_values import NOON, requested

from kimisession.cli.sessions import REASONS, Progress, ends_text, page, phase_text
from kimisession.core.ledger import (
    EndedOnNode,
    Event,
    LaunchRequested,
    PhaseBegan,
    PhaseEnded,
    Ready,
    ResourceCreated,
    ResourceGone,
    Restarted,
    Session,
    TeardownConfirmed,
    fold,
)
from kimisession.core.lifecycle import Observation
from kimisession.node.policy import Reason

BEGAN = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)


def ran(at: datetime, seconds: float, reason: str = "never-used", evidence: str = "") -> list[Event]:
    """A whole session that took so long."""
    end = at + timedelta(seconds=seconds)
    return [
        requested(at, infra="local", profile="rehearsal"),
        LaunchRequested(at),
        ResourceCreated(at, "local/demo-1", "machine", Decimal("26.00"), "a test's"),
        Ready(at + timedelta(seconds=2)),
        EndedOnNode(end, reason, evidence, 11),
        ResourceGone(end, "local/demo-1", "test"),
        TeardownConfirmed(end, "test"),
    ]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A ledger with one session that is gone: it took 5.6 seconds."""
    home = Home(tmp_path)
    store = home.store()
    store.append("demo-1", ran(BEGAN, 5.6))
    store.close()
    yield home
    assert home.machines() == []


@pytest.mark.parametrize(
    "words", [("extend", "30m"), ("restart", "--undo"), ("connect",), ("test",), ("bench",)], ids=str
)
def test_what_is_gone_is_said_with_hints_that_lead_somewhere(home: Home, words: tuple[str, ...]) -> None:
    said = home.type(*words, "demo")
    assert said.code in (1, 2)
    assert said.sentence.startswith("session demo is gone")
    assert "kimisession cost demo" in said.hint
    assert "kimisession start rehearsal" in said.hint
    assert home.type("cost", "demo").code == 0


def test_a_start_of_the_engine_that_never_was_has_no_log(home: Home) -> None:
    said = home.type("logs", "demo", "--run", "99")
    assert (said.code, said.out) == (2, "")
    assert said.sentence == "--run: the engine of demo was started once, so there is no log of start 99"
    assert said.hint == "kimisession logs demo --run 1"


def test_the_list_says_why_a_session_ended_in_words_and_not_in_codes(home: Home) -> None:
    listed, costs = home.type("status", "--all").out, home.type("cost").out
    assert "ended: never used" in listed
    assert costs.splitlines()[1].endswith("never used")
    assert "never-used" not in listed + costs


def test_a_session_took_the_same_in_every_list(home: Home) -> None:
    """5.6 s are 6 s for people, rounded once and alike; $0.0404 are $0.04."""
    line = home.type("status", "--all").out.splitlines()[1].split()
    assert (line[2], line[3]) == ("6s", "$0.04")
    assert home.type("cost").out.splitlines()[1].split()[3:5] == ["6s", "$0.04"]
    assert "5.6 s x $26.00/h = $0.04" in home.type("cost", "demo").out
    assert "$0.04 in 6s" in home.type("status", "demo").out


# -- what is made of a session that lives ---------------------------------------------------------------------------------


def living(*more: Event) -> Session:
    """A ready session."""
    return fold("demo-1", [*ran(NOON, 60)[:4], *more])


def beating(**said: object) -> Observation:
    """What the keeper's last heartbeat says."""
    beat = {"at": NOON.isoformat(), "kind": "beat", "ends_utc": (NOON + timedelta(minutes=9)).timestamp(), **said}
    return Observation(NOON, True, journal=(beat,))


@pytest.mark.parametrize(
    ("beat", "text"),
    [
        ({"next": "hard-cap", "evidence": "hard cap, up for 40s", "activity": "busy", "running": 2},
         "in 9m: the hard cap; busy with 2 requests"),
        ({"next": "hard-cap", "evidence": "hard cap, up for 40s", "activity": "busy", "running": 1},
         "in 9m: the hard cap; busy with 1 request"),
        ({"next": "hard-cap", "evidence": "hard cap, up for 40s", "activity": "quiet", "running": 0}, "in 9m: the hard cap"),
        ({"next": "budget", "evidence": "the budget is spent at the price", "activity": "busy", "running": 0},
         "in 9m: the budget's end; busy"),
        ({"next": "idle", "evidence": "idle 7m of 20m, last request 14:02:00 UTC", "activity": "quiet", "running": 0},
         "in 9m: idle 7m of 20m, last request 14:02:00 UTC"),
    ],
)  # fmt: skip
def test_a_busy_session_is_not_told_that_its_hard_cap_is_at_fault(beat: dict[str, object], text: str) -> None:
    assert ends_text(living(), beating(**beat), NOON) == text


@pytest.mark.parametrize(("times", "text"), [(1, "once, at"), (2, "twice, last at"), (3, "3 times, last at")])
def test_restarts_are_counted_as_people_count(times: int, text: str) -> None:
    again: list[Event] = []
    for run in range(2, times + 2):
        again += [Restarted(NOON, run, f"max-model-len={run}"), Ready(NOON, run)]
    rows = dict(page(living(*again), beating(), NOON))
    assert rows["restarted"] == f"{text} 12:00:00 UTC with max-model-len={times + 1}"


def test_phases_of_a_restarted_engine_stand_under_the_number_of_its_start() -> None:
    def phase(name: str, at: int) -> list[Event]:
        return [PhaseBegan(NOON, name), PhaseEnded(NOON + timedelta(seconds=at), name, False)]

    session = living(*phase("load", 2), Restarted(NOON, 2, "x=1"), *phase("boot.2", 1), *phase("load.2", 3))
    lines = list(Progress(countdown=False).lines(session, beating(), NOON))
    assert lines == [
        "  load          2.0 s    $0.01",
        "  start 2 of the engine",
        "  boot          1.0 s    $0.01",
        "  load          3.0 s    $0.02",
    ]
    assert phase_text("load.2") == "load, start 2"


def test_off_a_screen_a_countdown_speaks_at_milestones_and_when_something_changes() -> None:
    progress, session = Progress(countdown=True), living()
    said = []
    for second in range(600):
        now = NOON + timedelta(seconds=second)
        seen = beating(next="idle", evidence=f"idle {second}s of 9m", activity="quiet")
        said += list(progress.lines(session, seen, now))
    assert [line.rpartition("in ")[2] for line in said] == [
        "9m", "5m", "2m", "1m", "30s", "20s", "10s", "5s", "3s", "2s", "1s", "0s",
    ]  # fmt: skip
    busy = beating(next="hard-cap", evidence="", activity="busy", running=1)
    assert list(progress.lines(session, busy, NOON)) == ["  busy      1 request; the hard cap in 9m"]


def test_every_reason_of_the_keeper_has_words() -> None:
    assert {reason.value for reason in Reason} <= set(REASONS)
