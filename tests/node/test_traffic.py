"""The metrics reader: what counts, what is summed, and what must never read as silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimisession.node.traffic import Counters, read_metrics

METRICS = Path(__file__).parents[1] / "fixtures" / "metrics"
RECORDED = sorted(METRICS.glob("vllm*"))

TWO_ENGINES = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="kimi"} 2.0
vllm:num_requests_running{engine="1",model_name="kimi"} 3.0
vllm:num_requests_waiting{engine="0",model_name="kimi"} 0.0
vllm:num_requests_waiting{engine="1",model_name="kimi"} 4.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="kimi",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="kimi"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="kimi"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="kimi"} 1.5e+06
vllm:prompt_tokens_total{engine="1",model_name="kimi"} 10.0
vllm:prompt_tokens_created{engine="0",model_name="kimi"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="kimi"} 100.0
vllm:generation_tokens_total{engine="1",model_name="kimi"} 11.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="kimi"} 5.0
vllm:request_success_total{engine="1",finished_reason="length",model_name="kimi"} 2.0
vllm:request_success_total{engine="1",finished_reason="repetition",model_name="kimi"} 1.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="kimi"} 3.0
vllm:request_success_total{engine="1",finished_reason="error",model_name="kimi"} 1.0
"""


def test_engines_are_summed_and_the_fullest_kv_cache_speaks_for_all() -> None:
    assert read_metrics("vllm", TWO_ENGINES) == Counters(
        running=5, waiting=4, prompt_tokens=1_500_010, generation_tokens=111, finished=8, aborted=4, kv_usage=0.75
    )


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_a_recorded_page_is_read(path: Path) -> None:
    counters = read_metrics("vllm", path.read_text())
    assert counters.running >= 0
    assert counters.kv_usage is not None


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html><body>404 Not Found</body></html>",
        '{"detail": "Not Found"}',
        'python_gc_objects_collected_total{generation="0"} 1.0\nprocess_cpu_seconds_total 3.0\n',
        TWO_ENGINES.replace("vllm:", "sglang:"),
    ],
)
def test_a_page_that_is_not_the_engines_is_never_zero_traffic(page: str) -> None:
    with pytest.raises(
        ValueError, match="not the metrics of an engine of kind vllm: it lacks vllm:num_requests_running"
    ):
        read_metrics("vllm", page)


@pytest.mark.parametrize(
    "family",
    [
        "num_requests_running",
        "num_requests_waiting",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
    ],
)
def test_a_page_cut_short_of_any_needed_family_is_refused_and_says_which(family: str) -> None:
    cut = "\n".join(line for line in TWO_ENGINES.splitlines() if not line.startswith(f"vllm:{family}{{"))
    with pytest.raises(ValueError, match=f"lacks vllm:{family}\\."):
        read_metrics("vllm", cut)


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks vllm:num_requests_running"):
        read_metrics("vllm", TWO_ENGINES.replace("} 2.0", "} two"))


def test_without_a_kv_family_usage_is_unknown_rather_than_zero() -> None:
    assert read_metrics("vllm", TWO_ENGINES.replace("kv_cache_usage_perc", "gpu_cache_usage_perc")).kv_usage is None


def test_label_values_may_hold_anything_that_prometheus_allows() -> None:
    page = TWO_ENGINES.replace('model_name="kimi"', 'model_name="a \\"b\\", finished_reason=x} 9 {"')
    assert read_metrics("vllm", page) == read_metrics("vllm", TWO_ENGINES)


@pytest.mark.parametrize("count", ["+Inf", "NaN"])
def test_a_count_that_is_no_number_is_unknown_and_never_counted(count: str) -> None:
    with pytest.raises(ValueError, match=r"no number|lacks vllm:generation_tokens_total"):
        read_metrics("vllm", TWO_ENGINES.replace(" 11.0", f" {count}"))


def test_sglang_counts_tokens_while_they_come() -> None:
    page = """\
sglang:num_running_reqs{engine_type="unified",model_name="kimi",tp_rank="0"} 2.0
sglang:num_queue_reqs{engine_type="unified",model_name="kimi",tp_rank="0"} 1.0
sglang:token_usage{engine_type="unified",model_name="kimi",tp_rank="0"} 0.5
sglang:realtime_tokens_total{mode="prefill_compute",model_name="kimi"} 70.0
sglang:realtime_tokens_total{mode="prefill_cache",model_name="kimi"} 30.0
sglang:realtime_tokens_total{mode="decode",model_name="kimi"} 400.0
"""
    assert read_metrics("sglang", page) == Counters(2, 1, 100, 400, 0, 0, 0.5)


def test_an_unknown_engine_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'tgi'.*vllm, sglang"):
        read_metrics("tgi", TWO_ENGINES)
