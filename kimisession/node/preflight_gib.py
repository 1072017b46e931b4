"""Traces of GCP's GIB, which breaks NCCL inside one machine (incident 5), and which no setting can silence.

GIB is a folder of NCCL plugins (`libnccl-net.so`, `libnccl-tuner.so`) that images register with the dynamic linker and
with environment variables. It has to be out of the linker's cache, not only of the environment.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from kimisession.node.preflight_finding import Failed, Skipped, run

FOLDER = Path("/usr/local/gib")
INCIDENT = "incident 5 (GIB breaks NCCL inside one machine)"
FIX = "run scripts/hooks/gib.sh remove, in a shell that starts the engine anew"


def residue(environment: Mapping[str, str], timeout_s: float) -> list[str]:
    """Every trace, as words for people. Empty when there is none."""
    found = []
    if FOLDER.exists():
        found.append(f"{FOLDER} is there")
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        for line in run([ldconfig, "-p"], timeout_s).text.splitlines():
            name, _, path = line.strip().partition(" => ")
            if is_gibs(path):
                found.append(f"ldconfig -p has {name.split()[0]} from {path}")
    except Skipped as skip:
        found.append(str(skip))
    found += [f"{name}={value} is set here" for name, value in environment.items() if is_gibs_variable(name, value)]
    plain = {"PATH": os.defpath, "HOME": environment.get("HOME", "/root"), "TERM": "dumb"}
    try:
        for line in run(["bash", "-l", "-c", "env"], timeout_s, plain).text.splitlines():
            name, _, value = line.partition("=")
            if is_gibs_variable(name, value):
                found.append(f"a login shell sets {name}={value}")
    except Skipped:
        pass
    return found


def is_gibs(path: str) -> bool:
    """Whether a library's path leads to GIB, by its name or by what it links to."""
    return bool(path) and any("/gib/" in text for text in (path, os.path.realpath(path)))


def is_gibs_variable(name: str, value: str) -> bool:
    """Whether a variable points NCCL or the linker to GIB."""
    if not name.startswith(("NCCL_", "LD_")) and name != "PATH":
        return False
    return "/gib/" in f"{value}/" or value.lower() == "gib"


def check(nodes: int, environment: Mapping[str, str], timeout_s: float) -> str:
    """No trace of GIB. Returns the evidence; raises Failed, or Skipped for a session on several machines."""
    if nodes > 1:
        raise Skipped(f"GIB connects the {nodes} machines of this session and stays")
    found = residue(environment, timeout_s)
    if found:
        more = f" and {len(found) - 1} more traces" if len(found) > 1 else ""
        raise Failed(INCIDENT, found[0] + more, FIX)
    return "no folder, no library in the linker's cache, no variable here or in a login shell"
