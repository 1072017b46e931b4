"""Between an engine's flags and what the plan calculates with: flags into a Setup, and a changed Setup into flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kimisession.core.plan.setup import Setup, VisionMode
from kimisession.core.profile import FlagValue

_SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size",
}
_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def setup_of(version: str, flags: Mapping[str, FlagValue], env: Mapping[str, str] | None = None) -> Setup:
    """How vLLM flags say that the model is served. Flags that do not touch memory are ignored; what is not said keeps
    the version's default. Raises ValueError, one sentence that names the flag, for a value that is no number."""
    said = {_SHORT.get(name, name.replace("_", "-")): value for name, value in flags.items()}
    draft = speculative(said.get("speculative-config"))
    estimates = (env or {}).get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    return Setup(
        engine_version=version,
        tp=whole(said, "tensor-parallel-size") or 1,
        pp=whole(said, "pipeline-parallel-size") or 1,
        dp=whole(said, "data-parallel-size") or 1,
        ep=said.get("enable-expert-parallel") is True,
        dcp=whole(said, "decode-context-parallel-size") or 1,
        utilisation=_float(said, "gpu-memory-utilization"),
        max_model_len=whole(said, "max-model-len"),
        max_num_seqs=whole(said, "max-num-seqs"),
        max_num_batched_tokens=whole(said, "max-num-batched-tokens"),
        kv_dtype=str(said.get("kv-cache-dtype", "auto")),
        eager=said.get("enforce-eager") is True,
        vision=_vision(said),
        draft=str(draft.get("model") or draft.get("method") or "") or None,
        draft_tokens=whole(draft, "num_speculative_tokens", "speculative-config: num_speculative_tokens") or 3,
        attention_backend=str(said.get("attention-backend", "")),
        block_size=whole(said, "block-size"),
        graphs_in_budget=None if estimates is None else estimates == "1",
        lora=said.get("enable-lora") is True,
    )


def speculative(value: FlagValue | None) -> Mapping[str, Any]:
    """--speculative-config as a dict, from a table or from JSON text; empty where there is none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _vision(said: Mapping[str, FlagValue]) -> VisionMode:
    if said.get("language-model-only") is True:
        return "text-only"
    return "data" if said.get("mm-encoder-tp-mode") == "data" else "weights"


def tokens_of(text: str) -> int:
    """Tokens as people write them: 65536, 64k and 64K are 64 x 1024, 1m is 1024 x 1024. Raises ValueError."""
    scale = {"k": 1024, "m": 1024 * 1024}.get(text[-1:].lower(), 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"{text!r} is not a number of tokens; write it like 65536 or 64k")
    return int(digits) * scale


def whole(said: Mapping[str, Any], name: str, written: str = "") -> int | None:
    """A flag's whole number, 64k and 64K as vLLM reads them; None where it is not said or left to the engine. Raises ValueError,
    one sentence that names the flag (`written`, where that is not its name)."""
    value = said.get(name)
    if value is None or value is True or str(value) in ("-1", "auto"):
        return None
    text = str(value)
    scale = _SIZES.get(text[-1:], 1)
    try:
        return int(float(text[:-1]) * scale) if scale > 1 else int(text)
    except (ValueError, OverflowError):
        raise ValueError(f"--{written or name} {text}: that is not a whole number") from None


def _float(said: Mapping[str, FlagValue], name: str) -> float | None:
    value = said.get(name)
    if value is None or value is True:
        return None
    try:
        return float(str(value))
    except ValueError:
        raise ValueError(f"--{name} {value}: that is not a number") from None


def changed_flags(before: Setup, after: Setup) -> dict[str, FlagValue]:
    """The flags that turn one setup into the other; False takes a flag away. The engine's version and the GPU are not
    flags: who changes them says so elsewhere."""
    found: dict[str, FlagValue] = {}
    numbers = (
        ("tensor-parallel-size", before.tp, after.tp),
        ("decode-context-parallel-size", before.dcp, after.dcp),
        ("gpu-memory-utilization", before.utilisation, after.utilisation),
        ("max-model-len", before.max_model_len, after.max_model_len),
        ("max-num-seqs", before.max_num_seqs, after.max_num_seqs),
        ("max-num-batched-tokens", before.max_num_batched_tokens, after.max_num_batched_tokens),
    )
    for name, old, new in numbers:
        if new is not None and new != old:
            found[name] = new
    if after.kv_dtype != before.kv_dtype:
        found["kv-cache-dtype"] = after.kv_dtype
    if after.eager and not before.eager:
        found["enforce-eager"] = True
    if after.vision == "text-only" != before.vision:
        found["language-model-only"] = True
        if before.vision == "data":
            found["mm-encoder-tp-mode"] = False
    return found
