"""STAND-IN for the package index, called by standins/uv for `uv pip sync`: what a lock names is said to be installed, and the
two packages that a session's set-up imports are those of this folder. No hash is compared: there is no wheel.

locked.py VENV/bin/python LOCK
"""

import re
import shutil
import sys
from pathlib import Path


def main(python: str, lock: str) -> None:
    """Metadata for all of it, so that scripts/hooks/stack.sh can compare names and versions."""
    (site,) = (Path(python).parents[1] / "lib").glob("python3.*/site-packages")
    locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^ \\\n]+)", Path(lock).read_text(), re.M))
    for name, version in locked.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for name in ("torch", "vllm"):
        shutil.copytree(Path(__file__).parent / name, site / name, dirs_exist_ok=True)
    nccl = next((version for name, version in locked.items() if name.startswith("nvidia-nccl-")), "0")
    cuda = next((version for name, version in locked.items() if name.startswith("nvidia-cuda-runtime")), "0")
    (site / "torch" / "locked.py").write_text(f"TORCH, NCCL, CUDA = {locked.get('torch')!r}, {nccl!r}, {cuda!r}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
