"""Ctrl-C at moments when nobody thinks of it: while the program loads, while a command has nothing to undo."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Home

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
