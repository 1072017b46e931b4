"""The folder that a machine starts from, the same for this machine and for every cloud.

spec.json      what the keeper is told        api_key   and other secrets, mode 0600
control/       requests to the keeper         run/      journal, logs, locks
disk/          the session's disk             lib/      the copy of kimisession.node that runs there; the whole package
                                                        where there is no engine: a seeding runs it
scripts/       the hooks, where a step of the session calls them
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from kimisession.core.launch import LaunchSpec

_PACKAGE = Path(__file__).parent.parent


def shipped(name: str) -> Path:
    """A folder that stands beside the package in a checkout, and travels inside of it in a wheel."""
    inside = _PACKAGE / name
    return inside if inside.exists() else _PACKAGE.parent / name


def lay_out(folder: Path, spec: LaunchSpec, secrets: Mapping[str, str]) -> None:
    """Fill `folder`, which exists. Repeatable. Each secret is a file that this user alone can read. Raises OSError."""
    for name in ("control", "run", "disk"):
        (folder / name).mkdir(exist_ok=True)
    package, part = folder / "lib" / "kimisession", "node" if spec.engine else "."
    shutil.copytree(_PACKAGE / part, package / part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    if any(arg.startswith("@{machine}/scripts/") for step in spec.steps for arg in step.argv):
        shutil.copytree(shipped("scripts"), folder / "scripts", dirs_exist_ok=True)
        for script in (folder / "scripts").rglob("*.sh"):
            script.chmod(0o755)  # not every way of installing a wheel keeps that bit
    (folder / "spec.json").write_text(spec.node_config(), encoding="utf-8")
    for name, text in secrets.items():
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
