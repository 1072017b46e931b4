"""The folder that a machine starts from, the same for this machine and for every cloud.

spec.json      what the keeper is told        api_key   and other secrets, mode 0600
control/       requests to the keeper         run/      journal, logs, locks
disk/          the session's disk             lib/      the copy of kimisession.node that runs there
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from kimisession.core.launch import LaunchSpec

_NODE = Path(__file__).parent.parent / "node"


def lay_out(folder: Path, spec: LaunchSpec, secrets: Mapping[str, str]) -> None:
    """Fill `folder`, which exists. Repeatable. Each secret is a file that this user alone can read. Raises OSError."""
    for name in ("control", "run", "disk"):
        (folder / name).mkdir(exist_ok=True)
    package = folder / "lib" / "kimisession"
    shutil.copytree(_NODE, package / "node", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    (folder / "spec.json").write_text(spec.node_config(), encoding="utf-8")
    for name, text in secrets.items():
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
