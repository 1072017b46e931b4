"""`guard`: the reaper of a project, which deletes what is past its deadline even when every other layer is dead."""

import sys

from kimisession.cli import show
from kimisession.cli.asking import agreed
from kimisession.cli.sessions import utc_now
from kimisession.cloud import guard, permissions
from kimisession.cloud.base import Cloud
from kimisession.cloud.compute import open_compute
from kimisession.core.guard import EVERY_S, LABEL_CODE, LABEL_DID, NAME, beat_of, guard_layer
from kimisession.errors import KimiError, UsageMistake

#: What a reaper costs outside of the free tier (notes/decisions/003-reaper.md has the sources).
COSTS = "about $7 a month outside of the free tier, and the address beside it"


def run_enable(project: str, zone: str, account: str, network: str, dry_run: bool, cloud: Cloud | None = None) -> None:
    """Have one reaper, with this installation's code."""
    cloud = cloud or open_compute(project)
    email = guard.account_of(cloud.project, account)
    if dry_run:
        show.would(
            f"create {NAME} ({guard.MACHINE_TYPE}) in {zone} of project {cloud.project}, acting as {email}; {COSTS}"
        )
        return
    machine = guard.enable(cloud, zone, account, network, show.say)
    show.out(f"the reaper is {machine.name} in {machine.zone} of project {cloud.project}; {COSTS}")
    show.say(f"it looks every {EVERY_S // 60} minutes; its first look is a few minutes away")
    show.next_step("kimisession guard status")


def run_status(project: str, json: bool, cloud: Cloud | None = None) -> None:
    """Whether it can be counted on. Exit code 1 when it cannot."""
    cloud = cloud or open_compute(project)
    now = utc_now()
    machines = guard.guards(cloud)
    layer = guard_layer(machines, cloud.project, now, guard.code_version())
    if json:
        show.as_json(
            "guard",
            {
                "project": cloud.project,
                "armed": layer.armed,
                "evidence": layer.evidence,
                "machines": [
                    {
                        "name": machine.name,
                        "zone": machine.zone,
                        "status": machine.status,
                        "beat": beat_of(machine),
                        "did": machine.labels.get(LABEL_DID),
                        "code": machine.labels.get(LABEL_CODE),
                        "code_here": guard.code_version(),
                    }
                    for machine in machines
                ],
            },
        )
    else:
        rows = [("reaper", f"{'armed and verified' if layer.armed else 'NOT armed'}: {layer.evidence}")]
        for machine in machines:
            did = machine.labels.get(LABEL_DID, "nothing yet").replace("-", " ")
            rows.append((machine.name, f"{machine.zone}, {machine.status}; its last run: {did}"))
        show.pairs(rows)
    if not layer.armed:
        hint = "kimisession guard enable"
        if machines:
            first = machines[0]
            hint = (
                f"gcloud compute instances get-serial-port-output {first.name} --zone {first.zone} "
                f"--project {cloud.project} tells what it says"
            )
        raise KimiError("nothing outside of the machines would delete them", hint)


def run_disable(project: str, dry_run: bool, cloud: Cloud | None = None, yes: bool = False) -> None:
    """Delete it, after a question where sessions run that it watches over. Repeatable."""
    cloud = cloud or open_compute(project)
    watched = watched_over(cloud)
    if dry_run:
        names = ", ".join(f"{m.name} in {m.zone}" for m in guard.guards(cloud)) or "nothing: there is none"
        show.would(f"delete {names}{f'; {watched}' if watched else ''}")
        return
    if watched:
        _agree(watched, yes)
    count = guard.disable(cloud, show.say)
    show.out(f"project {cloud.project} has no reaper now" if count else f"project {cloud.project} had no reaper")
    if watched:
        show.next_step("kimisession guard enable", "kimisession sweep")


def watched_over(cloud: Cloud) -> str:
    """What nothing outside of the machines would end without the reaper, whoever began it; empty when there is nothing."""
    found = cloud.ours()
    sessions = sorted({machine.session for machine in found.machines})
    if not sessions and found.unreachable:
        return f"{', '.join(found.unreachable)} did not answer: what runs there is not known"
    names = ", ".join(sessions[:5]) + (" ..." if len(sessions) > 5 else "")
    return f"only their own layers would end {names}" if sessions else ""


def _agree(watched: str, yes: bool) -> None:
    if yes:
        show.say(watched)
        return
    if not sys.stdin.isatty():
        raise UsageMistake(f"{watched}; there is no terminal to ask for a yes", "add --yes; nothing was deleted")
    if not agreed(f"{watched}. Delete the reaper?"):
        raise KimiError("the reaper was not deleted", "kimisession guard status")


def run_permissions(project: str, json: bool, cloud: Cloud | None = None) -> None:
    """What this account lacks in the project. Exit code 1 when it lacks something."""
    cloud = cloud or open_compute(project)
    lacking = permissions.missing(cloud)
    if json:
        missing = list(lacking.permissions) if lacking else []
        show.as_json("permissions", {"project": cloud.project, "wanted": list(permissions.USER), "missing": missing})
    elif lacking is None:
        show.out(f"this account has all {len(permissions.USER)} permissions that kimisession uses in {cloud.project}")
    if lacking is not None:
        rest = len(lacking.permissions) - 1
        more = f" and {rest} more" if rest else ""
        raise KimiError(
            f"this account lacks {lacking.permissions[0]}{more} in project {cloud.project}", lacking.command
        )
