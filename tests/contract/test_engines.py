"""The one contract that every engine passes: the rules at the top of kimisession/engines/base.py, on each place to run.

A new engine is one more `Place` here. Nothing in a test knows which engine it has.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from good_values import PROFILE, an_id, choices

from kimisession.core.launch import (
    LABEL_DEADLINE,
    LABEL_OWNER,
    LABEL_SESSION,
    LaunchSpec,
    deadline_label,
    parse_deadline_label,
)
from kimisession.core.lifecycle import Observation
from kimisession.core.quote import launch_spec, make_quote
from kimisession.engines.base import Engine
from kimisession.engines.local import LocalEngine
from kimisession.engines.local_machine import Machine
from kimisession.engines.memory import MemoryCloud, MemoryEngine
from kimisession.errors import NotYetGone, UsageMistake
from kimisession.rehearsal.standin_model import make_standin_model

QUICK = replace(
    PROFILE,
    engine=replace(
        PROFILE.engine, flags={"phase-seconds": "boot=0,load=0.1,compile=0,memory=0,graphs=0,serve=0", "ttft-s": 0}
    ),
    load="in-place",
    limits=replace(
        PROFILE.limits, idle="1h", unused="1h", tick=0.05, scrape=0.2, stop_grace="1s", silent="5s", stall="1m"
    ),
)


@dataclass
class Place:
    """Somewhere to run, with what the tests need to play a user there."""

    engine: Callable[[], Engine]  # a fresh one each time: engines keep nothing
    infra: str
    bucket_url: str
    now: Callable[[], datetime]
    sleep: Callable[[float], None]
    number: int = 0

    def spec(self, **changes: Any) -> LaunchSpec:
        """A launch that works there, of a session of its own."""
        self.number += 1
        given: dict[str, Any] = {
            "name": f"demo{self.number}",
            "infra": self.infra,
            "bucket_url": self.bucket_url,
            "port": free_port(),
        }
        quote = make_quote(QUICK, choices(**{**given, **changes}), self.now())
        return launch_spec(quote, an_id(f"demo{self.number}"), "someone")

    def until(self, what: Callable[[], Any], within_s: float = 20) -> Any:
        """Wait for a condition; fails the test when it does not come."""
        for _ in range(int(within_s / 0.05)):
            if found := what():
                return found
            self.sleep(0.05)
        raise AssertionError("it did not come in time")

    def end(self, session_id: str, reason: str = "user") -> Observation:
        """`down` until it returns, then what is seen."""

        def down() -> bool:
            with suppress(NotYetGone):
                self.engine().down(session_id, "a test", reason)
                return True
            return False

        self.until(down)
        return self.engine().observe(session_id)


def free_port() -> int:
    """A port of loopback that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module", params=["memory", "local"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Each place to run. What a failed test left on this machine is killed at the end."""
    if request.param == "memory":
        moment = [datetime(2026, 11, 20, 12, 0, tzinfo=UTC)]
        cloud = MemoryCloud(lambda: moment[0])
        cloud.faults.delete_calls = 2

        def sleep(seconds: float) -> None:
            moment[0] += timedelta(seconds=seconds * 20)

        yield Place(lambda: MemoryEngine(cloud), "memory", "file:///none", lambda: moment[0], sleep)
        return
    folder = tmp_path_factory.mktemp("machines")
    model = tmp_path_factory.mktemp("model")
    make_standin_model(model, shards=1, shard_bytes=1000)
    yield Place(lambda: LocalEngine(folder), "local", f"file://{model}", lambda: datetime.now(UTC), time.sleep)
    for machine in map(Machine, folder.iterdir()):
        machine.close("test")


@pytest.fixture(scope="module")
def shared(place: Place) -> LaunchSpec:
    """A machine that the tests which do not end it look at together."""
    spec = place.spec()
    place.engine().launch(spec, {"api_key": "a-key"})
    return spec


def test_what_was_never_launched_is_not_there(place: Place) -> None:
    seen = place.engine().observe("nobody-0123abcd")
    assert (seen.present, seen.resources, seen.unguarded) == (False, (), False)
    assert list(place.engine().logs("nobody-0123abcd", False)) == []


def test_a_launch_returns_with_its_layers_armed(place: Place, shared: LaunchSpec) -> None:
    seen = place.until(lambda: all_armed(place.engine().observe(shared.session_id)))
    assert seen.present is True
    assert not seen.unguarded
    assert [resource.ended for resource in seen.resources] == [None]


def all_armed(seen: Observation) -> Observation | None:
    """The observation, once every layer of it is armed."""
    return seen if seen.layers and all(layer.armed for layer in seen.layers) else None


def test_something_guards_the_machine_from_the_very_return_of_launch(place: Place) -> None:
    spec = place.spec()
    place.engine().launch(spec, {"api_key": "a-key"})
    seen = place.engine().observe(spec.session_id)
    assert any(layer.armed for layer in seen.layers)
    assert not seen.unguarded
    place.end(spec.session_id)


def test_launching_what_exists_returns_it(place: Place, shared: LaunchSpec) -> None:
    before = place.engine().observe(shared.session_id).resources
    place.engine().launch(shared, {"api_key": "another-key"})
    after = place.engine().observe(shared.session_id).resources
    assert [(r.id, r.began) for r in after] == [(r.id, r.began) for r in before]
    assert len([f for f in place.engine().find() if f.session_id == shared.session_id]) == 1


def test_labels_carry_session_owner_and_deadline_and_need_no_local_state(place: Place, shared: LaunchSpec) -> None:
    (found,) = [f for f in place.engine().find() if f.session_id == shared.session_id]
    assert dict(found.labels) == dict(shared.labels)
    assert found.labels[LABEL_SESSION] == shared.session_id
    assert found.labels[LABEL_OWNER] == "someone"
    assert parse_deadline_label(found.labels[LABEL_DEADLINE]) == shared.deadline.replace(microsecond=0)
    assert found.began.tzinfo is not None


def test_a_session_gets_ready_and_tells_its_phases(place: Place, shared: LaunchSpec) -> None:
    def kinds() -> set[str]:
        return {str(line["kind"]) for line in place.engine().observe(shared.session_id).journal}

    place.until(lambda: {"phase", "ready"} <= kinds())


def test_a_base_url_is_where_a_client_appends_its_path(place: Place, shared: LaunchSpec) -> None:
    url = place.engine().base_url(shared.session_id, shared.engine.port)
    assert url.startswith(("http://127.0.0.1:", "https://"))
    assert not url.endswith("/")


def test_extending_moves_the_label_and_then_the_machine(place: Place) -> None:
    spec = place.spec()
    place.engine().launch(spec, {"api_key": "a-key"})
    moved = spec.deadline + timedelta(minutes=30)
    for _ in range(2):  # a lost reply makes people ask again
        place.engine().extend(spec.session_id, moved, 1800)
    (found,) = [f for f in place.engine().find() if f.session_id == spec.session_id]
    assert found.labels == {**spec.labels, LABEL_DEADLINE: deadline_label(moved)}
    place.until(lambda: any(line["kind"] == "extended" for line in place.engine().observe(spec.session_id).journal))
    place.end(spec.session_id)


def test_a_machine_is_there_until_it_is_gone_and_then_for_good(place: Place) -> None:
    spec = place.spec()
    place.engine().launch(spec, {"api_key": "a-key"})
    with pytest.raises(NotYetGone):
        place.engine().down(spec.session_id, "a test", "user")
    assert place.engine().observe(spec.session_id).present is True
    seen = place.end(spec.session_id)
    assert seen.present is False
    assert seen.why
    assert all(resource.ended and resource.ended >= resource.began for resource in seen.resources)
    assert spec.session_id not in [found.session_id for found in place.engine().find()]
    place.engine().down(spec.session_id, "a test", "user")  # what is gone is fine
    place.engine().launch(spec, {"api_key": "a-key"})  # a command that comes late makes nothing
    again = place.engine().observe(spec.session_id)
    assert (again.present, again.resources) == (False, seen.resources)


def test_a_machine_says_why_it_ended(place: Place) -> None:
    spec = place.spec()
    place.engine().launch(spec, {"api_key": "a-key"})
    place.until(lambda: all_armed(place.engine().observe(spec.session_id)))
    seen = place.end(spec.session_id, "launch-failed")
    (ended,) = [line for line in seen.journal if line["kind"] == "ended"]
    assert ended["reason"] == "launch-failed"
    assert "a test" in ended["evidence"]


def test_ending_what_was_never_made_is_fine_and_forbids_it(place: Place) -> None:
    spec = place.spec()
    place.engine().down(spec.session_id, "a test", "user")
    place.engine().launch(spec, {"api_key": "a-key"})
    assert place.engine().observe(spec.session_id).present is False


def test_logs_survive_the_end(place: Place) -> None:
    spec = place.spec()
    place.engine().launch(spec, {"api_key": "a-key"})
    place.until(lambda: any(line["kind"] == "ready" for line in place.engine().observe(spec.session_id).journal))
    before = list(place.engine().logs(spec.session_id, False))
    place.end(spec.session_id)
    after = list(place.engine().logs(spec.session_id, True))  # a follower of what is gone is let go
    assert before
    assert after[: len(before)] == before


def test_the_end_of_one_session_is_not_the_end_of_another(place: Place, shared: LaunchSpec) -> None:
    one, other = place.spec(), place.spec()
    for spec in (one, other):
        place.engine().launch(spec, {"api_key": "a-key"})
    place.end(one.session_id)
    assert place.engine().observe(other.session_id).present is True
    assert place.engine().observe(shared.session_id).present is True
    assert {other.session_id, shared.session_id} <= {found.session_id for found in place.engine().find()}
    assert place.end(other.session_id).present is False


def test_a_restart_brings_another_run_on_the_same_machine(place: Place, shared: LaunchSpec) -> None:
    def runs(kind: str) -> list[int]:
        return [line["run"] for line in place.engine().observe(shared.session_id).journal if line["kind"] == kind]

    place.until(lambda: 1 in runs("ready"))
    resources = place.engine().observe(shared.session_id).resources
    place.engine().restart(shared.session_id, {"max-model-len": 4096})
    place.until(lambda: 2 in runs("ready"))
    assert runs("restarted") == [2]
    assert place.engine().observe(shared.session_id).resources == resources


def test_nothing_of_the_shared_machine_is_left(place: Place, shared: LaunchSpec) -> None:
    assert place.end(shared.session_id).present is False
    assert place.engine().find() == ()


def test_extending_what_is_not_there_is_refused_in_a_sentence(place: Place) -> None:
    with pytest.raises(UsageMistake, match="no machine to extend"):
        place.engine().extend("nobody-0123abcd", place.now() + timedelta(hours=1), 3600)
