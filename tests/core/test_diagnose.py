"""What a log says went wrong: the literal words of real failures, and no rule fires on a log without one."""

from pathlib import Path

import pytest

from kimisession.core.diagnose import RULES, diagnose
from kimisession.node.standin_faults import FAILURES

LOGS = sorted((Path(__file__).parents[1] / "fixtures/logs").glob("*.log"))
INCIDENTS = (Path(__file__).parents[2] / "notes/incidents.md").read_text(encoding="utf-8")

#: The stand-in's faults have the words of the public write-up (node/standin_faults.py).
SAID = {
    "cuda-init": "cuda-build",
    "ptx": "driver-ptx",
    "gib": "gib-nccl",
    "oom-sampler": "sampler-oom",
    "no-kv": "no-kv",
    "kv-too-small": "kv-too-small",
}


@pytest.mark.parametrize(("fault", "rule"), SAID.items())
def test_a_failure_is_known_by_its_own_words(fault: str, rule: str) -> None:
    failure = FAILURES[fault]
    found = diagnose(["INFO starting", *failure.before, *failure.error.splitlines()])
    assert found is not None
    assert found.id == rule


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_no_rule_fires_on_a_log_without_one_of_these_failures(log: Path) -> None:
    assert diagnose(log.read_text(encoding="utf-8", errors="replace").splitlines()) is None


def test_every_rule_is_shown_by_a_failure_and_told_among_the_incidents() -> None:
    assert {rule.id for rule in RULES} == {*SAID.values()}
    assert all(f"| {rule.incident} |" in INCIDENTS for rule in RULES)
