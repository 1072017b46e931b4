"""Real vLLM on the CPU, serving mini-kimi: started once for the tests of this folder, and gone after them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_rig import PYTHON, READY_WITHIN_S, Server, start, until

from kimisession.rehearsal.mini_kimi import make_mini_kimi


def pytest_configure(config: pytest.Config) -> None:
    """Name the mark of this folder; `-m "not vllm"` leaves the rig out."""
    config.addinivalue_line("markers", "vllm: starts real vLLM on the CPU; needs .venv-vllm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test here, and skip it where the environment is not there."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(READY_WITHIN_S + 60))
            if not PYTHON.exists():
                item.add_marker(pytest.mark.skip(reason="no .venv-vllm: run scripts/setup-vllm-cpu.sh first"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh mini-kimi folder."""
    folder = tmp_path_factory.mktemp("mini-kimi")
    make_mini_kimi(folder)
    return folder


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM, ready; afterwards its whole session is killed, should a test have left anything."""
    server = start(model, tmp_path_factory.mktemp("v"))
    try:
        assert until(server.healthy, READY_WITHIN_S), f"not ready in {READY_WITHIN_S} s: {server.log}"
        yield server
    finally:
        for pid in server.processes():
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
