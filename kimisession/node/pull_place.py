"""Where pulled weights lie: room for them, on one disk or spread over several, and what an earlier pull left there.

All names are in one folder, the one that the engine loads from. Large files may lie on other disks, each where most
room is left, with links to them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimisession.node.manifest import PULLED, Manifest

JOURNAL = ".kimisession-pulling.jsonl"
LOCK = ".kimisession-pulling.lock"
LOCK_WAIT_S = 10.0
LARGE_BYTES = 64 * 2**20
"""Files from this size on are spread; the others stay beside the first."""

OK, OTHER, NOT_SEALED, WRONG_BYTES, NO_SPACE, INTERRUPTED = 0, 1, 3, 4, 5, 130


class PullError(Exception):
    """Why the pull ended: the exit code and one sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def take_lock(folder: Path, wait_s: float = LOCK_WAIT_S) -> int:
    """One puller per folder. The workers inherit the lock, so it lasts until the last of them has gone."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise PullError(OTHER, f"another pull into {folder} is running; wait for it or stop it") from None
            time.sleep(0.05)


def read_marker(folder: Path) -> dict[str, Any]:
    """What an earlier pull left to say that it was complete; empty if there is none."""
    try:
        with (folder / PULLED).open("rb") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_marker(folder: Path, manifest: Manifest) -> None:
    """Say, last and atomically, that all is here. Good for this boot: later ones read every part back."""
    value = {
        "manifest": manifest.digest,
        "model": manifest.model,
        "revision": manifest.revision,
        "bytes": manifest.total_bytes,
        "boot": boot_id(),
    }
    fresh = folder / (PULLED + ".new")
    with fresh.open("w") as file:
        file.write(json.dumps(value) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / PULLED)


def boot_id() -> str:
    """The kernel's name for this boot; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def sizes_agree(folder: Path, manifest: Manifest) -> bool:
    """Whether every file is here with its size."""
    try:
        return all((folder / entry.path).stat().st_size == entry.size for entry in manifest.files)
    except OSError:
        return False


def prepare(folder: Path, spread: Sequence[Path], manifest: Manifest) -> None:
    """Give every file its place, size and blocks, so that a full disk is told now, before a byte moves.

    All names are in `folder`; large files lie in `spread`, with links. Raises PullError 5 for what cannot fit.
    """
    for path, place in deal(folder, spread, manifest).items():
        name = folder / path
        size = next(entry.size for entry in manifest.files if entry.path == path)
        try:
            for each in (name, place):
                each.parent.mkdir(parents=True, exist_ok=True)
            if name.is_symlink() and (name == place or name.readlink() != place):
                name.unlink()
            reserve(place, size)
            if name != place and not name.is_symlink():
                name.unlink(missing_ok=True)
                name.symlink_to(place)
        except OSError as error:
            raise unwritable(place, error) from None


def deal(folder: Path, spread: Sequence[Path], manifest: Manifest) -> dict[str, Path]:
    """The place of each file: where an earlier run put it, else, if it is large, where most room is left of `spread`.

    Raises PullError 5.
    """
    homes = [folder, *(home for home in spread if home != folder)]
    room: dict[int, int] = {}
    device: dict[Path, int] = {}
    for home in homes:
        device[home] = home.stat().st_dev
        room[device[home]] = free_bytes(home)
    places: dict[str, Path] = {}
    for entry in manifest.files:
        known = [home for home in homes if (home / entry.path).is_file() and not (home / entry.path).is_symlink()]
        large = entry.size >= LARGE_BYTES and spread
        home = known[0] if known else max(spread, key=lambda one: room[device[one]]) if large else folder
        place = home / entry.path
        there = place.stat().st_blocks * 512 if place.is_file() else 0
        room[device[home]] -= entry.size - min(entry.size, there)
        places[entry.path] = place
    if min(room.values()) < 0:
        free = sum(free_bytes(home) for home in {device[home]: home for home in homes}.values())
        raise PullError(
            NO_SPACE,
            f"{' and '.join(map(str, homes))} {'has' if len(homes) == 1 else 'have'} {gb(free)} free and "
            f"{manifest.model} needs {gb(manifest.total_bytes)}; choose another --to or larger disks",
        )
    return places


def gb(size: int) -> str:
    """Bytes for people, in decimal gigabytes; three places where one would say 0.0."""
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e9:.3f} GB"


def refuse_others(folder: Path, manifest: Manifest) -> None:
    """Raise PullError for safetensors files that are not of this manifest: an engine loads every one that it finds beside the
    index, so those of an earlier revision would be served among these."""
    ours = {entry.path for entry in manifest.files}
    for found in sorted(folder.rglob("*.safetensors")):
        if found.relative_to(folder).as_posix() not in ours:
            raise PullError(
                OTHER, f"{found} is not one of {manifest.model}'s files; move it away or choose another --to"
            )


def free_bytes(folder: Path) -> int:
    """The bytes that an ordinary user may still write where `folder` lies."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def unwritable(path: Path, error: OSError) -> PullError:
    """Why a file could not be written, with its exit code."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PullError(NO_SPACE, f"{path.parent} is full; choose another --to or a larger disk")
    return PullError(OTHER, f"{path} cannot be written: {error.strerror}; choose another --to")


def reserve(path: Path, size: int) -> None:
    """Make a file of `size` bytes, keeping what is there; with its blocks, where the file system is no memory."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        now = os.fstat(file).st_size
        if now == size:
            return
        os.ftruncate(file, size)
        if now < size and not in_memory(path.parent):
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    finally:
        os.close(file)


def in_memory(folder: Path) -> bool:
    """Whether a folder lies in memory: there, reserving is clearing pages, one after the other, before they are used.

    One run each on a busy machine, 2026-11-21: 0.16 s a GiB in tmpfs, 0.003 s in ext4.
    """
    device = folder.stat().st_dev
    try:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == f"{os.major(device)}:{os.minor(device)}":
                return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    except (OSError, ValueError, IndexError):
        pass
    return False


def local_ssds(root: Path = Path("/")) -> list[Path]:
    """Mount points of local SSDs that this process may write to; empty where there are none or they are not mounted.

    On Google Cloud a local SSD calls itself nvme_card0, nvme_card1, ... and a persistent disk nvme_card-pd; a RAID
    counts when all its members are local. Mounting them is the business of the setup hooks.
    """
    found = []
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        fields = line.split()
        if len(fields) < 10 or fields[3] != "/" or "-" not in fields:
            continue
        device, point = fields[fields.index("-") + 2], Path(fields[4])
        if device.startswith("/dev/") and is_local_ssd(Path(device).name, root) and os.access(point, os.W_OK):
            found.append(point)
    return found


def is_local_ssd(device: str, root: Path = Path("/")) -> bool:
    """Whether a block device is a local SSD of Google Cloud, or a RAID of nothing else."""
    block = root / "sys/block" / device
    members = block / "slaves"
    if members.is_dir() and any(members.iterdir()):
        return all(is_local_ssd(member.name, root) for member in members.iterdir())
    try:
        return re.fullmatch(r"nvme_card\d*", (block / "device/model").read_text().strip()) is not None
    except OSError:
        return False


def read_journal(folder: Path, digest: str) -> set[int]:
    """Numbers of the parts that an earlier run of the same manifest finished; a torn line counts as none."""
    found: set[int] = set()
    try:
        with (folder / JOURNAL).open("rb") as file:
            for number, line in enumerate(file):
                value = json.loads(line)
                if number == 0 and value != {"manifest": digest}:
                    return set()
                if number > 0 and isinstance(value, int):
                    found.add(value)
    except (OSError, ValueError):
        pass
    return found
