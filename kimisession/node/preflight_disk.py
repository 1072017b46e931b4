"""Room for the weights, and how fast this disk really is: written and read past the page cache, for two seconds each."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from pathlib import Path

from kimisession.node.preflight_finding import Failed

BLOCK_BYTES = 8 << 20
MOST_BYTES = 4 << 30
WRITE_S = 2.0


def check(folder: Path, need_bytes: int, min_mb_per_s: float) -> str:
    """Returns the evidence; raises Failed when there is too little room, or when reading is slower than allowed."""
    while not folder.exists():
        folder = folder.parent
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    if free < need_bytes:
        cause = f"{folder} has {free / 1e9:.1f} GB free and the weights need {need_bytes / 1e9:.1f} GB"
        raise Failed("no space", cause, "ask for a larger disk (disk_gib in the profile)")
    try:
        wrote, read, how = measure(folder, min(MOST_BYTES, free // 20))
    except OSError as error:
        raise Failed("bad disk", f"{folder} cannot be written: {error}", "name another folder with --disk") from None
    evidence = f"{free / 1e9:.1f} GB free in {folder}, writes {wrote:.0f} MB/s, reads {read:.0f} MB/s ({how})"
    if read < min_mb_per_s:
        cause = f"{folder} reads {read:.0f} MB/s and {min_mb_per_s:.0f} is wanted"
        raise Failed("incident 12 (a slow disk or a mount)", cause, "put the weights on local NVMe")
    return evidence


def measure(folder: Path, most_bytes: int) -> tuple[float, float, str]:
    """Write for two seconds or `most_bytes`, read the same back; MB/s (decimal) of each, and how. Raises OSError."""
    path = folder / f".kimisession-preflight-{os.getpid()}"
    # Random: a disk that compresses must not look fast. A map is page aligned, as O_DIRECT wants it.
    block = mmap.mmap(-1, BLOCK_BYTES)
    block.write(os.urandom(BLOCK_BYTES))
    blocks = max(1, most_bytes // BLOCK_BYTES)
    how = "direct"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:  # a file system without direct access, e.g. one in memory
            path.unlink(missing_ok=True)
            fd = os.open(path, flags, 0o600)
            how = "through the page cache"
        try:
            began = time.monotonic()
            written = 0
            while written < blocks and (written == 0 or time.monotonic() - began < WRITE_S):
                os.write(fd, block)
                written += 1
            os.fsync(fd)
            wrote_s = max(1e-6, time.monotonic() - began)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.monotonic()
            os.lseek(fd, 0, os.SEEK_SET)
            done = 0
            while done < written and (done == 0 or time.monotonic() - began < WRITE_S) and os.readv(fd, [block]):
                done += 1
            read_s = max(1e-6, time.monotonic() - began)
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return written * BLOCK_BYTES / wrote_s / 1e6, done * BLOCK_BYTES / read_s / 1e6, how
