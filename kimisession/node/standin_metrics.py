"""The stand-in engine's /metrics: vLLM's names, types and labels (vllm/v1/metrics/loggers.py of 0.33.0)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

# As vLLM 0.33.0 orders them (vllm/v1/engine/__init__.py). A client that hangs up is an "abort".
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
_LATENCY_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)


class Histogram:
    """A Prometheus histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, name: str, labels: str) -> Iterator[str]:
        """Its lines in the text format: cumulative buckets, sum, count."""
        bounds = [str(bound) for bound in self._bounds] + ["+Inf"]
        for bound, count in zip(bounds, accumulate(self._counts)):
            yield f'{name}_bucket{{{labels},le="{bound}"}} {float(count)}'
        yield f"{name}_sum{{{labels}}} {self._sum}"
        yield f"{name}_count{{{labels}}} {float(sum(self._counts))}"


@dataclass
class Meters:
    """What the page tells. Counts are of requests and tokens; `held_tokens` is what running requests keep in KV."""

    running: int = 0
    waiting: int = 0
    held_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISHED_REASONS, 0))
    ttft_s: Histogram = field(default_factory=lambda: Histogram(_TTFT_S))
    latency_s: Histogram = field(default_factory=lambda: Histogram(_LATENCY_S))

    def page(self, model_id: str, kv_tokens: int) -> str:
        """The page as text; `kv_tokens` is how many tokens the KV cache holds."""
        labels = f'engine="0",model_name="{model_id}"'
        usage = min(1.0, self.held_tokens / kv_tokens)
        lines: list[str] = []
        for name, kind, value, help_text in (
            ("num_requests_running", "gauge", self.running, "Number of requests in execution."),
            ("num_requests_waiting", "gauge", self.waiting, "Number of requests waiting to be processed."),
            ("kv_cache_usage_perc", "gauge", usage, "KV-cache usage. 1 means 100 percent usage."),
            ("num_preemptions_total", "counter", 0, "Cumulative number of preemptions."),
            ("prompt_tokens_total", "counter", self.prompt_tokens, "Number of prompt tokens processed."),
            ("generation_tokens_total", "counter", self.generation_tokens, "Number of tokens generated."),
        ):
            lines += _head(name, kind, help_text)
            lines.append(f"vllm:{name}{{{labels}}} {float(value)}")
        lines += _head("request_success_total", "counter", "Count of finished requests.")
        for reason, count in self.finished.items():
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(count)}')
        for name, histogram in (
            ("time_to_first_token_seconds", self.ttft_s),
            ("e2e_request_latency_seconds", self.latency_s),
        ):
            lines += _head(name, "histogram", "Histogram of " + name.replace("_", " ") + ".")
            lines += histogram.samples(f"vllm:{name}", labels)
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP vllm:{name} {help_text}", f"# TYPE vllm:{name} {kind}"]
