"""Who writes into a bucket: what a seal is signed with, and the name by which others on a machine tell whether a seeder lives."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path

from kimisession import __version__


def signature() -> str:
    """Who seals, and with what: `user@host with kimisession VERSION`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()} with kimisession {__version__}"


def writer_id() -> str:
    """This process, so that others on this machine can tell whether it lives: host/boot/pid/start."""
    return f"{socket.gethostname()}/{_boot_id()}/{os.getpid()}/{_started(os.getpid())}"


def is_dead(writer: str) -> bool:
    """Whether a writer of `writer_id` is known to be gone; of another machine or boot one cannot know."""
    try:
        host, boot, pid, started = writer.split("/")
        if (host, boot) != (socket.gethostname(), _boot_id()) or not boot:
            return False
        return _started(int(pid)) != started
    except ValueError:
        return False


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "gone"
