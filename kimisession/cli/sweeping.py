"""`sweep`: what of ours exists in a project, whoever began it, and what of that should not be there any more."""

import sys
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from kimisession.cli import show
from kimisession.cli.asking import agreed
from kimisession.cloud.base import Cloud
from kimisession.cloud.compute import open_compute
from kimisession.cloud.resource_prices import price_of_resource
from kimisession.cloud.sweep import Failure, Look, Sweeper
from kimisession.controller import owner_here
from kimisession.core.audit import WITHOUT_DEADLINE, Finding, kind_of
from kimisession.core.cost import UNPRICED, cents
from kimisession.core.inventory import Machine
from kimisession.core.launch import label_value
from kimisession.core.ledger import LaunchRequested, ResourceCreated, SessionRequested
from kimisession.errors import LeakSuspected
from kimisession.paths import state_home
from kimisession.store import NameTaken, Store, open_store

#: Deleting a machine takes about a minute, one with many GPUs a few.
PATIENCE_S = 300.0


@dataclass(frozen=True)
class SweepOptions:
    """The command's options, parsed."""

    project: str
    owner: str | None
    delete: bool
    adopt: bool
    yes: bool
    json: bool


def run_sweep(options: SweepOptions, cloud: Cloud | None = None) -> None:
    """Look, and delete or adopt where that is asked for. Raises LeakSuspected while something is left."""
    store = open_store(state_home())
    sweeper = Sweeper(
        cloud or open_compute(options.project),
        owner=owner_here(),
        only=label_value(options.owner) if options.owner else "",
        known=frozenset(row.session for row in store.rows()),
        price=price_of_resource,
    )
    look, failed, deleted = sweeper.look(), tuple[Failure, ...](), tuple[Finding, ...]()
    if not options.json:
        _table(look)
    adopted = adopt(store, look, foreign_too=bool(options.owner)) if options.adopt else []
    if options.delete and look.due:
        _agree(look, options)
        before = look.due
        look, failed = sweeper.delete_until_gone(PATIENCE_S, lambda text: show.say(f"  {text}"))
        left = {_thing(f) for f in look.findings}
        # Of a zone that does not answer nothing is known: what was there is not called deleted.
        deleted = tuple(f for f in before if not _silent(f, look) and _thing(f) not in left)
    if options.json:
        show.as_json("sweep", _document(look, deleted, adopted))
    else:
        _tell(look, deleted, adopted, failed)
    _raise_if_left(look, failed, options)


def _thing(finding: Finding) -> tuple[str, str, str]:
    """A machine and its boot disk share a name."""
    return kind_of(finding.resource), finding.resource.name, finding.resource.zone


def _silent(finding: Finding, look: Look) -> bool:
    return any(finding.resource.zone == scope.rpartition("/")[2] for scope in look.unreachable)


def _table(look: Look) -> None:
    if not look.findings:
        where = " where it answered" if look.unreachable else ""
        show.out(f"nothing of ours in project {look.project}{where}")
        return
    show.table(
        ("STATE", "RESOURCE", "WHERE", "OWNER", "SINCE (UTC)", "COST", "$/H"),
        [_row(finding) for finding in look.findings],
        frozenset({5, 6}),
    )


def _row(finding: Finding) -> tuple[str, ...]:
    thing = finding.resource
    usd = "not priced" if finding.usd is None else cents(finding.usd) + ("+" if finding.unpriced else "")
    rate = "" if finding.usd_per_hour is None else cents(finding.usd_per_hour)
    name = f"{kind_of(thing)} {thing.name}"
    return finding.verdict.value, name, thing.zone, finding.owner or "?", f"{finding.since:%m-%d %H:%M}", usd, rate


def _tell(look: Look, deleted: tuple[Finding, ...], adopted: list[str], failed: tuple[Failure, ...]) -> None:
    for name in adopted:
        show.out(f"adopted {name}: the ledger knows it now")
    for failure in failed:
        show.say(f"could not delete {failure.finding.resource.name}: {failure.error.message}")
    if deleted:
        show.out(f"deleted {len(deleted)}: {', '.join(f.resource.name for f in deleted)}")
    for finding in look.leaks:
        show.say(f"{finding.verdict.value}: {kind_of(finding.resource)} {finding.resource.name}: {finding.why}")
    if not look.leaks and not look.unreachable:
        show.out(f"nothing is left over in project {look.project}")
        show.next_step("kimisession status" if look.findings else "kimisession start")


def _agree(look: Look, options: SweepOptions) -> None:
    """Ask. What is left over stays a leak when the answer is no, or when there is nobody to ask."""
    if options.yes:
        return
    names = ", ".join(f.resource.name for f in look.due[:5]) + (" ..." if len(look.due) > 5 else "")
    if not sys.stdin.isatty():
        raise LeakSuspected(
            f"{len(look.due)} left over ({names}), and nobody to ask whether to delete",
            f"{_command(options, delete=True)} -y",
        )
    if not agreed(f"delete {len(look.due)} ({names})?"):
        raise LeakSuspected(f"nothing was deleted: {len(look.due)} left over", _command(options))


def _command(options: SweepOptions, delete: bool = False) -> str:
    """The same look again, of the same project and the same owner's things alone."""
    words = ["kimisession sweep", "--delete" if delete else ""]
    words += [
        f"--owner {options.owner}" if options.owner else "",
        f"--project {options.project}" if options.project else "",
    ]
    return " ".join(filter(None, words))


def _raise_if_left(look: Look, failed: tuple[Failure, ...], options: SweepOptions) -> None:
    if look.unreachable:
        raise LeakSuspected(
            f"{', '.join(look.unreachable)} did not answer: what is there is not known", _command(options)
        )
    if failed:
        raise LeakSuspected(f"{len(failed)} could not be deleted: {failed[0].error.message}", failed[0].error.hint)
    if look.due:
        word = "is" if len(look.due) == 1 else "are"
        raise LeakSuspected(
            f"{len(look.due)} {word} left over in project {look.project}",
            _command(options, delete=True) if not options.delete else "the same command again",
        )
    if look.leaks:
        first = look.leaks[0].resource
        command = "instances" if isinstance(first, Machine) else "disks"
        raise LeakSuspected(
            f"{len(look.leaks)} named like ours without labels: nobody here knows whose",
            f"if it is yours: gcloud compute {command} delete {first.name} --zone {first.zone} --project {look.project}",
        )


def _document(look: Look, deleted: tuple[Finding, ...], adopted: list[str]) -> dict[str, Any]:
    return {
        "project": look.project,
        "at": look.at,
        "findings": [finding_data(finding) for finding in look.findings],
        "unreachable": list(look.unreachable),
        "deleted": [finding.resource.name for finding in deleted],
        "adopted": adopted,
        "left": len(look.leaks),
    }


def finding_data(finding: Finding) -> dict[str, Any]:
    """A finding for --json."""
    thing = finding.resource
    return {
        "kind": kind_of(thing),
        "resource": thing.name,
        "zone": thing.zone,
        "session": finding.session or None,
        "name": thing.session_name or None,
        "owner": finding.owner or None,
        "verdict": finding.verdict.name.lower().replace("_", "-"),
        "leak": finding.leak,
        "due": finding.due,
        "why": finding.why,
        "began": thing.began,
        "since": finding.since,
        "deadline": thing.deadline,
        "usd": finding.usd,
        "usd_per_hour": finding.usd_per_hour,
        "unpriced": list(finding.unpriced),
    }


# -- adopt ----------------------------------------------------------------------------------------------------------------


def adopt(store: Store, look: Look, foreign_too: bool) -> list[str]:
    """Write down what labels tell of machines that this ledger does not know. Returns the sessions' names; one whose name
    is taken by another live session is left out and told. What only the ledger had stays unknown: profile, key, the price that
    was agreed, and the idle limit, which the machine's keeper holds."""
    adopted = []
    machines = [f for f in look.findings if isinstance(f.resource, Machine) and f.session]
    for finding in sorted(machines, key=lambda f: f.resource.began):
        if store.session(finding.session).request is not None:
            continue
        if finding.owner not in ("", owner_here()) and not foreign_too:  # past its deadline, too: it is their bill
            show.say(f"not adopted: {finding.session} is {finding.owner}'s; `--owner {finding.owner}` adopts it")
            continue
        request = _request(finding)
        try:
            store.append(finding.session, [request, LaunchRequested(finding.resource.began), _created(finding)])
        except NameTaken:
            show.say(f"not adopted: {finding.session}: a live session is called {request.name} already")
            continue
        adopted.append(request.name)
    return adopted


def _created(finding: Finding) -> ResourceCreated:
    """The machine, by the id that the place has for it: what it takes counts from now on, also while nobody can look."""
    machine = finding.resource
    price = price_of_resource(machine)
    ground = UNPRICED if price.usd_per_hour is None else price.ground
    return ResourceCreated(machine.began, f"gcp/{machine.zone}/{machine.name}", "machine", price.usd_per_hour, ground)


def _request(finding: Finding) -> SessionRequested:
    machine = finding.resource
    assert isinstance(machine, Machine)
    # One whose label cannot be read has as long as the sweep gives it; `now` would have the next look end it.
    deadline: datetime = machine.deadline or machine.began + WITHOUT_DEADLINE
    price = price_of_resource(machine)
    accelerators = ",".join(f"{kind}:{count}" for kind, count in machine.accelerators) or machine.machine_type
    return SessionRequested(
        at=machine.began,
        name=machine.session_name,
        owner=finding.owner,
        profile="adopted",
        checkpoint="",
        infra="gcp",
        accelerators=accelerators,
        served_name="",
        port=0,
        usd_per_hour=price.usd_per_hour or Decimal(0),
        price_ground=UNPRICED if price.usd_per_hour is None else price.ground,
        idle_s=0,
        deadline=deadline,
        latest=deadline,
        budget_usd=None,
        budget_at=None,
        engine_flags="",
        stand_in=False,
        pretended=False,
    )
