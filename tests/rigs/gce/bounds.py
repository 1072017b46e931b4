"""What must end each session of the rig, and the latest second of it, written down before anything is measured.

The profile is `rehearsal` with the limits of the case. Gone means that Compute Engine's list has no such machine. Seconds are
for two busy cores; `from_` says what they count from.
"""

import os
from dataclasses import dataclass, replace

#: For a machine that others work on at the same time; printed with the figures.
PATIENCE = float(os.environ.get("KIMISESSION_RIG_PATIENCE", "1"))

#: SkyPilot's autodown after the end of the keeper's job: 1 minute, ticks of 60 s; then the deletion.
AUTODOWN_S = 60 + 60 + 20


@dataclass(frozen=True)
class Bound:
    """`layer` must be what ended it, within `latest_s` of `from_`."""

    case: str
    layer: str
    from_: str
    latest_s: float


BOUNDS = (
    # SkyPilot's server, its set-up of the machine, files, job: 42 s alone, seen; here up to four at once.
    Bound("start to ready", "-", "the command", 200),
    # idle 75 s, then: scrape 0.5, tick 0.2, engine ends in 3; SkyPilot's autodown
    Bound("idle, and no API server", "keeper: idle, autodown", "the last request", 75 + 4 + AUTODOWN_S),
    # the wrapper reads the end of the lifeline at once
    Bound("kill -9 of the keeper", "wrapper: keeper-died, autodown", "the kill", 5 + AUTODOWN_S),
    # the hook fails in seconds
    Bound("a step of the set-up fails", "keeper: setup-failed, autodown", "the command", 200 + AUTODOWN_S),
    # cancel the request, delete the machine, look twice a minute apart
    Bound("Ctrl-C during the launch", "command", "the Ctrl-C", 150),
    # the notice reaches the keeper at once; the machine goes half a minute later
    Bound("preempted", "Google", "the notice", 90),
    # 240 s without a keeper, looked at every 60 s; then the deletion
    Bound("reboot of the machine", "timer in the machine", "the boot", 240 + 60 + 30),
    Bound("another job on the machine", "timer in the machine", "the keeper's end", 240 + 60 + 30),
    # the label's deadline, the reaper's grace, looked at every 3 minutes
    Bound("kill -9 of command and API server before anything ran", "reaper", "the deadline", 600),
)


def bound(case: str) -> Bound:
    """The bound of a case, stretched by `PATIENCE`."""
    found = next(one for one in BOUNDS if one.case == case)
    return replace(found, latest_s=found.latest_s * PATIENCE)
