"""The stand-in engine's faults: what goes wrong, where, and the literal words that the real ones were reported with.

The texts of ptx, gib, oom-sampler, no-kv and kv-too-small are those of a public write-up of a day with Kimi K2.5 on
8xH100 (February 2026, vLLM 0.15.0); cuda-init's is how PyTorch words that cause (c10/cuda/CUDAFunctions.cpp). The
tracebacks around them are shaped like vLLM's, with frames of our own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from kimisession.node.phases import PHASES
from kimisession.node.standin_log import APISERVER, ENGINE, Log

ORPHAN_SLEEPS_S = 600
FLOOD_LINES = 50_000
FLOOD_LONG_LINE_BYTES = 2**20


@dataclass(frozen=True)
class Failure:
    """A fault that ends the engine with a traceback, in its usual phase."""

    phase: str
    where: str
    error: str
    before: tuple[str, ...] = ()


FAILURES = {
    "cuda-init": Failure(
        "boot",
        "init_device",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12080).",
    ),
    "ptx": Failure(
        "load",
        "CompressedTensorsWNA16MarlinMoEMethod.process_weights_after_loading",
        "RuntimeError: PTX compilation failed",
        before=("PTX JIT compilation failed",),
    ),
    "gib": Failure(
        "memory",
        "profile_run",
        "torch.distributed.DistBackendError: NCCL error: ncclInternalError: Internal check failed.",
        before=("NCCL WARN Failed to initialize any NET plugin",),
    ),
    "oom-sampler": Failure(
        "memory",
        "_dummy_sampler_run",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
    ),
    "no-kv": Failure(
        "memory",
        "_check_enough_kv_cache_memory",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine.",
        before=("Available KV cache memory: -3.32 GiB",),
    ),
    "kv-too-small": Failure(
        "memory",
        "_check_enough_kv_cache_memory",
        "ValueError: To serve at least one request with max seq len (16384), 1.07 GiB KV cache is needed. "
        "Estimated maximum model length is 9664.",
        before=("Available KV cache memory: 0.64 GiB",),
    ),
    "crash": Failure("", "forward", "RuntimeError: The stand-in engine was told to crash here."),
}
HANGS = {"hang": "", "gib-hang": "memory"}
"""Faults that say nothing more and live on. An empty phase must be given with @PHASE."""
OTHERS = {
    "orphan": "boot",
    "deaf": "boot",
    "flood-log": "load",
    "stall": "",
    "die-after": "",
    "metrics-500": "",
    "slow-metrics": "",
}
"""Faults that the cold start survives, and the phase where they act; without one, on a server that serves.

orphan leaves a process behind, deaf ignores SIGTERM, flood-log writes some 9 MB and one line of a MiB; stall lets no
token move after the first completion, die-after=SECONDS ends the engine so long after its port opened, metrics-500
and slow-metrics=SECONDS answer /metrics with an error, or late.
"""


@dataclass(frozen=True)
class Fault:
    """One --fault: its name, the phase where it acts (empty once ready), and its seconds where it takes some."""

    name: str
    phase: str = ""
    seconds: float = 0.0


def parse_fault(text: str) -> Fault:
    """Read NAME, NAME@PHASE or NAME=SECONDS; ValueError, in one sentence, for anything else."""
    head, _, phase = text.partition("@")
    name, _, seconds = head.partition("=")
    if name not in (*FAILURES, *HANGS, *OTHERS):
        raise ValueError(f"Unknown fault {name!r}; known: {', '.join((*FAILURES, *HANGS, *OTHERS))}.")
    if phase and phase not in PHASES:
        raise ValueError(f"Unknown phase {phase!r} in --fault {text}; known: {', '.join(PHASES)}.")
    usual = FAILURES[name].phase if name in FAILURES else HANGS.get(name, OTHERS.get(name, ""))
    if name in ("crash", "hang") and not phase:
        raise ValueError(f"--fault {name} needs its phase: {name}@load, for instance.")
    if (name in ("die-after", "slow-metrics")) != bool(seconds):
        raise ValueError(f"--fault die-after and slow-metrics take seconds, the others none: got {text!r}.")
    return Fault(name, phase or usual, float(seconds or 0))


def strike(fault: Fault, log: Log) -> None:
    """Let a fault of the cold start happen. Returns only from those that the engine survives.

    Raises SystemExit(1) after a failure's text; never returns from a hang.
    """
    if fault.name in FAILURES:
        fail(FAILURES[fault.name], log)
    elif fault.name in HANGS:
        while True:
            time.sleep(3600)
    elif fault.name == "orphan":
        log.info(APISERVER, "standin_faults.py:1", f"stand-in fault: orphan pid={spawn_orphan()}")
    elif fault.name == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif fault.name == "flood-log":
        for number in range(FLOOD_LINES):
            log.info(ENGINE, "standin_faults.py:1", f"stand-in fault: flood-log line {number} " + "x" * 80)
        log.info(ENGINE, "standin_faults.py:1", "stand-in fault: flood-log long line " + "x" * FLOOD_LONG_LINE_BYTES)


def fail(failure: Failure, log: Log) -> NoReturn:
    """Print a failure as vLLM does, engine core first and API server after it, and exit with 1."""
    for line in failure.before:
        log.info(ENGINE, "gpu_worker.py:1", line)
    log.error(ENGINE, "core.py:1", ("EngineCore failed to start.", *_traceback(failure.where, failure.error)))
    beyond = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    log.error(APISERVER, "", _traceback("wait_for_engine_startup", beyond))
    raise SystemExit(1)


def die(log: Log) -> None:
    """Print what vLLM prints when its engine dies while serving."""
    error = "RuntimeError: The stand-in engine was told to die."
    log.error(ENGINE, "core.py:1", ("EngineCore encountered a fatal error.", *_traceback("run_busy_loop", error)))


def spawn_orphan() -> int:
    """Leave a process behind that nothing ties to us: forked twice, own session, no environment, no descriptors.

    It sleeps ORPHAN_SLEEPS_S and ends. Returns its pid. A test of whatever must clean up after an engine.
    """
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            grandchild = os.fork()
            if grandchild:
                os.write(tell, str(grandchild).encode())
                os._exit(0)
            os.closerange(0, 4096)
            sleep = f"import time; time.sleep({ORPHAN_SLEEPS_S})"
            os.execve(sys.executable, [sys.executable, "-S", "-c", sleep, "kimisession-stand-in-orphan"], {})  # noqa: S606
        finally:
            os._exit(1)
    os.close(tell)
    os.waitpid(child, 0)
    with os.fdopen(told, "rb") as pipe:
        return int(pipe.read())


def _traceback(where: str, error: str) -> Sequence[str]:
    """A traceback's lines; the frame names what vLLM calls the place, the file is ours."""
    frame = f'  File "kimisession/node/standin_faults.py", line 1, in {where}'
    return ("Traceback (most recent call last):", frame, *error.split("\n"))
