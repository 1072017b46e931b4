"""What must end each session of the rig, and the latest second of it, written down before anything is measured.

The profile is `rehearsal` with the limits of the case. Gone means that Compute Engine's list has no such machine. Seconds are
for two busy cores; `from_` says what they count from.
"""

import os
from dataclasses import dataclass, replace

#: For a machine that others work on at the same time; printed with the figures.
PATIENCE = float(os.environ.get("KIMISESSION_RIG_PATIENCE", "1"))

#: SkyPilot's autodown after the end of the keeper's job: 3 minutes, counted and looked at every 60 s; then the deletion.
AUTODOWN_S = 3 * 60 + 60 + 20

#: The machine's own timer after the same: 30 s, at the latest with its next look, a minute later; then the deletion.
TIMER_S = 60 + 30

#: ... after a start that failed, so that somebody who follows it can read why.
FAILED_S = 100 + 30


@dataclass(frozen=True)
class Bound:
    """`layer` must be what ended it, within `latest_s` of `from_`."""

    case: str
    layer: str
    from_: str
    latest_s: float


BOUNDS = (
    # SkyPilot's server, its set-up of the machine, files, job: 42 s alone, seen; here five at once, and this one's own set-up.
    Bound("start to ready", "-", "the command", 200),
    # scrape 0.5, tick 0.2, engine ends in 3
    Bound("idle to gone, no API server", "keeper: idle, timer", "the idle limit", 10 + TIMER_S),
    # the wrapper reads the end of the lifeline at once
    Bound("kill -9 of the keeper, disk full", "wrapper: keeper-died, timer", "the kill", 5 + TIMER_S),
    Bound("idle, its timer taken away", "keeper: idle, autodown", "the idle limit", 10 + AUTODOWN_S),
    # the hook fails in seconds
    Bound("a step of the set-up fails", "keeper: setup-failed, timer", "the command", 200 + FAILED_S),
    # cancel the request, delete the machine, look twice a minute apart
    Bound("Ctrl-C during the launch", "command", "the Ctrl-C", 150),
    # the notice reaches the keeper at once; the machine goes half a minute later
    Bound("preempted", "Google", "the notice", 90),
    Bound("recovered in the next zone", "-", "the command", 200),
    # 240 s without a keeper, looked at every 60 s; then the deletion
    Bound("reboot of the machine", "timer", "the boot", 240 + 60 + 30),
    # the label's deadline, the reaper's grace, looked at every 3 minutes
    Bound("kill -9 of command and API server before anything ran", "reaper", "the deadline", 600),
)


def bound(case: str) -> Bound:
    """The bound of a case, stretched by `PATIENCE`."""
    found = next(one for one in BOUNDS if one.case == case)
    return replace(found, latest_s=found.latest_s * PATIENCE)
