"""What to change so that a wished context or concurrency fits: the cheapest change first, with what it buys and costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

from kimisession.core.plan.engine_memory import DCP_TAKES_FP8_SINCE, engine_of
from kimisession.core.plan.fit import Fit, Verdict, predict
from kimisession.core.plan.gpus import Gpu, gpu_named
from kimisession.core.plan.models import ModelCard
from kimisession.core.plan.setup import CannotPlan, Setup, resolve

MOST_CHANGES = 4
LANGUAGE_MODEL_ONLY_SINCE = (0, 19)
"""Read in the wheels: models/kimi_k25.py of 0.15.0 builds the vision tower unconditionally; 0.19.1 skips it with
--language-model-only. The versions between were not read."""
_BIGGER = ("H100-NVL", "RTX PRO 6000", "H200", "B200", "B300")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to change. `price` orders changes from free to dear; it is a rank, not money.

    `applies` says whether it can still be made and `make` makes it. `evidence` says what was measured, where, or that
    the gain is predicted only.
    """

    name: str
    price: int
    applies: Callable[[ModelCard, Gpu, Setup], bool]
    make: Callable[[ModelCard, Gpu, Setup], tuple[Gpu, Setup]]
    costs: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Step:
    """A change as part of an answer: what it buys on its own, on top of the steps before it."""

    name: str
    gib_bought: float
    tokens_bought: int
    costs: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Advice:
    """How to reach a wish. `reached` is "starts" if it is sure, "borderline" if it may, "does not start" if no
    combination of up to four changes gets there; `fit` is then of the best one found.

    `steps` is empty if nothing has to change. `flags` is the whole list for the engine's command line.
    """

    wish: str
    reached: Verdict
    steps: tuple[Step, ...]
    flags: tuple[str, ...]
    gpu: Gpu
    setup: Setup
    fit: Fit
    sentence: str


def _dcp(card: ModelCard, _gpu: Gpu, setup: Setup) -> bool:
    return setup.dcp < setup.tp and setup.pp == 1 and not card.index_heads


def _next_gpu(gpu: Gpu) -> Gpu | None:
    """The smallest GPU of the usual ones that has at least 10% more memory."""
    known = [found for found in (gpu_named(name) for name in _BIGGER) if found]
    larger = [found for found in known if found.total_gib > gpu.total_gib * 1.1]
    return min(larger, key=lambda found: found.total_gib) if larger else None


def _can_drop_vision(setup: Setup) -> bool:
    """Whether this version can leave the tower out: 0.15.0 always builds it, 0.19.1 has --language-model-only."""
    version = engine_of(setup.engine_version).version
    return version is None or version >= LANGUAGE_MODEL_ONLY_SINCE


CHANGES: tuple[Change, ...] = (
    Change(
        "fewer sequences at once",
        1,
        lambda card, gpu, setup: resolve(card, gpu, setup).max_num_seqs > 64,
        lambda card, gpu, setup: (gpu, replace(setup, max_num_seqs=64)),
        "at most 64 requests run at once; a session of one person does not notice",
        "measured: 1,024 dummy requests ran out of memory beside 72 GiB of weights, 64 started "
        "(8xH100, vLLM 0.15.0, public write-up, Feb 2026)",
    ),
    Change(
        "decode context parallel",
        2,
        _dcp,
        lambda card, gpu, setup: (gpu, replace(setup, dcp=setup.tp)),
        "each decode step gathers the query heads: latency of a single stream not measured; 485.78 -> 695.13 output "
        "tok/s at high load (K2-Thinking, 8xH200, vLLM recipes, Nov 2025)",
        "measured: 22,336 -> 178,688 tokens from the same 1.46 GiB (8xH200 held to an H100's budget, vLLM 0.26.0, text "
        "only, dummy weights, eager, own run 2026-11-20); with real weights and with graphs not shown",
    ),
    Change(
        "smaller batches",
        3,
        lambda card, gpu, setup: resolve(card, gpu, setup).batch_tokens > 4096,
        lambda card, gpu, setup: (gpu, replace(setup, max_num_batched_tokens=4096)),
        "long prompts are read in more, smaller steps: slower first token, not measured",
        "predicted; logs at 4,096 and 8,192 tokens differ by about 1.3 GiB (K2.6, 8xH200 NVL, vLLM 0.20.0)",
    ),
    Change(
        "batches of 2,048 tokens",
        7,
        lambda card, gpu, setup: resolve(card, gpu, setup).batch_tokens > 2048,
        lambda card, gpu, setup: (gpu, replace(setup, max_num_batched_tokens=2048)),
        "long prompts are read in four times as many steps as by default: slower first token, not measured",
        "predicted; measured with five layers: a peak of 2.24 GiB where 8,192 tokens took 4.2 to 4.4 (1x H200, vLLM "
        "0.26.0, dummy weights, own runs 2026-11-21)",
    ),
    Change(
        "text only",
        3,
        lambda card, gpu, setup: card.vision is not None and setup.vision != "text-only" and _can_drop_vision(setup),
        lambda card, gpu, setup: (gpu, replace(setup, vision="text-only")),
        "no images",
        "measured: 72.02 GiB with the vision tower in data mode against 71.16 without (K2.5 and K2.6 at TP8, logs)",
    ),
    Change(
        "vLLM 0.19.1 and text only",
        5,
        lambda card, gpu, setup: (
            card.vision is not None and setup.vision != "text-only" and not _can_drop_vision(setup)
        ),
        lambda card, gpu, setup: (gpu, replace(setup, vision="text-only", engine_version="0.19.1")),
        "no images, and another pinned stack: 0.15.0 cannot leave the vision tower out",
        "measured: 72.02 GiB with the vision tower in data mode against 71.16 without (K2.5 and K2.6 at TP8, logs)",
    ),
    Change(
        "higher utilisation",
        4,
        lambda card, gpu, setup: resolve(card, gpu, setup).utilisation < 0.95,
        lambda card, gpu, setup: (gpu, replace(setup, utilisation=0.95)),
        "less room above the budget for CUDA graphs, NCCL and prefill peaks",
        "measured: 0.95 starts where 0.90 is refused (8xH100, vLLM 0.15.0, public write-up, Feb 2026)",
    ),
    Change(
        "FP8 KV cache",
        5,
        lambda card, gpu, setup: resolve(card, gpu, setup).kv_element_bytes == 2 and gpu.compute >= 8.9,
        lambda card, gpu, setup: (gpu, replace(setup, kv_dtype="fp8")),
        "accuracy of Kimi with it was not measured here; scales are 1.0 without calibration",
        "halves the bytes per token by arithmetic; 437,520 tokens of 35,136 B were logged on 8x RTX PRO 6000 "
        "(K2.6, community build, Apr 2026); on Hopper predicted only",
    ),
    Change(
        "eager mode",
        8,
        lambda card, gpu, setup: not setup.eager and resolve(card, gpu, setup).graphs_in_budget,
        lambda card, gpu, setup: (gpu, replace(setup, eager=True)),
        "slow: 10.5 tok/s for one stream (K2-Thinking, 8xH100, Nov 2025) where graphs give 62 to 112 (K2.5, same GPUs); "
        "14 against 179 (4x H200, 40 layers, dummy weights, own run 2026-11-21)",
        "arithmetic: the graph estimate is not subtracted",
    ),
    Change(
        "a larger GPU",
        20,
        lambda card, gpu, setup: _next_gpu(gpu) is not None,
        lambda card, gpu, setup: (_next_gpu(gpu) or gpu, replace(setup, gpu_total_gib=None)),
        "a higher price per hour",
        "predicted",
    ),
)


def flags_of(card: ModelCard, setup: Setup) -> tuple[str, ...]:
    """The setup as vLLM's flags, in the order people write them."""
    found: list[str] = [f"--tensor-parallel-size {setup.tp}"]
    if setup.pp > 1:
        found.append(f"--pipeline-parallel-size {setup.pp}")
    if setup.dp > 1:
        found.append(f"--data-parallel-size {setup.dp}")
    if setup.ep:
        found.append("--enable-expert-parallel")
    if setup.dcp > 1:
        found.append(f"--decode-context-parallel-size {setup.dcp}")
    if setup.utilisation is not None:
        found.append(f"--gpu-memory-utilization {setup.utilisation:g}")
    if setup.max_model_len:
        found.append(f"--max-model-len {setup.max_model_len}")
    if setup.max_num_seqs:
        found.append(f"--max-num-seqs {setup.max_num_seqs}")
    if setup.max_num_batched_tokens:
        found.append(f"--max-num-batched-tokens {setup.max_num_batched_tokens}")
    if "fp8" in setup.kv_dtype:
        found.append("--kv-cache-dtype fp8")
    if setup.eager:
        found.append("--enforce-eager")
    if card.vision and setup.vision == "text-only":
        found.append("--language-model-only")
    elif card.vision and setup.vision == "data":
        found.append("--mm-encoder-tp-mode data")
    return tuple(found)


def advise(
    card: ModelCard,
    gpu: Gpu,
    setup: Setup,
    want_context: int | None = None,
    want_concurrency: int | None = None,
) -> Advice:
    """The cheapest changes with which `want_context` tokens, `want_concurrency` times at once, surely fit.

    Without a wish it is about the setup's own --max-model-len, once. Combinations of up to four changes are tried in
    the order of their prices. Raises CannotPlan if the wish is beyond the model's own context.
    """
    context = want_context or setup.max_model_len or card.max_context
    if context > card.max_context:
        raise CannotPlan(f"{card.name} holds {card.max_context:,} tokens at most, not {context:,}")
    requests = want_concurrency or 1
    base = replace(setup, max_model_len=context)
    if base.max_num_seqs is not None and base.max_num_seqs < requests:
        base = replace(base, max_num_seqs=requests)
    wish = f"{context:,} tokens" + (f" x {requests} requests" if requests > 1 else "")
    usable = [c for c in CHANGES if c.applies(card, gpu, base) and _keeps(c.make(card, gpu, base)[1], requests)]
    orders = sorted(
        (combo for size in range(min(MOST_CHANGES, len(usable)) + 1) for combo in combinations(usable, size)),
        key=lambda combo: (sum(change.price for change in combo), len(combo)),
    )
    best: tuple[float, tuple[Change, ...]] = (-1.0, ())
    maybe: tuple[Change, ...] | None = None
    for combo in orders:
        changed_gpu, changed = _apply(combo, card, gpu, base)
        if not _runs_together(card, changed_gpu, changed):
            continue
        fit = predict(card, changed_gpu, changed)
        reached = _reaches(fit, requests)
        if reached == "starts":
            return _answer("starts", wish, combo, card, gpu, base)
        if reached == "borderline" and maybe is None:
            maybe = combo
        if fit.kv_tokens.low > best[0]:
            best = (fit.kv_tokens.low, combo)
    if maybe is not None:
        return _answer("borderline", wish, maybe, card, gpu, base)
    return _answer("does not start", wish, best[1], card, gpu, base)


def _keeps(setup: Setup, requests: int) -> bool:
    """Whether the engine still takes that many requests at once."""
    return setup.max_num_seqs is None or setup.max_num_seqs >= requests


def _runs_together(card: ModelCard, gpu: Gpu, setup: Setup) -> bool:
    """Whether this version is known to run an FP8 KV cache with decode context parallel, if the setup has both."""
    r = resolve(card, gpu, setup)
    if setup.dcp == 1 or r.kv_element_bytes == 2 or r.engine.is_fork:
        return True
    return r.engine.version is not None and r.engine.version >= DCP_TAKES_FP8_SINCE


def _reaches(fit: Fit, requests: int) -> Verdict:
    """Whether the fit surely, perhaps or surely not holds that many requests of its own --max-model-len."""
    if fit.verdict == "starts" and fit.concurrency.low >= requests:
        return "starts"
    if fit.verdict == "does not start" or fit.concurrency.high < requests:
        return "does not start"
    return "borderline"


def _apply(combo: tuple[Change, ...], card: ModelCard, gpu: Gpu, setup: Setup) -> tuple[Gpu, Setup]:
    for change in combo:
        gpu, setup = change.make(card, gpu, setup)
    return gpu, setup


def _answer(reached: Verdict, wish: str, combo: tuple[Change, ...], card: ModelCard, gpu: Gpu, setup: Setup) -> Advice:
    """The advice for a chosen combination, with what each change buys on top of those before it."""
    steps: list[Step] = []
    now_gpu, now = gpu, setup
    before = predict(card, now_gpu, now)
    for change in combo:
        now_gpu, now = change.make(card, now_gpu, now)
        after = predict(card, now_gpu, now)
        steps.append(
            Step(
                name=change.name,
                gib_bought=after.kv_gib_per_gpu.value - before.kv_gib_per_gpu.value,
                tokens_bought=int(after.kv_tokens.value - before.kv_tokens.value),
                costs=change.costs,
                evidence=change.evidence,
            )
        )
        before = after
    names = " and ".join(step.name for step in steps)
    if not steps and reached == "starts":
        sentence = f"{wish} fit as it is."
    elif reached == "starts":
        sentence = f"{wish} fit with {names}."
    elif reached == "borderline":
        sentence = f"{wish} may fit{f' with {names}' if names else ''}: the margin is inside the error."
    else:
        sentence = (
            f"{wish} do not fit with any of the changes known here; the most is "
            f"{int(before.kv_tokens.value):,} tokens, with {names or 'the setup as it is'}."
        )
    return Advice(
        wish=wish,
        reached=reached,
        steps=tuple(steps),
        flags=flags_of(card, now),
        gpu=now_gpu,
        setup=now,
        fit=before,
        sentence=sentence,
    )
