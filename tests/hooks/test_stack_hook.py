"""The stack hook with the real uv or pip, and wheels made on the spot that pretend to be torch, vLLM and NCCL."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.hooks.private_mounts import HOOKS

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
STAND_IN_TORCH = """
class version: cuda = "12.8"
class cuda:
    class nccl:
        version = staticmethod(lambda: ({nccl}))
"""


def wheel(folder: Path, name: str, version: str, source: str = "") -> str:
    """A stand-in wheel; its SHA-256."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/__init__.py", source)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{info}/RECORD", f"{module}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_lock(folder: Path, nccl_loaded: str = "2, 29, 3") -> Path:
    """A lock of stand-in wheels."""
    folder.mkdir(exist_ok=True)
    lines = []
    for name, version, source in (
        ("vllm", "0.15.0", ""),
        ("torch", "2.9.1", STAND_IN_TORCH.format(nccl=nccl_loaded)),
        ("nvidia-nccl-cu12", "2.29.3", ""),
        ("nvidia-cuda-runtime-cu12", "12.8.90", ""),
    ):
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{wheel(folder, name, version, source)}\n")
    path = folder / "stand-in.lock"
    path.write_text("".join(lines), encoding="ascii")
    return path


def stack(tmp_path: Path, lock: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """The hook, with nothing but the stand-in wheels to install from."""
    links = str(lock.parent)
    env = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(Path(sys.base_prefix) / "bin"), os.defpath]),
        "HOME": str(tmp_path),
        **{"PIP_FIND_LINKS": links, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull},
        **{"UV_FIND_LINKS": links, "UV_OFFLINE": "1", "UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(tmp_path / "uv")},
    }
    argv = [HOOKS / "stack.sh", "--lock", lock, "--venv", tmp_path / "engine", "--python", PYTHON, *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)


def test_what_is_locked_is_installed_and_verified_and_a_second_run_agrees(tmp_path: Path) -> None:
    lock = make_lock(tmp_path / "wheels")
    for _ in range(2):
        done = stack(tmp_path, lock, "--driver", "580.126.09")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "stack: verified: vllm 0.15.0, torch 2.9.1, CUDA 12.8, NCCL 2.29.3" in done.stdout


def test_wheels_for_a_newer_cuda_than_the_driver_serves_are_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    done = stack(tmp_path, make_lock(tmp_path / "wheels"), "--driver", "565")
    assert done.returncode == 5
    assert done.stdout.splitlines()[-1].startswith("stack: incident 1 (wheels for a newer CUDA than the driver serves)")
    assert not (tmp_path / "engine").exists()


def test_a_wheel_that_is_not_the_locked_one_is_not_installed(tmp_path: Path) -> None:
    lock = make_lock(tmp_path / "wheels")
    wheel(lock.parent, "vllm", "0.15.0", "print('not what was looked at')")
    done = stack(tmp_path, lock)
    assert done.returncode == 5
    assert "the stack is not what was locked" in done.stdout.splitlines()[-1]


def test_a_torch_that_loads_another_nccl_than_the_pinned_one_is_told(tmp_path: Path) -> None:
    done = stack(tmp_path, make_lock(tmp_path / "wheels", nccl_loaded="2, 26, 2"))
    assert done.returncode == 5
    assert "torch loads NCCL 2.26.2 and the lock pins 2.29.3" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("lock", sorted((HOOKS / "locks").glob("vllm-*.lock")), ids=lambda path: str(path.stem))
def test_every_lock_names_its_cuda_and_has_a_hash_for_each_package(lock: Path) -> None:
    text = lock.read_text(encoding="ascii")
    packages = [line for line in text.splitlines() if "==" in line and not line.startswith("#")]
    assert len(packages) > 100
    assert all(line.endswith("\\") for line in packages)
    assert "\nnvidia-cuda-runtime" in text
    assert f"\n{lock.stem.replace('vllm-', 'vllm==')} " in text


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="there is no shellcheck here")
def test_every_hook_is_clean_under_shellcheck() -> None:
    scripts = sorted(HOOKS.parent.rglob("*.sh"))
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
