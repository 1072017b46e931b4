"""No schedule of faults, crashes, reboots, clock steps and users leaves a machine that nothing covers; and whatever is taken
out of what covers it, a promise breaks. The world is in lifecycle_world.py, the table of mutations in
lifecycle_mutations.py."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from lifecycle_mutations import MUTATIONS, caught_by
from lifecycle_world import STEPS, Mutation, World


class Sessions(RuleBasedStateMachine):
    """Every step checks every promise, each minute that it takes (`World.check`)."""

    @initialize()
    def begin(self) -> None:
        """A project with a reaper, and nothing in it."""
        self.world = World()

    def teardown(self) -> None:
        """However it went, nothing is left, and that is proven."""
        try:
            self.world.settle()
        finally:
            self.world.close()


def _step(name: str) -> Callable[[Sessions], None]:
    def step(self: Sessions) -> None:
        STEPS[name](self.world)

    step.__name__ = name.replace(" ", "_")
    return step


for _name in STEPS:
    setattr(Sessions, _name.replace(" ", "_"), rule()(_step(_name)))

#: HYPOTHESIS_PROFILE=wide tries hundreds. Shrinking takes minutes and is left out: a failure prints every step.
TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=(settings.default or settings()).max_examples // 2,
    stateful_step_count=20,
    phases=(Phase.explicit, Phase.generate),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: str(mutation.name))
def test_taking_out_any_one_thing_breaks_a_promise(mutation: Mutation) -> None:
    schedules, broken = caught_by(mutation)
    assert schedules, "nothing guards this"
    assert broken


def test_with_nothing_taken_out_no_promise_breaks() -> None:
    assert caught_by(Mutation(), 150) == (0, "")
