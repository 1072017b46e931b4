"""`bench` beside `vllm bench serve`, on the same real server: output throughput and mean time to first token.

    .venv/bin/python benchmarks/bench_vs_vllm.py [--pairs 7]

The bound is older than any run, the configuration is not (notes/benchmarks.md): over the pairs,
the median of (ours / theirs) has to lie within 0.95 and 1.05, for output
tok/s and for mean TTFT, at 1, 2 and 8 requests at once. Exit code 0 when all six do, else 1. Four minutes on a machine
that does nothing else, which it needs: what others took of it is printed beside every pair.

Needs the environment of scripts/setup-vllm-cpu.sh (.venv-vllm; KIMISESSION_ENGINE_PYTHON names another). One vLLM serves
mini-kimi on the CPU. What makes the two alike:

- The same texts in the same order (theirs reads them as a ShareGPT file), the same number of tokens asked for and
  answered (`ignore_eos`), thinking off, the server's own defaults for sampling, no prefix cache on this backend.
- A pair is one run of each, right after one another, the first one changing from pair to pair; each run asks one
  question before it that is not counted, and both clients have run once at 8 at once before the first pair.
- vLLM's client is loaded once and waits between its turns. The server, on one thread, has the first core for itself and
  the clients the others: what a client takes of the machine does not slow the server that it measures.
- Prompts of some 630 tokens, one a prefill step: TTFT is then 100 ms and more, as on the machines that `bench` is for, and
  not the time that a Python client takes to send a request; and which prompts share a step, which sets the TTFT of all
  of them, does not hang on the microseconds in which requests come.

Thinking is off because with it the first token is the mark that opens a thought, which vLLM's client sees by the event
that comes with it, and ours, which waits for text, one token later.

Not judged, but printed: TPOT and ITL, and the same ratios "at equal pace", where each client's figure is set against what
the server's own histograms say of the same requests. Where those are near 1 and the plain ones are not, something else
took the machine.
"""

import argparse
import json
import os
import platform
import random
import re
import secrets
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kimisession.node.benchmark import Endpoint, Load, NoAnswer, ask, figure, measure_pass, thinking_switch
from kimisession.rehearsal.mini_kimi import make_mini_kimi
from kimisession.rehearsal.vllm_cpu import VLLM_CPU_ENV, vllm_cpu_argv

ROOT = Path(__file__).parent.parent
PYTHON = Path(os.environ.get("KIMISESSION_ENGINE_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
MODEL = "mini-kimi"
CORES = sorted(os.sched_getaffinity(0))
AT_ONCE = (1, 2, 8)
ROUNDS = {1: 6, 2: 4, 8: 3}  # requests of each client in a run, by how many clients there are
LETTERS, TOKENS = 600, 128  # letters of a prompt (mini-kimi's tokens are letters), tokens of an answer
MAX_MODEL_LEN = 1024  # tokens of a prefill step as well: one prompt fits, and two do not
WITHIN = 0.05

#: vLLM's own client, loaded once: a line of JSON arguments in, a line of JSON figures out. The console script cannot be
#: used: it looks for the metadata of a package called vllm, which vllm-cpu is not.
THEIRS = """
import asyncio, json, sys
from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
answers, sys.stdout = sys.stdout, sys.stderr
print("loaded", file=answers, flush=True)
for line in sys.stdin:
    result = asyncio.run(main_async(parser.parse_args(json.loads(line))))
    kept = {name: value for name, value in result.items() if isinstance(value, (int, float))}
    print(json.dumps(kept), file=answers, flush=True)
"""

#: Name, path in our pass, factor to their unit, their key, and the server's own pace beside it: more seconds of it mean
#: more (1) or less (-1) of the figure. Those with a pace are judged.
FIGURES = (
    ("output tok/s", ("output_tokens_per_s",), 1, "output_throughput", "server_latency_s", -1),
    ("TTFT, mean", ("ttft_s", "mean"), 1000, "mean_ttft_ms", "server_ttft_s", 1),
    ("TPOT, mean", ("tpot_s", "mean"), 1000, "mean_tpot_ms", "", 0),
    ("ITL, mean", ("itl_s", "mean"), 1000, "mean_itl_ms", "", 0),
)
HISTOGRAMS = {"server_ttft_s": "time_to_first_token_seconds", "server_latency_s": "e2e_request_latency_seconds"}


def a_free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(folder: Path, key: str) -> Iterator[Endpoint]:
    """Real vLLM, serving `folder`."""
    port = a_free_port()
    argv = [*vllm_cpu_argv(PYTHON, folder, port, MODEL, MAX_MODEL_LEN), f"--max-num-batched-tokens={MAX_MODEL_LEN}"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(argv, env=environment(key), stdout=log, stderr=log, cwd=folder)
    os.sched_setaffinity(server.pid, {CORES[0]})  # before it has any thread or child
    endpoint = Endpoint(f"http://127.0.0.1:{port}", key)
    try:
        until = time.monotonic() + 300
        while True:
            try:
                endpoint.first_model()
                break
            except NoAnswer:
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"vLLM did not start:\n{(folder / 'server.log').read_text()[-3000:]}") from None
                time.sleep(0.5)
        yield endpoint
    finally:
        server.terminate()
        server.wait()


def environment(key: str) -> dict[str, str]:
    """Of both processes in vLLM's environment: one thread (`VLLM_CPU_ENV`). The key is in no argv."""
    return {**os.environ, **VLLM_CPU_ENV, "VLLM_API_KEY": key, "OPENAI_API_KEY": key}


@contextmanager
def their_client(folder: Path, key: str) -> Iterator[subprocess.Popen[str]]:
    """vLLM's client, waiting for arguments."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (folder / "client.log").open("wb") as log:
        client = subprocess.Popen([PYTHON, "-c", THEIRS], env=environment(key), stderr=log, cwd=folder, **pipes)
    try:
        if client.stdout is None or client.stdout.readline() != "loaded\n":
            raise SystemExit(f"vLLM's client did not start:\n{(folder / 'client.log').read_text()[-3000:]}")
        yield client
    finally:
        if client.stdin:
            client.stdin.close()
        client.wait()


def theirs(
    client: subprocess.Popen[str], endpoint: Endpoint, folder: Path, at_once: int, texts: Sequence[str]
) -> dict[str, float]:
    """One run of `vllm bench serve` over these texts."""
    talks = [{"conversations": [{"value": text}, {"value": "-"}]} for text in texts]
    (folder / "texts.json").write_text(json.dumps(talks))
    argv = [
        "--backend=openai-chat",
        "--endpoint=/v1/chat/completions",
        f"--base-url={endpoint.base_url}",
        f"--model={MODEL}",
        f"--tokenizer={folder}",
        "--dataset-name=sharegpt",
        f"--dataset-path={folder / 'texts.json'}",
        f"--sharegpt-output-len={TOKENS}",
        "--disable-shuffle",
        "--ignore-eos",
        f"--extra-body={json.dumps(thinking_switch(False))}",  # --chat-template-kwargs stays in the client
        f"--num-prompts={len(texts)}",
        f"--max-concurrency={at_once}",
        "--disable-tqdm",
    ]
    if client.stdin is None or client.stdout is None:
        raise SystemExit("vLLM's client has no pipes")
    print(json.dumps(argv), file=client.stdin, flush=True)
    answer = client.stdout.readline()
    if not answer:
        raise SystemExit(f"vLLM's client ended:\n{(folder / 'client.log').read_text()[-3000:]}")
    found = dict(json.loads(answer))
    if found["failed"] or found["completed"] != len(texts):
        raise SystemExit(f"{found['completed']} of vLLM's {len(texts)} requests were answered")
    return found


def letters_for(pair: int) -> str:
    """The prompt of a pair, but for the number of the request."""
    return "".join(random.Random(pair).choices(string.ascii_uppercase, k=LETTERS))


def texts_of(load: Load, numbers: Sequence[str]) -> list[str]:
    """What our requests say, as text."""
    return [json.loads(load.body(MODEL, number))["messages"][0]["content"] for number in numbers]


def histograms(endpoint: Endpoint) -> dict[str, tuple[float, float]]:
    """(sum of seconds, requests) of the server's own histograms."""
    connection = endpoint.connect()
    endpoint.send(connection, "GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    found = {}
    for key, name in HISTOGRAMS.items():
        values = [re.search(rf"vllm:{name}_{what}{{.*}} (\S+)", page) for what in ("sum", "count")]
        total, count = (float(match[1]) if match else 0.0 for match in values)
        found[key] = total, count
    return found


def paced(endpoint: Endpoint, run: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The figures of a run, with the server's own means over the same requests."""
    before = histograms(endpoint)
    found = run()
    after = histograms(endpoint)
    for key in HISTOGRAMS:
        found[key] = (after[key][0] - before[key][0]) / (after[key][1] - before[key][1])
    return found


def ours(endpoint: Endpoint, load: Load, at_once: int, numbers: Sequence[str]) -> dict[str, float]:
    """One pass of our bench, figures under their names; as theirs does, the first request goes before, not counted."""
    ask(endpoint, load.body(MODEL, numbers[0]))
    one = measure_pass(endpoint, [load.body(MODEL, number) for number in numbers], at_once)
    if one["errors"]:
        raise SystemExit(f"requests failed: {one['first_error']}")
    found = {key: (figure(one, path) or 0.0) * factor for _, path, factor, key, _, _ in FIGURES}
    return {**found, "total_output_tokens": one["completion_tokens"], "total_input_tokens": one["prompt_tokens"]}


def cpu_seconds() -> tuple[float, float]:
    """(CPU seconds that the machine has spent, those of this process and its descendants among them)."""
    tick = os.sysconf("SC_CLK_TCK")
    spent = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        stats[int(path.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine, layer = 0, {os.getpid()}
    while layer:
        mine += sum(stats[pid][1] for pid in layer if pid in stats)
        layer = {pid for pid, (parent, _) in stats.items() if parent in layer}
    return (sum(spent) - spent[3] - spent[4]) / tick, mine / tick


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    if args.pairs < 5:
        raise SystemExit("the rule wants 5 pairs or more")
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is not there: scripts/setup-vllm-cpu.sh makes it")
    began = time.monotonic()
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, nice {os.nice(0)}, load {os.getloadavg()[0]:.2f}\n"
        f"{TOKENS} tokens of every answer, {args.pairs} pairs"
    )
    key = secrets.token_urlsafe(16)
    pairs: dict[int, list[tuple[dict[str, float], dict[str, float]]]] = {at_once: [] for at_once in AT_ONCE}
    os.sched_setaffinity(0, set(CORES[1:] or CORES))
    with tempfile.TemporaryDirectory(prefix="kimisession-vs-") as name:
        folder = Path(name)
        make_mini_kimi(folder)
        with served(folder, key) as endpoint, their_client(folder, key) as client:
            print(f"vLLM {endpoint.json('GET', '/version')['version']}, ready after {time.monotonic() - began:.0f} s")
            for pair in range(args.pairs + 1):  # the first one warms both sides up, and does not count
                for at_once in AT_ONCE if pair else AT_ONCE[-1:]:
                    load = Load(
                        ROUNDS[at_once], (), TOKENS, thinking=False, ignore_eos=True, question=letters_for(pair)
                    )
                    numbers = [f"{at_once}-{number:03}" for number in range(ROUNDS[at_once] * at_once)]
                    clients = [
                        partial(ours, endpoint, load, at_once, numbers),
                        partial(theirs, client, endpoint, folder, at_once, texts_of(load, numbers)),
                    ]
                    turn = 1 if pair % 2 else -1
                    before, start = cpu_seconds(), time.monotonic()
                    mine, other = [paced(endpoint, run) for run in clients[::turn]][::turn]
                    if pair:
                        pairs[at_once].append((mine, other))
                    spent, own = (after - then for after, then in zip(cpu_seconds(), before, strict=True))
                    others = (spent - own) / (time.monotonic() - start) / (os.cpu_count() or 1)
                    print(
                        f"  pair {pair}, {at_once} at once: tok/s {mine['output_throughput']:.1f} and "
                        f"{other['output_throughput']:.1f}, TTFT ms {mine['mean_ttft_ms']:.1f} and "
                        f"{other['mean_ttft_ms']:.1f}, others took {others:.0%} of the machine",
                        file=sys.stderr,
                    )
    code = judge(pairs)
    print(f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.2f}")
    return code


def judge(pairs: Mapping[int, list[tuple[dict[str, float], dict[str, float]]]]) -> int:
    """Print a line for each figure; 1 when the median of one that counts is off."""
    ok = True
    for at_once, found in pairs.items():
        tokens = [sum(one["total_output_tokens"] for one in side) for side in zip(*found, strict=True)]
        prompts = [sum(one["total_input_tokens"] for one in side) for side in zip(*found, strict=True)]
        if tokens[0] != tokens[1] or prompts[0] != prompts[1]:
            raise SystemExit(f"they were not asked the same: {tokens} tokens answered, {prompts} in prompts")
        print(f"{at_once} at once: {tokens[0]:g} tokens answered, {prompts[0]:g} in prompts, by each")
        for name, _, _, key, pace, direction in FIGURES:
            plain = [mine[key] / other[key] for mine, other in found]
            ratio = statistics.median(plain)
            medians = [statistics.median(one[key] for one in side) for side in zip(*found, strict=True)]
            told = f"{name} at {at_once} at once, ours/vLLM's {ratio:.4f} [{min(plain):.4f} to {max(plain):.4f}]"
            told += f", medians {medians[0]:.2f} and {medians[1]:.2f}"
            if not direction:
                print(f"      {told} (not judged)")
                continue
            paced_ratios = [mine[key] / other[key] * (other[pace] / mine[pace]) ** direction for mine, other in found]
            good = abs(ratio - 1) <= WITHIN
            ok &= good
            print(
                f"ratio {told} (within {WITHIN:.2f} of 1){'' if good else ' MISSED'}; "
                f"at equal pace {statistics.median(paced_ratios):.4f}"
            )
    print(f"within {WITHIN:.2f} of 1, all six: {'yes' if ok else 'NO'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
