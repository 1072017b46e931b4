"""What the reaper runs every few minutes on its own small machine: a sweep of the whole project on labels alone.

    python -m kimisession.cloud.reaper --zone us-central1-a [--name kimisession-reaper] [--project P]

One run: list everything in all zones, delete what is past its deadline and the grace, or left over, whoever's it is; then
write the heartbeat, a label on its own machine. The heartbeat says that a complete list was made by something that may
delete: a run that could not list every zone, or may not delete, writes none, and `guard status` and `start` see that.
What it did is printed, which on Compute Engine is the serial console. Exit code 0: it looked at everything; 1: it did not.
"""

import argparse
import sys
import time
from collections.abc import Callable

from kimisession.cloud.base import Cloud
from kimisession.cloud.compute import open_compute
from kimisession.cloud.sweep import Sweeper
from kimisession.core.audit import kind_of
from kimisession.core.guard import DELETE, LABEL_BEAT, LABEL_DID, NAME
from kimisession.errors import KimiError

#: Deleting takes about a minute; the next run sees what was not done by then.
PATIENCE_S = 60.0


def reap(sweeper: Sweeper, zone: str, name: str, clock: Callable[[], float], say: Callable[[str], None]) -> bool:
    """One run. True: everything was listed, and the heartbeat is written. `clock`: seconds since 1970."""
    cloud: Cloud = sweeper.cloud
    sweeper.spare = {name}
    itself = cloud.machine(zone, name)
    if itself is None:
        say(f"there is no machine {name} in {zone}: not the reaper's own machine")
        return False
    first = sweeper.look()
    last, failed = sweeper.delete_until_gone(PATIENCE_S, say)
    for failure in failed:
        say(f"could not delete {failure.finding.resource.name}: {failure.error.message}")
    for finding in last.leaks:
        say(f"left: {kind_of(finding.resource)} {finding.resource.name}: {finding.verdict.value}: {finding.why}")
    silent = sorted({*first.unreachable, *last.unreachable})
    if silent:
        say(f"{', '.join(silent)} did not answer: no heartbeat")
        return False
    if not cloud.may(itself, DELETE):
        say(f"the reaper's account lacks {DELETE}: no heartbeat")
        return False
    done = len(first.due) - len(last.due)
    did = f"{max(0, done)}-deleted-{len(last.due)}-left"
    if cloud.set_labels(itself, {LABEL_BEAT: str(int(clock())), LABEL_DID: did}) is None:
        return False
    say(f"looked at project {last.project}: {len(last.findings)} of ours, {did.replace('-', ' ')}")
    return True


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Delete what is past its deadline, once.")
    parser.add_argument("--zone", required=True, help="where the reaper's own machine is")
    parser.add_argument("--name", default=NAME, help="... and what it is called")
    parser.add_argument("--project", default="", help="default: the machine's own")
    args = parser.parse_args(argv)

    def say(text: str) -> None:
        print(f"kimisession reaper: {text}", flush=True)

    try:
        return 0 if reap(Sweeper(open_compute(args.project)), args.zone, args.name, time.time, say) else 1
    except KimiError as error:
        say(f"{error.message}. {error.hint}".strip())
        return 1


if __name__ == "__main__":
    sys.exit(main())
