"""Whole sessions on GCP: ledger, controller, the engine over SkyPilot and the place, with Compute Engine in memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from good_values import PROFILE, choices
from memory_compute import MemoryCompute, node_of

from kimisession.cli.recovering import find_lost
from kimisession.controller import Controller
from kimisession.core.cost import cost_of
from kimisession.core.ledger import Session, State
from kimisession.core.lifecycle import PROOF_WITHIN, Layer, Observation
from kimisession.core.quote import make_quote
from kimisession.core.recovery import under_the_same_caps, useful
from kimisession.engines.gcp import GcpPlace
from kimisession.engines.skypilot import SkyPilotEngine
from kimisession.errors import EngineFailed, EngineMissing, LeakSuspected, NoCapacity, UsageMistake
from kimisession.store import Store


class Sdk:
    """SkyPilot: what its launch does to the cloud is told by the test."""

    StatusRefreshMode = SimpleNamespace(FORCE="force")
    skylet = SimpleNamespace(autostop_lib=SimpleNamespace(AutostopWaitFor=SimpleNamespace(JOBS="jobs")))
    Task = SimpleNamespace(from_yaml_config=lambda config: config)

    def __init__(self, launches: Callable[[dict[str, Any]], None]) -> None:
        self.launches = launches
        self.calls: list[str] = []
        self.running = False

    def launch(self, task: dict[str, Any], **options: Any) -> str:
        self.task = {**task, **options}
        return "r1"

    def stream_and_get(self, request: str, output_stream: object) -> tuple[int, Any]:
        self.launches(self.task)
        return 1, SimpleNamespace(launched_resources=SimpleNamespace(get_cost=lambda seconds: 20.0))

    def get(self, answer: Any) -> Any:
        return answer

    def api_cancel(self, requests: list[str], silent: bool) -> None:
        self.calls.append("cancel")

    def api_status(self, requests: list[str]) -> list[Any]:
        return [SimpleNamespace(status="RUNNING" if self.running else "CANCELLED")]

    def status(self, names: list[str], refresh: str) -> list[Any]:
        return []

    def down(self, name: str) -> None:
        """It finds no record and says that all is well."""
        self.calls.append("down")


class There:
    """One laptop, one project."""

    def __init__(self, folder: Path) -> None:
        self.moment = datetime.now(UTC)
        self.folder = folder
        self.cloud = MemoryCompute(lambda: self.moment)
        self.sdk = Sdk(self.insert)
        self.store = Store(folder / "ledger.db")

    def insert(self, task: dict[str, Any]) -> None:
        """What a launch that works makes."""
        self.cloud.insert(task["cluster_name"], task["resources"]["labels"])

    def engine(self, infra: str) -> SkyPilotEngine:
        cloud: Any = self.cloud
        sdk: Any = self.sdk
        place = GcpPlace(
            self.folder,
            lambda: cloud,
            guard=lambda cloud, now: Layer("reaper", True, "it looks"),
            desk=lambda session_id: None,
            now=lambda: self.moment,
        )
        return SkyPilotEngine("gcp", self.folder, place, lambda: sdk, settle_s=0.0, now=lambda: self.moment)

    def sleep(self, seconds: float) -> None:
        self.moment += timedelta(seconds=max(seconds, 1))

    def controller(self) -> Controller:
        return Controller(
            self.store, self.folder / "keys", self.engine, lambda: self.moment, self.sleep, places=("gcp",)
        )

    def start(self) -> Session:
        controller = self.controller()
        chosen = choices(infra="gcp", bucket_url="gs://weights", usd_per_hour=Decimal(26))
        quote = make_quote(replace(PROFILE, load="copy"), chosen, self.moment)
        spec = controller.check(quote)
        return controller.launch(controller.request(quote, spec), spec)

    def look(self) -> list[tuple[Session, Observation]]:
        return self.controller().live()

    def session(self) -> Session:
        return self.store.session(self.store.rows()[0].session)


@pytest.fixture
def there(tmp_path: Path) -> Iterator[There]:
    made = There(tmp_path)
    yield made
    made.store.close()


def test_a_session_is_stopped_proven_gone_and_billed_by_the_clouds_own_times(there: There) -> None:
    session = there.start()
    assert session.state is State.STARTING
    began = there.moment
    there.moment += timedelta(minutes=20)
    gone = there.controller().stop(session, "kimisession stop", "user")
    assert gone.state is State.GONE
    assert gone.confirmed is not None
    assert "two empty lists of all zones" in gone.confirmed.evidence
    assert there.moment - began > timedelta(minutes=21)
    lines = {line.resource.kind: line for line in cost_of(gone, there.moment).lines}
    assert set(lines) == {"machine", "disk", "address"}
    assert lines["machine"].seconds == 20 * 60
    assert lines["machine"].usd == Decimal(26) / 3


def test_a_launch_broken_off_whose_request_was_lost_stays_loud_until_nothing_can_come_of_it(there: There) -> None:
    lost: list[Any] = []

    def breaks(task: dict[str, Any]) -> None:
        lost.append(there.cloud.did("bulkInsert", "", status="RUNNING", group="g"))
        raise KeyboardInterrupt

    there.sdk.launches = breaks
    with pytest.raises(LeakSuspected, match="may still make a machine") as caught:
        there.start()
    assert caught.value.exit_code == 7
    session = there.session()
    assert session.state is State.UNCONFIRMED
    # Minutes later it comes after all; whoever looks next ends it.
    there.cloud.finish(lost[0])
    there.cloud.insert(session.id, {})
    there.look()
    assert there.cloud.machines == {}
    assert there.session().state is State.UNCONFIRMED
    there.moment += timedelta(seconds=61)
    there.look()
    there.moment += timedelta(seconds=61)
    there.look()
    assert there.session().state is State.GONE


def test_a_stop_while_the_cloud_is_down_is_loud_and_confirmed_once_it_answers(there: There) -> None:
    session = there.start()
    there.cloud.unreachable = True
    with pytest.raises(LeakSuspected, match="does not answer"):
        there.controller().stop(session, "kimisession stop", "user")
    assert [one.state for one, _ in there.look()] == [State.UNCONFIRMED]
    there.cloud.unreachable = False
    for _ in range(3):
        there.look()
        there.moment += timedelta(seconds=61)
    assert there.session().state is State.GONE
    assert there.cloud.machines == {}


def test_a_clock_that_is_set_back_during_a_stop_makes_no_endless_wait(there: There) -> None:
    session = there.start()
    there.cloud.silent = ("us-central1-a",)
    controller, rounds = there.controller(), []

    def sleep(seconds: float) -> None:
        rounds.append(seconds)
        there.moment += timedelta(seconds=-3600 if len(rounds) == 20 else seconds)

    controller.sleep = sleep
    with pytest.raises(LeakSuspected):
        controller.stop(session, "kimisession stop", "user", within_s=120)
    assert 100 < sum(rounds) < 130


def test_a_session_that_ended_by_itself_is_proven_gone_by_two_looks(there: There) -> None:
    session = there.start()
    there.cloud.remove(node_of(session.id))
    assert [one.live for one, _ in there.look()] == [True]
    there.moment += timedelta(seconds=61)
    there.look()
    assert there.look() == []


def test_past_its_deadline_with_a_cloud_that_does_not_answer_it_is_loud(there: There) -> None:
    session = there.start()
    there.cloud.unreachable = True
    assert session.deadline is not None
    there.moment = session.deadline + PROOF_WITHIN - timedelta(seconds=1)
    assert [one.state for one, _ in there.look()] == [State.STARTING]
    there.moment += timedelta(minutes=1)
    assert [one.state for one, _ in there.look()] == [State.UNCONFIRMED]


def test_past_its_deadline_without_the_library_that_could_look_it_is_loud(there: There) -> None:
    there.start()
    controller = there.controller()

    def missing(infra: str) -> SkyPilotEngine:
        raise EngineMissing("SkyPilot is not installed", "install it")

    controller.engines = missing
    there.moment += timedelta(hours=5)
    controller.live()
    [(session, seen)] = controller.live()
    assert session.unconfirmed
    assert seen.why == "SkyPilot is not installed"


def test_a_preempted_session_says_so_with_what_it_lost(there: There) -> None:
    session = there.start()
    there.moment += timedelta(minutes=7)
    there.cloud.preempt(node_of(session.id))
    for _ in range(2):
        there.look()
        there.moment += timedelta(seconds=61)
    gone = there.session()
    assert (gone.state, gone.reason) == (State.GONE, "preempted")
    assert gone.ended is not None
    assert "Compute Engine: preempted at" in gone.ended.evidence


def test_a_stopped_machine_that_still_bills_its_disk_is_deleted_by_whoever_looks(there: There) -> None:
    session = there.start()
    there.cloud.stop(node_of(session.id))
    there.look()
    assert there.cloud.machines == {}
    assert there.session().live


def test_a_launch_that_fails_and_leaves_a_machine_is_cleaned_up_in_every_zone(there: There) -> None:
    def fails(task: dict[str, Any]) -> None:
        there.cloud.insert(task["cluster_name"], task["resources"]["labels"], zone="us-central1-a")
        there.cloud.insert(task["cluster_name"], task["resources"]["labels"], zone="us-east5-a")
        raise RuntimeError("rsync failed")

    there.sdk.launches = fails
    with pytest.raises(EngineFailed, match="rsync failed"):
        there.start()
    assert there.cloud.machines == {}
    assert there.session().state is State.GONE
    assert len([r for r in there.session().resources if r.kind == "machine"]) == 2


def test_two_machines_of_one_session_are_both_billed(there: There) -> None:
    session = there.start()
    there.cloud.insert(session.id, {}, zone="us-east5-a")
    there.cloud.machines = {
        name: replace(m, labels=next(iter(there.cloud.machines.values())).labels)
        for name, m in there.cloud.machines.items()
    }
    there.look()
    there.moment += timedelta(hours=1)
    assert cost_of(there.session(), there.moment).usd >= 2 * 26


def test_a_lost_session_is_gone_on_with_under_its_old_caps_once_it_is_proven_gone(there: There) -> None:
    first = there.start()
    there.moment += timedelta(minutes=7)
    there.cloud.preempt(node_of(first.id))
    there.look()  # the journal says preempted, and it is not proven gone yet
    assert there.session().live
    lost = find_lost(there.controller(), "demo", "good", ())
    assert [one.id for one in lost] == [first.id]
    assert (lost[0].state, lost[0].reason) == (State.GONE, "preempted")
    controller = there.controller()
    chosen = choices(infra="gcp", bucket_url="gs://weights", usd_per_hour=Decimal(26))
    quote = under_the_same_caps(make_quote(replace(PROFILE, load="copy"), chosen, there.moment), lost, ())
    spec = controller.check(quote)
    second = controller.launch(controller.request(quote, spec), spec)
    assert second.deadline == first.deadline
    assert [one.id for one in controller.chain(second)] == [second.id, first.id]
    there.moment += timedelta(hours=1)
    assert useful(controller.chain(second), there.moment).sessions == 2


def test_only_what_was_lost_is_gone_on_with_and_no_cap_can_be_typed_for_it(there: There) -> None:
    session = there.start()
    with pytest.raises(UsageMistake, match="is starting; only a machine that was lost"):
        find_lost(there.controller(), "demo", "good", ())
    there.controller().stop(session, "kimisession stop", "user")
    with pytest.raises(UsageMistake, match="ended: user"):
        find_lost(there.controller(), "demo", "good", ())
    with pytest.raises(UsageMistake, match="--budget cannot be given"):
        find_lost(there.controller(), "demo", "good", ("--budget",))
    with pytest.raises(UsageMistake, match="no session 'other'"):
        find_lost(there.controller(), "other", "good", ())


def test_places_that_had_no_machine_are_in_the_ledger_with_their_reasons(there: There) -> None:
    class ResourcesUnavailableError(Exception):
        failover_history = (Exception("us-east5-a: ZONE_RESOURCE_POOL_EXHAUSTED"),)

    def fails(task: dict[str, Any]) -> None:
        raise ResourcesUnavailableError("none to be had")

    there.sdk.launches = fails
    with pytest.raises(NoCapacity):
        there.start()
    assert [attempt.why for attempt in there.session().attempts] == ["us-east5-a: ZONE_RESOURCE_POOL_EXHAUSTED"]
    assert there.session().state is State.GONE
