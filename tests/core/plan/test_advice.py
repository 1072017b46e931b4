"""What to change so that a wish fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kimisession.core.plan.advice import advise
from kimisession.core.plan.fit import predict
from kimisession.core.plan.gpus import Gpu, gpu_named
from kimisession.core.plan.setup import CannotPlan, Setup
from kimisession.model_file import card_named

K25 = card_named("Kimi-K2.5")


def gpu(name: str) -> Gpu:
    found = gpu_named(name)
    assert found is not None
    return found


H100, H200 = gpu("H100"), gpu("H200")
WRITE_UP = Setup(engine_version="0.15.0", utilisation=0.95, max_num_seqs=64, vision="data")


def test_64k_on_8xh100_comes_out_with_decode_context_parallel() -> None:
    found = advise(K25, H100, WRITE_UP, want_context=65_536)
    assert found.reached == "starts"
    assert "--decode-context-parallel-size 8" in found.flags
    assert "--max-model-len 65536" in found.flags
    assert predict(K25, H100, found.setup).verdict == "starts"


def test_text_only_is_offered_where_the_version_can_leave_the_tower_out() -> None:
    found = advise(K25, H100, replace(WRITE_UP, engine_version="0.20.0"), want_context=65_536)
    assert found.reached == "starts"
    assert "--language-model-only" in found.flags
    assert [step.name for step in found.steps].count("text only") == 1


def test_an_older_version_is_told_to_move_before_it_can_drop_the_tower() -> None:
    found = advise(K25, H100, WRITE_UP, want_context=262_144)
    assert "vLLM 0.19.1 and text only" in [step.name for step in found.steps]
    assert found.setup.engine_version == "0.19.1"


def test_each_step_says_what_it_buys_what_it_costs_and_what_it_rests_on() -> None:
    found = advise(K25, H100, WRITE_UP, want_context=65_536)
    assert found.steps
    for step in found.steps:
        assert step.tokens_bought > 0
        assert step.costs
        assert "measured" in step.evidence or "predicted" in step.evidence


def test_nothing_is_changed_where_the_wish_fits_already() -> None:
    found = advise(K25, H200, replace(WRITE_UP, utilisation=0.92), want_context=65_536)
    assert (found.reached, found.steps) == ("starts", ())


def test_a_wish_for_many_requests_is_met_for_all_of_them() -> None:
    found = advise(K25, H100, WRITE_UP, want_context=65_536, want_concurrency=8)
    assert found.reached == "starts"
    assert found.fit.concurrency.low >= 8


def test_fp8_kv_is_not_joined_with_decode_context_parallel_where_vllm_refuses_both() -> None:
    for version in ("0.15.0", "0.19.1", "0.20.0"):
        for context in (65_536, 131_072, 262_144):
            setup = advise(K25, H100, replace(WRITE_UP, engine_version=version), want_context=context).setup
            assert not (setup.dcp > 1 and setup.kv_dtype == "fp8")


def test_a_wish_beyond_the_model_is_refused_with_its_limit() -> None:
    with pytest.raises(CannotPlan, match="262,144"):
        advise(K25, H100, WRITE_UP, want_context=1_000_000)


def test_what_cannot_be_reached_is_said_with_the_most_there_is() -> None:
    found = advise(K25, gpu("RTX 4090"), WRITE_UP, want_context=8192)
    assert found.reached == "does not start" or "a larger GPU" in [step.name for step in found.steps]
    assert found.sentence.endswith(".")


def test_no_advice_takes_away_the_requests_that_were_wished() -> None:
    found = advise(K25, H200, WRITE_UP, want_context=8_192, want_concurrency=300)
    assert (found.setup.max_num_seqs or 0) >= 300
    assert "fewer sequences at once" not in [step.name for step in found.steps]
