"""A layer that is taken out of a copy of the package is missed: each by the cell that was named beforehand."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from taking_out import QUICK, Mutation, Verdict, report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, mutations: Future[list[Verdict]]) -> list[Verdict]:
    played = mutations.result()
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{report(played)}")
    return played


@pytest.mark.parametrize("mutation", QUICK, ids=lambda mutation: mutation.name.strip(" +"))
def test_a_layer_that_is_taken_out_is_missed(mutation: Mutation, verdicts: list[Verdict]) -> None:
    wrong = [v for v in verdicts if v.mutation is mutation and not v.holds]
    assert not [(v.cell.name, v.wanted, v.outcome.problems) for v in wrong]
