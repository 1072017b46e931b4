"""The fault matrix of the path over GCP: every wire cell, and, when asked for everything, those through real SkyPilot that
this rig's other cases do not play."""

import os
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from tests.rigs.gce.matrix.cells import CELLS, FULL, WIRE, Cell
from tests.rigs.gce.matrix.wire import Outcome

Outcomes = dict[str, "Future[Outcome]"]
everything = pytest.mark.skipif(not os.environ.get("KIMISESSION_RIG_ALL"), reason="make test-gce ALL=1")


@pytest.mark.parametrize("cell", WIRE, ids=lambda cell: cell.key)
@pytest.mark.timeout(300)
def test_what_goes_wrong_is_ended_by_its_own_layer_in_time(cell: Cell, wire: Callable[[], Outcomes]) -> None:
    outcome = wire()[cell.key].result()
    assert outcome.problems == (), outcome


@everything
@pytest.mark.timeout(3600)
def test_what_goes_wrong_through_real_skypilot_is_ended_in_time() -> None:
    from tests.rigs.gce.matrix.full import play_all

    broken: dict[str, tuple[str, ...]] = {}
    play_all(FULL, lambda cell, outcome: broken.update({cell.key: outcome.problems} if outcome.problems else {}))
    assert broken == {}


def test_every_layer_and_every_hazard_has_a_cell() -> None:
    assert {cell.layer for cell in CELLS} >= {"keeper", "wrapper", "autodown", "timer", "reaper", "command", "sweep"}
    assert {number for cell in CELLS for number in cell.hazards} == set(range(1, 16)) - {14}
