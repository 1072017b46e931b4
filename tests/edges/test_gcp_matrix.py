"""The quickest cells of the GCP path's fault matrix (tests/rigs/gce/matrix); `make test-gce` plays all of them."""

import pytest
from emulated import needed

QUICK = ("lost-reply", "late-insert", "record-removed", "delete-reply-lost", "power-off", "preempted", "sweep-others")


@pytest.mark.parametrize("key", QUICK)
def test_what_goes_wrong_is_ended_by_its_own_layer_in_time(key: str) -> None:
    needed()
    from tests.rigs.gce.matrix.cells import WIRE
    from tests.rigs.gce.matrix.wire import play

    (cell,) = (cell for cell in WIRE if cell.key == key)
    outcome = play(cell)
    assert outcome.problems == (), outcome
