"""What a log says went wrong: literal texts of real failures, each with cause and fix. A table, not branches.

The incidents are those of a public write-up of February 2026 (a day of debugging Kimi K2.5 on 8xH100) and are told in
notes/incidents.md. No rule may fire on a healthy log.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnosis:
    """One known failure. `incident` is its number in notes/incidents.md."""

    id: str
    incident: int
    pattern: str
    cause: str
    fix: str


#: The most telling first: a log of one failure often holds the text of a later one.
RULES = (
    Diagnosis(
        "gib-nccl",
        5,
        r"Failed to initialize any NET plugin|ncclInternalError: Internal check failed",
        "GCP's GIB libraries break NCCL on a single node",
        "remove /usr/local/gib and its ld.so.conf entries, then run ldconfig",
    ),
    Diagnosis(
        "driver-ptx",
        2,
        r"PTX JIT compilation failed|PTX compilation failed|unsupported toolchain",
        "the NVIDIA driver is too old for the Marlin MoE kernels",
        "install driver 580 or newer",
    ),
    Diagnosis(
        "sampler-oom",
        7,
        r"CUDA out of memory occurred when warming up sampler with \d+ dummy requests",
        "max-num-seqs is too high beside these weights",
        "set max-num-seqs to 64",
    ),
    Diagnosis(
        "no-kv",
        8,
        r"No available memory for the cache blocks",
        "the weights alone are larger than the memory budget",
        "raise gpu-memory-utilization to 0.95",
    ),
    Diagnosis(
        "kv-too-small",
        9,
        r"To serve at least one request with max seq len|is larger than the maximum number of tokens that can be stored",
        "the KV cache cannot hold one request of that length",
        "lower max-model-len, or use decode-context-parallel-size, kv-cache-dtype fp8 or text only",
    ),
    Diagnosis(
        "cuda-build",
        1,
        r"The NVIDIA driver on your system is too old|CUDA driver version is insufficient|no kernel image is available",
        "the wheels were built for a newer CUDA than the driver serves",
        "install with a torch backend that the driver serves, such as cu128",
    ),
)


def diagnose(lines: Iterable[str]) -> Diagnosis | None:
    """The first rule that any line matches; None for a log that shows nothing known."""
    text = "\n".join(lines)
    return next((rule for rule in RULES if re.search(rule.pattern, text)), None)
