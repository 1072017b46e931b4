"""Score the fit planner on a table of memory figures that real servers logged.

    python benchmarks/fit.py tests/fixtures/fit_cases.csv

A line per case; the last line has the largest and mean errors. Exit status 1 if a bound that notes/fit.md and the
README promise is missed, 2 if the table cannot be read. Columns: tests/fixtures/fit_cases.md.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from kimisession.core.plan.cpu_fit import hybrid_vram
from kimisession.core.plan.fit import Fit, predict
from kimisession.core.plan.gpus import Gpu, gpu_named
from kimisession.core.plan.kv import token_bytes, tokens_from_kv
from kimisession.core.plan.models import ModelCard, ModelUnknown
from kimisession.core.plan.setup import CannotPlan, Figure, Setup, VisionMode, resolve
from kimisession.model_file import card_named

Row = dict[str, str]

WEIGHTS_GIB = 0.15
TOKENS_SHARE = 0.006
KV_MEDIAN_GIB = 0.5
KV_MAX_GIB = 1.0
BORDERLINE_SHARE = 0.25


def numbers(text: str) -> list[float]:
    """Every number of a cell: "default(262144)" gives one, "0.88-0.95" two, "unknown" none."""
    return [
        float(found)
        for found in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?|(?<=\()\d+(?:\.\d+)?|(?<=\d-)\d+(?:\.\d+)?", text)
    ]


def spread(text: str) -> tuple[float, ...]:
    """The values that a cell stands for: none, one, or the ends of a range."""
    ranged = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*-\s*(\d+(?:\.\d+)?)\s*", text)
    if ranged:
        return float(ranged[1]), float(ranged[2])
    found = numbers(text)
    return (found[0],) if found else ()


def logged(text: str) -> float | None:
    """A measured figure, or None where the log has none."""
    found = spread(text)
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class Case:
    """One row, read: the card if the model is known, and every setup that its cells allow (one but for ranges)."""

    row: Row
    card: ModelCard | None
    gpu: Gpu | None
    setups: tuple[Setup, ...]
    problem: str


def read_case(row: Row) -> Case:
    """Turn a row into setups; whatever cannot be read is a `problem`, never an exception."""
    cell = {key: (value or "").strip() for key, value in row.items() if isinstance(key, str)}
    gpu = gpu_named(cell.get("gpu", ""))
    total = logged(cell.get("gpu_total_gib", ""))
    if gpu is None and total:
        gpu = Gpu(cell.get("gpu", "") or "unnamed GPU", total, 0.0, "the table")
    try:
        card = card_named(cell.get("model", ""))
    except ModelUnknown as error:
        return Case(cell, None, gpu, (), str(error))
    engine = cell.get("engine", "")
    if "kt-kernel" in engine.lower() or "ktransformers" in engine.lower():
        return Case(cell, card, gpu, (), "KT-Kernel")
    if engine and "vllm" not in engine.lower():
        return Case(cell, card, gpu, (), f"not calibrated: engine {engine!r} is not vLLM")
    wrong_format = next(
        (name for name in ("gguf", "awq", "mxfp4", "nvfp4") if name in cell.get("quant", "").lower()), None
    )
    if wrong_format and wrong_format not in card.experts_format:
        return Case(cell, None, gpu, (), f"no card for {wrong_format} of this model")
    if gpu is None:
        return Case(cell, card, None, (), f"GPU {cell.get('gpu', '')!r} is not known")
    return Case(cell, card, gpu, _setups(cell, total), "")


def _setups(cell: Row, total: float | None) -> tuple[Setup, ...]:
    assumed: set[str] = set()

    def whole(key: str, default: int) -> int:
        found = spread(cell.get(key, ""))
        return max(1, int(found[0])) if found else default

    def choices(key: str) -> tuple[int | None, ...]:
        text = cell.get(key, "")
        found = spread(text)
        if not found or "?" in text:
            if key != "max_model_len":
                assumed.add(key)
            return (None,) if not found else tuple(int(n) for n in found)
        return tuple(int(n) for n in found)

    vision_text = cell.get("vision_mode", "").lower()
    vision: VisionMode = "unknown"
    if any(mark in vision_text for mark in ("text", "language", "none")):
        vision = "text-only"
    elif vision_text.startswith("data"):
        vision = "data"
    elif vision_text.startswith("weights"):
        vision = "weights"
    budget = cell.get("cg_estimate_in_budget", "").lower()
    in_budget = None if not budget else budget.startswith("yes")
    version = f"{cell.get('vllm_version', '')} {'fork' if 'fork' in cell.get('engine', '').lower() else ''}".strip()
    draft = cell.get("spec_decode", "")
    k = re.search(r"k\s*=\s*(\d+)", draft)
    base = Setup(
        engine_version=version or "unknown",
        tp=whole("tp", whole("gpu_count", 8)),
        pp=whole("pp", 1),
        dp=whole("dp", 1),
        ep=cell.get("ep", "").lower().startswith("yes"),
        dcp=whole("dcp", 1),
        kv_dtype=cell.get("kv_cache_dtype", "") or "auto",
        eager=cell.get("enforce_eager", "").lower().startswith("yes"),
        vision=vision,
        draft=draft or None,
        draft_tokens=int(k[1]) if k else 3,
        attention_backend=cell.get("attn_backend", ""),
        block_size=whole("block_size", 0) or None,
        gpu_total_gib=total,
        graphs_in_budget=in_budget,
        lora=any("lora" in cell.get(key, "").lower() for key in ("group", "model", "quant", "flags_other", "notes")),
    )
    lengths, seqs, batches = choices("max_model_len"), choices("max_num_seqs"), choices("max_num_batched_tokens")
    return tuple(
        replace(
            base,
            utilisation=utilisation,
            max_model_len=length,
            max_num_seqs=seq,
            max_num_batched_tokens=batch,
            assumed=frozenset(assumed),
        )
        for utilisation, length, seq, batch in product(spread(cell.get("util", "")) or (None,), lengths, seqs, batches)
    )


@dataclass
class Score:
    """What one row came to. Errors are None where the log has nothing to compare with."""

    case: Case
    fit: Fit | None = None
    verdict: str = "-"
    note: str = ""
    weights_error: float | None = None
    tokens_error: float | None = None
    tokens: Figure | None = None
    kv_error: float | None = None
    covered: bool | None = None
    wrong: bool = False

    @property
    def kv_calibrated(self) -> bool:
        return self.fit is not None and self.fit.calibrated and len(self.case.setups) == 1

    @property
    def weights_calibrated(self) -> bool:
        return self.fit is not None and self.fit.weights_gib_per_gpu.ground.startswith("calibrated")


def score(row: Row) -> Score:
    """Predict one row and compare; a row that cannot be predicted says why."""
    case = read_case(row)
    result = Score(case, note=case.problem)
    starts = case.row.get("starts", "").lower()
    if case.card is None or not case.setups:
        if case.card is not None and "KT-Kernel" in case.problem:
            result.verdict, result.note = _hybrid(case)
            result.wrong = (starts.startswith("yes") and result.verdict == "does not start") or (
                starts.startswith("no") and result.verdict == "starts"
            )
        return result
    assert case.gpu is not None
    try:
        fits = [predict(case.card, case.gpu, setup) for setup in case.setups]
        result.tokens = _tokens(case)
    except (CannotPlan, ValueError) as error:
        result.note = str(error)
        return result
    result.fit = fits[0]
    verdicts = {fit.verdict for fit in fits}
    result.verdict = verdicts.pop() if len(verdicts) == 1 else "borderline"
    result.note = "" if fits[0].calibrated else fits[0].kv_gib_per_gpu.ground
    weights, kv, tokens = (logged(case.row.get(key, "")) for key in ("weights_gib", "avail_kv_gib", "kv_tokens"))
    if weights is not None:
        result.weights_error = fits[0].weights_gib_per_gpu.value - weights
    if kv is None and tokens is not None:
        kv = _gib_of(case, tokens)
    if kv is not None:
        result.kv_error = fits[0].kv_gib_per_gpu.value - kv
        result.covered = any(fit.kv_gib_per_gpu.low - 0.005 <= kv <= fit.kv_gib_per_gpu.high + 0.005 for fit in fits)
    if result.tokens and tokens:
        low, high = result.tokens.low, result.tokens.high
        nearest = min(max(tokens, low), high) if high / low - 1 > TOKENS_SHARE else low
        result.tokens_error = abs(nearest - tokens) / tokens
    result.wrong = (starts.startswith("yes") and result.verdict == "does not start") or (
        starts.startswith("no") and result.verdict == "starts"
    )
    return result


def _tokens(case: Case) -> Figure | None:
    """KV tokens out of the logged KV memory, as the row's own blocks and layers give them."""
    kv = logged(case.row.get("avail_kv_gib", ""))
    if kv is None or kv <= 0 or case.card is None or case.gpu is None:
        return None
    setup = case.setups[0]
    r = resolve(case.card, case.gpu, setup)
    by_concurrency = r.max_model_len if r.engine.rules.tokens_by_concurrency else None
    per_token = token_bytes(case.card, setup, r)
    return tokens_from_kv(kv, per_token, r.block_size, setup.dcp, max_model_len=by_concurrency)


def _gib_of(case: Case, tokens: float) -> float:
    """The KV memory that a logged token count stands for, where the memory itself was not logged."""
    assert case.card is not None
    assert case.gpu is not None
    setup = case.setups[0]
    r = resolve(case.card, case.gpu, setup)
    return tokens / setup.dcp * token_bytes(case.card, setup, r) / 2**30


def _hybrid(case: Case) -> tuple[str, str]:
    """The GPU side of a KT-Kernel row, whose settings stand in its notes."""
    assert case.card is not None
    note = case.row.get("notes", "")
    experts = re.search(r"(\d+) GPU experts?/layer|num-gpu-experts (\d+)", note)
    context = logged(case.row.get("max_model_len", "")) or 32768.0
    on_gpu = int(next(group for group in experts.groups() if group)) if experts else 1
    vram = hybrid_vram(case.card, gpu_experts=on_gpu, context=int(context))
    size = re.search(r"(\d+)\s*GB", case.row.get("gpu", ""))
    have = case.gpu.total_gib if case.gpu else float(size[1]) * 0.93 if size else None
    text = f"not calibrated: KT-Kernel, {vram.value:.1f} GiB of GPU memory in all; host memory not in the table"
    if have is None:
        return "-", text
    return ("starts" if vram.high < have else "does not start" if vram.low > have else "borderline"), text


def line(s: Score) -> str:
    """One row of the report."""
    cell = s.case.row
    kv = logged(cell.get("avail_kv_gib", ""))
    tokens = logged(cell.get("kv_tokens", ""))
    seen = f"{kv:.2f}" if kv is not None else "-"
    if kv is None and tokens and s.fit is not None:
        seen = f"~{_gib_of(s.case, tokens):.2f}"
    if s.fit is None:
        shown = f"{'-':>7} {'-':>16}"
    else:
        figure = s.fit.kv_gib_per_gpu
        shown = f"{figure.value:7.2f} {f'{figure.low:.2f}..{figure.high:.2f}':>16}"
    weights = "-" if s.weights_error is None else f"{s.weights_error:+.2f}"
    count = "-" if s.tokens_error is None else f"{100 * s.tokens_error:.2f}%"
    mark = "calibrated" if s.kv_calibrated else "not calibrated"
    flag = " WRONG" if s.wrong else ""
    return (
        f"{cell.get('id', '?'):5} {cell.get('group', '')[:26]:26} {seen:>8} {shown} {weights:>6} {count:>7} "
        f"{mark:14} {cell.get('starts', '')[:3] or '?':3} -> {s.verdict}{flag}  {s.note[:90]}"
    ).rstrip()


def group_of(s: Score) -> str:
    """The named group of a row, by what sets its memory apart."""
    cell = s.case.row
    named = f"{cell.get('model', '')} {cell.get('quant', '')}".lower()
    setup = s.case.setups[0] if s.case.setups else None
    if s.case.problem == "KT-Kernel":
        return "CPU experts"
    if setup and setup.lora:
        return "LoRA"
    for mark in ("glm", "gguf", "nvfp4"):
        if mark in named:
            return mark.upper()
    if setup and setup.pp > 1:
        return "pipeline"
    if setup and (setup.dp > 1 or setup.ep):
        return "EP and DP"
    if "fp8" in named:
        return "FP8 DeepSeek and K2"
    return "Kimi INT4 on TP" if "kimi" in named else "other"


def by_group(scores: list[Score]) -> list[str]:
    """One line per named group: rows, calibrated rows with their largest KV error, intervals that cover."""
    found: dict[str, list[Score]] = {}
    for s in scores:
        found.setdefault(group_of(s), []).append(s)
    lines: list[str] = []
    for name, members in found.items():
        kv = [abs(s.kv_error) for s in members if s.kv_calibrated and s.kv_error is not None]
        outside = [s.covered for s in members if not s.kv_calibrated and s.covered is not None]
        weights = [abs(s.weights_error) for s in members if s.weights_error is not None and s.weights_calibrated]
        lines.append(
            f"{name}: {len(members)} rows; {len(kv)} calibrated"
            + (f", KV max {max(kv):.2f} GiB" if kv else "")
            + (f"; {sum(outside)} of {len(outside)} other intervals cover" if outside else "")
            + (f"; weights max {max(weights):.2f} GiB (n={len(weights)})" if weights else "")
        )
    return lines


def misses(scores: list[Score]) -> list[str]:
    """Every bound that is not kept, one sentence each."""
    found: list[str] = []
    for s in scores:
        name = s.case.row.get("id", "?")
        kv = logged(s.case.row.get("avail_kv_gib", ""))
        if s.weights_calibrated and s.weights_error is not None and abs(s.weights_error) > WEIGHTS_GIB:
            found.append(f"{name}: weights are off by {s.weights_error:+.2f} GiB")
        if s.tokens_error is not None and s.tokens_error > TOKENS_SHARE:
            found.append(f"{name}: KV tokens are off by {100 * s.tokens_error:.2f}%")
        if s.kv_calibrated and s.kv_error is not None and abs(s.kv_error) > KV_MAX_GIB:
            found.append(f"{name}: KV memory is off by {s.kv_error:+.2f} GiB in the calibrated regime")
        if not s.kv_calibrated and s.covered is False:
            found.append(f"{name}: the interval does not cover the logged KV memory")
        if s.wrong:
            found.append(f"{name}: the verdict is wrong")
        if s.verdict == "borderline" and kv is not None and (kv > 2 or kv < -1):
            found.append(f"{name}: borderline, although the logged KV memory is {kv:.2f} GiB")
    errors = [abs(s.kv_error) for s in scores if s.kv_calibrated and s.kv_error is not None]
    if errors and statistics.median(errors) > KV_MEDIAN_GIB:
        found.append(f"the median KV error is {statistics.median(errors):.2f} GiB")
    borderline = sum(s.verdict == "borderline" for s in scores)
    if borderline > BORDERLINE_SHARE * len(scores):
        found.append(f"{borderline} of {len(scores)} verdicts are borderline")
    return found


def summary(scores: list[Score]) -> str:
    """The last line: largest and mean errors, and how the verdicts came out."""

    def of(values: list[float], unit: str) -> str:
        return f"max {max(values):.2f} mean {statistics.mean(values):.2f}{unit} (n={len(values)})" if values else "none"

    weights = [abs(s.weights_error) for s in scores if s.weights_calibrated and s.weights_error is not None]
    tokens = [100 * s.tokens_error for s in scores if s.tokens_error is not None]
    kv = [abs(s.kv_error) for s in scores if s.kv_calibrated and s.kv_error is not None]
    outside = [s.covered for s in scores if not s.kv_calibrated and s.covered is not None]
    counts = Counter(s.verdict for s in scores)
    verdicts = ", ".join(f"{n} {name if name != '-' else 'without verdict'}" for name, n in counts.most_common())
    median = f" median {statistics.median(kv):.2f}" if kv else ""
    return (
        f"weights {of(weights, ' GiB')}; KV tokens {of(tokens, '%')}; KV memory, calibrated {of(kv, ' GiB')}{median}; "
        f"elsewhere {sum(outside)} of {len(outside)} intervals cover; verdicts: {verdicts}, "
        f"{sum(s.wrong for s in scores)} wrong of {len(scores)}"
    )


def main(argv: list[str]) -> int:
    """Score the table that argv names and return the exit status."""
    if len(argv) != 1:
        print("usage: python benchmarks/fit.py TABLE.csv", file=sys.stderr)
        return 2
    try:
        with Path(argv[0]).open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        print(f"{argv[0]} cannot be read as a table: {error}", file=sys.stderr)
        return 2
    print(
        f"{'id':5} {'group':26} {'logged':>8} {'predict':>7} {'interval, GiB':>16} {'weight':>6} {'tokens':>7} "
        f"{'':14} log -> verdict"
    )
    scores = [score(row) for row in rows]
    for s in scores:
        print(line(s))
    print(*by_group(scores), sep="\n")
    missed = misses(scores)
    for sentence in missed:
        print(f"MISSED {sentence}")
    print(summary(scores))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
