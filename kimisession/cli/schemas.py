"""`kimisession schema`: what `--json` prints, as JSON Schema. The files are made by kimisession/cli/documents."""

import difflib
from pathlib import Path

from kimisession.cli import show
from kimisession.errors import UsageMistake


def folder() -> Path:
    """Where the published files are."""
    return Path(__file__).parent.parent / "schemas"


def names() -> list[str]:
    """Every command that prints documents, and `error`."""
    return sorted(path.stem for path in folder().glob("*.json"))


def print_schema(command: str | None) -> None:
    """One schema; without a command which there are."""
    if command is None:
        for name in names():
            show.out(name)
        show.next_step("kimisession schema status", "kimisession help json")
        return
    name = command.strip().replace(" ", "-")
    if name not in names():
        close = difflib.get_close_matches(name, names(), 1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise UsageMistake(f"there is no schema of {command!r}", f"{guess}`kimisession schema` lists them")
    show.out((folder() / f"{name}.json").read_text(encoding="utf-8").rstrip("\n"))
