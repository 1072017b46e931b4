"""Compute Engine through Google's own client library, against the emulated one."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from emulated import ID, NODE, PROJECT, ZONE, Project, body_of, labels_of, needed, project

from kimisession.cloud.compute import open_compute
from kimisession.cloud.google_errors import Denied, NoCredentials
from kimisession.core.audit import proof_of_gone, what_ended
from kimisession.core.inventory import Disk, Inventory, may_still_make
from kimisession.errors import INSTALL_CLOUD, EngineMissing, KimiError, QuotaExceeded, Unconfirmed

NOW = datetime.now(UTC)
AN_HOUR_AGO = NOW - timedelta(hours=1)
LABELS = labels_of(NOW + timedelta(hours=1))


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Project]:
    needed()
    with project(tmp_path) as made:
        yield made
        assert made.state.data["violations"] == []  # every request and answer fits Google's own documents


def test_a_machine_is_found_by_its_label_in_whatever_zone_it_is(there: Project) -> None:
    there.insert(labels=LABELS, zone="europe-west4-b")
    there.insert("other")
    (machine,) = there.compute.ours().machines
    assert (machine.name, machine.zone, machine.session, machine.owner) == (NODE, "europe-west4-b", ID, "ann")
    assert machine.deadline == (NOW + timedelta(hours=1)).replace(microsecond=0)
    assert (machine.machine_type, machine.spot, machine.status) == ("a3-highgpu-8g", True, "RUNNING")
    assert machine.disks == ((NODE, True),)
    assert abs((machine.began - datetime.now(UTC)).total_seconds()) < 60, "its time is in Pacific time on the wire"
    assert there.compute.ours(ID).machines == (machine,)
    assert there.compute.ours("kimi-ffffffff").machines == ()


def test_everything_has_boot_disks_without_labels_by_their_machine(there: Project) -> None:
    there.insert(labels=LABELS)
    there.insert("other")
    found = there.compute.everything()
    assert {m.name for m in found.machines} == {NODE, "other"}
    mine = found.of(ID)
    assert [thing.name for thing in mine.everything] == [NODE, NODE]
    assert (mine.disks[0].size_gib, mine.disks[0].users, mine.disks[0].labels) == (100, (NODE,), {})


def test_more_than_a_page_of_machines_is_listed_whole(there: Project) -> None:
    there.insert(labels=LABELS)
    ((key, one),) = there.state.data["instances"].items()
    for number in range(1200):
        there.state.data["instances"][f"{ZONE}/copy-{number:04}"] = {**one, "name": f"copy-{number:04}"}
        there.state.data["inside"][f"{ZONE}/copy-{number:04}"] = there.state.data["inside"][key]
    assert len(there.compute.ours().machines) == 1201
    pages = [name for name, _, _ in there.emulator.calls if name == "compute.instances.aggregatedList"]
    assert len(pages) == 3


def test_a_zone_that_does_not_answer_is_named_and_the_others_are_listed(there: Project) -> None:
    there.insert(labels=LABELS)
    there.tell("faults", kind="unreachable", zone="us-east4-a")
    found = there.compute.ours()
    assert [m.name for m in found.machines] == [NODE]
    assert found.unreachable == ("us-east4-a",)
    assert there.compute.everything().unreachable == ("us-east4-a",)


def test_where_one_zone_fails_the_list_of_all_each_is_asked_by_itself(there: Project) -> None:
    there.insert(labels=LABELS)
    there.tell("faults", kind="unreachable", zone="us-east4-a", **{"as": "error"})
    there.tell("faults", kind="http_error", status=503, method="compute.*.list", zone="us-east4-a")
    found = there.compute.everything()
    assert [m.name for m in found.machines] == [NODE]
    assert [d.name for d in found.disks] == [NODE]
    assert found.unreachable == ("us-east4-a",)
    assert there.compute.ours(ID).machines == found.machines


# -- deletion -------------------------------------------------------------------------------------------------------------


def test_deleting_twice_is_fine(there: Project) -> None:
    there.insert(labels=LABELS)
    (machine,) = there.compute.ours().machines
    operation = there.compute.delete(machine)
    assert operation is not None
    assert there.compute.wait(operation, 30).done
    assert there.compute.delete(machine) is None
    assert there.names() == []


def test_a_left_over_disk_is_deleted(there: Project) -> None:
    there.call("POST", f"zones/{ZONE}/disks", {"name": NODE, "sizeGb": "10"})
    (disk,) = there.compute.everything().disks
    assert isinstance(disk, Disk)
    operation = there.compute.delete(disk)
    assert operation is None or there.compute.wait(operation, 30).done
    assert there.compute.everything().disks == ()


def test_an_operation_that_nobody_knows_any_more_is_done(there: Project) -> None:
    there.tell("faults", kind="slow_operation", seconds=600, method="compute.instances.insert")
    there.call("POST", f"zones/{ZONE}/instances", body_of(NODE, LABELS), wait=False)
    (pending,) = may_still_make(there.compute.operations(ID, AN_HOUR_AGO))
    assert not there.compute.wait(pending, 0.05).done
    there.state.data["operations"].clear()
    assert there.compute.wait(pending, 5).done


# -- operations and the proof -----------------------------------------------------------------------------------------------


def test_the_operations_of_a_session_tell_when_it_was_made_and_why_it_went(there: Project) -> None:
    there.insert(labels=LABELS)
    there.insert("other")
    there.tell("preempt", name=NODE, notice_s=0)
    there.state.wait_until(lambda data: f"{ZONE}/{NODE}" not in data["instances"], 20)
    operations = there.compute.operations(ID, AN_HOUR_AGO)
    assert {op.target for op in operations} == {NODE}
    assert operations[0].kind == "insert"
    assert abs((operations[0].began - datetime.now(UTC)).total_seconds()) < 60
    ended = what_ended(NODE, operations)
    assert ended is not None
    assert ended[0] == "preempted"
    assert there.compute.operations(ID, datetime.now(UTC) + timedelta(hours=1)) == ()


def test_an_insert_whose_answer_was_lost_is_no_proof_of_gone_until_it_is_done(there: Project) -> None:
    there.tell("faults", kind="slow_operation", seconds=600, method="compute.instances.bulkInsert", times=1)
    properties = {key: value for key, value in body_of(NODE, LABELS).items() if key != "name"}
    body = {
        "count": "1",
        "perInstanceProperties": {NODE: {}},
        "instanceProperties": properties | {"machineType": "a3-highgpu-8g"},
    }
    there.call("POST", f"zones/{ZONE}/instances/bulkInsert", body, wait=False)
    empty = Inventory(NOW, PROJECT)
    assert may_still_make(there.compute.operations(ID, AN_HOUR_AGO))
    proof = proof_of_gone(empty, empty, there.compute.operations(ID, AN_HOUR_AGO), timedelta(0))
    assert not proof.gone
    assert "may still make a machine" in proof.evidence


def test_operations_cannot_be_listed_while_a_zone_is_silent(there: Project) -> None:
    there.tell("faults", kind="unreachable", zone="us-east4-a")
    with pytest.raises(Unconfirmed, match="us-east4-a"):
        there.compute.operations(ID, AN_HOUR_AGO)


# -- labels ---------------------------------------------------------------------------------------------------------------


def test_a_label_is_set_beside_those_that_are_there(there: Project) -> None:
    there.insert(labels=LABELS)
    (machine,) = there.compute.ours().machines
    changed = there.compute.set_labels(machine, {"kimisession-beat": "7"})
    assert changed is not None
    assert changed.labels == {**LABELS, "kimisession-beat": "7"}


def test_labels_that_somebody_else_changed_meanwhile_are_read_again(there: Project) -> None:
    there.insert(labels=LABELS)
    (machine,) = there.compute.ours().machines
    there.tell(
        "faults", kind="http_error", status=412, reason="conditionNotMet", method="compute.instances.setLabels", times=2
    )
    changed = there.compute.set_labels(machine, {"kimisession-beat": "8"})
    assert changed is not None
    assert changed.labels["kimisession-beat"] == "8"


def test_labels_of_a_machine_that_is_gone_are_nobodys(there: Project) -> None:
    there.insert(labels=LABELS)
    (machine,) = there.compute.ours().machines
    there.tell("vanish", name=NODE)
    assert there.compute.set_labels(machine, {"a": "b"}) is None


# -- what goes wrong --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_answer_is_asked_again(there: Project, status: int) -> None:
    there.insert(labels=LABELS)
    there.tell("faults", kind="http_error", status=status, method="compute.instances.aggregatedList", times=3)
    assert len(there.compute.ours().machines) == 1
    assert there.slept == [0.5, 1.0, 2.0]


def test_a_broken_connection_is_asked_again(there: Project) -> None:
    there.insert(labels=LABELS)
    there.tell("faults", kind="lost_reply", method="compute.instances.delete", times=1)
    (machine,) = there.compute.ours().machines
    operation = there.compute.delete(machine)
    assert operation is None or there.compute.wait(operation, 30).done
    assert there.names() == []


def test_asking_ends_after_a_few_times(there: Project) -> None:
    there.tell("faults", kind="http_error", status=503)
    with pytest.raises(Unconfirmed, match="does not answer"):
        there.compute.ours()
    assert len(there.slept) == 5


def test_a_missing_permission_is_named(there: Project) -> None:
    there.tell("deny", member="user:owner@example.com", permission="compute.instances.list")
    with pytest.raises(Denied, match=r"compute\.instances\.list") as caught:
        there.compute.ours()
    assert caught.value.permission == "compute.instances.list"
    assert there.slept == []


def test_credentials_that_google_does_not_take_say_how_to_log_in(there: Project) -> None:
    there.state.data["tokens"].clear()
    with pytest.raises(NoCredentials) as caught:
        there.compute.ours()
    assert "gcloud auth application-default login" in caught.value.hint


def test_a_project_that_is_not_there_is_told(there: Project) -> None:
    elsewhere = there.as_member("", "no-such-project")
    with pytest.raises(Denied, match="there is no project no-such-project"):
        elsewhere.ours()


def test_creating_what_exists_is_fine_and_a_full_quota_is_told(there: Project) -> None:
    there.compute.create_machine(ZONE, body_of(NODE, LABELS))
    there.compute.create_machine(ZONE, body_of(NODE, LABELS))
    assert there.names() == [NODE]
    there.tell("faults", kind="stockout", zone=ZONE)
    with pytest.raises(QuotaExceeded, match="ZONE_RESOURCE_POOL_EXHAUSTED"):
        there.compute.create_machine(ZONE, body_of("second", LABELS))


def test_what_the_account_may_do_is_asked(there: Project) -> None:
    there.insert(labels=LABELS)
    (machine,) = there.compute.ours().machines
    assert there.compute.may(machine, "compute.instances.delete")
    there.tell("deny", member="user:owner@example.com", permission="compute.instances.delete")
    assert not there.compute.may(machine, "compute.instances.delete")
    assert there.compute.permitted(["compute.instances.delete", "compute.instances.list"]) == {"compute.instances.list"}


def test_quotas_of_all_regions_and_of_the_project_are_read(there: Project) -> None:
    there.insert(labels=LABELS)
    found = {(q.region, q.metric): q for q in there.compute.quotas()}
    assert found["us-central1", "PREEMPTIBLE_NVIDIA_H100_GPUS"].usage == 8
    assert found["global", "GPUS_ALL_REGIONS"].limit == 64


def test_without_the_library_or_credentials_it_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.delenv("KIMISESSION_COMPUTE_ENDPOINT", raising=False)
    with pytest.raises((NoCredentials, EngineMissing)) as caught:
        open_compute("p")
    assert isinstance(caught.value, KimiError)
    assert caught.value.hint in ("gcloud auth application-default login", INSTALL_CLOUD)
