"""The planner's memory figures held against a real H200: Kimi K2.5 cut to few layers, dummy weights, real vLLM 0.26.0.

    python benchmarks/h200_fit.py predict                                   # on any machine, before the run
    python benchmarks/h200_fit.py run --out DIR [--engine-python PYTHON]    # on a machine with one H200

Three settings, none of which is in tests/fixtures/fit_cases.csv or in notes/eight-gpus.md. They differ in layers, KV dtype,
block size, batch, sequences, context, graphs and utilisation. What the constants behind the figures were fitted on is in
notes/fit.md. Exit status 1 if a weight is off by more than 0.15 GiB, a KV memory outside its interval, or the tokens off by
more than 0.6% given the KV memory that the engine printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from kimisession.core.plan.fit import Fit, predict
from kimisession.core.plan.gpus import gpu_named
from kimisession.core.plan.kv import token_bytes, tokens_from_kv
from kimisession.core.plan.models import ModelCard
from kimisession.core.plan.setup import Setup
from kimisession.model_file import card_named
from kimisession.rehearsal.dummy_kimi import make_dummy_kimi

WEIGHTS_GIB = 0.15
TOKENS_SHARE = 0.006
READY_WITHIN_S = 170.0
PORT = 8131
#: FlashInfer's sampler is compiled on the machine at its first use; the runs that this is compared with left it out.
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
SAYS = {
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "graphs_gib": r"Estimated CUDA graph memory: ([\d.]+) GiB",
    "kv_gib": r"Available KV cache memory: (-?[\d.]+) GiB",
    "kv_tokens": r"GPU KV cache size: ([\d,]+) tokens",
    "peak_gib": r"([\d.]+) GiB for peak activation",
    "non_torch_gib": r"([\d.]+) GiB for non-torch",
}
DONE = "init engine (profile, create kv cache, warmup model) took"


@dataclass(frozen=True)
class Run:
    """One setting: the layers that are left, what the planner is told, and the same for the engine."""

    title: str
    layers: int
    setup: Setup
    flags: tuple[str, ...]


BASE = Setup(engine_version="0.26.0", tp=1, vision="text-only")
RUNS = (
    Run(
        "A: 4 layers, util 0.60, 32K, 16 sequences, eager",
        4,
        replace(BASE, utilisation=0.60, max_model_len=32768, max_num_seqs=16, eager=True),
        ("--gpu-memory-utilization=0.60", "--max-model-len=32768", "--max-num-seqs=16", "--enforce-eager"),
    ),
    Run(
        "B: 8 layers, util 0.85, FP8 KV, 128 sequences, graphs",
        8,
        replace(BASE, utilisation=0.85, max_model_len=16384, max_num_seqs=128, kv_dtype="fp8"),
        ("--gpu-memory-utilization=0.85", "--max-model-len=16384", "--max-num-seqs=128", "--kv-cache-dtype=fp8"),
    ),
    Run(
        "C: 5 layers, util 0.72, batch 2,048, blocks of 128, 5,000 tokens, compiled without graphs",
        5,
        replace(
            BASE,
            utilisation=0.72,
            max_model_len=5000,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
            block_size=128,
            graphs_in_budget=False,
        ),
        (
            "--gpu-memory-utilization=0.72",
            "--max-model-len=5000",
            "--max-num-seqs=32",
            "--max-num-batched-tokens=2048",
            "--block-size=128",
            '--compilation-config={"cudagraph_mode": "NONE"}',
        ),
    ),
)


def main() -> int:
    """Dispatch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "run"))
    parser.add_argument("--out", type=Path, default=Path("h200-fit"))
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--only", default="ABC", help="letters of the settings")
    args = parser.parse_args()
    chosen = [run for run in RUNS if run.title[0] in args.only]
    if args.what == "predict":
        for run in chosen:
            print(*foretold(run), sep="\n")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    missed = 0
    for run in chosen:
        seen = play(run, args.engine_python, args.out)
        lines, wrong = compared(run, seen)
        print(*lines, sep="\n", flush=True)
        (args.out / f"{run.title[0]}.json").write_text(json.dumps({"run": run.title, "seen": seen, "wrong": wrong}))
        missed += len(wrong)
    print(f"{len(chosen)} settings, {missed} bounds missed")
    return 1 if missed else 0


def card_of(run: Run) -> ModelCard:
    """Kimi K2.5 without its vision tower (the dummy has none), cut to the run's layers."""
    card = card_named("moonshotai/Kimi-K2.5")
    return replace(card, layers=run.layers, vision=None, checkpoint_bytes=None)


def fit_of(run: Run) -> Fit:
    """What the planner expects of a run on one H200."""
    gpu = gpu_named("H200")
    assert gpu is not None
    return predict(card_of(run), gpu, run.setup)


def foretold(run: Run) -> list[str]:
    """The prediction, one line a figure."""
    fit = fit_of(run)
    weights, graphs, kv, tokens = fit.weights_gib_per_gpu, fit.cudagraph_gib, fit.kv_gib_per_gpu, fit.kv_tokens
    return [
        run.title,
        f"  weights    {weights.value:12.2f} GiB  [{weights.low:.2f} to {weights.high:.2f}]",
        f"  graphs     {graphs.value:12.2f} GiB  [{graphs.low:.2f} to {graphs.high:.2f}]"
        + ("" if fit.resolved.graphs_in_budget else "  (none are captured)"),
        f"  KV memory  {kv.value:12.2f} GiB  [{kv.low:.2f} to {kv.high:.2f}]",
        f"  KV tokens  {tokens.value:12,.0f}      [{tokens.low:,.0f} to {tokens.high:,.0f}]",
        f"  {fit.verdict}; {kv.ground}",
    ]


def compared(run: Run, seen: dict[str, float]) -> tuple[list[str], list[str]]:
    """Prediction beside what was seen, and the bounds that were missed."""
    fit = fit_of(run)
    lines = foretold(run)
    wrong = [
        f"{run.title[0]}: the engine did not print {name}" for name in SAYS if name not in seen and "graphs" not in name
    ]
    if wrong:
        return [*lines, *(f"  MISSED {w}" for w in wrong)], wrong
    weights_error = fit.weights_gib_per_gpu.value - seen["weights_gib"]
    kv, r = fit.kv_gib_per_gpu, fit.resolved
    by_concurrency = r.max_model_len if r.engine.rules.tokens_by_concurrency else None
    given = tokens_from_kv(
        seen["kv_gib"],
        token_bytes(card_of(run), run.setup, r),
        r.block_size,
        run.setup.dcp,
        max_model_len=by_concurrency,
    )
    nearest = min(max(seen["kv_tokens"], given.low), given.high)
    tokens_error = abs(nearest - seen["kv_tokens"]) / seen["kv_tokens"]
    if abs(weights_error) > WEIGHTS_GIB:
        wrong.append(f"{run.title[0]}: weights are off by {weights_error:+.2f} GiB")
    if not kv.low - 0.005 <= seen["kv_gib"] <= kv.high + 0.005:
        wrong.append(f"{run.title[0]}: KV memory is outside its interval")
    if tokens_error > TOKENS_SHARE:
        wrong.append(f"{run.title[0]}: KV tokens are off by {100 * tokens_error:.2f}% given the KV memory")
    lines += [
        f"  SEEN  weights {seen['weights_gib']:.2f} GiB ({weights_error:+.2f}), graphs {seen.get('graphs_gib', 0.0):.2f}, "
        f"KV {seen['kv_gib']:.2f} GiB ({kv.value - seen['kv_gib']:+.2f}), {seen['kv_tokens']:,.0f} tokens "
        f"({given.low:,.0f} to {given.high:,.0f} given that memory: {100 * tokens_error:.3f}%)",
        f"  SEEN  peak activation {seen['peak_gib']:.2f}, non-torch {seen['non_torch_gib']:.2f} GiB "
        f"against {fit.overhead_gib.value:.2f} in all",
        *(f"  MISSED {w}" for w in wrong),
    ]
    return lines, wrong


def play(run: Run, engine_python: str, out: Path) -> dict[str, float]:
    """Start the engine, read what it says of its memory, end it. Its log stays in `out`."""
    model = out / f"model-{run.layers}"
    make_dummy_kimi(model, run.layers)
    log = out / f"{run.title[0]}.log"
    argv = [engine_python, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--load-format=dummy"]
    argv += ["--trust-remote-code", "--host=127.0.0.1", f"--port={PORT}", "--served-model-name=dummy", *run.flags]
    began = time.monotonic()
    with log.open("wb") as sink:
        engine = subprocess.Popen(
            argv, env={**os.environ, **ENV}, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while engine.poll() is None and time.monotonic() - began < READY_WITHIN_S:
                if DONE in log.read_text(errors="replace"):
                    break
                time.sleep(0.5)
        finally:
            end(engine)
    text = log.read_text(errors="replace")
    seen: dict[str, float] = {}
    for name, pattern in SAYS.items():
        found = re.search(pattern, text)
        if found:
            seen[name] = float(found[1].replace(",", ""))
    if "kv_tokens" not in seen:
        print(*text.splitlines()[-25:], sep="\n", file=sys.stderr)
    seen["took_s"] = round(time.monotonic() - began, 1)
    return seen


def end(engine: subprocess.Popen[bytes]) -> None:
    """End the engine with all that it started, and wait until the GPU is free again (at most a minute)."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(engine.pid, sign)
        except ProcessLookupError:
            break
        try:
            engine.wait(timeout=15)
        except subprocess.TimeoutExpired:
            continue
    deadline = time.monotonic() + 60
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    while time.monotonic() < deadline:
        used = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split()
        if all(mib.isdigit() and int(mib) < 2000 for mib in used):
            return
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
