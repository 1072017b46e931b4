"""The reaper's machine as its labels tell it: names, heartbeat, and whether it can be counted on. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from kimisession.core.inventory import Machine
from kimisession.core.lifecycle import Layer

NAME = "kimisession-reaper"
LABEL_GUARD = "kimisession-guard"
LABEL_CODE = "kimisession-reaper-code"
LABEL_BEAT = "kimisession-reaper-beat"
LABEL_DID = "kimisession-reaper-did"
DELETE = "compute.instances.delete"

#: Pause between two runs, and the longest that one may take.
EVERY_S = 180
RUN_S = 240

#: A heartbeat older than a pause, the longest run and a failed one in between proves nothing any more.
SILENT = timedelta(seconds=2 * EVERY_S + RUN_S)


def beat_of(machine: Machine) -> datetime | None:
    """When the reaper last looked at everything; None when it never did."""
    text = machine.labels.get(LABEL_BEAT, "")
    return datetime.fromtimestamp(int(text), UTC) if text.isdigit() and len(text) <= 11 else None


def guard_layer(machines: Sequence[Machine], project: str, now: datetime, code: str = "") -> Layer:
    """The reaper as a layer of every session in `project`. `machines` are those with LABEL_GUARD; `code` is the version of
    the code that `guard enable` would install."""
    if not machines:
        return Layer("reaper", False, f"project {project} has none: kimisession guard enable")
    best = max(machines, key=lambda m: (m.status == "RUNNING", beat_of(m) or m.began))
    where = f"{best.name} in {best.zone}"
    beat = beat_of(best)
    if best.status != "RUNNING":
        return Layer("reaper", False, f"{where} is {best.status}")
    if beat is None:
        return Layer("reaper", False, f"{where}, {_span(now - best.began)} old, has not looked yet")
    if not -SILENT < now - beat < SILENT:
        return Layer("reaper", False, f"{where} last looked at {beat:%Y-%m-%d %H:%M:%S} UTC: it is not alive any more")
    old = "" if not code or best.labels.get(LABEL_CODE) == code else ", with the code of another version"
    return Layer("reaper", True, f"{where} looked at all zones {_span(now - beat)} ago{old}")


def _span(time: timedelta) -> str:
    seconds = max(0, int(time.total_seconds()))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"
