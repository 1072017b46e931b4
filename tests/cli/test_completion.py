"""Shell completion, asked as bash asks it: through environment variables."""

import resource
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from command_line import ROOT, Home
from good_values import requested

from kimisession.cli.completing import PLACES
from kimisession.core.ledger import TeardownConfirmed
from kimisession.engines.base import open_engine

LOADED = """\
import sys
from kimisession.__main__ import main
try:
    main()
finally:
    heavy = {"sky", "google", "httpx", "rich", "numpy", "pandas"} & {name.partition(".")[0] for name in sys.modules}
    assert not heavy, heavy
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A ledger with one live session and two that are gone, and a profile of one's own."""
    home, now = Home(tmp_path), datetime.now(UTC)
    store = home.store()
    for name, live in (("alpha", False), ("alphorn", False), ("beta", True)):
        store.append(f"{name}-1", [requested(now, name=name, infra="local")])
        if not live:
            store.append(f"{name}-1", [TeardownConfirmed(now, "test")])
    store.close()
    (home.config / "profiles").mkdir(parents=True)
    (home.config / "profiles" / "kimi-mine.toml").write_text("")
    return home


def completed(home: Home, line: str) -> list[str]:
    """What bash would offer at the end of this line."""
    asked = {
        "_KIMISESSION_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        cwd=home.folder,
        env=home.env(**asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kimisession sta", ["start", "status"]),
        ("kimisession stop ", ["beta"]),
        ("kimisession extend 30m ", ["beta"]),
        ("kimisession cost al", ["alpha", "alphorn"]),
        ("kimisession logs ", ["beta", "alpha", "alphorn"]),
        ("kimisession start kimi-k2.5-i", ["kimi-k2.5-int4"]),
        ("kimisession plan kimi-m", ["kimi-mine"]),
        ("kimisession start --infra l", ["local"]),
        ("kimisession schema config", ["config-show"]),
        ("kimisession help ex", ["exit-codes"]),
        ("kimisession status --wa", ["--watch"]),
    ],
)
def test_bash_is_offered_commands_sessions_profiles_and_places(home: Home, line: str, offered: list[str]) -> None:
    assert sorted(completed(home, line)) == sorted(offered)


def test_without_a_ledger_nothing_is_offered_and_none_is_made(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert completed(home, "kimisession stop ") == []
    assert not home.state.exists()


def test_a_damaged_ledger_is_no_error_on_the_command_line(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.state.mkdir()
    (home.state / "ledger.db").write_bytes(b"no database" * 100)
    assert completed(home, "kimisession stop ") == []


def test_completing_takes_less_than_half_a_second(home: Home) -> None:
    """In time of its own, best of three: what else this machine does is not ours to answer for."""
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        completed(home, "kimisession stop ")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.5


@pytest.mark.parametrize("place", PLACES)
def test_every_place_that_is_offered_can_be_asked_for(place: str) -> None:
    text = (ROOT / "kimisession" / "engines" / "base.py").read_text(encoding="utf-8")
    assert f'"{place}": ' in text.partition("def open_engine")[2], open_engine


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_that_a_shell_loads_names_the_program(tmp_path: Path, shell: str) -> None:
    said = Home(tmp_path).type(_KIMISESSION_COMPLETE=f"source_{shell}")
    assert (said.code, "_KIMISESSION_COMPLETE" in said.out) == (0, True)
