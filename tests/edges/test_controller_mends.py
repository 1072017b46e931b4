"""The controller when the ledger, a place or a second command is in the way."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from memory_world import World

from kimisession.controller import Controller
from kimisession.core.launch import LABEL_DEADLINE, LABEL_OWNER, parse_deadline_label
from kimisession.core.ledger import ExtendRefused, ExtendRequested, State
from kimisession.core.lifecycle import DEADLINE_GRACE
from kimisession.engines.memory import MemoryCloud, MemoryEngine
from kimisession.errors import EngineFailed, LeakSuspected, UsageMistake
from kimisession.errors import Unconfirmed as UnconfirmedError


@pytest.fixture
def world() -> Iterator[World]:
    """A world of its own for each test."""
    world = World()
    yield world
    world.close()


def full_disk(world: World, full: bool = True) -> None:
    """From now on the ledger takes nothing."""
    world.store._db.execute(f"PRAGMA query_only = {int(full)}")


# -- a ledger that cannot be written -----------------------------------------------------------------------------------


def test_a_stop_that_cannot_be_written_down_is_done_all_the_same_and_said(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    session = world.start()
    full_disk(world)
    gone = world.controller().stop(session, "kimisession stop", "user")
    assert world.cloud.exists() == []
    assert (gone.state, gone.reason) == (State.GONE, "user")
    assert "cannot be written" in caplog.text
    assert "TeardownRequested is only in memory" in caplog.text
    full_disk(world, full=False)
    assert world.store.session(session.id).live  # this ledger was never told ...
    world.look()
    assert world.store.session(session.id).state is State.GONE  # ... and learns it from the provider


def test_a_stop_without_ledger_and_without_proof_is_loud(world: World) -> None:
    session = world.start()
    full_disk(world)
    world.cloud.faults.delete_calls = 10**6
    with pytest.raises(LeakSuspected, match="could not be proven gone") as caught:
        world.controller().stop(session, "kimisession stop", "user")
    assert caught.value.exit_code == 7


def test_what_the_ledger_did_not_take_is_written_once_it_can_be(world: World) -> None:
    session = world.start()
    full_disk(world)
    controller = world.controller()
    world.cloud.faults.delete_calls = 10**6
    with pytest.raises(LeakSuspected):
        controller.stop(session, "kimisession stop", "user", within_s=5)
    full_disk(world, full=False)
    world.cloud.heal()
    controller.stop(controller.refresh(session)[0], "kimisession stop", "user")
    kinds = [row[0] for row in world.store._db.execute("SELECT kind FROM events ORDER BY seq")]
    assert kinds.index("TeardownRequested") < kinds.index("TeardownConfirmed")
    assert kinds.count("TeardownRequested") == 1


def test_a_launch_that_fails_on_a_full_disk_is_still_taken_down(world: World) -> None:
    world.cloud.faults.fails_after_creating = 1
    controller = world.controller()
    quote = world.quote()
    spec = controller.check(quote)
    session = controller.request(quote, spec)
    engine = MemoryEngine(world.cloud)

    class Fills(MemoryEngine):
        def launch(self, spec: Any, secrets: Any) -> None:
            full_disk(world)
            engine.launch(spec, secrets)

    controller.engines = lambda infra: Fills(world.cloud)
    with pytest.raises(EngineFailed):
        controller.launch(session, spec)
    assert world.cloud.exists() == []


def test_nothing_is_launched_that_could_not_be_written_down_first(world: World) -> None:
    full_disk(world)
    with pytest.raises(Exception, match="cannot be written"):
        world.start()
    assert world.cloud.exists() == []


# -- places ------------------------------------------------------------------------------------------------------------


class Places:
    """Several providers, and which of them were asked."""

    def __init__(self, world: World, *names: str) -> None:
        self.clouds = {name: MemoryCloud(world.now) for name in names}
        self.asked: list[str] = []

    def __call__(self, infra: str) -> MemoryEngine:
        self.asked.append(infra)
        return MemoryEngine(self.clouds[infra])

    def controller(self, world: World, *places: str) -> Controller:
        return Controller(world.store, world.ledger.parent / "keys", self, world.now, world.sleep, places)


def test_a_machine_that_came_up_late_is_found_on_the_place_where_it_was_asked_for(world: World) -> None:
    places = Places(world, "local", "far")
    session = world.start(places.controller(world), infra="far")
    places.clouds["far"].faults.lies_about_deletion = True
    assert places.controller(world).stop(session, "me", "user").state is State.GONE
    places.clouds["far"].heal()
    assert places.clouds["far"].exists() == [session.id]
    places.controller(world, "local").live()
    assert places.clouds["far"].exists() == []


def test_a_place_is_asked_when_it_is_configured_or_in_the_ledger_and_not_for_ever(world: World) -> None:
    places = Places(world, "local", "far", "mine")
    controller = places.controller(world, "local", "mine")
    controller.live()
    assert set(places.asked) == {"local", "mine"}
    session = world.start(controller, infra="far")
    controller.stop(session, "me", "user")
    places.asked.clear()
    controller.live()
    assert "far" in places.asked
    world.moment += timedelta(days=8)
    places.asked.clear()
    controller.live()
    assert set(places.asked) == {"local", "mine"}


def test_not_having_been_able_to_look_is_said(world: World, caplog: pytest.LogCaptureFixture) -> None:
    places = Places(world, "local", "far")
    places.clouds["far"].faults.unreachable = True
    assert places.controller(world, "local", "far").live() == []
    assert "not looked on far for machines that this ledger does not know: the provider does not answer" in caplog.text


def test_with_a_lost_ledger_our_own_machines_are_found_on_their_place_and_those_of_others_left_alone(
    world: World,
) -> None:
    places = Places(world, "local", "memory")
    ours, theirs = (world.start(places.controller(world), infra="memory", name=name) for name in ("ours", "theirs"))
    far = places.clouds["memory"]
    far.machines[theirs.id].labels[LABEL_OWNER] = "somebody-else"
    far.kill_layers(theirs.id)  # as seen from here: nobody reaches it by ssh
    world.store._db.execute("DELETE FROM events")
    world.store._db.execute("DELETE FROM sessions")
    assert [session.id for session, _ in places.controller(world, "memory").live()] == [ours.id]
    gone = places.controller(world, "memory").stop(world.store.session(ours.id), "me", "user")
    assert gone.state is State.GONE
    assert far.exists() == [theirs.id]


# -- extend ------------------------------------------------------------------------------------------------------------


def test_an_extension_that_the_place_refuses_moved_nothing_in_the_ledger(world: World) -> None:
    session = world.start()
    world.cloud.faults.refuses_extend = True
    with pytest.raises(UsageMistake, match="does not lengthen"):
        world.controller().extend(session, 1800)
    now = world.store.session(session.id)
    assert (now.deadline, now.extending) == (session.deadline, None)
    kinds = [row[0] for row in world.store._db.execute("SELECT kind FROM events ORDER BY seq")]
    assert kinds[-2:] == [ExtendRequested.__name__, ExtendRefused.__name__]


def test_an_extension_whose_reply_was_lost_is_learned_from_the_machine(world: World) -> None:
    session = world.start()
    world.until(lambda: world.look()[0][0].state is State.READY)
    world.cloud.faults.lost_replies = 1
    with pytest.raises(UnconfirmedError):
        world.controller().extend(session, 1800)
    assert world.store.session(session.id).extending is not None
    ((now, _),) = world.look()
    assert session.deadline is not None
    assert (now.deadline, now.extending) == (session.deadline + timedelta(minutes=30), None)


def test_while_nobody_knows_whether_an_extension_came_to_be_it_is_not_torn_down_at_the_old_cap(world: World) -> None:
    session = world.start()
    world.cloud.faults.lost_replies = 1
    with pytest.raises(UnconfirmedError):
        world.controller().extend(session, 1800)
    world.cloud.machines[session.id].extended.clear()  # and its journal cannot be read either
    world.cloud.machines[session.id].idle_s = 10**6
    assert session.deadline is not None
    world.moment = session.deadline + DEADLINE_GRACE * 2
    assert [one.live for one, _ in world.look()] == [True]
    world.moment = session.deadline + timedelta(minutes=30) + DEADLINE_GRACE * 2
    world.look()
    assert world.cloud.exists() == []


def test_two_extensions_add_up(world: World) -> None:
    session = world.start()
    for _ in range(2):
        session = world.controller().extend(session, 600)
    moved = world.now() + timedelta(minutes=80)
    machine = world.cloud.machines[session.id]
    assert session.deadline == machine.hard_cap == parse_deadline_label(machine.labels[LABEL_DEADLINE]) == moved
