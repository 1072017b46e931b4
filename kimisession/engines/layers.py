"""What a machine's own files say of the layers that would end it, and when it is left to itself. Pure."""

import contextlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kimisession.core.lifecycle import Layer

#: A keeper that has not been heard for this long is not counted on.
SILENT_S = 60.0

#: A machine that is up this long without a keeper has none coming: SkyPilot's set-up takes one to three minutes.
ARM_WITHIN_S = 15 * 60.0


def journal_lines(text: str) -> list[dict[str, Any]]:
    """Lines of a keeper's journal; one that is damaged is left out."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "at" in record:
                found.append(record)
    return found


def clock_told(text: str) -> datetime | None:
    """The machine's own clock, as `date +%s` printed it; None where it did not."""
    text = text.strip()
    return datetime.fromtimestamp(int(text), UTC) if text.isdecimal() and len(text) <= 11 else None


def keeper_layer(lines: Sequence[dict[str, Any]], now: datetime) -> Layer:
    """The keeper, by the journal that it writes; `now` is by the clock of the machine that it runs on."""
    last = next((line for line in reversed(lines) if line.get("by") == "keeper"), None)
    if last is None:
        return Layer("keeper", False, "not heard yet")
    heard_s = (now - datetime.fromisoformat(last["at"])).total_seconds()
    over = any(line.get("kind") == "closed" for line in lines[-20:])
    return Layer("keeper", heard_s < SILENT_S and not over, f"last heard {max(0.0, heard_s):.0f} s ago")


def autodown_layer(text: str) -> Layer:
    """SkyPilot's autodown, as skylet on the machine has it (run/layers.json)."""
    try:
        there = json.loads(text)
    except ValueError:
        return Layer("SkyPilot autodown", False, "not read back from the machine yet")
    armed = there["down"] and there["idle_minutes"] >= 0 and there["same_boot"] and there["skylet"]
    armed = armed and there["wait_for"] == "jobs"
    words = (
        f"skylet: down={there['down']}, {there['idle_minutes']} min after the last job, wait_for={there['wait_for']}"
    )
    return Layer("SkyPilot autodown", bool(armed), f"{words}, {'alive' if there['skylet'] else 'not running'}")


def left_to_itself(since: datetime, lines: Sequence[dict[str, Any]], now: datetime, there: datetime) -> bool:
    """Up for long enough, with a journal that stopped or never began. `since` is when there was a machine, and `now` this
    moment, by the place's clock; `there` is this moment by the machine's own, which the journal goes by."""
    up_s = (now - since).total_seconds()
    if not lines:
        return up_s > ARM_WITHIN_S
    return min(up_s, (there - datetime.fromisoformat(lines[-1]["at"])).total_seconds()) > SILENT_S * 3
