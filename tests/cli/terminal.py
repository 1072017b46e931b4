"""A program on a terminal of its own: everything that it writes there, as it writes it."""

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path

#: Select graphic rendition, and the other controls that the program uses: up, erase below, erase line.
SGR = re.compile(r"\x1b\[([0-9;]*)m")
MOVES = re.compile(r"\x1b\[[0-9]*[AJK]|\x1b\[2K")


def on_terminal(
    argv: list[str], columns: int, env: Mapping[str, str], folder: Path, within_s: float = 60
) -> tuple[int, str]:
    """Run a program with a terminal as its three streams. Returns its exit code and what it wrote, line ends as \\n."""
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    wide = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
    program = subprocess.Popen(
        argv, cwd=folder, env=wide, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    )
    os.close(follower)
    written, until = b"", time.monotonic() + within_s
    try:
        while time.monotonic() < until:
            if not select.select([leader], [], [], 0.2)[0]:
                continue
            try:
                part = os.read(leader, 65536)
            except OSError:  # the last of its ends was closed
                break
            if not part:
                break
            written += part
        code = program.wait(max(0.1, until - time.monotonic()))
    finally:
        program.kill()
        program.wait()
        os.close(leader)
    return code, written.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    """The text without colour."""
    return SGR.sub("", text)


def too_wide(text: str, columns: int) -> list[str]:
    """Lines that were ever shown and are wider than the terminal, but for a word that is itself: a path stays whole."""
    lines = [MOVES.sub("", part) for line in plain(text).split("\n") for part in line.split("\r")]
    return [line for line in lines if len(line) > columns and len(line.split("  ")[-1].split()) > 1]


def balanced(text: str) -> bool:
    """Whether every style is ended on its own line, so that a line that is cut or copied colours nothing else."""
    for line in text.split("\n"):
        codes = SGR.findall(line)
        if [bool(code.strip("0")) for code in codes] != [True, False] * (len(codes) // 2):
            return False
    return True


if __name__ == "__main__":  # python tests/cli/terminal.py COLUMNS PROGRAM...
    sys.stdout.write(on_terminal(sys.argv[2:], int(sys.argv[1]), os.environ, Path.cwd())[1])
