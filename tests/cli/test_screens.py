"""The screens, kept as people see them in tests/cli/golden/screens: what changes there is seen in review.

Each is drawn from fixed values by tests/cli/screens.py on a terminal of its own: `NAME.80.txt` and `NAME.140.txt` are what
stands there, `NAME.80.colour.txt` has the escapes as well (written ^[), `NAME.pipe.txt` is what a pipe gets. Light and dark
terminals are sent the same bytes: see test_colour.py. `python tests/cli/test_screens.py` writes the files anew.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from command_line import Home
from screens import NEXT, SCREENS
from terminal import balanced, on_terminal, plain, too_wide

from kimisession.cli.show import Screen

GOLDEN = Path(__file__).parent / "golden" / "screens"
WIDTHS = (80, 140)
DRAW = [sys.executable, str(Path(__file__).parent / "screens.py")]
COLOUR = {"TERM": "xterm-256color"}


def drawn(names: Iterable[str], columns: int, folder: Path, **env: str) -> dict[str, str]:
    """Screens on a terminal so wide."""
    code, text = on_terminal([*DRAW, *names], columns, {**Home(folder).env(), **COLOUR, **env}, folder)
    assert code == 0, text
    return dict(zip(names, text.split(NEXT), strict=True))


def piped(names: Iterable[str], folder: Path) -> dict[str, str]:
    """Screens in a pipe, both streams together."""
    env = {**Home(folder).env(), **COLOUR}
    done = subprocess.run(
        [*DRAW, *names], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return dict(zip(names, done.stdout.split(NEXT), strict=True))


def shown(text: str) -> str:
    """Escapes made readable."""
    return text.replace("\x1b", "^[")


def all_files(folder: Path) -> dict[str, dict[str, str]]:
    """Every file of every screen."""
    kinds = {
        **{f"{columns}.txt": drawn(SCREENS, columns, folder, NO_COLOR="1") for columns in WIDTHS},
        "80.colour.txt": {name: shown(text) for name, text in drawn(SCREENS, 80, folder).items()},
        "pipe.txt": piped(SCREENS, folder),
    }
    return {name: {f"{name}.{kind}": texts[name] for kind, texts in kinds.items()} for name in SCREENS}


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Every screen as it is drawn now."""
    return all_files(tmp_path_factory.mktemp("screens"))


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_looks_as_it_looked(name: str, now: dict[str, dict[str, str]]) -> None:
    files = now[name]
    for file, text in files.items():
        assert text == (GOLDEN / file).read_text(encoding="utf-8"), "if it is meant: python tests/cli/test_screens.py"
    colour = (GOLDEN / f"{name}.80.colour.txt").read_text(encoding="utf-8").replace("^[", "\x1b")
    assert plain(colour) == files[f"{name}.80.txt"], "without colour the same words stand there"
    assert balanced(colour)


def test_every_file_that_is_kept_is_of_a_screen() -> None:
    kept = {path.name.split(".")[0] for path in GOLDEN.glob("*.txt")}
    assert kept == set(SCREENS)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.name)
def test_what_is_kept_is_no_wider_than_its_terminal_and_a_pipe_has_no_escapes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert not any(line != line.rstrip() for line in plain(text).splitlines()), "no line ends in spaces"
    if path.name.endswith(".pipe.txt"):
        assert "^[" not in text
        assert "\x1b" not in text
        assert "\r" not in text
    else:
        columns = int(path.name.split(".")[1])
        assert too_wide(text.replace("^[", "\x1b"), columns) == []


def test_a_dumb_terminal_gets_no_escape_at_all(tmp_path: Path) -> None:
    dumb = drawn(SCREENS, 80, tmp_path, TERM="dumb")
    for name, text in dumb.items():
        assert "\x1b" not in text, name
        assert "\r" not in text, name
    assert dumb["cost"] == (GOLDEN / "cost.80.txt").read_text(encoding="utf-8")


def test_a_screen_is_removed_from_the_first_column_wherever_an_echoed_ctrl_c_left_the_cursor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Screen() as screen:
        screen.draw(["one", "two"])
        screen.draw(["three"])
    assert capsys.readouterr().err == "one\ntwo\n\r\x1b[2A\x1b[Jthree\n\r\x1b[1A\x1b[J"


def test_a_very_narrow_terminal_still_gets_every_word(tmp_path: Path) -> None:
    narrow = drawn(("status-one",), 40, tmp_path, NO_COLOR="1")["status-one"]
    assert narrow.split() == (GOLDEN / "status-one.140.txt").read_text(encoding="utf-8").split()


def test_a_session_on_a_real_terminal_is_never_wider_than_it_and_leaves_no_style_on(tmp_path: Path) -> None:
    """Not from fixed values: the commands themselves, from the start to the end of an idle session."""
    home = Home(tmp_path)
    assert home.type("seed", "rehearsal").code == 0
    env = {**home.env(), **COLOUR}
    program = [sys.executable, "-m", "kimisession"]
    quick = "phase-seconds=boot=0.3,load=0.5,compile=0,memory=0,graphs=0,serve=0"
    start = [*program, "start", "rehearsal", "--name", "demo", "--budget", "10", "--idle", "2s", "-y", "--set", quick]
    for argv, last in ((start, "kimisession connect demo"), ([*program, "status", "demo", "--watch"], "next:")):
        code, text = on_terminal(argv, 80, env, tmp_path)
        assert code == 0, text
        assert too_wide(text, 80) == []
        assert balanced(text)
        assert last in plain(text)
    assert "\x1b[J" in text, "the screen was drawn over"
    assert "never used" in text
    assert "Receipt" in text.rpartition("\x1b[J")[2]
    assert home.live() == []


def write() -> None:
    """Write every screen anew."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for path in GOLDEN.glob("*.txt"):
        path.unlink()
    with tempfile.TemporaryDirectory() as folder:
        for files in all_files(Path(folder)).values():
            for file, text in files.items():
                (GOLDEN / file).write_text(text, encoding="utf-8")
    print(f"wrote {len(list(GOLDEN.iterdir()))} files into {GOLDEN}")


if __name__ == "__main__":
    write()
