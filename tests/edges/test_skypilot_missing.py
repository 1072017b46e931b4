"""Without SkyPilot, and with a folder of its name on the path."""

import subprocess
import sys
from pathlib import Path

from kimisession.errors import INSTALL_CLOUD

CHECKOUT = Path(__file__).parents[2]
ASK = """
from kimisession.engines.base import open_engine
try:
    open_engine("slurm")
except Exception as error:
    print(type(error).__name__, error.hint)
"""


def ask(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{CHECKOUT}", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_an_empty_folder_named_sky_is_not_taken_for_skypilot(tmp_path: Path) -> None:
    (tmp_path / "sky").mkdir()
    assert ask(tmp_path) == f"EngineMissing {INSTALL_CLOUD}"


def test_a_folder_named_sky_with_the_real_distribution_absent_says_how_to_install(tmp_path: Path) -> None:
    (tmp_path / "sky").mkdir()
    (tmp_path / "sky" / "__init__.py").write_text("")
    assert ask(tmp_path) == f"EngineMissing {INSTALL_CLOUD}"
