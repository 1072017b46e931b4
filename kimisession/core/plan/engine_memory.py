"""How each vLLM version shares out GPU memory, as a table: read from the wheels, not from the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass

CHARGE_PER_LOGIT_TORCH = 37
"""Bytes of sampler peak per sequence and vocabulary entry with torch's sort: bf16 and fp32 logits (6), sorted values
and int64 indices (12), the sort's own copies (12), softmax and cumulative sum (8). It also is what is left of the one
log with 1,024 sequences (K2-Thinking, 8xH200, Nov 2025) after the other terms."""

CHARGE_PER_LOGIT_FLASHINFER = 14
"""The same without the sort: bf16 and fp32 logits, fp32 probabilities, one scratch copy. Arithmetic, no log."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The rules of every vLLM from `since` (major, minor) to the next row.

    `extra_gib` is what that version takes beside weights, activations and graphs, over 0.15 to 0.20; `spread_gib` the
    half-width to add for it. `graphs_in_budget`: whether the CUDA-graph estimate is taken off the KV cache.
    `tokens_by_concurrency`: the printed token count is concurrency x max_model_len, not blocks x block size.
    `counted_one_by_one`: the profiled peak is the sum of buffers read in this version's source (overhead.py), not the
    factor fitted for the versions before.
    """

    since: tuple[int, int]
    utilisation: float
    batch_tokens: int
    batch_tokens_160gib: int
    max_num_seqs: int
    graphs_in_budget: bool
    sampler_bytes_per_logit: int
    tokens_by_concurrency: bool
    kv_row_multiple: int
    extra_gib: float
    extra_eager_gib: float
    spread_gib: float
    ground: str
    counted_one_by_one: bool = False


_WHEEL = "read in the wheel: v1/worker/gpu_worker.py, utils/mem_utils.py, config/cache.py, engine/arg_utils.py"

RULES: tuple[EngineMemory, ...] = (
    EngineMemory(
        (0, 0),
        0.90,
        8192,
        8192,
        256,
        False,
        CHARGE_PER_LOGIT_TORCH,
        False,
        128,
        6.0,
        6.0,
        7.0,
        "V0 engine: activations depend on flags that no log states; MLA rows padded from 576 to 640 elements; 2 logs",
    ),
    EngineMemory(
        (0, 8),
        0.90,
        8192,
        8192,
        1024,
        False,
        CHARGE_PER_LOGIT_TORCH,
        False,
        1,
        2.0,
        2.0,
        1.2,
        "vLLM 0.8 to 0.14: 2.0 GiB more than 0.15 in three logs (0.11.1rc twice, about 0.12), cause not found",
    ),
    EngineMemory(
        (0, 15),
        0.90,
        8192,
        8192,
        1024,
        False,
        CHARGE_PER_LOGIT_TORCH,
        False,
        1,
        0.0,
        0.0,
        0.0,
        f"0.15.0, {_WHEEL}: requested = ceil(total x utilisation), minus weights, torch peak and non-torch growth",
    ),
    EngineMemory(
        (0, 19),
        0.90,
        8192,
        8192,
        1024,
        False,
        CHARGE_PER_LOGIT_TORCH,
        False,
        1,
        0.0,
        0.0,
        0.0,
        f"0.19.1, {_WHEEL}: as 0.15; the graph estimate is printed, applied only with "
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1",
    ),
    EngineMemory(
        (0, 20),
        0.92,
        8192,
        8192,
        1024,
        True,
        CHARGE_PER_LOGIT_TORCH,
        False,
        1,
        0.0,
        0.0,
        0.0,
        f"0.20.0, {_WHEEL}: the graph estimate comes off the KV cache by default; default utilisation 0.92",
    ),
    EngineMemory(
        (0, 21),
        0.92,
        8192,
        8192,
        1024,
        True,
        CHARGE_PER_LOGIT_TORCH,
        True,
        1,
        0.3,
        0.0,
        0.4,
        "vLLM 0.21 to 0.25: taken for 0.26.0, which was read and run; no log",
        counted_one_by_one=True,
    ),
    EngineMemory(
        (0, 26),
        0.92,
        8192,
        8192,
        1024,
        True,
        CHARGE_PER_LOGIT_TORCH,
        True,
        1,
        0.3,
        0.0,
        0.0,
        "0.26.0, read in the wheel and run: 20 own logs on 1, 4 and 8 H200s (dummy weights, 2026-11-20 and 21)",
        counted_one_by_one=True,
    ),
    EngineMemory(
        (0, 27),
        0.92,
        8192,
        8192,
        1024,
        True,
        CHARGE_PER_LOGIT_TORCH,
        True,
        1,
        0.3,
        0.0,
        0.4,
        "vLLM 0.27 to 0.32: taken for 0.26.0, which was read and run; no log on GPUs",
        counted_one_by_one=True,
    ),
    EngineMemory(
        (0, 33),
        0.92,
        8192,
        16384,
        1024,
        True,
        CHARGE_PER_LOGIT_FLASHINFER,
        True,
        1,
        0.3,
        0.0,
        0.8,
        f"0.33.0, {_WHEEL}: all consumed memory and the transient peak count; FlashInfer samples by default; no log",
        counted_one_by_one=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Engine:
    """A version text, read: its rules and whether it is a community build."""

    text: str
    version: tuple[int, int] | None
    is_fork: bool
    rules: EngineMemory


def engine_of(text: str) -> Engine:
    """Read a version as logs and people write it: "0.15.0", "nightly ~0.11.1rc", "0.20.2 fork (V2 runner)".

    The first number wins. A text without one is taken for 0.19's rules (the middle of the table), `version` None.
    """
    found = re.search(r"(?<![\d.])(\d+)\.(\d+)", text)
    version = (int(found[1]), int(found[2])) if found else None
    rules = next(row for row in reversed(RULES) if row.since <= (version or (0, 19)))
    return Engine(text, version, "fork" in text.lower(), rules)


def block_size_of(backend: str, compute: float, kv_dtype: str, version: tuple[int, int] | None) -> int:
    """Tokens per KV block where nothing states it.

    Backends: FLASHMLA 64, FLASHINFER_MLA 64, CUTLASS_MLA 128, sparse and indexer 64, FLASH_ATTN_MLA and TRITON_MLA 16,
    ROCM_AITER_MLA 1 (vLLM sources 0.15 to 0.33). Without a backend: 64 on Hopper before 0.20 (logged) and for FP8,
    128 on compute 10, else 16.
    """
    low = backend.lower()
    for mark, size in (
        ("sparse", 64),
        ("flashmla", 64),
        ("flashinfer_mla", 64),
        ("cutlass_mla", 128),
        ("rocm_aiter", 1),
        ("flash_attn_mla", 16),
        ("triton_mla", 16),
        ("cpu_mla", 16),
    ):
        if mark in low:
            return size
    if 10.0 <= compute < 12.0:
        return 128
    if 9.0 <= compute < 10.0 and (kv_dtype == "fp8" or (version or (0, 15)) < (0, 20)):
        return 64
    return 16


DCP_REFUSES_FP8 = ((0, 15), (0, 21))
"""Releases from the first to before the second assert "DCP not support fp8 kvcache now." at the first decode step (read
in the wheels of 0.15.0, 0.19.1 and 0.20.0, mla_attention.py). 0.33.0 takes both; between was not read."""
DCP_TAKES_FP8_SINCE = (0, 33)


def refuses_fp8_with_dcp(engine: Engine) -> bool:
    """Whether this engine is known to assert against an FP8 KV cache with decode context parallel."""
    first, last = DCP_REFUSES_FP8
    return engine.version is not None and not engine.is_fork and first <= engine.version < last


def may_refuse_fp8_with_dcp(engine: Engine) -> bool:
    """Whether nobody read if this engine takes an FP8 KV cache with decode context parallel."""
    known = refuses_fp8_with_dcp(engine) or (engine.version is not None and engine.version >= DCP_TAKES_FP8_SINCE)
    return not known and not engine.is_fork
