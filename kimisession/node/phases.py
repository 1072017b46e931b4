"""Reading an engine's log, line by line, into the phases of a cold start.

Wording is data: one table per engine kind, each row the phase that a message belongs to and the message as
the engine's own wheel words it. What no row knows is not a mark; the reader never guesses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

PHASES = ("boot", "load", "compile", "memory", "graphs", "serve")
"""In order: process up and imports; weights onto devices; torch.compile; profiling and KV cache; graph capture;
the API server starting. Ready is no phase of the log: it is a completion that came back."""


@dataclass(frozen=True)
class Mark:
    """What one line of a log says about the cold start.

    `done` of `total` are counted in `unit` inside the phase. `facts` are what the line says for sure, as text
    without thousands separators; their names carry the unit (weights_gib, kv_gib, kv_tokens, compile_s, ...).
    """

    phase: str
    done: float | None = None
    total: float | None = None
    unit: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)


class LogReader(Protocol):
    """Reads one engine's log. One reader per start of an engine: it remembers how far the start has come."""

    def read(self, line: str) -> Mark | None:
        """Return the mark of a line, or None where the line says nothing about phases. Never raises.

        The phases of successive marks never go back: a late line of an earlier phase (another rank, another
        process) keeps its facts, but is reported in the phase that the start has already reached.
        """
        ...


@dataclass(frozen=True)
class _Row:
    """One message. Groups `done` and `total` are progress, every other named group is a fact."""

    phase: str
    message: str
    unit: str = ""


# Messages as worded in the wheels of vLLM 0.15.0, 0.19.1, 0.32.0 (CPU) and 0.33.0; where they differ, the row says so.
_VLLM_ROWS = (
    # The logo says "version 0.15.0" behind block characters; without the logo it is the second form.
    _Row("boot", r"(?:\W*version|vLLM server version) +(?P<engine_version>\d+\.\d+[^\s,]*)"),
    _Row("boot", r"non-default args: "),
    _Row("boot", r"Resolved architecture: (?P<architecture>\w+)"),
    _Row("boot", r"Using max model len (?P<max_model_len>\d+)"),
    _Row("boot", r"Initializing a V1 LLM engine \(v(?P<engine_version>[^)]+)\)"),
    _Row("boot", r"world_size=\d+ rank=\d+ "),
    # The second form is that of the second model runner, which 0.33.0 chooses for some architectures.
    _Row("load", r"(?:Starting to load model |Loading model from scratch)"),
    _Row(
        "load",
        r"(?:Loading \S+ checkpoint shards|Multi-thread loading (?:\w+ checkpoint )?shards)"
        r"(?: \(eager\))?:.*?\| (?P<done>\d+)/(?P<total>\d+) ",
        unit="shards",
    ),
    _Row(
        "load",
        r"Loading safetensors using (?:Runai Model Streamer|InstantTensor loader):"
        r".*?\| (?P<done>\d+)/(?P<total>\d+) ",
        unit="tensors",
    ),
    _Row(
        "load",
        r"Loading safetensors using Fastsafetensor loader:"
        r".*?\| (?P<done>\d+)/(?P<total>\d+) ",
        unit="batches",
    ),
    _Row("load", r"Prefetching checkpoint files"),
    _Row("load", r"Loading weights took (?P<load_s>[\d.]+) seconds"),
    # 0.15.0's second model runner leaves the word "memory" out.
    _Row("load", r"Model loading took (?P<weights_gib>[\d.]+) GiB (?:memory )?and "),
    # With a vision encoder the first run through the model begins here, before torch.compile says anything.
    _Row("compile", r"Encoder cache will be initialized with a budget of "),
    _Row("compile", r"Using cache directory: .* for vLLM's torch\.compile"),
    _Row("compile", r"Starting torch\.compile"),
    _Row("compile", r"Dynamo bytecode transform time: (?P<dynamo_s>[\d.]+) s"),
    _Row("compile", r"(?:Compiling a graph|Directly load the compiled graph\(s\)|Cache the graph) "),
    _Row("compile", r"(?:sav(?:ed|ing) AOT compiled function|Directly load AOT compilation|Compiling model again)\b"),
    _Row("compile", r"Warming up model for the compilation"),
    # "takes" in 0.15.0, "took" since 0.19; without ahead-of-time compilation the first run is inside that time.
    _Row(
        "compile",
        r"torch\.compile (?:and initial profiling/warmup run together )?(?:takes|took) (?P<compile_s>[\d.]+) s in",
    ),
    _Row("memory", r"Initial profiling/warmup run took (?P<profile_s>[\d.]+) s"),
    _Row("memory", r"Profiling CUDA graph memory: "),
    _Row("memory", r"Estimated CUDA graph memory: (?P<graphs_estimate_gib>[\d.]+) GiB"),
    _Row("memory", r"Available KV cache memory: (?P<kv_gib>-?[\d.]+) GiB"),
    # The CPU backend has a budget instead of a measurement.
    _Row("memory", r"(?:Explicitly|Auto) set \((?P<kv_gib>[\d.]+)/"),
    # One line since 0.32, two before it; the device was always "GPU" before it.
    _Row(
        "memory",
        r"\w+(?: \+ host)? KV cache size: (?P<kv_tokens>[\d,]+) tokens"
        r"(?:, Maximum concurrency for [\d,]+ tokens per request: (?P<kv_requests>[\d.]+)x)?",
    ),
    _Row("memory", r"Maximum concurrency for [\d,]+ tokens per request: (?P<kv_requests>[\d.]+)x"),
    _Row(
        "graphs",
        r"Capturing (?:[\w -]+ )?CUDA graphs(?: \([^)]*\))?:\s+\d+%\|.*?\| (?P<done>\d+)/(?P<total>\d+) ",
        unit="graphs",
    ),
    _Row("graphs", r"Graph capturing finished in (?P<graphs_s>[\d.]+) secs, took (?P<graphs_gib>-?[\d.]+) GiB"),
    _Row("serve", r"init engine \(profile, create kv cache, warmup model\) took (?P<init_s>[\d.]+) s"),
    _Row("serve", r"Supported tasks: "),
    _Row("serve", r"Starting vLLM (?:API )?server "),
    _Row("serve", r"(?:Started server process|Waiting for application startup|Application startup complete)"),
)

# Messages as worded in the wheel of SGLang 0.5.23, which does without torch.compile by default.
_SGLANG_ROWS = (
    _Row("boot", r"server_args="),
    _Row("boot", r"Init parallel begin\."),
    _Row("load", r"Load weight begin\."),
    _Row(
        "load",
        r"(?:Loading \S+ checkpoint shards|Multi-thread loading shards):.*?\| (?P<done>\d+)/(?P<total>\d+) ",
        unit="shards",
    ),
    # KT-Kernel's, a layer at a time: where host memory ends, this says at which.
    _Row("load", r"(?:\[NativeMoEWrapper Layer |TP MOE layer )(?P<layer>\d+)\b"),
    _Row("load", r"Load weight end\. elapsed=(?P<load_s>[\d.]+) s, .*\bmem usage=(?P<weights_gib>[\d.]+) GB"),
    _Row(
        "memory",
        r"KV Cache is allocated\.(?: dtype: \S+,)? #tokens: (?P<kv_tokens>\d+)"
        r"(?:, KV size: (?P<kv_gib>[\d.]+) GB)?",
    ),
    _Row("memory", r"Memory pool end\."),
    # The fork that KT-Kernel 0.7.2 pins says "cuda graph" (on a CPU "cpu graph") and "Time elapsed: ".
    _Row("graphs", r"Capture (?:[\w ]+ )?(?:CUDA|cuda|cpu) graph begin\b"),
    _Row("graphs", r"Capturing batches [^:]*:\s+\d+%\|.*?\| (?P<done>\d+)/(?P<total>\d+) ", unit="graphs"),
    _Row(
        "graphs",
        r"Capture (?:[\w ]+ )?(?:CUDA|cuda|cpu) graph end\.(?: bs=\[[^\]]*\],)?"
        r" (?:elapsed=|Time elapsed: )(?P<graphs_s>[\d.]+) s[,.] mem usage=(?P<graphs_gib>-?[\d.]+) GB",
    ),
    _Row("serve", r"max_total_num_tokens=(?P<kv_tokens>\d+), .*\bcontext_len=(?P<max_model_len>\d+)"),
    _Row("serve", r"(?:Started server process|Waiting for application startup|Application startup complete)"),
    _Row("serve", r"Uvicorn running on |The server is fired up and ready to roll!"),
)

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class _TableLog:
    """A reader over a table of rows; an engine kind is a table and the shape of its line heads."""

    rows: ClassVar[Sequence[_Row]]
    head: ClassVar[str]
    """What stands before the message; removed when it is there."""

    def __init__(self) -> None:
        self._head = re.compile(self.head)
        self._table: Sequence[tuple[_Row, re.Pattern[str]]] = [(row, re.compile(row.message)) for row in self.rows]
        self._reached = 0

    def read(self, line: str) -> Mark | None:
        """Return the mark of a line; of a line with carriage returns in it, the last one. See `LogReader.read`."""
        mark = None
        # Progress bars redraw themselves with carriage returns and no newline.
        for drawn in re.split(r"[\r\n]+", _ANSI.sub("", line)):
            mark = self._read_message(self._head.sub("", drawn, count=1)) or mark
        return mark

    def _read_message(self, message: str) -> Mark | None:
        for row, pattern in self._table:
            found = pattern.match(message)
            if found is None:
                continue
            said = {name: text.replace(",", "") for name, text in found.groupdict().items() if text is not None}
            done, total = said.pop("done", None), said.pop("total", None)
            place = PHASES.index(row.phase)
            if place < self._reached or done is None or total is None:
                self._reached = max(place, self._reached)
                return Mark(PHASES[self._reached], facts=said)
            self._reached = place
            return Mark(row.phase, done=float(done), total=float(total), unit=row.unit, facts=said)
        return None


class VllmLog(_TableLog):
    """vLLM's log, tested against the wording of 0.15.0, 0.19.1, 0.33.0 and a recorded run of 0.32.0 on the CPU."""

    rows = _VLLM_ROWS
    # "(Worker_TP0 pid=12) INFO 02-11 10:00:00 [core.py:97] "; uvicorn's own lines say "INFO:     "; bars have neither.
    # Since 0.32 the compiler may name the part that it works on, as in "[encoder] torch.compile took".
    head = (
        r"^(?:.*?\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] (?:\[[^\]]*\] )?"
        r"|\s*(?:\(\w+ pid=\d+\) )*(?:INFO:\s+)?)"
    )


class SglangLog(_TableLog):
    """SGLang's log, in the wording of the wheels of 0.5.23 and of KT-Kernel's fork 0.7.2, held against what others
    recorded (tests/fixtures/logs/sglang-*.log)."""

    rows = _SGLANG_ROWS
    # "[2026-02-11 10:00:00 TP0] "; uvicorn's own lines say "INFO:     ".
    head = r"^(?:\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] )?\s*(?:INFO:\s+)?"


_READERS: Mapping[str, type[_TableLog]] = {"vllm": VllmLog, "sglang": SglangLog}


def log_reader(engine_kind: str) -> LogReader:
    """Return a fresh reader for an engine kind; ValueError, naming the known kinds, for one that has none."""
    try:
        return _READERS[engine_kind]()
    except KeyError:
        raise ValueError(
            f"No log reader for engine kind {engine_kind!r}; known kinds: {', '.join(_READERS)}."
        ) from None
