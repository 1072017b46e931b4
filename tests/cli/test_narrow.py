"""Terminals that are narrower than anybody's habit: what is there to be copied stays whole, and every line fits."""

import sys
from pathlib import Path

import pytest
from command_line import Home
from terminal import on_terminal, plain, too_wide

SCREENS = [sys.executable, str(Path(__file__).parent / "screens.py")]
PROGRAM = [sys.executable, "-m", "kimisession"]
TABLE = """
from kimisession.cli.show import table
rows = [("orphan-disk", "disk kimi-k2-5-int4-0123abcd", "us-central1-a", "ada", "$0.10"),
        ("live", "machine demo-4567cdef", "europe-north1-c", "grace", "$26.00")]
table(("STATE", "RESOURCE", "WHERE", "OWNER", "COST"), rows, frozenset({4}))
"""


def at(columns: int, argv: list[str], folder: Path) -> str:
    """What a program writes on a terminal so wide, without colour."""
    code, text = on_terminal(argv, columns, Home(folder).env(), folder)
    assert code == 0, text
    return plain(text)


@pytest.mark.parametrize("columns", [30, 40, 60])
def test_names_and_places_are_whole_however_narrow_the_terminal_is(columns: int, tmp_path: Path) -> None:
    text = at(columns, [sys.executable, "-c", TABLE], tmp_path)
    for word in ("orphan-disk", "kimi-k2-5-int4-0123abcd", "us-central1-a", "europe-north1-c", "$26.00"):
        assert word in text
    assert too_wide(text, columns) == []


@pytest.mark.parametrize("screen", ["status", "cost"])
def test_a_list_of_sessions_fits_forty_columns(screen: str, tmp_path: Path) -> None:
    text = at(40, [*SCREENS, screen], tmp_path)
    assert too_wide(text, 40) == []
    assert screen != "cost" or "long-named-experiment" in text


@pytest.mark.parametrize("words", [(), ("guard",), ("start",), ("seed",)], ids=" ".join)
def test_help_fits_forty_columns_and_cuts_no_sentence(words: tuple[str, ...], tmp_path: Path) -> None:
    text = at(40, [*PROGRAM, *words, "--help"], tmp_path)
    assert max(map(len, text.splitlines())) <= 40
    assert "..." not in text.replace("[ARGS]...", "")


def test_a_topic_fits_forty_columns(tmp_path: Path) -> None:
    assert too_wide(at(40, [*PROGRAM, "help", "exit-codes"], tmp_path), 40) == []
