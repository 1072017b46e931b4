"""The seeder's Python: one that is there and has what it needs, else the locked environment."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.hooks.private_mounts import HOOKS

ROOT = Path(__file__).parents[2]


def hook(tmp_path: Path, tried: str, **env: str) -> "subprocess.CompletedProcess[str]":
    argv = [str(HOOKS / "seeder.sh"), "--venv", str(tmp_path / "seeder"), "--try", tried]
    offline = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "uv"), "UV_PYTHON_DOWNLOADS": "never"}
    away = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    return subprocess.run(argv, env={**offline, **away, **env}, capture_output=True, text=True, check=False, timeout=60)


def test_a_python_that_has_what_it_needs_is_taken_and_nothing_is_fetched(tmp_path: Path) -> None:
    for _ in range(2):
        done = hook(tmp_path, sys.executable, PYTHONPATH=str(ROOT))
        assert (done.returncode, "has what it needs" in done.stdout) == (0, True), done.stdout + done.stderr
    said = subprocess.run(
        [tmp_path / "seeder" / "bin" / "python", "-m", "kimisession.weights.seeder", "--help"],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.returncode, "--revision" in said.stdout) == (0, True), said.stderr


def test_without_one_only_what_was_locked_is_installed(tmp_path: Path) -> None:
    done = hook(tmp_path, "no-such-python")
    assert done.returncode == 5
    assert "locks/seed.lock" in done.stdout
    assert not (tmp_path / "seeder" / "bin" / "kimisession").exists()


def test_every_package_of_the_lock_has_its_hashes() -> None:
    lock = (HOOKS / "locks" / "seed.lock").read_text(encoding="ascii")
    packages = re.findall(r"^([a-z0-9-]+)==\S+ \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", lock, re.MULTILINE)
    assert len(packages) == lock.count("==")
    assert {"httpx", "tenacity", "crc32c", "google-cloud-storage"} <= {name for name, _ in packages}
