"""A few (phase, fault) pairs of the long fault run, one for every kind of fault; `python -m tests.weights.faults` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("google.cloud.storage")

from tests.weights.faults import PAIRS, PULL_PHASES, SEED_PHASES, Broken, one_run

FEW = [
    "hub.body/short",
    "hub.body/flip",
    "hub.body/flip-always",
    "hub.body/revision",
    "gcs.control/lost",
    "gcs.status/cut",
    "gcs.put/503-storm",
    "gcs.put/cut-mid",
    "gcs.put/quota",
    "gcs.put/flip",
    "gcs.put/kill-seeder",
    "gcs.get/flip-always",
    "gcs.get/kill-puller",
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", FEW)
def test_under_a_fault_nothing_wrong_is_sealed_and_the_next_run_finishes(pair: str, tmp_path: Path) -> None:
    for chance in range(100, 104):
        try:
            one_run(pair, chance, tmp_path / str(chance))
        except Broken as error:
            if str(error) != "the fault was not reached":
                raise
        else:
            return
    pytest.fail("the fault was never reached")


def test_the_long_run_knows_every_phase_and_fault_once() -> None:
    assert len(PAIRS) == len(set(PAIRS)) == sum(len(faults) for faults in (SEED_PHASES | PULL_PHASES).values())
    assert set(FEW) <= set(PAIRS)
