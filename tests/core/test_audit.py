"""What is ours, what of that is left over, and when something is proven gone."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from kimisession.core.audit import (
    APART,
    BY_US,
    FRESH,
    GRACE,
    MARK,
    Price,
    Verdict,
    audit,
    proof_of_gone,
    what_ended,
)
from kimisession.core.inventory import (
    Address,
    Disk,
    Inventory,
    Machine,
    Operation,
    Resource,
    cluster_name,
    looks_like_ours,
    may_still_make,
    named_after,
    operations_of,
)
from kimisession.core.launch import deadline_label, session_labels
from kimisession.node.deadline import request_id

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)
ID = "kimi-1a2b3c4d"
NODE = f"{ID}-0f0f0f0f-head-ab12cd34-compute"


def labels(deadline: datetime = NOW + HOUR, owner: str = "ann", session: str = ID) -> dict[str, str]:
    return session_labels(session, "kimi", owner, deadline)


def machine(name: str = NODE, **changes: object) -> Machine:
    good = Machine(name, "us-central1-a", NOW - HOUR, labels(), machine_type="a3-highgpu-8g", disks=((NODE, True),))
    return replace(good, **changes)  # type: ignore[arg-type]


def disk(name: str = NODE, **changes: object) -> Disk:
    return replace(Disk(name, "us-central1-a", NOW - HOUR, size_gib=100), **changes)  # type: ignore[arg-type]


def seen(*things: Resource, at: datetime = NOW, unreachable: tuple[str, ...] = ()) -> Inventory:
    machines = tuple(t for t in things if isinstance(t, Machine))
    disks = tuple(t for t in things if isinstance(t, Disk))
    return Inventory(at, "p", machines, disks, tuple(t for t in things if isinstance(t, Address)), unreachable)


# -- verdicts -------------------------------------------------------------------------------------------------------------

ROWS: list[tuple[str, Resource, Verdict, bool]] = [
    ("before its deadline", machine(), Verdict.LIVE, False),
    ("at its deadline", machine(labels=labels(NOW)), Verdict.LIVE, False),
    ("a second after it", machine(labels=labels(NOW - SECOND)), Verdict.ENDING, False),
    ("at the end of the grace", machine(labels=labels(NOW - GRACE)), Verdict.ENDING, False),
    ("a second after the grace", machine(labels=labels(NOW - GRACE - SECOND)), Verdict.PAST_DEADLINE, True),
    ("another's, live", machine(labels=labels(owner="bob")), Verdict.FOREIGN, False),
    ("another's, past", machine(labels=labels(NOW - HOUR, "bob")), Verdict.PAST_DEADLINE, True),
    (
        "stopped a moment ago",
        machine(status="TERMINATED", ended=NOW - FRESH + SECOND),
        Verdict.ENDING,
        False,
    ),
    ("stopped", machine(status="TERMINATED", ended=NOW - FRESH), Verdict.STOPPED_WITH_DISK, True),
    ("stopped, nobody knows when", machine(status="TERMINATED"), Verdict.STOPPED_WITH_DISK, True),
    ("suspended", machine(status="SUSPENDED", ended=NOW - HOUR), Verdict.STOPPED_WITH_DISK, True),
    ("a label that is no moment", machine(labels=labels() | {"kimisession-deadline": "soon"}), Verdict.LIVE, False),
    (
        "... for longer than a day",
        machine(labels=labels() | {"kimisession-deadline": "soon"}, began=NOW - 25 * HOUR),
        Verdict.PAST_DEADLINE,
        True,
    ),
    ("a disk alone", disk(labels=labels()), Verdict.ORPHAN_DISK, True),
    ("a disk just made", disk(labels=labels(), began=NOW - SECOND), Verdict.LIVE, False),
    ("an address alone", Address("a", "us-central1", NOW - HOUR, labels()), Verdict.ORPHAN_ADDRESS, True),
    ("no labels, our shape", machine(labels={}), Verdict.UNLABELLED_OURS, False),
    ("a disk without labels, our shape", disk(), Verdict.UNLABELLED_OURS, False),
]


@pytest.mark.parametrize(("thing", "verdict", "due"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_resource_alone_is_judged_by_its_labels_its_state_and_the_time(
    thing: Resource, verdict: Verdict, due: bool
) -> None:
    (finding,) = audit(seen(thing), NOW, "ann")
    assert (finding.verdict, finding.due) == (verdict, due)
    assert finding.leak == (verdict not in (Verdict.LIVE, Verdict.ENDING, Verdict.FOREIGN))
    assert finding.why


DECOYS = [
    "kimi-1a2b3c4d-backup",
    "kimi-1a2b3c4d5-0f0f0f0f-head-ab12cd34-compute",
    "my-kimi-1a2b3c4d-0f0f0f0f-head-ab12cd34-compute",
    "kimi-1a2b3c4d-0f0f0f0f-head-ab12cd34-compute-copy",
    "kimi-1a2b3c4d-0f0f0f0f-head-ab12cd3-compute",
    "kimisession",
    "kimisession-reaper",
]


@pytest.mark.parametrize("name", DECOYS)
def test_a_decoy_with_a_similar_name_is_never_due(name: str) -> None:
    past = machine(labels=labels(NOW - HOUR))
    decoy = machine(name, labels={"kimi": "session", "owner": "ann"}, disks=((name, True),))
    found = audit(seen(past, decoy, disk(name)), NOW, "ann", known=[ID])
    assert [f.resource.name for f in found if f.due] == [NODE]


def test_what_a_known_session_left_without_labels_is_due() -> None:
    (finding,) = audit(seen(disk()), NOW, "ann", known=[ID])
    assert (finding.verdict, finding.due, finding.session) == (Verdict.ORPHAN_DISK, True, ID)


def test_a_disk_in_use_is_part_of_its_machine() -> None:
    (finding,) = audit(seen(machine(), disk(users=(NODE,))), NOW, "ann")
    assert isinstance(finding.resource, Machine)


def test_a_disk_of_a_session_whose_machine_is_there_waits_for_it() -> None:
    found = audit(seen(machine(), disk("data", labels=labels())), NOW, "ann")
    assert {f.verdict for f in found} == {Verdict.LIVE}


def test_leaks_come_first() -> None:
    old = machine("old", labels=labels(NOW - HOUR, session="z-1a2b3c4d"))
    assert [f.resource.name for f in audit(seen(machine(), old), NOW, "ann")] == ["old", NODE]


# -- money ----------------------------------------------------------------------------------------------------------------


def price(thing: Resource) -> Price:
    return Price(Decimal(90) if isinstance(thing, Machine) else None, "a test")


def test_what_has_no_price_is_named_and_never_made_up() -> None:
    (finding,) = audit(seen(machine(), disk(users=(NODE,))), NOW, "ann", price=price)
    assert (finding.usd_per_hour, finding.usd, finding.unpriced) == (Decimal(90), Decimal(90), (f"disk {NODE}",))
    (finding,) = audit(seen(disk()), NOW, "ann", price=price)
    assert (finding.usd_per_hour, finding.usd, finding.unpriced) == (None, None, (NODE,))


def test_a_stopped_machine_takes_nothing_more_for_itself_and_goes_on_taking_it_for_its_disk() -> None:
    def both(thing: Resource) -> Price:
        return Price(Decimal(90) if isinstance(thing, Machine) else Decimal("0.02"), "a test")

    stopped = machine(status="TERMINATED", ended=NOW - HOUR / 2)
    (finding,) = audit(seen(stopped, disk(users=(NODE,))), NOW, "ann", price=both)
    assert (finding.usd_per_hour, finding.usd) == (Decimal("0.02"), Decimal("45.02"))


# -- names ----------------------------------------------------------------------------------------------------------------


def test_a_long_name_is_known_in_the_form_to_which_skypilot_cuts_it() -> None:
    long = "a-rather-long-session-name-1a2b3c4d"  # the cut form was made with SkyPilot 0.14.1's own function
    assert cluster_name(long) == "a-rather-long-session-n-dy"
    assert named_after("a-rather-long-session-n-dy-0f0f0f0f-head-ab12cd34-compute", long)
    assert not named_after("a-rather-long-session-n-dz-0f0f0f0f-head-ab12cd34-compute", long)


@pytest.mark.parametrize("name", [NODE, "x-1a2b3c4d-0f0f0f0f-worker-00000000-compute"])
def test_a_name_of_our_shape_is_recognised(name: str) -> None:
    assert looks_like_ours(name)


def test_what_belongs_to_a_session_is_found_by_label_by_name_and_by_its_machine() -> None:
    other = machine("other", labels=labels(session="b-1a2b3c4d"), disks=(("data", True),))
    mine = machine("relabelled", disks=(("boot", True),))
    boot, theirs, left = disk("boot", users=("relabelled",)), disk("data", users=("other",)), disk()
    found = seen(mine, other, boot, theirs, left, Address("ip", "us-central1", NOW, users=("relabelled",))).of(ID)
    assert [t.name for t in found.everything] == ["relabelled", "boot", NODE, "ip"]


def test_a_disk_without_labels_is_ours_once_one_of_ours_has_deleted_the_machine_of_its_name() -> None:
    ours, theirs = f"{MARK}-{BY_US:04x}-4abc-8abc-0123456789ab", "9a1ba1c1-63a3-49c2-a739-d12dee0b1352"
    for request, zone, ended, verdict in (
        (ours, "us-central1-a", NOW - FRESH - SECOND, Verdict.ORPHAN_DISK),
        (request_id(10), "us-central1-a", NOW - FRESH - SECOND, Verdict.ORPHAN_DISK),
        (ours, "us-central1-a", NOW - FRESH, Verdict.UNLABELLED_OURS),  # the deletion may be about to take it
        (ours, "us-central1-b", NOW - FRESH - SECOND, Verdict.UNLABELLED_OURS),
        (ours, "us-central1-a", NOW - 2 * HOUR, Verdict.UNLABELLED_OURS),  # made after that end: another's
        (theirs, "us-central1-a", NOW - FRESH - SECOND, Verdict.UNLABELLED_OURS),
    ):
        gone = operation("delete", zone=zone, request=request, ended=ended)
        (finding,) = audit(seen(disk()), NOW, done=[gone])
        assert (finding.verdict, finding.due) == (verdict, verdict is Verdict.ORPHAN_DISK), (request, zone, ended)
    assert audit(seen(disk(f"x{NODE}")), NOW, done=[operation("delete", f"x{NODE}", request=theirs, ended=NOW)])


# -- operations -----------------------------------------------------------------------------------------------------------


def operation(kind: str = "insert", target: str = NODE, status: str = "DONE", **changes: object) -> Operation:
    good = Operation(f"op-{kind}-{target}", "us-central1-a", kind, target, status, NOW - HOUR)
    return replace(good, **changes)  # type: ignore[arg-type]


def test_a_bulk_insert_that_named_no_machine_yet_may_be_ours() -> None:
    bulk = operation("bulkInsert", "", "RUNNING", group="g")
    theirs = operation(target="b-1a2b3c4d-0f0f0f0f-head-ab12cd34-compute", group="g")
    assert may_still_make(operations_of(ID, [bulk])) == (bulk,)
    assert may_still_make(operations_of(ID, [bulk, theirs])) == ()
    assert may_still_make(operations_of(ID, [bulk, theirs, operation(group="g")])) == (bulk,)
    assert operations_of(ID, [replace(bulk, status="DONE")]) == ()


def test_what_ended_a_machine_is_the_cause_and_not_its_consequence() -> None:
    preempted = operation("compute.instances.preempted")
    assert what_ended(NODE, [operation("delete"), preempted]) == ("preempted", preempted)
    assert what_ended("other", [preempted]) is None
    assert what_ended(NODE, [operation("delete", errors=(("X", "no"),))]) is None


def test_a_machine_that_started_again_did_not_end_with_what_stopped_it() -> None:
    crashed = operation("compute.instances.hostError")
    again = operation("compute.instances.automaticRestart")
    deleted = operation("delete")
    assert what_ended(NODE, [crashed]) == ("host error", crashed)
    assert what_ended(NODE, [crashed, again]) is None, "it runs"
    assert what_ended(NODE, [crashed, again, deleted]) == ("deleted", deleted)
    assert what_ended(NODE, [crashed, again, crashed]) == ("host error", crashed)
    stopped = operation("stop")
    assert what_ended(NODE, [stopped, operation("start"), deleted]) == ("deleted", deleted)
    assert what_ended(NODE, [stopped, operation("start", errors=(("X", "no"),))]) == ("stopped", stopped)


# -- gone -----------------------------------------------------------------------------------------------------------------

LATER = NOW + APART


def test_two_empty_lists_a_minute_apart_with_every_insert_done_are_a_proof() -> None:
    proof = proof_of_gone(seen(), seen(at=LATER), [operation(), operation("bulkInsert", "", group="g")])
    assert proof.gone
    assert "60 s apart" in proof.evidence
    assert "all 2 requests" in proof.evidence


NOT_YET = [
    ("one second early", seen(), seen(at=LATER - SECOND), [], "59 s apart", LATER),
    ("there before", seen(machine()), seen(at=LATER), [], "before it", LATER + APART),
    ("still there", seen(), seen(machine(), at=LATER), [], "still there", None),
    ("a disk still there", seen(), seen(disk(), at=LATER), [], f"disk {NODE}", None),
    ("an insert runs", seen(), seen(at=LATER), [operation(status="RUNNING")], "may still make", None),
    ("a zone was silent", seen(), seen(at=LATER, unreachable=("z",)), [], "z did not answer", None),
    ("... the first time", seen(unreachable=("z",)), seen(at=LATER), [], "z did not answer", None),
]


@pytest.mark.parametrize("row", NOT_YET, ids=[row[0] for row in NOT_YET])
def test_nothing_less_is_a_proof(
    row: tuple[str, Inventory, Inventory, list[Operation], str, datetime | None],
) -> None:
    _, first, second, operations, words, again = row
    proof = proof_of_gone(first, second, operations)
    assert not proof.gone
    assert words in proof.evidence
    assert proof.look_again_at == again


def test_the_label_is_the_one_that_launches_write() -> None:
    assert machine(labels=labels(NOW)).deadline == NOW
    assert labels(NOW)["kimisession-deadline"] == deadline_label(NOW)
