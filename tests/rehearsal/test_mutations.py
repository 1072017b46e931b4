"""A layer that is taken out of a copy of the package is missed: each by the cell that was named beforehand."""

from __future__ import annotations

import pytest
from taking_out import MUTATIONS, Mutation, Verdict, play_mutations, report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

#: The rest, where several layers back each other up, is in `python tests/rehearsal/mutations.py`.
QUICK = [mutation for mutation in MUTATIONS if mutation.quick]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> list[Verdict]:
    played = play_mutations(QUICK)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{report(played)}")
    return played


@pytest.mark.parametrize("mutation", QUICK, ids=lambda mutation: mutation.name.strip(" +"))
def test_a_layer_that_is_taken_out_is_missed(mutation: Mutation, verdicts: list[Verdict]) -> None:
    wrong = [v for v in verdicts if v.mutation is mutation and not v.holds]
    assert not [(v.cell.name, v.wanted, v.outcome.problems) for v in wrong]
