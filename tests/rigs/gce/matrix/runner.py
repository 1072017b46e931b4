"""Play cells of the matrix, keep what came of them per commit, and write the table.

python -m tests.rigs.gce.matrix.runner [--only PATTERN] [--kind wire|full] [--again] [--write]

What held is not played again without --again, unless the code of the path was changed since: then its record is stale, and
the table says so. A commit alone changes nothing. `--write`: the table of notes/teardown.md from the records. Full cells
need tests/rigs/gce/setup.sh.
"""

import argparse
import fcntl
import fnmatch
import hashlib
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.rigs.gce.matrix.cells import CELLS, Cell
from tests.rigs.gce.matrix.wire import Outcome, play

CHECKOUT = Path(__file__).parents[4]
RECORDS = Path(__file__).with_name("records.json")
LOCK = CHECKOUT / ".cache" / "rigs" / "matrix.lock"
NOTES = CHECKOUT / "notes" / "teardown.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

Records = dict[str, dict[str, Any]]


#: What a cell's outcome depends on.
PLAYED = (
    "kimisession/*.py",
    "kimisession/core/*.py",
    "kimisession/cloud/*",
    "kimisession/engines/*.py",
    "kimisession/node/*.py",
    "scripts/deadline/*",
    "scripts/hooks/*.sh",
    "tests/rigs/gce/emulator/*.py",
    "tests/rigs/gce/matrix/[cfsw]*.py",
    "tests/rigs/gce/world/*",
    "tests/rigs/gce/world/st*/**/*",
)


def commit() -> str:
    """This checkout's, with a + where it differs from it."""
    words = ("git", "-C", str(CHECKOUT))
    name = subprocess.run((*words, "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=True).stdout
    told = subprocess.run((*words, "status", "--porcelain"), capture_output=True, text=True, check=True).stdout
    return name.strip() + ("+" if told.strip() else "")


def code() -> str:
    """A fingerprint of what is played."""
    digest = hashlib.sha256()
    for pattern in PLAYED:
        for path in sorted(CHECKOUT.glob(pattern)):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(str(path.relative_to(CHECKOUT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def load() -> Records:
    """What was recorded."""
    found: Records = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else {}
    return found


def record(records: Records, cell: Cell, outcome: Outcome, at: str) -> None:
    """At once: a run that is broken off loses nothing."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be at it as well
        records |= load()
        records[cell.key] = {
            "held": not outcome.problems,
            "seconds": round(outcome.seconds, 1),
            "layer": outcome.layer,
            "reason": outcome.reason,
            "receipt": outcome.receipt,
            "problems": list(outcome.problems),
            "within_s": cell.within_s,
            "commit": commit(),
            "code": at,
            "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        }
        ordered = {one.key: records[one.key] for one in CELLS if one.key in records}
        part = RECORDS.with_suffix(".part")
        part.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        part.replace(RECORDS)


def attempt(cell: Cell, how: Callable[[Cell], Outcome]) -> Outcome:
    """A play that breaks is a cell that did not hold."""
    try:
        return how(cell)
    except Exception as error:
        traceback.print_exc()
        return Outcome(0.0, "-", "-", (f"{type(error).__name__}: {str(error)[:200]}",))


def table(records: Records, at: str) -> str:
    """Rows of Markdown, in the order of cells.py."""
    rows = [
        "| cell | fault | phase | hazard | must be ended by | within s | of | took s | receipt | |",
        "|" + "---|" * 10,
    ]
    for cell in CELLS:
        found = records.get(cell.key)
        if found is None:
            took, verdict = "", "not played"
        else:
            took = f"{found['seconds']:g}"
            verdict = "held" if found["held"] else "BROKEN: " + "; ".join(found["problems"])
            if found["within_s"] != cell.within_s or found.get("code") != at:
                verdict += f" (stale: {found['commit']})"
        numbers = " ".join(map(str, cell.hazards))
        by = f"{cell.layer}: {cell.reason}" if cell.reason != "-" else cell.layer
        receipt = (found or {}).get("receipt", "")
        line = (cell.key, cell.fault, cell.phase, numbers, by, f"{cell.within_s:g}", cell.of, took, receipt, verdict)
        rows.append("| " + " | ".join(line) + " |")
    held = sum(bool(records.get(cell.key, {}).get("held")) for cell in CELLS)
    played = sum(cell.key in records for cell in CELLS)
    return "\n".join(
        [
            f"Commit {commit()}, code {at}: {held} of {played} played cells held, {len(CELLS)} are written down.",
            "",
            *rows,
        ]
    )


def write(records: Records, at: str) -> None:
    """Put the table where it belongs."""
    text = NOTES.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    NOTES.write_text(f"{before}{BEGIN}\n\n{table(records, at)}\n\n{END}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """0: all that was chosen holds at this commit."""
    parser = argparse.ArgumentParser(description="Play the fault matrix of the GCP path.")
    parser.add_argument("--only", default="*", help="cells by name, * for a part, several with commas between")
    parser.add_argument("--kind", choices=("wire", "full"))
    parser.add_argument("--again", action="store_true", help="also what held at this commit")
    parser.add_argument("--write", action="store_true", help="write the table to notes/teardown.md")
    args = parser.parse_args(argv)
    records, at = load(), code()
    patterns = args.only.split(",")
    chosen = [c for c in CELLS if any(fnmatch.fnmatch(c.key, p) for p in patterns) and args.kind in (None, c.kind)]
    due = [c for c in chosen if args.again or not _holds(records, c, at)]

    def tell(cell: Cell, outcome: Outcome) -> None:
        record(records, cell, outcome, at)
        verdict = "; ".join(outcome.problems) or "held"
        print(f"{cell.key:22} {outcome.seconds:7.1f} of {cell.within_s:5g} s  {outcome.layer:9} {verdict}", flush=True)

    for cell in (one for one in due if one.kind == "wire"):
        tell(cell, attempt(cell, play))
    full = [one for one in due if one.kind == "full"]
    if full:
        from tests.rigs.gce.matrix.full import play_all

        play_all(full, tell)
    if args.write:
        write(records, at)
    return 0 if all(_holds(records, cell, at) for cell in chosen) else 1


def _holds(records: Records, cell: Cell, at: str) -> bool:
    found = records.get(cell.key, {})
    # A bound that was changed since is another cell.
    return bool(found.get("held")) and found.get("code") == at and found["within_s"] == cell.within_s


if __name__ == "__main__":
    sys.exit(main())
