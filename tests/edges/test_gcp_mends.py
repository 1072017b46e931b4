"""What an adversary found on GCP, each a promise: clocks that disagree, names that repeat, deletions that only seem to work."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from emulated import ID, PROJECT, ZONE, Project, labels_of, needed, project
from good_values import PROFILE, choices
from memory_compute import MemoryCompute
from test_gcp_session import There

from kimisession.cloud import guard
from kimisession.cloud.sweep import Sweeper
from kimisession.core.clocks import CLOCKS_APART, SAME, by_the_other, quarrel
from kimisession.core.cost import estimate_of
from kimisession.core.guard import LABEL_CODE, NAME
from kimisession.core.inventory import Disk
from kimisession.core.ledger import State
from kimisession.core.quote import launch_spec, make_quote
from kimisession.engines.layers import left_to_itself
from kimisession.errors import DoesNotFit, EngineFailed, Unconfirmed

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
EMAIL = f"kimisession-reaper@{PROJECT}.iam.gserviceaccount.com"


# -- clocks ---------------------------------------------------------------------------------------------------------------


class Machine:
    """A machine that ssh reaches, with a keeper that beats, by a clock of its own."""

    words = ("demo",)

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self.clock = clock
        self.silent_s = 0.0

    def run(self, script: str, text: str = "", within_s: float = 30.0) -> str:
        said = ""
        for command in script.split("echo @@kimisession@@; ")[1:]:
            said += "@@kimisession@@\n"
            if command.startswith("tail -c"):
                at = self.clock() - timedelta(seconds=self.silent_s)
                said += json.dumps({"at": at.isoformat(), "kind": "beat", "by": "keeper"}) + "\n"
            elif "date +%s" in command:
                said += f"{int(self.clock().timestamp())}\n"
        return said

    def write_json(self, path: str, content: object) -> None:
        """It is told to stop."""


class Skewed(There):
    """`moment` is what the laptop believes; `ahead` is by how much it is wrong, `slow` by how much the machine is."""

    ahead, slow = timedelta(0), timedelta(0)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cloud = MemoryCompute(lambda: self.moment - self.ahead)
        self.machine = Machine(lambda: self.moment - self.ahead - self.slow)

    def engine(self, infra: str) -> Any:
        made = super().engine(infra)
        made.place.desk_of = lambda session_id: self.machine  # type: ignore[attr-defined]
        return made

    def wake(self, ahead: timedelta) -> None:
        """The laptop's clock is off from now on."""
        self.moment, self.ahead = self.moment + ahead, ahead


@pytest.fixture
def skewed(tmp_path: Path) -> Iterator[Skewed]:
    made = Skewed(tmp_path)
    yield made
    made.store.close()


@pytest.mark.parametrize("ahead", [4 * MINUTE, 300 * MINUTE, -300 * MINUTE], ids=str)
def test_a_laptop_whose_clock_is_off_ends_no_session_whose_keeper_beats(skewed: Skewed, ahead: timedelta) -> None:
    session = skewed.start()
    skewed.moment += 20 * MINUTE
    skewed.wake(ahead)
    session, seen = skewed.controller().refresh(session)
    assert (session.teardown, skewed.cloud.deleted) == (None, [])
    assert {layer.name: layer.armed for layer in seen.layers}["keeper"]


def test_a_laptop_whose_clock_is_behind_still_finds_a_keeper_that_is_silent(skewed: Skewed) -> None:
    session = skewed.start()
    skewed.moment += 20 * MINUTE
    skewed.wake(-300 * MINUTE)
    skewed.machine.silent_s = 600
    session, seen = skewed.controller().refresh(session)
    assert not {layer.name: layer.armed for layer in seen.layers}["keeper"]
    assert session.reason == "unguarded"


def test_a_machine_whose_clock_is_slow_is_not_taken_for_one_without_a_keeper(skewed: Skewed) -> None:
    skewed.slow = 120 * MINUTE
    session = skewed.start()
    skewed.moment += 20 * MINUTE
    session, _ = skewed.controller().refresh(session)
    assert (session.teardown, skewed.cloud.deleted) == (None, [])


def test_a_session_past_its_deadline_by_the_clouds_clock_is_ended_whatever_the_laptop_believes(skewed: Skewed) -> None:
    session = skewed.start()
    assert session.deadline is not None
    skewed.moment = session.deadline + 2 * MINUTE
    skewed.wake(-300 * MINUTE)
    assert skewed.controller().refresh(session)[0].reason == "past-deadline"


def test_no_session_is_started_by_a_clock_that_is_off(skewed: Skewed) -> None:
    skewed.wake(6 * MINUTE)
    with pytest.raises(DoesNotFit, match="6 min ahead of the cloud's, and every deadline would be off"):
        skewed.start()


def test_stop_works_by_whatever_clock(skewed: Skewed) -> None:
    session = skewed.start()
    skewed.wake(300 * MINUTE)
    assert skewed.controller().stop(session, "kimisession stop", "user").state is State.GONE


def test_a_journal_that_stopped_is_told_by_the_machines_clock_and_a_late_machine_by_the_places() -> None:
    beat = [{"at": (NOON - timedelta(hours=2)).isoformat()}]  # by a clock that is two hours slow
    assert not left_to_itself(NOON - 30 * MINUTE, beat, NOON, NOON - timedelta(hours=2))
    assert left_to_itself(NOON - 30 * MINUTE, beat, NOON, NOON - timedelta(hours=2) + 4 * MINUTE)
    assert left_to_itself(NOON - 16 * MINUTE, [], NOON, NOON)
    assert not left_to_itself(NOON - 14 * MINUTE, [], NOON, NOON)


@pytest.mark.parametrize(
    ("apart", "wrong"), [(CLOCKS_APART, ""), (CLOCKS_APART + MINUTE, "is 6 min ahead of the cloud's")]
)
def test_clocks_quarrel_only_when_one_of_them_must_be_wrong(apart: timedelta, wrong: str) -> None:
    assert quarrel(NOON + apart, NOON).endswith(wrong)
    assert bool(quarrel(NOON, NOON + apart)) is bool(wrong)
    assert by_the_other(NOON, NOON + SAME) == NOON, "the wire and rounding are no other clock"
    assert by_the_other(NOON, NOON + apart) == NOON + apart
    assert by_the_other(NOON, None) == NOON


# -- the wire -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Project]:
    needed()
    with project(tmp_path) as made:
        made.tell("account", email=EMAIL)
        yield made
        assert made.state.data["violations"] == []


@pytest.mark.parametrize("off_s", [3 * 3600.0, -3 * 3600.0], ids=["behind", "ahead"])
def test_an_answers_date_tells_the_clouds_clock_and_a_sweeper_that_differs_deletes_nothing(
    there: Project, off_s: float
) -> None:
    there.insert(labels=labels_of(datetime.now(UTC) - timedelta(hours=1)))
    there.state.clock = lambda: time.time() + off_s
    there.token = there.emulator.token()
    at = there.as_member("").everything().at
    assert abs((at - datetime.now(UTC)).total_seconds() - off_s) < 10
    with pytest.raises(Unconfirmed, match="3 h 00 min"):
        Sweeper(there.as_member(""), sleep=there.sleep).delete_until_gone(60)
    assert len(there.names()) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [("op_error", f"{NAME} in .* was not deleted"), ("delete_ignored", f"{NAME} in .* is still there")],
)
def test_a_reaper_that_was_not_deleted_is_not_called_gone_nor_replaced(there: Project, fault: str, words: str) -> None:
    made = guard.enable(there.compute, ZONE, "", "default", lambda _: None)
    there.tell("faults", kind=fault, times=2, method="compute.instances.delete")
    with pytest.raises(Unconfirmed, match=words):
        guard.disable(there.compute, lambda _: None)
    there.compute.set_labels(made, {LABEL_CODE: "another"})
    with pytest.raises(Unconfirmed, match=words):
        guard.enable(there.compute, ZONE, "", "default", lambda _: None)
    assert guard.enable(there.compute, ZONE, "", "default", lambda _: None).labels[LABEL_CODE] == guard.code_version()
    assert guard.disable(there.compute, lambda _: None) == 1
    assert there.names() == []


def test_one_label_without_an_end_keeps_no_reaper_from_its_work(there: Project) -> None:
    past, ever = labels_of(datetime.now(UTC) - timedelta(hours=1)), "ever-1a2b3c4d"
    there.insert(labels=past)
    labels = {**labels_of(datetime.now(UTC), ever), "kimisession-deadline": "99991231t235959z"}
    there.insert(f"{ever}-0f0f0f0f-head-ab12cd34-compute", labels, "europe-west4-b")
    Sweeper(there.compute, sleep=there.sleep).delete_until_gone(60)
    assert there.names() == [f"{ever}-0f0f0f0f-head-ab12cd34-compute"]


# -- names that repeat ----------------------------------------------------------------------------------------------------


def test_a_disk_of_the_same_name_in_another_zone_is_somebody_elses(tmp_path: Path) -> None:
    with_data = There(tmp_path)
    session = with_data.start()
    (machine,) = with_data.cloud.machines.values()
    # A person attached a disk of theirs by hand; a colleague has one of that name elsewhere, attached to nothing.
    with_data.cloud.machines[machine.name] = replace(machine, disks=(*machine.disks, ("data", False)))
    with_data.cloud.disks["mine"] = Disk("data", machine.zone, machine.began, users=(machine.name,))
    with_data.cloud.disks["theirs"] = Disk("data", "europe-west4-b", machine.began)
    with_data.controller().stop(session, "kimisession stop", "user")
    assert "data" not in with_data.cloud.deleted
    with_data.store.close()


# -- the project that nobody looks at -------------------------------------------------------------------------------------


def test_a_start_is_refused_when_skypilot_would_launch_in_another_project_than_the_one_looked_at(
    tmp_path: Path,
) -> None:
    there = There(tmp_path)
    place = there.engine("gcp").place
    place.sky_project = lambda: "elsewhere"  # type: ignore[attr-defined]
    spec = launch_spec(make_quote(PROFILE, choices(infra="gcp", bucket_url="gs://weights"), NOON), ID, "me")
    with pytest.raises(
        DoesNotFit, match="SkyPilot launches in project elsewhere, and everything that would end it looks in"
    ):
        place.check(spec)
    place.sky_project = lambda: there.cloud.project  # type: ignore[attr-defined]
    place.check(spec)
    there.store.close()


def test_a_launch_that_came_to_be_where_nobody_looks_fails_and_is_ended_by_skypilot(tmp_path: Path) -> None:
    there = There(tmp_path)
    there.sdk.launches = lambda task: None  # it says that all is well, and this project never had a machine
    there.sdk.status = lambda names, refresh: [names]  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="never had a machine of it"):
        there.start()
    assert "down" in there.sdk.calls
    assert there.session().reason == "launch-failed"
    there.store.close()


def test_a_machine_that_was_taken_back_as_it_came_up_is_no_other_projects(tmp_path: Path) -> None:
    there = There(tmp_path)

    def taken(task: dict[str, Any]) -> None:
        there.insert(task)
        there.cloud.preempt(next(iter(there.cloud.machines)))

    there.sdk.launches = taken
    there.start()
    assert there.session().reason != "launch-failed"
    there.store.close()


# -- secrets --------------------------------------------------------------------------------------------------------------


def test_a_launch_that_was_killed_leaves_no_key_on_this_machine_once_it_is_gone(tmp_path: Path) -> None:
    there = There(tmp_path)
    session = there.start()
    payload = tmp_path / session.id / "payload"
    payload.mkdir()
    (payload / "hf_token").write_text("hf_secret", encoding="ascii")
    there.controller().stop(session, "kimisession stop", "user")
    assert not payload.exists()
    there.store.close()


# -- dollars --------------------------------------------------------------------------------------------------------------


def test_the_receipts_worst_case_is_the_one_that_was_agreed_to(tmp_path: Path) -> None:
    there = There(tmp_path)
    controller = there.controller()
    chosen = choices(infra="gcp", bucket_url="gs://w", usd_per_hour=Decimal(26), dearest_usd=Decimal(40))
    quote = make_quote(replace(PROFILE, load="copy"), chosen, there.moment)
    session = controller.request(quote, launch_spec(quote, ID, "me"))
    estimate = estimate_of(session, there.moment)
    assert estimate is not None
    assert estimate.worst_usd == quote.worst_usd == Decimal(80)
    there.store.close()
