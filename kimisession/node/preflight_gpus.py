"""The GPUs as the driver's own tool shows them: version, count, free memory, and who holds it."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kimisession.node.preflight_finding import Failed, Skipped, run

HALF_SWAPPED = "half-swapped driver"
OLD_DRIVER = "incident 2 (the driver is too old for the engine's kernels)"


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in MiB."""

    index: int
    uuid: str
    name: str
    driver: str
    total_mib: int
    free_mib: int


def look(timeout_s: float) -> list[Gpu]:
    """All GPUs. Raises Failed when the driver does not answer."""
    query = "index,uuid,name,driver_version,memory.total,memory.free"
    try:
        done = run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"], timeout_s)
    except Skipped:
        raise Failed(
            "no driver", "there is no nvidia-smi on this machine", "use an image with NVIDIA's driver"
        ) from None
    if done.code is None:
        raise Failed("hung driver", f"nvidia-smi did not answer in {timeout_s:.0f}s", "take another machine")
    if "Driver/library version mismatch" in done.text:
        fix = "run scripts/hooks/driver.sh again, or reboot with the deadline timer armed"
        raise Failed(HALF_SWAPPED, f"kernel modules and libraries differ ({done.last_line})", fix)
    if done.code != 0:
        raise Failed("no driver", f"nvidia-smi failed: {done.last_line}", "run scripts/hooks/driver.sh")
    gpus = []
    for line in done.text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 6 and parts[0].isdigit():
            gpus.append(Gpu(int(parts[0]), parts[1], parts[2], parts[3], _mib(parts[4]), _mib(parts[5])))
    return gpus


def _mib(text: str) -> int:
    return int(text) if text.isdigit() else 0


def numbers(version: str) -> tuple[int, ...]:
    """`580.126.09` as numbers that compare in the right order."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def check_driver(gpus: list[Gpu], wanted: int, min_driver: str) -> str:
    """New enough, and all GPUs there. Returns the evidence, raises Failed."""
    if len(gpus) < wanted:
        cause = f"the driver shows {len(gpus)} GPUs and the session wants {wanted}"
        raise Failed("missing GPUs", cause, "take another machine, or start with --gpus for what is here")
    version = gpus[0].driver
    if numbers(version) < numbers(min_driver):
        fix = f"run scripts/hooks/driver.sh --min {min_driver}"
        raise Failed(OLD_DRIVER, f"driver {version} is older than {min_driver}", fix)
    return f"driver {version}, {len(gpus)} x {gpus[0].name}"


def check_memory(gpus: list[Gpu], wanted: int, need_free: float, timeout_s: float) -> str:
    """At least `need_free` of each GPU's memory is free. Returns the evidence, raises Failed naming who holds it."""
    gpus = gpus[:wanted]
    short = [gpu for gpu in gpus if gpu.free_mib < need_free * gpu.total_mib]
    if short:
        first = short[0]
        who = holders(first, timeout_s) or "nobody that can be seen from here"
        cause = (
            f"GPU {first.index} has {first.free_mib / 1024:.1f} of {first.total_mib / 1024:.1f} GiB free "
            f"({need_free:.0%} is wanted), held by {who}"
        )
        more = f"; GPUs {', '.join(str(gpu.index) for gpu in short)} are short" if len(short) > 1 else ""
        raise Failed("GPU memory in use", cause + more, "end that process, or take another machine")
    least = min(gpus, key=lambda gpu: gpu.free_mib)
    return f"at least {least.free_mib / 1024:.1f} of {least.total_mib / 1024:.1f} GiB free on each of {len(gpus)} GPUs"


def holders(gpu: Gpu, timeout_s: float) -> str:
    """Who has memory on this GPU: the driver's list, else whoever has its device open."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
    found = []
    with contextlib.suppress(Skipped):
        for line in run(query, timeout_s).text.splitlines():
            parts = [part.strip() for part in line.split(",")]
            if len(parts) == 3 and parts[0] == gpu.uuid and parts[1].isdigit():
                size = f" with {int(parts[2]) / 1024:.1f} GiB" if parts[2].isdigit() else ""
                found.append(f"{process_name(int(parts[1]))}{size}")
    return ", ".join(found or [process_name(pid) for pid in openers(f"/dev/nvidia{gpu.index}")])


def process_name(pid: int) -> str:
    """`pid 123 (python3 train.py)`, as far as it can be seen."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        text = b" ".join(words).decode("utf-8", "replace").strip()
        if text:
            return f"pid {pid} ({text[:80]})"
    return f"pid {pid}"


def openers(device: str, proc: Path = Path("/proc")) -> list[int]:
    """Processes that have `device` open, ourselves left out."""
    found = []
    for entry in proc.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if any(_target(fd) == device for fd in (entry / "fd").iterdir()):
                    found.append(int(entry.name))
    return sorted(found)


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)  # noqa: PTH115 - 3.9, and a string is compared
    except OSError:
        return ""
