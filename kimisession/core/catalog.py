"""The accelerators that we know: architecture and memory as torch reports it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One kind of device. `memory_gib` is what torch reports as total, in GiB (None for the CPU)."""

    name: str
    architecture: str
    memory_gib: float | None
    matches: tuple[str, ...] = ()  # how the driver's tool names it, most telling word first


#: Memory as printed by torch ("total capacity of N GiB") and vLLM in public logs of 2024 to 2026; the two H200 rows
#: were also read on our own runs of 2026-11-20 (139.80 GiB, driver 580.159.04).
ACCELERATORS = (
    Accelerator("H100", "hopper", 79.18, ("H100 80GB", "H100-SXM")),
    Accelerator("H100-NVL", "hopper", 93.09, ("H100 NVL",)),
    Accelerator("H200", "hopper", 139.80, ("H200",)),
    Accelerator("A100-80GB", "ampere", 79.15, ("A100-SXM4-80GB", "A100 80GB", "A100-80GB")),
    Accelerator("B200", "blackwell", 178.35, ("B200",)),
    Accelerator("B300", "blackwell", 267.69, ("B300",)),
    Accelerator("RTXPRO6000", "blackwell", 94.97, ("RTX PRO 6000",)),
    Accelerator("CPU", "cpu", None),
)
BY_NAME = {a.name: a for a in ACCELERATORS}


def parse_accelerators(text: str) -> tuple[Accelerator, int]:
    """`H100:8` as (accelerator, count). Raises ValueError, one sentence, for a name or count that is not known."""
    name, _, count = text.partition(":")
    if name not in BY_NAME:
        raise ValueError(f"{name!r} is not an accelerator that is known here; known are {', '.join(BY_NAME)}")
    if not (count or "1").isdecimal() or int(count or 1) < 1:
        raise ValueError(f"{text!r} has no count of devices; write it like H100:8")
    return BY_NAME[name], int(count or 1)


def recognise(device_name: str) -> Accelerator | None:
    """The accelerator for a device name such as "NVIDIA H100 80GB HBM3"; None when it is not one that we know."""
    for accelerator in ACCELERATORS:
        if any(word in device_name for word in accelerator.matches):
            return accelerator
    return None
