"""Whatever phase real vLLM is in when it dies or hangs, its session ends in the seconds written down beforehand."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from vllm_kills import CELLS, Cell, beforehand

NOTES = Path(__file__).resolve().parents[3] / "notes" / "real-vllm-on-cpu.md"


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_it_ends_for_the_reason_and_in_the_time_written_down_beforehand(
    cell: Cell, plays: dict[str, Future[Any]]
) -> None:
    assert not plays[cell.name].result().problems


def test_the_notes_say_beforehand_what_the_test_expects() -> None:
    assert beforehand() in NOTES.read_text(), "python tests/rigs/vllm/vllm_kills.py --beforehand prints it"
