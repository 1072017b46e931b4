"""Hold on to every descendant, and let none of them outlive us.

Three layers, each catching what the one before it cannot:
- a *subreaper* inherits orphans instead of init, so a daemon that forked twice, left its session and cleared its
  environment is still our child, and a `/proc` walk finds it;
- *PDEATHSIG* makes the kernel signal a direct child when we die, however we die;
- a *cgroup*, where this user may make one, can be emptied by anybody later, even when all of us are dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

_CGROUPS = Path("/sys/fs/cgroup")

#: Every process of a machine carries this, so that leftovers can be found with no other record.
MARK = "KIMISESSION_MACHINE"


def become_subreaper() -> None:
    """From now on orphaned descendants become our children (Linux 3.4+). Raises OSError where the kernel refuses."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(sig: int, parent: int | None = None) -> None:
    """Ask the kernel to send `sig` to this process when its parent dies. With `parent`, closes the race: if that
    process is already gone the signal is sent at once."""
    _libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), sig)


def leashed(argv: list[str]) -> list[str]:
    """`argv` behind a tiny program that asks to die with this process and then becomes `argv`, same pid. Unlike a function
    between fork and exec it is safe in a process with threads."""
    return [sys.executable, "-S", "-E", __file__, str(os.getpid()), *argv]


def start_ticks(pid: int) -> str | None:
    """When a process began, in kernel ticks: with its pid, an identity that reuse cannot fake. None if it is gone or a
    zombie (a zombie runs nothing and holds nothing)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode("ascii", "replace")
    except OSError:
        return None
    fields = text.rsplit(")", 1)[1].split()
    return None if fields[0] in "ZX" else fields[19]


def identity(pid: int) -> str:
    """`PID:TICKS` for a living process."""
    return f"{pid}:{start_ticks(pid)}"


def alive(who: str) -> bool:
    """Whether the process that `identity` described still runs."""
    pid, _, ticks = who.partition(":")
    return pid.isdigit() and start_ticks(int(pid)) == ticks


def stopped(who: str) -> bool:
    """Whether the process that `identity` described is there and was stopped (SIGSTOP, a debugger): it guards nothing."""
    pid = who.partition(":")[0]
    if not alive(who):
        return False
    with contextlib.suppress(OSError, IndexError):
        text = Path(f"/proc/{int(pid)}/stat").read_bytes().decode("ascii", "replace")
        return text.rsplit(")", 1)[1].split()[0] in "Tt"
    return False


def _parents() -> dict[int, int]:
    """pid -> parent pid of everything that runs, zombies left out."""
    table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are wanted, not paths
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            text = Path(f"/proc/{name}/stat").read_bytes().decode("ascii", "replace")
            fields = text.rsplit(")", 1)[1].split()
            if fields[0] not in "ZX":
                table[int(name)] = int(fields[1])
    return table


def descendants(root: int) -> list[int]:
    """All living processes below `root`, nearest first."""
    parents = _parents()
    found: list[int] = []
    layer = {root}
    while layer:
        layer = {pid for pid, parent in parents.items() if parent in layer and pid not in found}
        found.extend(sorted(layer))
    return found


def marked(machine: str) -> Iterator[int]:
    """Living processes whose environment carries our mark for `machine`. Never this process itself."""
    want = f"{MARK}={machine}".encode()
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are wanted, not paths
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if want in Path(f"/proc/{name}/environ").read_bytes().split(b"\0") and start_ticks(int(name)):
                yield int(name)


def in_session(leader: str) -> list[int]:
    """Living processes of the session that `leader` (`PID:TICKS`) began. vLLM's EngineCore writes its title over its
    environment, mark and all, and outlives its API server; but it stays in that one's session, and the kernel gives no
    number away that still names a session. Empty when the number has come to belong to another process."""
    pid, _, ticks = leader.partition(":")
    if not pid.isdigit() or not ticks.isdigit() or start_ticks(int(pid)) not in (ticks, None):
        return []
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are wanted, not paths
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{int(name)}/stat").read_bytes().decode("ascii", "replace").rsplit(")", 1)[1].split()
            if fields[3] == pid and fields[0] not in "ZX" and int(fields[19]) >= int(ticks):
                found.append(int(name))
    return found


def reap() -> None:
    """Collect every child that has ended, ours by adoption included."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill(pid: int, sig: int) -> None:
    """Signal one process; one that is gone is what we wanted."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, sig)


def kill_descendants(root: int, within_s: float) -> list[int]:
    """Kill -9 everything below `root` until nothing is left or `within_s` has passed. Returns what is left: one in
    uninterruptible sleep (a dying GPU driver) can survive, and then somebody has to say so."""
    until = time.monotonic() + within_s
    while True:
        reap()
        left = descendants(root)
        if not left or time.monotonic() >= until:
            return left
        for pid in left:
            kill(pid, signal.SIGKILL)
        time.sleep(0.02)


class Cgroup:
    """A control group of our own under cgroup v2, where this user may make one. Every method is safe without."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def make(cls, name: str) -> Cgroup:
        """Make a group below the one we are in. `path` is None when there is no v2 hierarchy or no permission."""
        try:
            own = Path("/proc/self/cgroup").read_text(encoding="ascii")
            line = next(part for part in own.splitlines() if part.startswith("0::"))
            # Hosts that still have version 1 as well mount version 2 one level deeper.
            root = next(p for p in (_CGROUPS, _CGROUPS / "unified") if (p / "cgroup.procs").exists())
            path = root / line[3:].lstrip("/") / f"kimisession-{name}"
            path.mkdir(exist_ok=True)
            if not (path / "cgroup.kill").exists():
                path.rmdir()
                return cls(None)
            return cls(path)
        except (OSError, StopIteration):
            return cls(None)

    def join(self, pid: int) -> None:
        """Put a process, and so all that it will ever start, into the group."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                (self.path / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def pids(self) -> list[int]:
        """Who is in the group."""
        if self.path is None:
            return []
        try:
            return [int(line) for line in (self.path / "cgroup.procs").read_text(encoding="ascii").split()]
        except OSError:
            return []

    def kill(self) -> None:
        """Kill the whole group in one step, forks in flight included."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                (self.path / "cgroup.kill").write_text("1", encoding="ascii")

    def remove(self) -> None:
        """Remove the empty group."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.rmdir()


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - an argument list, no shell
