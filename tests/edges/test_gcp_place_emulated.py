"""The place against the emulated Compute Engine, through Google's own client library over plain HTTP."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from emulated import ID, NODE, ZONE, Project, body_of, labels_of, needed, project

from kimisession.core.lifecycle import Layer
from kimisession.engines.gcp import GcpPlace
from kimisession.engines.place import Sight
from kimisession.errors import Unconfirmed
from kimisession.node.deadline import request_id

LABELS = labels_of(datetime.now(UTC) + timedelta(hours=1))
APART = timedelta(seconds=0.5)


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Project]:
    needed()
    with project(tmp_path) as made:
        yield made
        assert made.state.data["violations"] == []


def place(there: Project, tmp_path: Path) -> GcpPlace:
    return GcpPlace(
        tmp_path / "home",
        lambda: there.compute,
        guard=lambda cloud, now: Layer("reaper", True, "it looks"),
        desk=lambda session_id: None,
        apart=APART,
    )


def until(look: Callable[[], Sight], what: Callable[[Sight], Any], within_s: float = 30) -> Sight:
    """The first sight of which that holds."""
    ends = time.monotonic() + within_s
    while not what(sight := look()):
        assert time.monotonic() < ends, sight
        time.sleep(0.1)
    return sight


def test_the_reason_outlives_the_machine_in_the_request_of_its_own_deletion(there: Project, tmp_path: Path) -> None:
    here = place(there, tmp_path)
    for code, kind in ((10, "ended"), (None, "deleted")):
        there.insert(labels=LABELS)
        here.look(ID)
        asked = f"?requestId={request_id(code)}" if code is not None else ""
        there.call("DELETE", f"zones/{ZONE}/instances/{NODE}{asked}")
        line = until(lambda: here.look(ID), lambda s: s.present is False).lines[-1]
        assert (line["kind"], line.get("reason")) == (kind, "idle" if code else None)
        there.state.data["operations"].clear()


def test_a_machine_is_seen_ended_and_proven_gone_with_the_clouds_own_times(there: Project, tmp_path: Path) -> None:
    here = place(there, tmp_path)
    there.insert(labels=LABELS)
    there.insert("other")
    sight = here.look(ID)
    assert sight.present is True
    assert {r.kind for r in sight.resources} >= {"machine", "disk"}
    here.end(ID, force=False)
    gone = until(lambda: here.look(ID), lambda s: s.present is False)
    assert "two empty lists of all zones" in gone.why
    assert there.names() == ["other"]
    machine = next(r for r in gone.resources if r.kind == "machine")
    assert machine.ended is not None
    assert machine.ended > machine.began
    assert "deleted" in machine.evidence


def test_an_insert_that_takes_its_time_keeps_the_session_from_being_gone(there: Project, tmp_path: Path) -> None:
    here = place(there, tmp_path)
    there.tell("faults", kind="slow_operation", seconds=3, times=1, method="compute.instances.insert")
    there.call("POST", "zones/us-central1-a/instances", body_of(NODE, LABELS), wait=False)
    sight = until(lambda: here.look(ID), lambda s: s.present is not None)
    assert sight.present is True, "it was never called gone in between"
    here.end(ID, force=False)
    until(lambda: here.look(ID), lambda s: s.present is False)


def test_a_preempted_machine_is_told_as_such(there: Project, tmp_path: Path) -> None:
    here = place(there, tmp_path)
    there.insert(labels=LABELS)
    assert here.look(ID).present is True
    there.tell("preempt", name=NODE, notice_s=0)
    sight = until(lambda: here.look(ID), lambda s: s.present is False)
    (line,) = [line for line in sight.lines if line["kind"] == "ended"]
    assert line["reason"] == "preempted"


def test_a_zone_that_is_silent_is_no_proof(there: Project, tmp_path: Path) -> None:
    here = place(there, tmp_path)
    there.insert(labels=LABELS, zone="us-east5-a")
    there.tell("faults", kind="unreachable", zone="us-east5-a")
    for _ in range(3):
        with pytest.raises(Unconfirmed, match="us-east5-a"):
            here.look(ID)
        time.sleep(0.6)
    there.admin.answer("DELETE", "/admin/faults", {})
    assert here.look(ID).present is True


def test_a_deletion_that_says_done_while_the_machine_stays_is_not_believed(there: Project, tmp_path: Path) -> None:
    here = place(there, tmp_path)
    there.insert(labels=LABELS)
    there.tell("faults", kind="delete_ignored", times=1)
    here.end(ID, force=False)
    time.sleep(0.6)
    assert here.look(ID).present is True
    here.end(ID, force=True)
    until(lambda: here.look(ID), lambda s: s.present is False)


def test_a_machine_is_found_by_its_labels_alone(there: Project, tmp_path: Path) -> None:
    there.insert(labels=LABELS)
    here = place(there, tmp_path)
    (found,) = here.find()
    assert dict(found.labels) == LABELS
    assert found.session_id == ID


def test_a_machine_on_demand_that_runs_is_told_not_to_restart(there: Project, tmp_path: Path) -> None:
    body = body_of(NODE, LABELS)
    body["scheduling"] = {"provisioningModel": "STANDARD", "automaticRestart": True, "onHostMaintenance": "TERMINATE"}
    there.call("POST", "zones/us-central1-a/instances", body)
    place(there, tmp_path).after_launch(ID)
    (instance,) = there.state.data["instances"].values()
    assert instance["scheduling"]["automaticRestart"] is False
