"""The stand-in engine: everything that vLLM shows to the outside, and no model.

    python3 -m kimisession.node.standin --model DIR --served-model-name kimi-k2.5 --port 8000

It starts like vLLM (log lines, phases, a port that opens last), serves like vLLM (OpenAI's routes, streaming,
reasoning, /metrics) and breaks on demand (--fault). Its model id, its headers and its answers say that it is a
stand-in. The API key comes from the environment (VLLM_API_KEY), never from the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kimisession.node.phases import PHASES
from kimisession.node.standin_api import Api, Served
from kimisession.node.standin_faults import FAILURES, HANGS, OTHERS, Fault, die, parse_fault, strike
from kimisession.node.standin_log import APISERVER, Line, Log, cold_start

SUFFIX = "-stand-in"
PHASE_SECONDS = {"boot": 0.2, "load": 0.6, "compile": 0.2, "memory": 0.2, "graphs": 0.2, "serve": 0.1}

# Spelled as in vLLM and without effect here, so that an engine's own flags can be passed on unchanged.
_IGNORED_WITH_VALUE = [
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--decode-context-parallel-size",
    "--gpu-memory-utilization",
    "--max-num-batched-tokens",
    "--kv-cache-dtype",
    "--kv-offloading-size",
    "--dtype",
    "--quantization",
    "--load-format",
    "--model-loader-extra-config",
    "--safetensors-load-strategy",
    "--reasoning-parser",
    "--tool-call-parser",
    "--chat-template",
    "--mm-encoder-tp-mode",
    "--limit-mm-per-prompt",
    "--speculative-config",
    "--compilation-config",
    "--performance-mode",
    "--tokenizer",
    "--seed",
    "--block-size",
    "--uvicorn-log-level",
    "--eplb-config",
]
_IGNORED_SWITCHES = [
    "--trust-remote-code",
    "--enable-auto-tool-choice",
    "--enable-expert-parallel",
    "--enable-eplb",
    "--enforce-eager",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--enable-chunked-prefill",
    "--language-model-only",
    "--enable-log-requests",
    "--disable-custom-all-reduce",
    "--disable-uvicorn-access-log",
    "--async-scheduling",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Start, serve until SIGTERM, and return the exit code: 0 stopped, 1 failed; argparse exits with 2."""
    args = _parser().parse_args(argv)
    log = Log()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    try:
        shards = _shards(args.model)
        listener = _bind(args.host, args.port)
    except (OSError, ValueError) as error:
        print(f"The stand-in engine cannot start: {error}", file=sys.stderr)
        return 1
    weights_bytes = sum(shard.stat().st_size for shard in shards)
    script = cold_start(
        args.model, len(shards), weights_bytes, args.max_model_len, _kv_tokens(args), args.phase_seconds
    )
    with listener, _workers(args.workers) as workers:
        for phase, lines in script.items():
            _play(lines, args.phase_seconds[phase], [f for f in args.fault if f.phase == phase], log)
        return asyncio.run(_serve(args, listener, workers, log))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kimisession.node.standin", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, help="folder with *.safetensors and their index")
    parser.add_argument("--served-model-name", help=f"gets {SUFFIX} appended (default: the folder's name)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one; the log says which")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=256, help="more requests than these wait")
    parser.add_argument("--tokens-per-second", type=float, default=100.0, help="of one request")
    parser.add_argument("--ttft-s", type=float, default=0.05, help="until a request's first token")
    parser.add_argument("--reasoning-tokens", type=int, default=24, help="of one chat answer, before its content")
    parser.add_argument("--phase-seconds", type=_seconds_per_phase, default=PHASE_SECONDS, metavar="boot=1,load=3,...")
    parser.add_argument("--workers", type=int, default=0, help="child processes, as vLLM's engine core and workers")
    parser.add_argument(
        "--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="NAME[@PHASE]|NAME=SECONDS",
        help=f"repeatable; one of {', '.join((*FAILURES, *HANGS, *OTHERS))}",
    )
    for flag in _IGNORED_WITH_VALUE:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    for flag in _IGNORED_SWITCHES:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    return parser


def _fault(text: str) -> Fault:
    try:
        return parse_fault(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds_per_phase(text: str) -> Mapping[str, float]:
    seconds = dict(PHASE_SECONDS)
    for part in filter(None, text.split(",")):
        phase, _, value = part.partition("=")
        if phase not in PHASES:
            raise argparse.ArgumentTypeError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
        seconds[phase] = float(value)
    return seconds


def _leave(signum: int, frame: object) -> NoReturn:
    raise SystemExit(0)


def _shards(model: Path) -> Sequence[Path]:
    """The weight files that the model's index names, every one of them there; ValueError otherwise."""
    index = model / "model.safetensors.index.json"
    if not index.is_file():
        raise ValueError(f"{model} has no model.safetensors.index.json; point --model at a folder with weights.")
    shards = [model / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ValueError(f"{model} lacks {len(missing)} of {len(shards)} shards, first {missing[0]}.")
    return shards


def _bind(host: str, port: int) -> socket.socket:
    """Take the port without opening it: as in vLLM, connections are refused until the engine serves."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


@contextlib.contextmanager
def _workers(number: int) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Child processes that end when we do, however we do: each reads a pipe whose other end only we hold."""
    command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()", "kimisession-stand-in-worker"]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(number)]
    try:
        yield workers
    finally:
        for worker in workers:
            if worker.stdin is not None:
                worker.stdin.close()
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(timeout=0.2)


def _kv_tokens(args: argparse.Namespace) -> int:
    return int(4 * args.max_model_len)


def _play(lines: Sequence[Line], phase_s: float, faults: Sequence[Fault], log: Log) -> None:
    """Print a phase's lines evenly over its seconds; halfway, and surely inside, let its faults happen."""
    begun = time.monotonic()
    halfway = max(1, len(lines) // 2)
    for number, line in enumerate(lines, start=1):
        log.write(line)
        if number == halfway:
            for fault in faults:
                strike(fault, log)
        time.sleep(max(0.0, begun + phase_s * number / len(lines) - time.monotonic()))


async def _serve(
    args: argparse.Namespace, listener: socket.socket, workers: Sequence[subprocess.Popen[bytes]], log: Log
) -> int:
    """Open the port and serve until a signal (0), or until the engine or one of its workers dies (1)."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    exit_code = 0

    def end(code: int) -> None:
        nonlocal exit_code
        exit_code = code
        ended.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(name) is not signal.SIG_IGN:
            loop.add_signal_handler(name, end, 0)
    faults = {fault.name: fault for fault in args.fault}
    api = Api(_served(args, faults), log.uvicorn)
    if "die-after" in faults:
        loop.call_later(faults["die-after"].seconds, end, 1)
    watch = loop.create_task(_first_death(workers, lambda: end(1)))
    host, port = listener.getsockname()[:2]
    log.info(APISERVER, "api_server.py:596", f"Starting vLLM server on http://{host}:{port}")
    server = await loop.create_server(api.connection, sock=listener, backlog=2048)
    for line in (
        f"Started server process [{os.getpid()}]",
        "Waiting for application startup.",
        "Application startup complete.",
    ):
        log.uvicorn(line)
    await ended.wait()
    if exit_code:
        die(log)
    log.uvicorn("Shutting down")
    watch.cancel()
    server.close()
    return exit_code


def _served(args: argparse.Namespace, faults: Mapping[str, Fault]) -> Served:
    name = args.served_model_name or args.model.resolve().name
    return Served(
        model_id=name if SUFFIX[1:] in name else name + SUFFIX,
        model_root=str(args.model),
        api_key=os.environ.get("VLLM_API_KEY") or None,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        kv_tokens=_kv_tokens(args),
        tokens_per_second=args.tokens_per_second,
        ttft_s=args.ttft_s,
        reasoning_tokens=args.reasoning_tokens,
        stalls="stall" in faults,
        metrics_broken="metrics-500" in faults,
        metrics_delay_s=faults["slow-metrics"].seconds if "slow-metrics" in faults else 0.0,
    )


async def _first_death(workers: Sequence[subprocess.Popen[bytes]], tell: Callable[[], None]) -> None:
    """Tell when a worker has ended: vLLM does not outlive its engine core."""
    while all(worker.poll() is None for worker in workers):
        await asyncio.sleep(0.2)
    tell()


if __name__ == "__main__":
    raise SystemExit(main())
