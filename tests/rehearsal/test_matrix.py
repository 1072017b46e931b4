"""Kill -9 of each part of a session in each phase: the layer, the second and the reason were written down beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix import CELLS, VOID, Cell, Outcome, beforehand, play_all, report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NOTES = Path(__file__).parents[2] / "notes" / "kill-matrix.md"


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    params = [
        getattr(item, "callspec", None) for item in request.session.items if item.path.name == Path(__file__).name
    ]
    chosen = [spec.params["cell"] for spec in params if spec is not None]
    played = play_all(chosen)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{report(played)}")
    return {outcome.cell.name: outcome for outcome in played}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_whatever_dies_it_ends_as_written_down_beforehand(cell: Cell, outcomes: dict[str, Outcome]) -> None:
    assert not outcomes[cell.name].problems


def test_every_part_has_a_cell_or_a_reason_for_having_none_in_every_phase() -> None:
    phases = dict.fromkeys(cell.phase for cell in CELLS)
    victims = ("command", "supervisor", "wrapper", "keeper", "engine")
    named = {cell.name for cell in CELLS} | set(VOID)
    assert not [f"{phase} {victim}" for phase in phases for victim in victims if f"{phase} {victim}" not in named]
    assert not {cell.name for cell in CELLS} & set(VOID)


def test_the_notes_say_beforehand_what_the_test_expects() -> None:
    assert beforehand() in NOTES.read_text(), "python tests/rehearsal/matrix.py --beforehand prints it"


def test_no_cell_is_saved_by_the_hard_cap() -> None:
    assert not [cell.name for cell in CELLS if cell.reason in ("hard-cap", "past-deadline", "budget")]
