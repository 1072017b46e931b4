"""GPU memory as torch reports it, which is what vLLM's utilisation multiplies: less than the name on the box."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `total_gib` is torch's total_memory; `compute` the CUDA compute capability (0: not NVIDIA's)."""

    name: str
    total_gib: float
    compute: float
    source: str


_TORCH = "torch's own texts in public logs ('total capacity of N GiB', total_gpu_memory), read 2026-11"

# Most specific pattern first: the first that is found in the name wins.
GPUS: tuple[tuple[str, Gpu], ...] = (
    (r"h100.*(nvl|94)", Gpu("H100-NVL-94GB", 93.09, 9.0, _TORCH)),
    (r"h100", Gpu("H100-SXM-80GB", 79.18, 9.0, f"{_TORCH}; drivers 570-580")),
    (r"a100.*40", Gpu("A100-40GB", 39.39, 8.0, _TORCH)),
    (r"a100", Gpu("A100-80GB", 79.15, 8.0, f"{_TORCH}; 79.25 with older drivers")),
    (
        r"gh200|h200",
        Gpu("H200-141GB", 139.80, 9.0, f"{_TORCH}; own runs 2026-11-20, SXM and NVL"),
    ),
    (r"h20", Gpu("H20-141GB", 139.72, 9.0, f"{_TORCH}; the 141 GB edition")),
    (r"b300", Gpu("B300-288GB", 267.69, 10.3, _TORCH)),
    (r"b200", Gpu("B200-180GB", 178.35, 10.0, _TORCH)),
    (r"mi300", Gpu("MI300X-192GB", 191.98, 0.0, f"{_TORCH}; 191.69 on newer ROCm")),
    (r"rtx.?pro.?6000", Gpu("RTX-PRO-6000-96GB", 94.97, 12.0, _TORCH)),
    (r"4090", Gpu("RTX-4090-24GB", 23.5, 8.9, _TORCH)),
    (r"3090", Gpu("RTX-3090-24GB", 23.58, 8.6, _TORCH)),
)


def gpu_named(name: str) -> Gpu | None:
    """The GPU that a name means ("H100", "H100-80GB:8", "NVIDIA H200 NVL"); None if it is in no row of the table."""
    low = name.lower()
    return next((gpu for pattern, gpu in GPUS if re.search(pattern, low)), None)
