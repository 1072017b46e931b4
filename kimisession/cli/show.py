"""What people see. Data goes to standard output, progress and errors to standard error.

Nothing here decides anything. Colour only on a terminal that wants it (NO_COLOR, --no-color, TERM=dumb); off a terminal
every line is plain and whole. Nothing is said by colour alone: without it the same words stand there.
"""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Literal, TextIO

SCHEMA_VERSION = 1

Style = Literal["bold", "bad", "warn"]

#: Bold in the terminal's own colour, and the two colours that can be read on dark and on light grounds alike: yellow,
#: green and cyan vanish on white, blue on black. tests/cli/test_colour.py has the palettes and the ratios.
STYLES: dict[Style, str] = {"bold": "1", "bad": "1;31", "warn": "1;35"}

#: No column of words is squeezed below this.
_NARROWEST = 12

#: Money in documents: millionths of a dollar.
_MICRO = Decimal("0.000001")


@dataclass
class Settings:
    """The options that every command has. `json` makes documents of errors as well."""

    colour: bool = True
    quiet: bool = False
    debug: bool = False
    json: bool = False


SETTINGS = Settings()

#: Whether the last line of the terminal is one of `flash`.
_FLASHED = [False]


def moves_cursor(stream: TextIO) -> bool:
    """Whether `stream` is a terminal where a line can be written over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def wants_colour(stream: TextIO) -> bool:
    """Whether `stream` is a terminal whose user wants colour."""
    return SETTINGS.colour and not os.environ.get("NO_COLOR") and moves_cursor(stream)


def paint(text: str, style: Style, stream: TextIO) -> str:
    """`text` in a style where colour is wanted."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if wants_colour(stream) else text


def columns(stream: TextIO) -> int:
    """How wide a terminal is; 0 off a terminal: nothing is wrapped there."""
    if not stream.isatty():
        return 0
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said):
        return int(said)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def follow_progress() -> None:
    """Show what engines tell while they launch, from now on."""
    import logging  # --help is faster without it

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:  # not even --quiet hides this
                clear()
                print(f"{paint('warning:', 'warn', sys.stderr)} {record.getMessage()}", file=sys.stderr, flush=True)
            else:
                say(f"  | {record.getMessage()}")

    progress = logging.getLogger("kimisession.progress")
    if not progress.handlers:
        progress.addHandler(Telling())
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
    if not SETTINGS.quiet and moves_cursor(sys.stderr):
        sys.stderr.write(f"\r\x1b[2K{text[: columns(sys.stderr) - 1]}")
        sys.stderr.flush()
        _FLASHED[0] = True


def clear() -> None:
    """Remove what `flash` left."""
    if _FLASHED[0]:
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()
        _FLASHED[0] = False


class Screen:
    """Lines on standard error that the next ones replace; the last are removed at the end. For a terminal that moves its
    cursor."""

    def __init__(self) -> None:
        self.height = 0

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def draw(self, lines: Sequence[str]) -> None:
        """Show these, as far down as the terminal goes."""
        shown = lines[: max(1, shutil.get_terminal_size().lines - 1)]
        sys.stderr.write(self._up() + "".join(f"{line}\n" for line in shown))
        sys.stderr.flush()
        self.height = len(shown)

    def clear(self) -> None:
        """Remove what was drawn."""
        sys.stderr.write(self._up())
        sys.stderr.flush()
        self.height = 0

    def _up(self) -> str:
        # Back to the first column: a ^C may have been echoed.
        return f"\r\x1b[{self.height}A\x1b[J" if self.height else ""


def error(message: str, hint: str = "", exit_code: int = 1) -> None:
    """One sentence, and what to type next. With --json one JSON object on a line instead: error, hint, exit_code."""
    clear()
    if SETTINGS.json:
        print(json.dumps({"error": message, "hint": hint, "exit_code": exit_code}), file=sys.stderr, flush=True)
        return
    _labelled("error:", "bad", message)
    if hint:
        _labelled("next: ", "bold", hint)


def _labelled(label: str, style: Style, text: str) -> None:
    """A label and what it is about, on a terminal wrapped under itself."""
    room = columns(sys.stderr) - len(label) - 1
    first, *rest = wrapped(text, max(_NARROWEST, room)) if room > 0 else [text]
    lines = [f"{paint(label, style, sys.stderr)} {first}", *(" " * (len(label) + 1) + line for line in rest)]
    print("\n".join(lines), file=sys.stderr, flush=True)


def warn(word: str, text: str) -> None:
    """Something to look at, on standard error; silent with --quiet."""
    if not SETTINGS.quiet:
        clear()
        _labelled(word, "warn", text)


def next_step(*commands: str) -> None:
    """What people type next: on one line if the terminal has room, else a line each, so that each can be copied."""
    if SETTINGS.quiet:
        return
    clear()
    line, room = ", ".join(commands), columns(sys.stderr)
    together = not room or len(line) + len("next: ") <= room
    _labelled("next:", "bold", line if together else "\n".join(commands))


def as_json(kind: str, content: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on a line of standard output. Money as decimal strings with at most six places, times as UTC ISO
    8601. `kimisession schema` prints what each kind holds."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, "kind": kind, "data": content}, default=_plain), flush=True)


def would(text: str) -> None:
    """What a command with --dry-run would do."""
    if SETTINGS.json:
        as_json("dry-run", {"would": text})
    else:
        out(f"would {text}")


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, Decimal):
        return decimal_text(value)
    raise TypeError(type(value).__name__)


def decimal_text(value: Decimal) -> str:
    """A decimal for a document: rounded half up to six places, at least two, never an exponent: 26.00, 0.101833."""
    whole, _, places = format(value.quantize(_MICRO, ROUND_HALF_UP), "f").partition(".")
    return f"{whole}.{places.rstrip('0').ljust(2, '0')}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Columns that align, on standard output; `right` names the columns of figures. On a terminal that is too narrow the
    widest columns of words fold under themselves between words, never inside one: a name stays whole, so that it can be copied.
    Where not even that has room, each row is a page of names and values. In a pipe every cell is whole."""
    cells = [[cell.split("\n") for cell in row] for row in [head, *rows]]
    room = columns(sys.stdout)
    if room and not _fold(cells, right, room):
        _pages(head, rows)
        return
    widths = [max(len(line) for row in cells for line in row[i]) for i in range(len(head))]
    for number, row in enumerate(cells):
        for line in range(max(map(len, row))):
            parts = [cell[line] if line < len(cell) else "" for cell in row]
            padded = [
                p.rjust(w) if i in right else p.ljust(w) for i, (p, w) in enumerate(zip(parts, widths, strict=True))
            ]
            text = "  ".join(padded).rstrip()
            out(text if number else paint(text, "bold", sys.stdout))


def _fold(cells: list[list[list[str]]], right: frozenset[int], room: int) -> bool:
    """Fold columns of words until the table is no wider than `room`; False if it cannot be."""
    columns_ = [[line for row in cells for line in row[i]] for i in range(len(cells[0]))]
    widths = [max(map(len, lines)) for lines in columns_]
    longest = [
        max((len(line) - len(line.lstrip()) + len(word) for line in lines for word in line.split()), default=0)
        for lines in columns_
    ]
    least = [
        w if i in right else max(long, min(w, _NARROWEST))
        for i, (w, long) in enumerate(zip(widths, longest, strict=True))
    ]
    while (over := sum(widths) + 2 * (len(widths) - 1) - room) > 0:
        widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i], default=None)
        if widest is None:
            return False
        narrower = max(least[widest], widths[widest] - over)
        for row in cells:
            row[widest] = [part for line in row[widest] for part in wrapped(line, narrower) or [""]]
        widths[widest] = max(len(line) for row in cells for line in row[widest])
    return True


def _pages(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Each row as names and values below each other; the first column heads it."""
    for row in rows:
        out(paint(row[0] or "-", "bold", sys.stdout))
        pairs([(name, cell) for name, cell in zip(head[1:], row[1:], strict=True) if cell])


def pairs(rows: Sequence[tuple[str, str]], stream: TextIO | None = None) -> None:
    """Names and values below each other; long values are wrapped under themselves on a terminal, whole in a pipe."""
    stream = stream or sys.stdout
    for line in pair_lines(rows, columns(stream)):
        print(line, file=stream)
    stream.flush()


def pair_lines(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """The lines of `pairs` for a terminal so wide; 0: as they are."""
    longest = max((len(name) for name, _ in rows), default=0)
    room = max(_NARROWEST, width - longest - 4) if width else 0
    return [
        f"  {(name if number == 0 else '').ljust(longest)}  {line}".rstrip()
        for name, value in rows
        for number, line in enumerate(wrapped(value, room))
    ]


def wrapped(text: str, room: int) -> list[str]:
    """The lines of `text`, none longer than `room` where words allow it; 0 means: as they are. A line's own indent is
    kept by what follows it; a word, such as a path, stays whole, so that it can be copied."""
    lines = text.split("\n")
    if not room:
        return lines
    found = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        wrap = textwrap.TextWrapper(room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False).wrap
        found += wrap(line) if len(line) > room else [line]
    return found


def moment(at: datetime, now: datetime | None = None) -> str:
    """A moment in local time and in UTC: `14:02:11 CET (13:02:11 UTC)`, with the date when it is not today's."""
    local, today = at.astimezone(), (now or datetime.now(UTC)).astimezone()
    day = "" if local.date() == today.date() else f"{local:%Y-%m-%d} "
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
