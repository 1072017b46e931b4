"""The stand-in engine's log: a cold start in vLLM's words, so that whatever reads the one reads the other.

Wording and places are those of vLLM 0.19.1's wheel; what is made up says "stand-in".
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_STDOUT, _STDERR = 1, 2
APISERVER, ENGINE, WORKER = "APIServer", "EngineCore_DP0", "Worker_TP0"

KV_BYTES_PER_TOKEN = 70_272  # Kimi K2's MLA: 61 layers x 576 x 2 bytes (public write-up, Feb 2026)
GRAPHS = 11


@dataclass(frozen=True)
class Line:
    """One message of one process. Without a place it is a progress bar, which may redraw the line it is on."""

    process: str
    place: str
    text: str
    redraws: bool = False


class Log:
    """Prints vLLM-shaped lines. As in vLLM, messages go to stdout; progress bars and uvicorn's words to stderr."""

    def __init__(self) -> None:
        self._drawing = False

    def write(self, line: Line) -> None:
        """Print a message, or a bar as tqdm draws it: redrawn behind a carriage return, or on a line of its own."""
        if line.place:
            return self.info(line.process, line.place, line.text)
        head = "\r" if self._drawing else self._prefix(line.process)
        self._drawing = line.redraws
        return _put(_STDERR, head + line.text + ("" if line.redraws else "\n"))

    def info(self, process: str, place: str, message: str) -> None:
        """Print "(process pid=1) INFO 02-11 10:00:00 [place] message"."""
        self._message(process, "INFO", place, message)

    def error(self, process: str, place: str, lines: Sequence[str]) -> None:
        """Print an error line by line; without a place, bare behind the process, as an uncaught exception comes."""
        for line in lines:
            self._message(process, "ERROR", place, line)

    def uvicorn(self, message: str) -> None:
        """Print one of uvicorn's own lines."""
        _put(_STDERR, f"{self._prefix(APISERVER)}INFO:     {message}\n")

    def _message(self, process: str, level: str, place: str, message: str) -> None:
        head = f"{level} {time.strftime('%m-%d %H:%M:%S')} [{place}] " if place else ""
        _put(_STDOUT, f"{self._prefix(process)}{head}{message}\n")

    def _prefix(self, process: str) -> str:
        return f"({process} pid={os.getpid()}) "


def _put(descriptor: int, text: str) -> None:
    """Write at once. A reader that is gone changes nothing: vLLM lives on without its log, and so must we."""
    data = memoryview(text.encode())
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def cold_start(
    model: Path, shards: int, weights_bytes: int, max_model_len: int, kv_tokens: int, seconds: Mapping[str, float]
) -> Mapping[str, Sequence[Line]]:
    """What each phase prints, in order of the phases; `seconds` is how long each of them takes."""
    load_s = f"{seconds['load']:.2f}"
    init_s = f"{seconds['compile'] + seconds['memory'] + seconds['graphs']:.2f}"
    weights_gib, kv_gib = weights_bytes / 2**30, kv_tokens * KV_BYTES_PER_TOKEN / 2**30
    concurrency = f"{kv_tokens / max_model_len:.2f}x"
    return {
        "boot": [
            Line(
                APISERVER, "standin.py:1", "This is kimisession's stand-in engine: shaped like vLLM, without a model."
            ),
            Line(APISERVER, "utils.py:233", f"non-default args: {{'model': '{model}'}}"),
            Line(APISERVER, "model.py:549", "Resolved architecture: StandIn"),
            Line(APISERVER, "model.py:1678", f"Using max model len {max_model_len}"),
            Line(ENGINE, "core.py:105", "Initializing a V1 LLM engine (v0.0.0+stand-in) with config: none"),
        ],
        "load": [
            Line(WORKER, "gpu_model_runner.py:4735", f"Starting to load model {model}..."),
            *_bars("Loading safetensors checkpoint shards", " Completed |", shards),
            Line(WORKER, "default_loader.py:384", f"Loading weights took {load_s} seconds"),
            Line(
                WORKER,
                "gpu_model_runner.py:4820",
                f"Model loading took {weights_gib:.2f} GiB memory and {load_s} seconds",
            ),
        ],
        "compile": [
            Line(WORKER, "backends.py:1051", "Using cache directory: /dev/null for vLLM's torch.compile"),
            Line(WORKER, "backends.py:1111", f"Dynamo bytecode transform time: {seconds['compile'] / 2:.2f} s"),
            Line(WORKER, "monitor.py:48", f"torch.compile took {seconds['compile']:.2f} s in total"),
        ],
        "memory": [
            Line(WORKER, "monitor.py:76", f"Initial profiling/warmup run took {seconds['memory'] / 2:.2f} s"),
            Line(WORKER, "gpu_worker.py:436", f"Available KV cache memory: {kv_gib:.2f} GiB"),
            Line(ENGINE, "kv_cache_utils.py:1319", f"GPU KV cache size: {kv_tokens:,} tokens"),
            Line(
                ENGINE,
                "kv_cache_utils.py:1324",
                f"Maximum concurrency for {max_model_len:,} tokens per request: {concurrency}",
            ),
        ],
        "graphs": [
            *_bars("Capturing CUDA graphs (decode, FULL)", "|#####     |", GRAPHS, redraws=True),
            Line(
                WORKER,
                "gpu_model_runner.py:6046",
                f"Graph capturing finished in {seconds['graphs']:.0f} secs, took 0.00 GiB",
            ),
        ],
        "serve": [
            Line(ENGINE, "core.py:283", f"init engine (profile, create kv cache, warmup model) took {init_s} seconds"),
            Line(APISERVER, "api_server.py:592", "Supported tasks: ['generate']"),
        ],
    }


def _bars(title: str, drawn: str, total: int, *, redraws: bool = False) -> Sequence[Line]:
    return [
        Line(
            WORKER,
            "",
            f"{title}: {100 * done // total:3d}%{drawn} {done}/{total} [00:00<00:00, 1.00it/s]",
            redraws=redraws and done < total,
        )
        for done in range(total + 1)
    ]
