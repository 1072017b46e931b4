"""What people see. Data goes to standard output, progress and errors to standard error.

Nothing here decides anything. Colour only on a terminal that wants it (NO_COLOR, --no-color); off a terminal every
line is plain and whole.
"""

import json
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TextIO

SCHEMA_VERSION = 1

_STYLES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
}


@dataclass
class Settings:
    """The options that every command has."""

    colour: bool = True
    quiet: bool = False
    debug: bool = False


SETTINGS = Settings()


def wants_colour(stream: TextIO) -> bool:
    """Whether `stream` is a terminal whose user wants colour."""
    return SETTINGS.colour and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def paint(text: str, style: str, stream: TextIO) -> str:
    """`text` in a style where colour is wanted."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if wants_colour(stream) else text


class _Progress(logging.Handler):
    """What engines tell while they launch."""

    def emit(self, record: logging.LogRecord) -> None:
        say(paint(f"  | {record.getMessage()}", "dim", sys.stderr))


def follow_progress() -> None:
    """Show what engines tell while they launch, from now on."""
    progress = logging.getLogger("kimisession.progress")
    if not progress.handlers:
        progress.addHandler(_Progress())
        progress.setLevel(logging.INFO)
        progress.propagate = False


def out(text: str = "") -> None:
    """A line of data."""
    print(text, flush=True)


def say(text: str = "") -> None:
    """A line of progress; silent with --quiet."""
    if not SETTINGS.quiet:
        clear()
        print(text, file=sys.stderr, flush=True)


def flash(text: str) -> None:
    """A line that the next one replaces; nothing off a terminal."""
    if not SETTINGS.quiet and sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[2K{text[:width]}")
        sys.stderr.flush()


def clear() -> None:
    """Remove what `flash` left."""
    if not SETTINGS.quiet and sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()


def error(message: str, hint: str = "") -> None:
    """One sentence, and what to type next."""
    clear()
    print(f"{paint('error:', 'red', sys.stderr)} {message}", file=sys.stderr)
    if hint:
        print(f"{paint('next:', 'cyan', sys.stderr)}  {hint}", file=sys.stderr)
    sys.stderr.flush()


def next_step(command: str) -> None:
    """What people type next."""
    say(f"{paint('next:', 'cyan', sys.stderr)} {command}")


def as_json(kind: str, content: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on standard output. Money as decimal strings, times as UTC ISO 8601."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, "kind": kind, "data": content}, default=_plain), flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, Decimal):
        return format(value, "f")
    raise TypeError(type(value).__name__)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Columns that align, on standard output; `right` names the columns of figures. Cells fold on a terminal and are
    whole in a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(head):
        grid.add_column(name, justify="right" if i in right else "left", no_wrap=i < len(head) - 1, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    tty = sys.stdout.isatty()
    console = Console(
        file=sys.stdout, width=None if tty else 1000, no_color=not wants_colour(sys.stdout), highlight=False
    )
    with console.capture() as captured:
        console.print(grid)
    out("\n".join(line.rstrip() for line in captured.get().splitlines()))


def pairs(rows: Sequence[tuple[str, str]], stream: TextIO = sys.stdout) -> None:
    """Names and values below each other; long values are wrapped under themselves on a terminal, whole in a pipe."""
    width = max(len(name) for name, _ in rows)
    room = max(20, shutil.get_terminal_size().columns - width - 5) if stream.isatty() else 0
    for name, value in rows:
        for number, line in enumerate(wrapped(value, room)):
            label = paint(name.ljust(width), "dim", stream) if number == 0 else " " * width
            print(f"  {label}  {line}", file=stream)
    stream.flush()


def wrapped(text: str, room: int) -> list[str]:
    """The lines of `text`, none longer than `room` where words allow it; 0 means: as they are."""
    lines = text.split("\n")
    if not room:
        return lines
    wrap = textwrap.TextWrapper(room, break_long_words=False, break_on_hyphens=False).wrap
    return [part for line in lines for part in (wrap(line) if len(line) > room else [line])]


def moment(at: datetime) -> str:
    """A moment in local time and in UTC: `14:02:11 CET (13:02:11 UTC)`, with the date when it is not today's."""
    local, now = at.astimezone(), datetime.now().astimezone()
    day = "" if local.date() == now.date() else f"{local:%Y-%m-%d} "
    if not local.utcoffset():
        return f"{day}{local:%H:%M:%S} UTC"
    return f"{day}{local:%H:%M:%S %Z} ({at.astimezone(UTC):%H:%M:%S} UTC)"


def size(count: float) -> str:
    """Bytes as people say them, decimal: 595.1 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""
