"""A whole rehearsal under a witness that shares no code with it, and one as an ordinary user."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from background import Background
from stage import environment_for
from witness import HOWS, works

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HERE = Path(__file__).parent


def told(play: Background) -> tuple[dict[str, Any], Path]:
    """What the witness says, and where the rehearsal kept its ledger."""
    code, out, err = play.result(within_s=100)
    assert code == 0, out + err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert found["exit_code"] == 0, out + err
    kept = next(line for line in err.splitlines() if line.startswith("kept: "))
    return found, Path(kept.removeprefix("kept: "))


def receipt(home: Path) -> Mapping[str, Any]:
    """The receipt, by the command, on the ledger that was kept."""
    argv = [sys.executable, "-m", "kimisession", "cost", "demo", "--json"]
    env = {**environment_for(home), "HOME": str(home)}
    done = subprocess.run(argv, env=env, cwd=home, capture_output=True, text=True, check=True)
    found: Mapping[str, Any] = json.loads(done.stdout)["data"]
    return found


def test_the_witness_agrees_with_the_receipt(rehearsals: dict[str, Background]) -> None:
    witness, home = told(rehearsals["witnessed"])
    line = receipt(home)["lines"][0]
    assert abs(float(line["seconds"]) - witness["seconds"]) <= 1.0, (line, witness["seconds"], witness["longest_gap_s"])
    assert receipt(home)["final"]
    assert receipt(home)["reason"] == "idle"


def test_nothing_is_left_not_even_a_daemon_that_cleared_its_environment(rehearsals: dict[str, Background]) -> None:
    witness, _ = told(rehearsals["witnessed"])
    daemons = [process for process in witness["seen"] if "kimisession-stand-in-orphan" in process["argv"]]
    assert len(daemons) == 1
    assert daemons[0]["cleared"]
    assert witness["left"] == []


def test_an_ordinary_user_rehearses_as_well(rehearsals: dict[str, Background]) -> None:
    witness, home = told(rehearsals["ordinary"])
    assert home.stat().st_uid != 0
    assert witness["how"] == "subreaper"
    assert witness["left"] == []
    line = receipt(home)["lines"][0]
    assert abs(float(line["seconds"]) - witness["seconds"]) <= 1.0, (line, witness["seconds"], witness["longest_gap_s"])


@pytest.mark.parametrize("how", HOWS)
def test_the_witness_sees_what_a_command_leaves_behind(how: str) -> None:
    """Else its "nothing is left" would be worth nothing."""
    if not works(how):
        pytest.skip(f"this kernel or this user does not allow it: {how}")
    argv = [sys.executable, str(HERE / "witness.py"), "--how", how, "--"]
    command = ["sh", "-c", "(setsid env -i sleep 30 >/dev/null 2>&1 & sleep 0.3); sleep 0.3"]
    done = subprocess.run([*argv, *command], capture_output=True, text=True, check=True, timeout=20)
    found = json.loads(done.stdout)
    try:
        assert [process["argv"].strip() for process in found["left"]] == ["sleep 30"]
        assert found["gone_at"] is None
    finally:
        if how == "subreaper":  # a namespace ends its processes itself
            for process in found["left"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process["pid"], signal.SIGKILL)
