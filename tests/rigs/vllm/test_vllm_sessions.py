"""What the keeper makes of real traffic on real vLLM, and what the commands say of it: each story is a session."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from vllm_stories import STORIES


@pytest.mark.parametrize("story", STORIES)
def test(story: str, plays: dict[str, Future[Any]]) -> None:
    plays[story].result()
