"""How long until the first completion: a path of phases, and one's own starts count more than others'."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from good_values import NOON, requested

from kimisession.core.ledger import Event, LaunchRequested, PhaseBegan, PhaseEnded, Ready, Session, fold
from kimisession.core.node_steps import ENGINE_PYTHON, setup_steps
from kimisession.core.plan.coldstart import ENOUGH_SESSIONS, TABLE, cold_start, history_of, phase_seconds
from kimisession.profile_file import load_profile

K25 = load_profile("kimi-k2.5")
BYTES = 595_147_639_776


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


def session(*phases: tuple[str, float]) -> Session:
    """A session whose phases follow each other, ready one second after the last began."""
    events: list[Event] = [requested(), LaunchRequested(NOON)]
    at = NOON + seconds(30)
    for name, takes in phases:
        events += [PhaseBegan(at, name), PhaseEnded(at + seconds(takes), name, False)]
        at += seconds(takes)
    return fold("s", [*events, Ready(at)])


def test_the_write_ups_quarter_of_an_hour_is_inside_the_interval() -> None:
    plan = cold_start(K25, BYTES, infra="gcp")
    assert plan is not None
    assert plan.total.low <= 15 * 60 <= plan.total.value <= 20 * 60 <= plan.total.high
    assert plan.path[:3] == ("machine", "weights", "boot")


def test_a_bucket_at_the_measured_rate_takes_about_eight_minutes() -> None:
    plan = cold_start(K25, BYTES, infra="gcp")
    assert plan is not None
    pull = next(phase for phase in plan.phases if phase.name == "weights")
    assert pull.seconds.value == pytest.approx(8 * 60, rel=0.05)


def test_driver_and_stack_hide_behind_the_weights() -> None:
    plan = cold_start(K25, BYTES, infra="gcp")
    assert plan is not None
    assert plan.total.value < sum(phase.seconds.value for phase in plan.phases)
    assert not {"driver", "stack", "preflight"} & set(plan.path)


def test_small_weights_put_the_set_up_on_the_path() -> None:
    plan = cold_start(K25, 10**9, infra="gcp")
    assert plan is not None
    assert plan.path[:3] == ("machine", "driver", "preflight")


def test_phases_wait_for_what_the_machines_steps_wait_for() -> None:
    """The set-up as `setup_steps` orders it, and what the plan says of it."""
    steps = {step.name: set(step.after) for step in setup_steps(K25, "gcp", 8, ENGINE_PYTHON)}
    table = {row.name: set(row.after) - {"machine"} for row in TABLE}
    for name in ("driver", "stack", "preflight"):
        assert table[name] == steps[name] & table.keys(), name


def test_a_stream_takes_no_less_than_the_bucket_gives() -> None:
    """Nobody measured it: neither quicker than a load from local disks nor than the bytes come out of the bucket."""
    copied, streamed = (cold_start(replace(K25, load=load), BYTES, infra="gcp") for load in ("copy", "stream"))
    assert copied is not None
    assert streamed is not None
    took = {phase.name: phase.seconds for phase in copied.phases}
    (load,) = (phase.seconds for phase in streamed.phases if phase.name == "load")
    assert load.value == max(took["load"].value, took["weights"].value)
    assert "not measured" in load.ground


def test_eager_captures_nothing() -> None:
    plan = cold_start(K25, BYTES, infra="gcp", eager=True)
    assert plan is not None
    assert {p.name: p.seconds.high for p in plan.phases}["graphs"] == 0


def test_every_figure_names_its_ground() -> None:
    plan = cold_start(K25, BYTES, infra="gcp")
    assert plan is not None
    assert all(phase.seconds.ground for phase in plan.phases)
    assert all(phase.seconds.low <= phase.seconds.value <= phase.seconds.high for phase in plan.phases)


@pytest.mark.parametrize(("starts", "whose"), [(ENOUGH_SESSIONS - 1, "write-up"), (ENOUGH_SESSIONS, "your own starts")])
def test_three_starts_of_ones_own_replace_the_table(starts: int, whose: str) -> None:
    plan = cold_start(K25, BYTES, infra="gcp", history={"weights": [600.0, 620.0, 900.0][:starts]})
    assert plan is not None
    pull = next(phase for phase in plan.phases if phase.name == "weights")
    assert whose in pull.seconds.ground
    if starts == ENOUGH_SESSIONS:
        assert (pull.seconds.low, pull.seconds.value, pull.seconds.high) == (600.0, 620.0, 900.0)


def test_a_local_session_without_a_history_has_no_figure() -> None:
    assert cold_start(K25, BYTES, infra="local") is None


def test_a_local_session_is_timed_by_its_own_history() -> None:
    history = history_of([session(("weights", 2), ("boot", 1), ("load", 3), ("serve", 1))] * 3)
    plan = cold_start(load_profile("rehearsal"), 10, infra="local", history=history)
    assert plan is not None
    assert plan.path == ("machine", "weights", "boot", "load", "first")
    assert plan.total.value == pytest.approx(30 + 2 + 1 + 3 + 1)


def test_a_second_start_on_the_same_machine_does_not_count() -> None:
    found = phase_seconds(session(("load", 3), ("load.2", 100), ("serve", 1)))
    assert "load.2" not in found
    assert found["load"] == 3


def test_a_session_that_never_became_ready_teaches_nothing() -> None:
    dead = fold("d", [requested(), LaunchRequested(NOON), PhaseBegan(NOON, "load"), PhaseEnded(NOON, "load", False)])
    assert history_of([dead]) == {}


def test_the_table_lists_a_phase_after_those_that_it_waits_for() -> None:
    names: Sequence[str] = [row.name for row in TABLE]
    assert all(names.index(before) < names.index(row.name) for row in TABLE for before in row.after)
