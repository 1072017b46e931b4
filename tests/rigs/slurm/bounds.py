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


#: SkyPilot's server, its set-up of the node, files, job: 32 to 50 s alone, seen; here up to five at once.
READY = Bound("start to ready", "-", "the command", 180)

#: From the keeper's last word to the end of the job: run script, and SkyPilot's batch script cleans up.
CLEAN_UP = Bound("clean-up", "-", "the keeper's last word", 30)

BOUNDS = (
    # idle 45 s, and then: scrape 0.5, tick 0.2, engine ends in 3, clean-up
    Bound("idle, with `sky exec sleep inf` on it", "keeper: idle", "the last request", 45 + 4 + 30),
    # the wrapper reads the end of the lifeline at once; clean-up
    Bound("kill -9 of the keeper", "wrapper: keeper-died", "the kill", 30),
    # nothing on the machine needs the server
    Bound("kill -9 of SkyPilot's API server", "keeper: idle", "the last request", 45 + 4 + 30),
    # the launch goes on without it: set-up, cold start of 10 s, then unused for 12 s
    Bound("kill -9 of the command during the launch", "keeper: never-used", "the kill", 180 + 10 + 12 + 30),
    # cancel the request, end the job, look twice
    Bound("Ctrl-C during the launch", "command", "the Ctrl-C", 90),
    # the command loses its stream, starts the server again, cancels, ends the job, looks twice
    Bound("kill -9 of the API server during the launch", "command", "the kill", 150),
    # nothing of ours ever ran on the node: only Slurm knows. 1 minute + 2 of grace, in whole minutes, looked at every 60 s
    Bound("kill -9 of command and API server before the keeper ran", "Slurm: time limit", "the job's start", 300),
    # Slurm sends TERM to what is left of the job, and kills it 5 s later (KillWait)
    Bound("kill -9 of the job's batch script", "Slurm", "the kill", 60),
    # the same, with the keeper told first
    Bound("scancel by somebody else", "Slurm", "the scancel", 60),
    # nothing that ends a session writes to the disk first
    Bound("idle, with a full disk under the machine's folder", "keeper: idle", "the last request", 45 + 4 + 30),
    # 120 s of asking, then exit code 7; the second `stop` tells the keeper: its tick, the engine's end, clean-up, two looks
    Bound("stop, with the login node away", "command", "the command", 120 + 30),
    Bound("stop, once the login node is back", "keeper: user", "the command", 60),
    # slurmctld finds out by itself, within its SlurmdTimeout of 300 s. 90 was written here first, for slurmd's registration
    # was thought to be enough: 238 s were seen.
    Bound("reboot of the node", "Slurm", "the reboot", 300 + 20),
    # imports and warm-up of real vLLM on two cores: 70 s alone, seen
    Bound("real vLLM: start to ready", "-", "the command", 180 + 180),
    # idle 8 s, engine ends in 10
    Bound("real vLLM: idle", "keeper: idle", "the last request", 8 + 11 + 30),
    Bound("real vLLM: kill -9 of the keeper", "wrapper: keeper-died", "the kill", 30),
)


def bound(case: str) -> Bound:
    """The bound of a case, stretched by `PATIENCE`."""
    found = next(one for one in (READY, CLEAN_UP, *BOUNDS) if one.case == case)
    return replace(found, latest_s=found.latest_s * PATIENCE)
