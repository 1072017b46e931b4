"""Ctrl-C at moments when nobody thinks of it: while the program loads, while a command has nothing to undo."""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from command_line import Home
from good_values import NOON, requested

from kimisession.cli.starting import _left_alone, answering_ctrl_c
from kimisession.core.ledger import LaunchRequested, ResourceCreated, fold

#: Stands where a real module is looked for, and presses Ctrl-C while it is loaded.
PRESSED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"


@pytest.mark.parametrize(
    ("module", "words"),
    [("typer", ()), ("typer", ("start", "rehearsal", "-y")), ("sqlite3", ("status",)), ("tomllib", ("profiles",))],
)
def test_ctrl_c_while_it_loads_is_one_sentence(tmp_path: Path, module: str, words: tuple[str, ...]) -> None:
    home = Home(tmp_path)
    early = tmp_path / "early"
    early.mkdir()
    (early / f"{module}.py").write_text(PRESSED)
    said = home.type(*words, PYTHONPATH=f"{early}{os.pathsep}{home.env()['PYTHONPATH']}")
    assert said.code == 130, said.err
    assert said.sentence.startswith("interrupted")
    assert len(said.err.splitlines()) == 1


def test_ctrl_c_at_a_question_creates_nothing_and_says_so(tmp_path: Path) -> None:
    home = Home(tmp_path)
    seeded = home.type("seed", "rehearsal")
    assert seeded.code == 0, seeded.err
    leader, follower = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "kimisession", "start", "rehearsal"],
        cwd=home.folder,
        env=home.env(),
        stdin=follower,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as start:
        os.close(follower)
        assert start.stderr is not None
        said = ""
        while not said.endswith("[y/N] "):
            letter = start.stderr.read(1)
            assert letter, said
            said += letter
        start.send_signal(signal.SIGINT)
        _, err = start.communicate(timeout=20)
    os.close(leader)
    assert start.returncode == 130
    assert "interrupted before anything was created: nothing is billed" in err
    assert "Traceback" not in err
    assert home.machines() == []


def test_the_first_ctrl_c_of_a_start_is_answered_at_once_and_the_second_is_counted(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with answering_ctrl_c() as heard:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert len(heard) == 2
    assert capfd.readouterr().err.strip() == "interrupted (Ctrl-C again leaves at once)"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_second_ctrl_c_leaves_behind_is_named_with_its_price_and_its_end() -> None:
    session = fold(
        "demo-1",
        [
            requested(NOON, budget_usd=Decimal(13), budget_at=NOON + timedelta(minutes=30)),
            LaunchRequested(NOON),
            ResourceCreated(NOON, "gcp/demo-1", "machine", Decimal("26.00"), "a test's"),
            ResourceCreated(NOON, "gcp/demo-1-disk", "disk", None, "not priced"),
        ],
    )
    said = _left_alone(session, NOON + timedelta(minutes=3))
    assert said == (
        "left while gcp/demo-1, gcp/demo-1-disk was being torn down: $1.30 so far at $26.00/h; if nobody does, it ends by "
        "itself at 12:30:00 UTC"
    )
