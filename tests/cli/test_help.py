"""Help as people read it, kept in tests/cli/golden: what changes there is seen in review.

`python tests/cli/test_help.py` writes the files anew.
"""

import re
import sys
import tempfile
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

from command_line import Home

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = sorted(path.stem for path in GOLDEN.glob("*.txt"))


def help_of(home: Home, command: str) -> str:
    """What `kimisession COMMAND --help` prints on a terminal of 80 columns."""
    words = [] if command == "kimisession" else command.split("-")
    said = home.type(*words, "--help", TERMINAL_WIDTH="80")
    assert said.code == 0, said.err
    return said.out


def commands_in(text: str) -> list[str]:
    """The commands that a help text lists."""
    lines = text.partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()
    return [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_it_said(command: str, tmp_path: Path) -> None:
    assert help_of(Home(tmp_path), command) == (GOLDEN / f"{command}.txt").read_text(encoding="utf-8"), (
        "if the new text is meant: python tests/cli/test_help.py"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal_of_80_columns(command: str) -> None:
    text = (GOLDEN / f"{command}.txt").read_text(encoding="utf-8")
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("kimisession", "config", "guard")])
def test_every_command_shows_how_it_is_typed_each_example_on_a_line_of_its_own(command: str) -> None:
    text = (GOLDEN / f"{command}.txt").read_text(encoding="utf-8").partition("\nOptions:")[0]
    typed = re.findall(
        rf"^  (?:Example: |  )(?:eval .*)?kimisession {command.replace('-', ' ')}\b.*$", text, re.MULTILINE
    )
    assert typed, text
    assert all(line.count("kimisession ") == 1 for line in typed), "a blank line between examples keeps them apart"


def test_every_command_is_kept() -> None:
    listed = commands_in((GOLDEN / "kimisession.txt").read_text(encoding="utf-8"))
    assert listed
    assert set(listed) <= set(COMMANDS), "run: python tests/cli/test_help.py"


def write() -> None:
    """Write every help text anew."""
    GOLDEN.mkdir(exist_ok=True)
    for path in GOLDEN.glob("*.txt"):
        path.unlink()
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder))
        names = ["kimisession"]
        for name in names:
            text = help_of(home, name)
            (GOLDEN / f"{name}.txt").write_text(text, encoding="utf-8")
            names += [name + "-" + found if name != "kimisession" else found for found in commands_in(text)]
    print(f"wrote {len(names)} files into {GOLDEN}")


if __name__ == "__main__":
    write()
