"""Run a command as an ordinary user, although these tests may run as root."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534
ROOT = Path(__file__).parents[2]


def ordinary(argv: Sequence[str]) -> list[str]:
    """`argv` as user 65534, without groups and capabilities, where we are root; else as it is.

    Where the interpreter or this checkout lie in a folder that is closed to others (/root, say), the command gets mounts
    of its own: in them that folder is an empty one that holds nothing but what is needed, where it was.
    """
    if os.geteuid() != 0:
        return list(argv)
    change = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", *argv]
    needed = {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, ROOT)}
    closed = {folder for path in needed if (folder := _closed_above(path))}
    if not closed:
        return change
    lines = ["set -e", "hold=$(mktemp -d)"]
    for number, path in enumerate(inside := [path for path in needed if _closed_above(path)]):
        lines.append(f"mkdir $hold/{number}; mount --bind {shlex.quote(str(path))} $hold/{number}")
    lines += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(folder))}" for folder in closed]
    for number, path in enumerate(inside):
        where = shlex.quote(str(path))
        lines.append(f"mkdir -p {where}; mount --move $hold/{number} {where}; rmdir $hold/{number}")
    lines += ["rmdir $hold", f"exec {shlex.join(change)}"]
    return ["unshare", "--mount", "sh", "-c", "; ".join(lines)]


def _closed_above(path: Path) -> Path | None:
    """The outermost folder on the way to `path` that others may not enter."""
    return next((folder for folder in reversed((path, *path.parents)) if not folder.stat().st_mode & 0o001), None)
