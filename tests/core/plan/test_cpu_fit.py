"""Engines with their experts in host memory."""

from __future__ import annotations

import pytest

from kimisession.core.plan.cpu_fit import expert_layer_gib, host_fit, hybrid_vram
from kimisession.model_file import card_named

K25 = card_named("Kimi-K2.5")
K2 = card_named("Kimi-K2-Instruct")


def test_a_layer_of_k2_5s_experts_is_8_86_gib_of_ram() -> None:
    assert expert_layer_gib(K25) == pytest.approx(8.859, abs=0.001)


@pytest.mark.parametrize("quota", [480, 500])
def test_the_seeds_quota_is_refused_and_the_reason_names_one_that_does(quota: int) -> None:
    found = host_fit(K25, quota)
    assert found.verdict == "does not start"
    assert f"{found.enough_quota_gib} GiB" in found.reason
    assert host_fit(K25, found.enough_quota_gib).verdict == "starts"


def test_the_death_at_layer_35_under_480_gib_lies_in_what_is_foretold() -> None:
    first, last = host_fit(K25, 480).last_layer
    assert first is not None
    assert last is not None
    assert first <= 35 <= last


def test_700_gib_is_called_borderline_because_no_log_shows_loading_under_it() -> None:
    assert host_fit(K25, 700).verdict == "borderline"


def test_the_measured_600_gb_after_loading_lies_in_the_interval() -> None:
    loaded = host_fit(K25, 1500, gpu_experts=8).loaded_gib
    assert loaded.low <= 600e9 / 2**30 <= loaded.high


def test_int8_experts_beside_a_ram_disk_leave_nothing_sure_in_2_tb() -> None:
    found = host_fit(K2, 2e12 / 2**30, stored_as="int8", files_in_ram_gib=812.8e9 / 2**30, cpu_only=True)
    assert found.verdict == "borderline"
    twice = host_fit(K2, 2e12 / 2**30, stored_as="int8", copies=2, cpu_only=True)
    assert twice.verdict == "does not start"


@pytest.mark.parametrize(("experts", "context", "gb"), [(1, 32_768, 31), (5, 65_536, 39)])
def test_the_gpu_side_of_kt_kernel_is_what_its_maintainer_states(experts: int, context: int, gb: float) -> None:
    found = hybrid_vram(K25, gpu_experts=experts, context=context)
    assert found.low <= gb <= found.high
