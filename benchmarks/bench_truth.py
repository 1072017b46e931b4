"""How near `bench` comes to the truth, against a server of known pace: the stand-in engine at fixed rates.

    .venv/bin/python benchmarks/bench_truth.py [--repeat 3]

The truth is the stand-in's own rule (token i leaves ttft + i / rate after the request came) for latency, tokens per
second and inter-token latency, and its own histogram for the time to first token, which at 64 at once it does not meet
to the millisecond itself. Prints the median of the repetitions as one ratio a line, measured / true, and ends with 1
when one of them is outside 2%. A busy machine delays the stand-in and this client alike: the load is printed too.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kimisession.node.benchmark import Endpoint, Load, figure, measure_pass

ROOT = Path(__file__).parent.parent
AT_ONCE = (1, 2, 16, 64)
TOKENS_PER_SECOND, TTFT_S, TOKENS, ROUNDS = 50.0, 0.5, 128, 2
WITHIN = 0.02

LATENCY_S = TTFT_S + (TOKENS - 1) / TOKENS_PER_SECOND
#: Name, path in a pass, and the true figure at so many at once.
TRUTHS = (
    ("latency", ("latency_s", "mean"), lambda at_once: LATENCY_S),
    ("tok/s a request", ("tokens_per_s", "mean"), lambda at_once: TOKENS / LATENCY_S),
    ("output tok/s", ("output_tokens_per_s",), lambda at_once: at_once * TOKENS / LATENCY_S),
    ("ITL", ("itl_s", "mean"), lambda at_once: 1 / TOKENS_PER_SECOND),
    ("TPOT", ("tpot_s", "mean"), lambda at_once: 1 / TOKENS_PER_SECOND),
)


@contextmanager
def standin(folder: Path) -> Iterator[str]:
    """A stand-in that serves; yields its base URL."""
    (folder / "one.safetensors").write_bytes(b"0123456789abcdef")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"layer": "one.safetensors"}}))
    phases = ",".join(f"{phase}=0" for phase in ("boot", "load", "compile", "memory", "graphs", "serve"))
    pace = ["--tokens-per-second", str(TOKENS_PER_SECOND), "--ttft-s", str(TTFT_S)]
    argv = [sys.executable, "-m", "kimisession.node.standin", "--model", str(folder), "--port", "0"]
    log = folder / "log"
    with log.open("wb") as out:
        engine = subprocess.Popen([*argv, "--phase-seconds", phases, *pace], cwd=ROOT, stdout=out, stderr=out)
    try:
        until = time.monotonic() + 30
        while "Application startup complete" not in log.read_text():
            if engine.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the stand-in did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield re.findall(r"Starting vLLM server on (\S+)", log.read_text())[-1]
    finally:
        engine.terminate()
        engine.wait()


def ttft_histogram(endpoint: Endpoint) -> tuple[float, float]:
    """(sum of seconds, requests) of the server's own histogram."""
    connection = endpoint.connect()
    endpoint.send(connection, "GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    found = [re.search(rf"time_to_first_token_seconds_{what}{{.*}} (\S+)", page) for what in ("sum", "count")]
    total, count = (float(match[1]) if match else 0.0 for match in found)
    return total, count


def one_pass(endpoint: Endpoint, model: str, load: Load, at_once: int, number: int) -> Mapping[str, float]:
    """Measured / true, by name."""
    before = ttft_histogram(endpoint)
    bodies = [load.body(model, f"{number}-{i}") for i in range(load.rounds * at_once)]
    seen: dict[str, Any] = measure_pass(endpoint, bodies, at_once)
    after = ttft_histogram(endpoint)
    if seen["errors"] or seen["completion_tokens"] != TOKENS * len(bodies):
        raise SystemExit(f"not every token came: {seen['first_error'] or seen['completion_tokens']}")
    ratios = {name: (figure(seen, path) or 0.0) / true(at_once) for name, path, true in TRUTHS}
    own_ttft_s = (after[0] - before[0]) / (after[1] - before[1])
    return {**ratios, "TTFT": (figure(seen, ("ttft_s", "mean")) or 0.0) / own_ttft_s}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    load = Load(rounds=ROUNDS, max_tokens=TOKENS, ignore_eos=True)
    print(
        f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores, nice {os.nice(0)}\n"
        f"{TOKENS_PER_SECOND:g} tok/s, TTFT {TTFT_S:g} s, {TOKENS} tokens, {ROUNDS} rounds, medians of {repeat}"
    )
    found: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kimisession-bench-") as folder, standin(Path(folder)) as url:
        endpoint = Endpoint(url)
        model = endpoint.first_model()
        one_pass(endpoint, model, load, 1, 0)  # warms both sides up
        for number in range(1, repeat + 1):
            for at_once in AT_ONCE:
                for name, ratio in one_pass(endpoint, model, load, at_once, number).items():
                    found.setdefault((at_once, name), []).append(ratio)
                print(f"  repetition {number}, {at_once} at once, load {os.getloadavg()[0]:.2f}", file=sys.stderr)
    ok = True
    for (at_once, name), ratios in found.items():
        ratio = statistics.median(ratios)
        good = abs(ratio - 1) <= WITHIN
        ok &= good
        print(
            f"ratio {name} at {at_once} at once, measured/true {ratio:.4f} [{min(ratios):.4f} to {max(ratios):.4f}] "
            f"(within {WITHIN:.2f} of 1){'' if good else ' MISSED'}"
        )
    print(f"load {os.getloadavg()[0]:.2f}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
