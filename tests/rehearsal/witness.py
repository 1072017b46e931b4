"""A witness: runs one command, and tells by its own clock and its own reading of /proc what came of it.

    python tests/rehearsal/witness.py [--how namespace|user-namespace|subreaper] -- COMMAND...

It is told nothing but the command, and uses nothing of ours. Whatever leaves the command's session (setsid) is counted
as "the machine": from the first sample that shows such a process to the first that shows none, twenty times a second.

In a PID namespace of its own (as root, else as an ordinary user in a user namespace) nothing can hide: whatever the
command left behind is in the namespace's /proc, and the namespace ends with the witness; its network is loopback alone.
Where the kernel refuses both,
the witness becomes a subreaper: what it started stays below it, whatever it does to its parent, session or environment;
and each identity (pid and start time) that was ever below it is looked for at the end once more. Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAMPLE_S = 0.05
#: After the command has ended, leftovers get so long to be on their way out.
SETTLE_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1

HOWS = {
    "namespace": ("unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"),
    "user-namespace": ("unshare", "-Ur", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"),
    "subreaper": (),
}


def works(how: str) -> bool:
    """Whether this kernel and this user allow it; tried, not guessed."""
    prefix = HOWS[how]
    if not prefix:
        return True
    if shutil.which(prefix[0]) is None:
        return False
    return subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0


def best() -> str:
    """The strictest way that works here."""
    return next(how for how in HOWS if works(how))


def _stat(pid: int) -> tuple[int, int, int] | None:
    """Start ticks, parent, session of a living process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text.rsplit(b")", 1)[1].split()
    return None if fields[0] in b"ZX" else (int(fields[19]), int(fields[1]), int(fields[3]))


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


class Witness:
    """Samples what lives below, or beside, the command."""

    def __init__(self, everything: bool) -> None:
        self.everything = everything  # in a namespace of our own all that lives is the command's doing
        self.seen: dict[tuple[int, int], dict[str, Any]] = {}
        self.command = 0
        self.first_at: float | None = None
        self.gone_at: float | None = None
        self.samples = 0
        self.longest_gap_s = 0.0

    def sample(self) -> list[tuple[int, int]]:
        """One look. Returns the identities of the machine's living processes."""
        now = time.time()
        table = {int(name): _stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208
        below = {os.getpid()}
        grew = True
        while grew:  # descendants, however deep
            more = {pid for pid, stat in table.items() if stat and stat[1] in below} - below
            below |= more
            grew = bool(more)
        machine = []
        for pid, stat in table.items():
            if stat is None or pid == os.getpid():
                continue
            ticks, _, session = stat
            who = (pid, ticks)
            if not (self.everything or pid in below or who in self.seen):
                continue
            seen = self.seen.setdefault(who, {"pid": pid, "first": now, "cleared": False, "argv": "?"})
            seen |= {"last": now, "session": session}
            if words := _text(pid, "cmdline"):  # one that is dying has no memory left to read
                seen |= {"argv": words.replace("\0", " ")[:200], "cleared": not _text(pid, "environ")}
            if self.command and session != self.command:
                machine.append(who)
        if machine:
            self.first_at, self.gone_at = self.first_at or now, None
        elif self.first_at and self.gone_at is None:
            self.gone_at = now
        self.samples += 1
        return machine

    def watch(self, argv: Sequence[str]) -> dict[str, Any]:
        """Run the command, sampling all the while and until its leftovers have gone or have not."""
        process = subprocess.Popen(argv, start_new_session=True, stdin=subprocess.DEVNULL)
        self.command = process.pid
        # Orphans become our children: somebody has to bury them, in a thread so that no sample waits for it.
        code: list[int] = []
        threading.Thread(target=_bury, args=(process.pid, code), daemon=True).start()
        before, settled = time.monotonic(), None
        while True:
            machine = self.sample()
            now = time.monotonic()
            self.longest_gap_s, before = max(self.longest_gap_s, now - before), now
            if code and settled is None:
                settled = now + SETTLE_S
            if settled is not None and (now > settled or not machine):
                break
            time.sleep(SAMPLE_S)
        left = [seen for (pid, ticks), seen in self.seen.items() if (stat := _stat(pid)) and stat[0] == ticks]
        return {
            "exit_code": code[0],
            "first_at": self.first_at,
            "gone_at": self.gone_at,
            "seconds": round(self.gone_at - self.first_at, 3) if self.gone_at and self.first_at else None,
            "left": left,
            "samples": self.samples,
            "longest_gap_s": round(self.longest_gap_s, 3),
            "seen": [seen for seen in self.seen.values() if seen["session"] != self.command],
        }


def _bury(command: int, code: list[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(SAMPLE_S)
            continue
        if pid == command:
            code.append(os.waitstatus_to_exitcode(status))


def _loopback_up() -> None:
    """The namespace has a network of its own, of which only loopback exists, and it is down at first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def main(argv: Sequence[str]) -> int:
    """Go into the namespace, or become the subreaper; watch; print."""
    cut = list(argv).index("--")
    options, command = list(argv[:cut]), list(argv[cut + 1 :])
    how = options[options.index("--how") + 1] if "--how" in options else best()
    if "--inside" not in options and HOWS[how]:
        inside = [sys.executable, __file__, "--how", how, "--inside", "--", *command]
        return subprocess.run([*HOWS[how], *inside], check=False).returncode
    if not HOWS[how] and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("this kernel has no subreapers")
    if HOWS[how]:
        _loopback_up()
    found = Witness(everything=bool(HOWS[how])).watch(command)
    print(json.dumps({"how": how, **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
