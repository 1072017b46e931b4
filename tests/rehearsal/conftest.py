"""What the rehearsal's tests share: one watch, one seeded bucket, and what mostly waits, which plays in the background."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from background import Background
from ordinary import NOBODY, ordinary
from processes import Watch
from stage import environment_for, seeded_bucket
from taking_out import QUICK, Verdict, play_mutations

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def watch() -> Iterator[Watch]:
    """Our own sampler of processes."""
    watch = Watch()
    yield watch
    watch.end()


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """A sealed stand-in model, seeded once."""
    root = Path(tempfile.mkdtemp(prefix="kimi-bucket-"))
    yield seeded_bucket(root)
    shutil.rmtree(root)


@pytest.fixture(scope="session", autouse=True)
def mutations(request: pytest.FixtureRequest) -> Iterator[Future[list[Verdict]] | None]:
    """The mutations, which wait for what nobody ends: they begin before the first test, few at once, beside the matrix."""
    if not any(item.path.name == "test_mutations.py" for item in request.session.items):
        yield None
        return
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(play_mutations, QUICK, 3)


@pytest.fixture(scope="session", autouse=True)
def rehearsals(request: pytest.FixtureRequest) -> Iterator[dict[str, Background]]:
    """Two whole rehearsals, which mostly wait, begin before the first test: one under the witness with an engine that
    leaves a daemon behind, one as an ordinary user."""
    plays: dict[str, Background] = {}
    if any(item.path.name == "test_witness.py" for item in request.session.items):
        env = environment_for(Path("/nonexistent"))
        env = {name: value for name, value in env.items() if not name.startswith("KIMISESSION_")}
        rehearse = [sys.executable, "-m", "kimisession", "rehearse", "--keep"]
        plays["witnessed"] = Background(
            [sys.executable, str(HERE / "witness.py"), "--", *rehearse, "--set", "fault=orphan"], env
        )
        as_user = [sys.executable, str(HERE / "witness.py"), "--how", "subreaper", "--", *ordinary(rehearse)]
        plays["ordinary"] = Background(as_user, env, NOBODY if os.geteuid() == 0 else None)
    yield plays
    for play in plays.values():
        play.close()
