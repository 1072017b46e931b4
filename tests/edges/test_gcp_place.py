"""What is concluded of a session from what Compute Engine says: there, gone, or not proven."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from good_values import NOON
from memory_compute import PROJECT, MemoryCompute, node_of
from test_skypilot_task import SPEC

from kimisession.cloud.base import Quota
from kimisession.cloud.google_errors import Denied, NoCredentials
from kimisession.core.audit import APART
from kimisession.core.guard import guard_layer
from kimisession.core.launch import LABEL_DEADLINE, LABEL_OWNER, deadline_label, session_labels
from kimisession.core.lifecycle import Layer
from kimisession.engines.gcp import GcpPlace
from kimisession.errors import DoesNotFit, QuotaExceeded, Unconfirmed, UsageMistake
from kimisession.node.deadline import request_id

ID = "demo-0123abcd"
DEADLINE = NOON + timedelta(hours=2)
LABELS = session_labels(ID, "demo", "me", DEADLINE)
UNIT = f"ExecStart=python3 deadline.py --deadline-utc {int(DEADLINE.timestamp()) + 120} --longest-uptime-s 9"
ARMED = Layer("reaper", True, "kimisession-reaper looked at all zones 9 s ago")


class Desk:
    """A machine that ssh reaches; what its files say."""

    words = ("demo",)

    def __init__(self, timer: str = f"active\n{UNIT}\n", refuses: bool = False) -> None:
        self.timer, self.refuses = timer, refuses
        self.ran: list[str] = []

    def run(self, script: str, text: str = "", within_s: float = 30.0) -> str:
        self.ran.append(script)
        if "arm.sh" in script:
            return "arm.sh: the disk is full\nREFUSED\n" if self.refuses else ""
        return f"@@kimisession@@\nthe journal\n@@kimisession@@\n{self.timer}"


class There:
    """A place with its clock."""

    def __init__(self, folder: Path) -> None:
        self.moment = NOON
        self.folder = folder
        self.cloud = MemoryCompute(lambda: self.moment)
        self.desk: Desk | None = Desk()
        self.guard = ARMED

    def place(self) -> GcpPlace:
        """As a new process has it."""
        cloud: Any = self.cloud
        return GcpPlace(
            self.folder,
            lambda: cloud,
            guard=lambda cloud, now: self.guard,
            desk=lambda session_id: self.desk,  # type: ignore[arg-type, return-value]
            now=lambda: self.moment,
        )

    def look(self) -> Any:
        return self.place().look(ID, ("cat journal",))

    def pass_(self, seconds: float) -> None:
        self.moment += timedelta(seconds=seconds)

    def proven(self) -> Any:
        """Two looks far enough apart."""
        self.look()
        self.pass_(APART.total_seconds())
        return self.look()


@pytest.fixture
def there(tmp_path: Path) -> There:
    return There(tmp_path)


# -- there -------------------------------------------------------------------------------------------------------------


def test_a_machine_is_seen_with_disk_and_address_each_from_when_it_began(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    there.pass_(60)
    sight = there.look()
    name = node_of(ID)
    assert sight.present is True
    assert sight.files == ("the journal\n",)
    assert [(r.id, r.kind, r.began, r.ended) for r in sight.resources] == [
        (f"gcp/us-central1-a/{name}", "machine", NOON, None),
        (f"gcp/us-central1-a/{name}/address", "address", NOON, None),
        (f"gcp/us-central1-a/{name}/disk", "disk", NOON, None),
    ]


@pytest.mark.parametrize("status", ["PROVISIONING", "STAGING", "STOPPING", "TERMINATED", "SUSPENDED"])
def test_a_machine_in_whatever_state_is_not_gone(there: There, status: str) -> None:
    there.cloud.insert(ID, LABELS, status=status)
    sight = there.look()
    assert sight.present is True
    assert sight.stopped == (status in ("TERMINATED", "SUSPENDED"))
    assert there.proven().present is True


def test_the_disk_of_a_machine_that_was_taken_away_keeps_its_price_when_another_one_comes(there: There) -> None:
    first = there.cloud.insert(ID, LABELS)
    there.look()
    there.cloud.preempt(first.name)
    there.pass_(60)
    second = there.cloud.insert(ID, LABELS)
    there.look()
    there.cloud.remove(second.name)
    there.pass_(60)
    disks = [resource for resource in there.proven().resources if resource.kind == "disk"]
    assert {disk.id.split("/")[2] for disk in disks} == {first.name, second.name}
    assert all(disk.usd_per_hour for disk in disks)


def test_what_has_lost_its_labels_is_found_by_its_name(there: There) -> None:
    there.cloud.insert(ID, {})
    assert there.look().present is True
    there.place().end(ID, force=False)
    assert there.cloud.machines == {}


def test_two_machines_of_two_attempts_are_both_seen_and_both_ended(there: There) -> None:
    there.cloud.insert(ID, LABELS, zone="us-central1-a")
    there.cloud.insert(ID, LABELS, zone="europe-west4-b")
    assert len([r for r in there.look().resources if r.kind == "machine"]) == 2
    there.place().end(ID, force=False)
    assert there.cloud.machines == {}


def test_a_machine_of_another_session_of_a_similar_name_is_not_ours(there: There) -> None:
    there.cloud.insert("demo-0123abce", session_labels("demo-0123abce", "demo", "me", DEADLINE))
    assert there.look().present is None
    there.place().end(ID, force=True)
    assert len(there.cloud.machines) == 1


# -- gone --------------------------------------------------------------------------------------------------------------


def test_one_empty_list_proves_nothing_and_two_a_minute_apart_do(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    there.look()
    there.cloud.remove(node_of(ID))
    first = there.look()
    assert (first.present, first.why) == (None, "two empty lists, but only 0 s apart")
    there.pass_(59)
    assert there.look().present is None
    there.pass_(1)
    gone = there.look()
    assert gone.present is False
    assert f"two empty lists of all zones of {PROJECT}, 60 s apart" in gone.why


def test_a_list_of_before_the_launch_is_no_half_of_the_proof(there: There) -> None:
    there.look()
    there.pass_(61)
    there.place().launching(ID)
    assert there.look().present is None
    there.pass_(60)
    assert there.look().present is False


def test_a_home_that_cannot_be_written_costs_no_proof(there: There) -> None:
    there.folder = there.folder / "file"
    there.folder.write_text("no folder")
    place = there.place()
    there.cloud.insert(ID, LABELS)
    place.look(ID)
    there.cloud.remove(node_of(ID))
    assert place.look(ID).present is None
    there.pass_(60)
    assert place.look(ID).present is False


def test_a_request_that_may_still_make_a_machine_keeps_it_from_being_gone(there: There) -> None:
    """The reply of a bulkInsert was lost, SkyPilot moved on, and the machine comes minutes later."""
    pending = there.cloud.did("bulkInsert", "", status="RUNNING", group="g")
    for _ in range(5):
        sight = there.proven()
        assert sight.present is None
        assert "may still make a machine" in sight.why
    there.cloud.finish(pending)
    there.cloud.insert(ID, LABELS)
    assert there.look().present is True
    there.cloud.remove(node_of(ID, 1))
    assert there.proven().present is False


def test_a_zone_that_does_not_answer_proves_nothing(there: There) -> None:
    there.cloud.insert(ID, LABELS, zone="us-east5-a")
    there.cloud.silent = ("us-east5-a",)
    with pytest.raises(Unconfirmed, match="us-east5-a"):
        there.proven()
    there.cloud.silent = ()
    assert there.look().present is True


def test_a_cloud_that_does_not_answer_proves_nothing_and_the_proof_goes_on_afterwards(there: There) -> None:
    there.look()
    there.cloud.unreachable = True
    there.pass_(30)
    with pytest.raises(Unconfirmed, match="does not answer"):
        there.look()
    there.cloud.unreachable = False
    there.pass_(30)
    assert there.look().present is False


def test_a_login_that_has_expired_proves_nothing(there: There) -> None:
    place = there.place()
    place.compute = lambda: (_ for _ in ()).throw(NoCredentials("the login is not valid any more", "gcloud auth"))
    with pytest.raises(Unconfirmed, match="login is not valid"):
        place.look(ID)


def test_a_machine_in_between_starts_the_proof_anew(there: There) -> None:
    there.look()
    there.pass_(40)
    there.cloud.insert(ID, LABELS)
    there.look()
    there.cloud.remove(node_of(ID))
    there.pass_(40)
    assert there.look().present is None
    there.pass_(60)
    assert there.look().present is False


def test_a_disk_that_was_left_over_is_not_gone_and_is_deleted(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    disk = there.cloud.disks[node_of(ID)]
    there.cloud.remove(node_of(ID))
    there.cloud.disks[disk.name] = disk
    sight = there.proven()
    assert (sight.present, sight.stopped) == (True, True)
    assert "left" in sight.why
    there.cloud.disks[disk.name] = type(disk)(disk.name, disk.zone, disk.began, size_gib=100)
    there.place().end(ID, force=False)
    assert there.proven().present is False


def test_a_deletion_that_says_done_while_the_machine_stays_is_not_believed(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    there.cloud.lies = True
    there.place().end(ID, force=False)
    assert there.proven().present is True
    there.cloud.lies = False
    there.place().end(ID, force=True)
    assert there.proven().present is False


# -- what it took ------------------------------------------------------------------------------------------------------


def test_what_is_gone_is_billed_from_its_insert_to_its_end_by_the_clouds_own_operations(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    there.look()
    there.pass_(754)
    there.cloud.remove(node_of(ID))
    there.pass_(300)
    resources = {r.kind: r for r in there.proven().resources}
    assert set(resources) == {"machine", "disk", "address"}
    for resource in resources.values():
        assert resource.began == NOON
        assert resource.ended == NOON + timedelta(seconds=754)
        assert "deleted by me@example.com at 12:12:34 UTC, operation operation-1" in resource.evidence


def test_a_machine_that_nobody_listed_had_an_address_all_the_same_whose_price_is_not_known(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    there.pass_(35)
    there.cloud.remove(node_of(ID))
    (address,) = [r for r in there.proven().resources if r.kind == "address"]
    assert (address.began, address.ended) == (NOON, NOON + timedelta(seconds=35))
    assert address.usd_per_hour is None
    assert "nobody listed this one" in address.evidence


def test_a_stopped_machine_is_billed_to_its_stop_and_its_disk_until_it_is_deleted(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    there.pass_(100)
    there.cloud.stop(node_of(ID))
    there.pass_(100)
    ended = {r.kind: r.ended for r in there.look().resources}
    assert ended == {"machine": NOON + timedelta(seconds=100), "address": NOON + timedelta(seconds=100), "disk": None}
    there.place().end(ID, force=False)
    later = {r.kind: r.ended for r in there.proven().resources}
    assert later["disk"] == NOON + timedelta(seconds=200)


def test_a_preempted_machine_says_so_though_it_could_not_tell(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    there.pass_(100)
    there.cloud.preempt(node_of(ID))
    (line,) = there.proven().lines
    assert (line["kind"], line["reason"]) == ("ended", "preempted")
    assert "preempted at 12:01:40 UTC" in line["evidence"]
    assert line["at"] == (NOON + timedelta(seconds=100)).isoformat()


OWN = "vm@a-project.iam.gserviceaccount.com"


@pytest.mark.parametrize(
    ("code", "reason"), [(0, "user"), (10, "idle"), (20, "setup-failed"), (40, "keeper-died"), (44, "unguarded")]
)
def test_a_machine_tells_why_with_its_own_deletion_though_nobody_looked_before_it_was_gone(
    there: There, code: int, reason: str
) -> None:
    there.cloud.insert(ID, LABELS)
    there.pass_(100)
    there.cloud.remove(node_of(ID), user=OWN, request=request_id(code))
    (line,) = there.proven().lines
    assert (line["kind"], line["reason"], line["exit_code"]) == ("ended", reason, code)
    assert f"exit code {code}" in line["evidence"]
    assert OWN in line["evidence"]


def test_a_machine_that_its_own_account_deleted_without_a_word_is_told_from_one_that_somebody_deleted(
    there: There,
) -> None:
    for user, itself in ((OWN, True), ("kimisession-reaper@a-project.iam.gserviceaccount.com", False)):
        there.cloud.log.clear()
        there.cloud.insert(ID, LABELS, account=OWN)
        there.look()
        there.cloud.remove(node_of(ID), user=user)
        (line,) = there.proven().lines
        assert (line["kind"], line["itself"]) == ("deleted", itself)
        assert user in line["evidence"]
        there.pass_(3600)


def test_a_machine_that_came_back_after_its_hosts_crash_is_billed_until_it_went(there: There) -> None:
    there.cloud.insert(ID, LABELS, spot=False)
    there.look()
    for kind in ("hostError", "automaticRestart"):
        there.pass_(100)
        there.cloud.did(f"compute.instances.{kind}", node_of(ID), user="system")
    there.pass_(1000)
    there.cloud.remove(node_of(ID))
    sight = there.proven()
    assert {r.kind: r.ended for r in sight.resources} == dict.fromkeys(
        ("machine", "disk", "address"), NOON + timedelta(seconds=1200)
    )
    assert [line["kind"] for line in sight.lines] == ["deleted"], "no host error ended it"


def test_attempts_that_failed_are_told_with_zone_and_reason(there: There) -> None:
    error = ("ZONE_RESOURCE_POOL_EXHAUSTED", "the zone has none")
    there.cloud.did("insert", node_of(ID, 9), "us-east5-a", errors=(error,))
    there.cloud.insert(ID, LABELS, zone="us-central1-a")
    there.cloud.remove(node_of(ID, 1))
    lines = [line for line in there.proven().lines if line["kind"] == "attempt"]
    assert [(line["place"], line["why"]) for line in lines] == [
        ("us-east5-a", "ZONE_RESOURCE_POOL_EXHAUSTED the zone has none")
    ]


# -- layers ------------------------------------------------------------------------------------------------------------


def layers(there: There) -> dict[str, Layer]:
    return {layer.name: layer for layer in there.look().layers}


def test_the_timer_in_the_machine_is_armed_only_when_systemd_there_says_so(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    assert layers(there)["timer in the machine"].armed
    late = UNIT.replace(str(int(DEADLINE.timestamp()) + 120), str(int(DEADLINE.timestamp()) + 7200))
    for timer in ("inactive\n", "", "active\n", f"active\n{late}\n"):
        there.desk = Desk(timer)
        assert not layers(there)["timer in the machine"].armed, timer
    there.desk = None
    assert not layers(there)["timer in the machine"].armed


def test_the_reaper_counts_only_while_it_lives_and_the_machine_has_a_deadline(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    assert layers(there)["reaper"].armed
    there.guard = guard_layer((), PROJECT, NOON)
    assert not layers(there)["reaper"].armed
    assert "kimisession guard enable" in layers(there)["reaper"].evidence
    there.guard = ARMED
    there.cloud.machines.clear()
    there.cloud.insert(ID, {k: v for k, v in LABELS.items() if k != LABEL_DEADLINE})
    assert not layers(there)["reaper"].armed


# -- move, end, find ---------------------------------------------------------------------------------------------------


def test_extending_moves_the_label_then_the_machines_own_timer(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    moved = DEADLINE + timedelta(hours=1)
    there.place().prolong(ID, moved, {LABEL_DEADLINE: deadline_label(moved)})
    assert there.cloud.labels_set == [{LABEL_DEADLINE: deadline_label(moved)}]
    assert isinstance(there.desk, Desk)
    assert f"--deadline {int(moved.timestamp()) + 120}" in there.desk.ran[-1]
    there.place().prolong(ID, DEADLINE, {LABEL_DEADLINE: deadline_label(DEADLINE)})
    assert len(there.cloud.labels_set) == 1, "a label never moves back"


def test_a_timer_that_refuses_is_told_and_nothing_else_is_moved_after_it(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    there.desk = Desk(refuses=True)
    with pytest.raises(UsageMistake, match="the disk is full"):
        there.place().prolong(ID, DEADLINE + timedelta(hours=1), {})


def test_there_is_nothing_to_extend_without_a_machine_that_runs(there: There) -> None:
    with pytest.raises(UsageMistake, match="no machine to extend"):
        there.place().prolong(ID, DEADLINE, {})


def test_a_deletion_under_way_is_not_asked_for_again_at_once(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    there.cloud.stopping_s = 30
    place = there.place()
    for _ in range(3):
        place.end(ID, force=False)
    assert there.cloud.deleted == [node_of(ID)]


def test_everything_with_our_labels_is_found_whoever_began_it(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    there.cloud.insert("hers-0123abcd", session_labels("hers-0123abcd", "hers", "her", DEADLINE))
    there.cloud.insert("other", {})
    found = there.place().find()
    assert {(one.session_id, one.labels[LABEL_OWNER]) for one in found} == {(ID, "me"), ("hers-0123abcd", "her")}


# -- before anything exists --------------------------------------------------------------------------------------------

QUOTAS = (
    Quota("global", "GPUS_ALL_REGIONS", 8, 0),
    *(Quota(region, "PREEMPTIBLE_NVIDIA_H200_GPUS", 8, 0) for region in ("us-central1", "us-east5")),
)


def test_a_project_that_has_everything_is_taken(there: There) -> None:
    there.cloud.limits = QUOTAS
    there.place().check(SPEC)
    assert there.cloud.log == []


def test_a_missing_permission_is_named_with_the_command_that_grants_it(there: There) -> None:
    there.cloud.limits = QUOTAS
    there.cloud.lacking = frozenset({"compute.globalOperations.list"})
    with pytest.raises(Denied, match=r"lacks compute\.globalOperations\.list in project a-project") as caught:
        there.place().check(SPEC)
    assert "gcloud iam roles create" in caught.value.hint


def test_a_project_without_gpus_is_told_before_anything_is_asked_for(there: There) -> None:
    there.cloud.limits = (Quota("global", "GPUS_ALL_REGIONS", 0, 0),)
    with pytest.raises(QuotaExceeded, match="GPUS_ALL_REGIONS") as caught:
        there.place().check(SPEC)
    assert "gcloud beta quotas preferences create" in caught.value.hint


def test_without_a_reaper_a_session_starts_only_when_a_person_says_so(
    there: There, caplog: pytest.LogCaptureFixture
) -> None:
    there.cloud.limits = QUOTAS
    there.guard = guard_layer((), PROJECT, NOON)
    with pytest.raises(DoesNotFit, match="nothing outside of the machine would end this session") as caught:
        there.place().check(SPEC)
    assert "kimisession guard enable" in caught.value.hint
    assert "--unguarded" in caught.value.hint
    there.place().check(replace(SPEC, placement=replace(SPEC.placement, unguarded=True)))
    assert "no reaper watches over this session" in caplog.text


def test_a_machine_on_demand_is_told_not_to_restart_and_a_spot_machine_never_does(there: There) -> None:
    there.cloud.insert(ID, LABELS)
    there.place().after_launch(ID)
    assert there.cloud.restarts_off == []
    there.cloud.insert(ID, LABELS, spot=False)
    there.place().after_launch(ID)
    assert there.cloud.restarts_off == [node_of(ID, 1)]
