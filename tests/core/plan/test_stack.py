"""What does not go together is told before it is paid for, and what does becomes a lock without invented values."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimisession.core.catalog import parse_accelerators
from kimisession.core.plan.stack import (
    BUILDS,
    DRIVERS,
    RULES,
    Case,
    Contradiction,
    Lock,
    examine,
    oldest_driver,
    resolve,
    written,
)
from kimisession.flag_file import known_flags
from kimisession.model_file import card_named
from kimisession.node.preflight_ptx import OF_DRIVER
from kimisession.profile_file import load_profile, profile_files


def case(name: str = "kimi-k2.5", gpus: str = "", checkpoint: int | None = None, **changes: Any) -> Case:
    """A shipped profile's case, varied: stack_driver and so on change its stack, env and flags its engine."""
    profile = load_profile(name)
    stack = {key.removeprefix("stack_"): changes.pop(key) for key in list(changes) if key.startswith("stack_")}
    env = changes.pop("env", profile.engine.env)
    cpu = changes.pop("cpu", profile.hardware.cpu)
    profile = replace(
        profile,
        stack=replace(profile.stack, **stack),
        engine=replace(profile.engine, env=env),
        hardware=replace(profile.hardware, cpu=cpu),
    )
    accelerator, count = parse_accelerators(gpus or profile.hardware.accelerators[0])
    fitting = [c for c in profile.checkpoints if accelerator.architecture in c.architectures]
    chosen = fitting[0] if checkpoint is None else profile.checkpoints[checkpoint]
    flags = {**profile.engine.flags, **chosen.flags, **changes.pop("flags", {})}
    good: dict[str, Any] = {
        "profile": profile,
        "accelerator": accelerator,
        "count": count,
        "checkpoint": chosen,
        "flags": flags,
        "infra": profile.hardware.infra,
        "table": known_flags(profile.engine.kind, profile.engine.version),
        "card": _card(chosen.repo),
    }
    return Case(**{**good, **changes})


def _card(repo: str) -> Any:
    try:
        return card_named(repo)
    except ValueError:
        return None


@pytest.mark.parametrize("name", profile_files())
def test_every_shipped_profile_resolves_to_a_lock(name: str) -> None:
    for gpus in load_profile(name).hardware.accelerators:
        assert isinstance(resolve(case(name, gpus)), Lock)


ROWS = [
    ("cuda-driver", {"stack_cuda": "13.0", "stack_torch": "2.11.0", "stack_driver": "570"}, "set stack.driver to 580"),
    ("kernels-driver", {"stack_driver": "570.195"}, "PTX JIT compilation failed"),
    ("torch-engine", {"stack_torch": "2.10.0"}, "compiled against torch 2.9.1"),
    ("torch-cuda", {"stack_cuda": "12.6"}, "--torch-backend=cu126"),
    ("engine-cuda", {"stack_cuda": "13.0"}, "libcudart.so.12"),
    ("nccl-torch", {"stack_nccl": "2.26.2"}, "2.27.5"),
    ("nccl-image", {"stack_nccl": ""}, "2.26.2"),
    ("gib-one-node", {"stack_gib": "keep"}, 'set stack.gib to "remove"'),
    ("gib-many-nodes", {"nodes": 2}, 'set stack.gib to "keep"'),
    ("fp4-gpu", {"name": "kimi-k2.5-int4", "checkpoint": 0}, "Blackwell's format"),
    ("blackwell-cuda", {"name": "kimi-k2.5-int4", "gpus": "B200:8", "stack_cuda": "12.4"}, "needs CUDA 12.8"),
    ("blackwell-cuda", {"name": "kimi-k2.5-int4", "gpus": "B300:8", "stack_cuda": "12.8"}, "needs CUDA 12.9"),
    ("container-driver", {"container": True}, "Error 803"),
    ("eplb-int4", {"flags": {"enable-eplb": True}}, "drop --enable-eplb"),
    ("tuned-marlin", {"env": {"VLLM_TUNED_CONFIG_FOLDER": "/x"}}, "Marlin"),
    ("amx-cpu", {"name": "kimi-k2-amx", "cpu": "avx512"}, "use RAWINT4"),
    ("driver-name", {}, "named by branch"),
]


@pytest.mark.parametrize(("rule", "changes", "says"), ROWS)
def test_each_rule_speaks_where_it_should(rule: str, changes: dict[str, Any], says: str) -> None:
    found = {finding.rule: finding for finding in examine(case(**changes))}
    assert says in found[rule].sentence
    assert found[rule].source


def test_every_rule_has_a_row_here() -> None:
    assert {rule.name for rule in RULES} == {row[0] for row in ROWS}


def test_a_contradiction_names_all_that_is_wrong() -> None:
    found = resolve(case(stack_driver="570", stack_gib="keep"))
    assert isinstance(found, Contradiction)
    assert [finding.rule for finding in found.findings] == ["kernels-driver", "gib-one-node"]
    assert "stack.driver" in str(found)
    assert "stack.gib" in str(found)


def test_driver_575_is_the_first_that_compiles_the_marlin_kernels() -> None:
    marlin = next(build for build in BUILDS if build.since == "0.15.0")
    assert oldest_driver(ptx=marlin.ptx) == 575
    assert not any(f.rule == "kernels-driver" for f in examine(case(stack_driver="575.57")))


def test_triton_experts_may_be_balanced() -> None:
    assert isinstance(resolve(case("kimi-k2.5-h200-eplb")), Lock)
    assert isinstance(resolve(case("kimi-k2.5-h200-eplb", flags={"moe-backend": "marlin"})), Contradiction)


def test_what_is_not_stated_is_not_guessed() -> None:
    bare = case(stack_driver="", stack_cuda="", stack_torch="", stack_nccl="", infra="slurm")
    assert examine(bare) == ()
    lock = resolve(bare)
    assert isinstance(lock, Lock)
    assert "# driver: not pinned" in lock.text


def test_a_lock_is_toml_with_the_wheels_own_hash_and_every_flag() -> None:
    lock = resolve(case())
    assert isinstance(lock, Lock)
    read = tomllib.loads(lock.text)
    assert read["engine"]["wheel_sha256"].startswith("fd033716")
    assert read["engine"]["argv"][:2] == ["--tensor-parallel-size", "8"]
    assert read["software"]["torch"] == "2.9.1"
    assert read["weights"]["bytes"] == 595147639776


def test_plan_preflight_and_stack_hook_know_the_same_of_every_driver() -> None:
    hook = (Path(__file__).parents[3] / "scripts/hooks/stack.sh").read_text(encoding="utf-8")
    rows = re.search(r"for row in ((?:\d+:[\d.]+ ?)+); do", hook)
    assert rows is not None
    served = {branch: written(cuda) for branch, cuda, _ in DRIVERS}
    assert all(served[int(branch)] == cuda for branch, cuda in (row.split(":") for row in rows[1].split()))
    assert [(branch, written(ptx)) for branch, _, ptx in DRIVERS] == [*OF_DRIVER]
