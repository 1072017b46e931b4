"""What must end each session of the rig, and the latest second of it, written down before anything is measured.

The profile is `rehearsal` with the limits of the case. Seconds are for two busy cores; `from_` says what they count from.
"""

import os
from dataclasses import dataclass, replace

#: For a machine that others work on at the same time; printed with the figures.
PATIENCE = float(os.environ.get("KIMISESSION_RIG_PATIENCE", "1"))


@dataclass(frozen=True)
class Bound:
    """`layer` must be what ended it, within `latest_s` of `from_`."""

    case: str
    layer: str
    from_: str
    latest_s: float


#: SkyPilot's server, its set-up of the node, files, job: 32 to 50 s alone, seen; here up to three at once.
READY = Bound("start to ready", "-", "the command", 180)

BOUNDS = (
    # idle 45 s, and then: scrape 0.5, tick 0.2, engine ends in 3, run script, SkyPilot's batch script cleans up
    Bound("idle, with `sky exec sleep inf` on it", "keeper: idle", "the last request", 45 + 4 + 30),
    # the wrapper reads the end of the lifeline at once; run script and clean-up as above
    Bound("kill -9 of the keeper", "wrapper: keeper-died", "the kill", 30),
    # nothing on the machine needs the server
    Bound("kill -9 of SkyPilot's API server", "keeper: idle", "the last request", 45 + 4 + 30),
    # the launch goes on without it: set-up, cold start of 10 s, then unused for 12 s
    Bound("kill -9 of the command during the launch", "keeper: never-used", "the kill", 180 + 10 + 12 + 30),
    # cancel the request, end the job, look twice
    Bound("Ctrl-C during the launch", "command", "the Ctrl-C", 90),
    # the command loses its stream, starts the server again, cancels, ends the job, looks twice
    Bound("kill -9 of the API server during the launch", "command", "the kill", 150),
    # imports and warm-up of real vLLM on two cores: 70 s alone, seen
    Bound("vllm", "-", "the command", 180 + 180),
    # idle 8 s, engine ends in 10
    Bound("vllm, idle", "keeper: idle", "the last request", 8 + 11 + 30),
    # nothing of ours ever ran on the node: only Slurm knows. 1 minute + 2 of grace, in whole minutes, looked at every 60 s
    Bound("kill -9 of command and API server before the keeper ran", "Slurm: time limit", "the job's start", 300),
)


def bound(case: str) -> Bound:
    """The bound of a case, stretched by `PATIENCE`."""
    found = next(one for one in (READY, *BOUNDS) if one.case == case)
    return replace(found, latest_s=found.latest_s * PATIENCE)
