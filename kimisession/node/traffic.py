"""Reading an engine's /metrics page into the few counters that say whether somebody is being served."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Counters:
    """One reading, summed over engines and ranks. Counts are since the engine started; a smaller one means a restart.

    `running` and `waiting` are requests now; `finished` are requests that came to their own end, `aborted` those that
    a client or an error ended; `kv_usage` is the fullest engine's share of its KV cache (0 to 1), None where the page
    does not say.
    """

    running: float
    waiting: float
    prompt_tokens: float
    generation_tokens: float
    finished: float
    aborted: float
    kv_usage: float | None


def read_metrics(engine_kind: str, text: str) -> Counters:
    """Sum an engine's /metrics text (Prometheus text format) over its label sets.

    ValueError, in one sentence, for an unknown engine kind, for a page that lacks a needed family, and for a count that is
    not finite: a page that is not the engine's must never read as an engine without traffic.
    """
    if engine_kind not in _READERS:
        raise ValueError(f"No metrics reader for engine kind {engine_kind!r}; known kinds: {', '.join(_READERS)}.")
    counters = _READERS[engine_kind](_Page(engine_kind, text))
    if not all(math.isfinite(count) for count in astuple(counters)[:-1]):  # all but kv_usage
        raise ValueError(f"The page has a count that is no number: {counters}.")
    return counters


class _Page:
    """The samples of one page by name."""

    _SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? +(\S+)(?: +-?\d+)?")
    _LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

    def __init__(self, engine_kind: str, text: str) -> None:
        self._engine_kind = engine_kind
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            sample = self._SAMPLE.fullmatch(line.strip())
            if sample is not None:
                name, labels, value = sample.groups()
                self._samples.setdefault(name, []).append((dict(self._LABEL.findall(labels or "")), _number(value)))

    def need(self, *names: str) -> None:
        """ValueError unless the page has a number for every one of these."""
        missing = [name for name in names if math.isnan(self.sum(name)) or name not in self._samples]
        if missing:
            raise ValueError(f"The page is not the metrics of an engine of kind {self._engine_kind}: "
                             f"it lacks {', '.join(missing)}.")  # fmt: skip

    def sum(self, name: str, **labels: tuple[str, ...]) -> float:
        """The sum over the samples whose labels have one of the given values; 0 where there is none."""
        return sum(
            value
            for have, value in self._samples.get(name, [])
            if all(have.get(label) in wanted for label, wanted in labels.items())
        )

    def largest(self, name: str) -> float | None:
        """The largest sample, None where there is none."""
        return max((value for _, value in self._samples.get(name, []) if not math.isnan(value)), default=None)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _vllm(page: _Page) -> Counters:
    """Names as in vllm/v1/metrics/loggers.py of 0.15.0 to 0.33.0; held against a recorded page of 0.32.0 (CPU)."""
    running, waiting = "vllm:num_requests_running", "vllm:num_requests_waiting"
    prompt, generation = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
    ended = "vllm:request_success_total"
    page.need(running, waiting, prompt, generation, ended)
    # Despite its name the family counts every end; the reasons are those of vllm/v1/engine/__init__.py.
    aborted = page.sum(ended, finished_reason=("abort", "error"))
    return Counters(
        running=page.sum(running),
        waiting=page.sum(waiting),
        prompt_tokens=page.sum(prompt),
        generation_tokens=page.sum(generation),
        finished=page.sum(ended) - aborted,
        aborted=aborted,
        kv_usage=page.largest("vllm:kv_cache_usage_perc"),
    )


def _sglang(page: _Page) -> Counters:
    """Names as in sglang/srt/observability/metrics_collector.py of 0.5.23 and of KT-Kernel's fork 0.7.2
    (--enable-metrics); not yet held against a recorded page. Its generation_tokens_total moves only when a request ends,
    so a long answer would look stalled: realtime_tokens_total moves while tokens come. Counters that never counted are
    not on its page.
    """
    running, waiting, tokens = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:realtime_tokens_total"
    page.need(running, waiting)
    aborted = page.sum("sglang:num_aborted_requests_total")
    return Counters(
        running=page.sum(running),
        waiting=page.sum(waiting),
        prompt_tokens=page.sum(tokens, mode=("prefill_compute", "prefill_cache")),
        generation_tokens=page.sum(tokens, mode=("decode",)),
        finished=page.sum("sglang:num_requests_total"),
        aborted=aborted,
        kv_usage=page.largest("sglang:token_usage"),
    )


_READERS: Mapping[str, Callable[[_Page], Counters]] = {"vllm": _vllm, "sglang": _sglang}
