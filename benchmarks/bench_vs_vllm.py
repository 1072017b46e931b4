"""`bench` beside `vllm bench serve`, on the same real server: output throughput and mean time to first token.

    .venv/bin/python benchmarks/bench_vs_vllm.py [--repeat 5]

Needs the environment of scripts/setup-vllm-cpu.sh (.venv-vllm; KIMISESSION_ENGINE_PYTHON names another). One vLLM serves
mini-kimi on the CPU. Both clients send chat completions of the same length (prompt tokens are matched by the server's
own count), run on to the same number of tokens, and take turns, the first one changing; vLLM's client is loaded once
and waits between its turns. Thinking is off: with it the first token is the mark that opens a thought, which vLLM's
client sees by the event that comes with it, and ours, which waits for text, one token later. Prints the median of
ours / theirs over the pairs as a ratio a line, and ends with 1 when throughput or mean TTFT is more than 5% off.

A burst of other work on the machine slows the server under one of the two. What is judged is therefore each client's
figure against what the server says of the same requests in its own histograms (TTFT, and latency for throughput): the
ratio "at equal pace". The plain ratio stands beside it, and is the same on a machine that does nothing else.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kimisession.node.benchmark import Endpoint, Load, NoAnswer, ask, figure, measure_pass, read_sample, thinking_switch
from kimisession.rehearsal.mini_kimi import make_mini_kimi
from kimisession.rehearsal.vllm_cpu import VLLM_CPU_ENV, vllm_cpu_argv

ROOT = Path(__file__).parent.parent
PYTHON = Path(os.environ.get("KIMISESSION_ENGINE_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
MODEL = "mini-kimi"
AT_ONCE = (1, 2, 8)
PROMPT_TOKENS, TOKENS, ROUNDS = 64, 128, 8
WITHIN = 0.05

#: The server computes on one core, so that on a machine with two the client has the other: measured is the client.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

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

#: Name, path in our pass, factor to their unit, their key, and the server's own pace in whose terms it is judged:
#: more seconds of it mean more (1) or less (-1) of the figure, 0 is not judged.
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
    argv = vllm_cpu_argv(PYTHON, folder, port, MODEL, max_model_len=1024)
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(argv, env={**environment(key), **ONE_THREAD}, stdout=log, stderr=log, cwd=folder)
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
    """Of both processes in vLLM's environment. The key is in no argv."""
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
    client: subprocess.Popen[str], endpoint: Endpoint, folder: Path, at_once: int, seed: int
) -> dict[str, float]:
    """One run of `vllm bench serve`."""
    argv = [
        "--backend=openai-chat",
        "--endpoint=/v1/chat/completions",
        f"--base-url={endpoint.base_url}",
        f"--model={MODEL}",
        f"--tokenizer={folder}",
        "--dataset-name=random",
        f"--random-input-len={PROMPT_TOKENS}",
        f"--random-output-len={TOKENS}",
        "--ignore-eos",
        f"--chat-template-kwargs={json.dumps(thinking_switch(False)['chat_template_kwargs'])}",
        f"--num-prompts={ROUNDS * at_once}",
        f"--max-concurrency={at_once}",
        f"--seed={seed}",
        "--disable-tqdm",
    ]
    if client.stdin is None or client.stdout is None:
        raise SystemExit("vLLM's client has no pipes")
    print(json.dumps(argv), file=client.stdin, flush=True)
    answer = client.stdout.readline()
    if not answer:
        raise SystemExit(f"vLLM's client ended:\n{(folder / 'client.log').read_text()[-3000:]}")
    found = dict(json.loads(answer))
    if found["failed"]:
        raise SystemExit(f"{found['failed']} of vLLM's requests failed")
    return found


def question(endpoint: Endpoint, prompt_tokens: int) -> str:
    """A prompt of so many tokens, by the server's own count; mini-kimi's tokens are letters."""
    letters = "".join(random.Random(1).choices(string.ascii_uppercase, k=4 * PROMPT_TOKENS))
    sample = read_sample(ask(endpoint, Load(max_tokens=1, thinking=False, question=letters).body(MODEL, "000-000000")))
    if sample.failure:
        raise SystemExit(sample.failure)
    return letters[: max(1, len(letters) - (sample.prompt_tokens - prompt_tokens))]


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


def ours(endpoint: Endpoint, load: Load, at_once: int, number: int) -> dict[str, float]:
    """One pass of our bench, figures under their names; as theirs does, one request goes before and is not counted."""
    ask(endpoint, load.body(MODEL, f"999-{number:06}"))
    one = measure_pass(
        endpoint, [load.body(MODEL, f"{i:03}-{number:06}") for i in range(load.rounds * at_once)], at_once
    )
    if one["errors"]:
        raise SystemExit(f"requests failed: {one['first_error']}")
    found = {key: (figure(one, path) or 0.0) * factor for _, path, factor, key, _, _ in FIGURES}
    return {**found, "total_output_tokens": one["completion_tokens"], "total_input_tokens": one["prompt_tokens"]}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is not there: scripts/setup-vllm-cpu.sh makes it")
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, nice {os.nice(0)}\n"
        f"{TOKENS} tokens of every request, {ROUNDS} requests of each client, {args.repeat} pairs"
    )
    key = secrets.token_urlsafe(16)
    pairs: dict[int, list[tuple[dict[str, float], dict[str, float]]]] = {at_once: [] for at_once in AT_ONCE}
    with tempfile.TemporaryDirectory(prefix="kimisession-vs-") as name:
        folder = Path(name)
        make_mini_kimi(folder)
        with served(folder, key) as endpoint, their_client(folder, key) as client:
            print(f"vLLM {endpoint.json('GET', '/version')['version']}")
            warm = theirs(client, endpoint, folder, max(AT_ONCE), 0)
            prompt_tokens = round(warm["total_input_tokens"] / warm["completed"])
            load = Load(
                rounds=ROUNDS,
                max_tokens=TOKENS,
                thinking=False,
                ignore_eos=True,
                question=question(endpoint, prompt_tokens),
            )
            ours(endpoint, load, max(AT_ONCE), 0)
            for number in range(1, args.repeat + 1):
                for at_once in AT_ONCE:
                    clients = [
                        partial(ours, endpoint, load, at_once, number),
                        partial(theirs, client, endpoint, folder, at_once, number),
                    ]
                    turn = 1 if number % 2 else -1
                    mine, other = [paced(endpoint, run) for run in clients[::turn]][::turn]
                    pairs[at_once].append((mine, other))
                    print(f"  pair {number}, {at_once} at once, load {os.getloadavg()[0]:.2f}", file=sys.stderr)
    return judge(pairs)


def judge(pairs: Mapping[int, list[tuple[dict[str, float], dict[str, float]]]]) -> int:
    """Print a line for each figure; 1 when one that counts is off."""
    ok = True
    for at_once, found in pairs.items():
        tokens = [sum(one["total_output_tokens"] for one in side) for side in zip(*found, strict=True)]
        prompts = [sum(one["total_input_tokens"] for one in side) for side in zip(*found, strict=True)]
        print(
            f"{at_once} at once: {tokens[0]:g} and {tokens[1]:g} tokens, {prompts[0]:g} and {prompts[1]:g} of prompts"
        )
        for name, _, _, key, pace, direction in FIGURES:
            plain = statistics.median(mine[key] / other[key] for mine, other in found)
            medians = [statistics.median(one[key] for one in side) for side in zip(*found, strict=True)]
            told = f"plain {plain:.4f}, medians {medians[0]:.2f} and {medians[1]:.2f}"
            if not direction:
                print(f"      {name} at {at_once} at once, ours/vLLM's {told} (not judged)")
                continue
            ratios = [mine[key] / other[key] * (other[pace] / mine[pace]) ** direction for mine, other in found]
            ratio = statistics.median(ratios)
            good = abs(ratio - 1) <= WITHIN
            ok &= good
            print(
                f"ratio {name} at {at_once} at once, ours/vLLM's at equal pace {ratio:.4f} [{min(ratios):.4f} to "
                f"{max(ratios):.4f}] (within {WITHIN:.2f} of 1){'' if good else ' MISSED'}; {told}"
            )
    print(f"load {os.getloadavg()[0]:.2f}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
