"""GCP as Compute Engine tells it: what exists of a session, in all zones, by label and by name, and what was done to it.

SkyPilot launches there and reaches the machine; what it believes is not asked. A machine that is stopping or stopped is not
gone: it, or its disk, is billed. Gone is proven when every request that could have made a machine is done and two lists of all
zones, a minute apart, were empty (kimisession/core/audit.py).
"""

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from kimisession.cloud.base import Cloud
from kimisession.cloud.compute import open_compute
from kimisession.cloud.google_errors import Denied
from kimisession.cloud.guard import guard_state
from kimisession.cloud.permissions import LOOK_AND_DELETE, ON_DEMAND, QUOTA, SKYPILOT, missing
from kimisession.cloud.quota import check_quota
from kimisession.cloud.resource_prices import price_of_resource
from kimisession.cloud.sweep import KEPT
from kimisession.core.audit import APART, PriceOf, code_told, proof_of_gone, what_ended
from kimisession.core.clocks import quarrel
from kimisession.core.inventory import MAKES, Address, Disk, Inventory, Machine, Operation
from kimisession.core.launch import LaunchSpec
from kimisession.core.lifecycle import Layer, SeenResource
from kimisession.engines.base import Found
from kimisession.engines.local_machine import read_json, write_json
from kimisession.engines.place import Sight
from kimisession.engines.remote import Remote
from kimisession.engines.sky_ssh import ask, sky_desk, sky_ssh_config
from kimisession.engines.slurm import FOLDER
from kimisession.engines.task import GRACE_S
from kimisession.errors import DoesNotFit, EngineFailed, KimiError, QuotaExceeded, Unconfirmed, UsageMistake
from kimisession.node.policy import EXIT_CODES

T = TypeVar("T")

#: From Google's notice to the end of a spot machine (Compute Engine documentation, Spot VMs: best effort, up to 30 s).
NOTICE = timedelta(seconds=30)

#: A deletion that was accepted is asked for again after this long.
AGAIN_S = 60.0

#: How long the reaper's heartbeat is taken for news.
REAPER_S = 30.0

#: What a machine's own timer says, in two lines: whether systemd runs it, and what it was told.
TIMER = (
    "systemctl is-active kimisession-deadline.timer 2>/dev/null;"
    " grep -h ^ExecStart= /etc/systemd/system/kimisession-deadline.service 2>/dev/null"
)

#: Ends that a machine cannot always tell of itself, by the words of `what_ended`.
_SUDDEN = {"preempted": "preempted", "host error": "host-error"}

#: What the exit code says that a machine tells with its own deletion: the keeper's, the wrapper's, that of `timeout` around
#: both, and what the machine's timer found by itself (notes/architecture.md).
_TOLD = {code: reason.value for reason, code in EXIT_CODES.items()} | {
    40: "keeper-died",
    41: "keeper-hung",
    42: "past-deadline",
    44: "unguarded",
    124: "past-deadline",
    137: "wrapper-died",
}

#: What a session needs from its start to its proof; the reaper's own is checked by `guard enable`.
NEEDED = tuple(dict.fromkeys((*SKYPILOT, *LOOK_AND_DELETE, *QUOTA)))

_PROGRESS = logging.getLogger("kimisession.progress")


def utc_now() -> datetime:
    """Aware wall-clock time."""
    return datetime.now(UTC)


class GcpPlace:
    """See the module's text. `home` remembers of each session when its list was first empty, and its disks' sizes; without
    it the proof only takes a minute longer. Every method raises Unconfirmed where Compute Engine cannot be relied on."""

    def __init__(
        self,
        home: Path,
        compute: Callable[[], Cloud] = open_compute,
        price: PriceOf = price_of_resource,
        guard: Callable[[Cloud, datetime], Layer] = guard_state,
        desk: Callable[[str], Remote | None] = sky_desk,
        now: Callable[[], datetime] = utc_now,
        apart: timedelta = APART,
        sky_project: Callable[[], str] = lambda: "",
    ) -> None:
        """`sky_project`: where SkyPilot launches, by its own configuration; empty where that is not known."""
        self.home = home
        self.sky_project = sky_project
        self.compute = compute
        self.price = price
        self.guard = guard
        self.now = now
        self.apart = apart
        self.desk_of = desk
        self._cloud: Cloud | None = None
        self._asked: dict[str, float] = {}
        self._guarded: tuple[float, Layer] | None = None
        self._unsaved: dict[str, dict[str, Any]] = {}  # what a full disk did not take

    def check(self, spec: LaunchSpec) -> None:
        """Credentials, permissions, quota, and somebody outside of the machine who ends it when everything in it is dead.
        Raises NoCredentials, Denied, QuotaExceeded, DoesNotFit."""
        cloud = self.compute()
        if (theirs := self.sky_project()) not in ("", cloud.project):
            raise DoesNotFit(
                f"SkyPilot launches in project {theirs}, and everything that would end it looks in {cloud.project}",
                f"GOOGLE_CLOUD_PROJECT={theirs} kimisession start, or mend workspaces.default.gcp.project_id in ~/.sky/config.yaml",
            )
        needed = (*NEEDED, *ON_DEMAND) if spec.placement.on_demand_fallback else NEEDED
        if (lacking := missing(cloud, needed)) is not None:
            more = f" and {len(lacking.permissions) - 1} more" if len(lacking.permissions) > 1 else ""
            raise Denied(
                f"this account lacks {lacking.permissions[0]}{more} in project {cloud.project}, which a session needs",
                lacking.command,
                lacking.permissions[0],
            )
        if wrong := quarrel(self.now(), cloud.ours().at):
            raise DoesNotFit(
                f"{wrong}, and every deadline would be off by as much", "set this machine's clock, then start"
            )
        self._check_quota(cloud, spec)
        reaper = self.guard(cloud, self.now())
        if not reaper.armed and not spec.placement.unguarded:
            raise DoesNotFit(
                f"nothing outside of the machine would end this session: {reaper.evidence}",
                "kimisession guard enable, once for the project; or --unguarded, and only the machine's own layers end it",
            )
        if not reaper.armed:
            _PROGRESS.error("no reaper watches over this session, as asked for: %s", reaper.evidence)

    @staticmethod
    def _check_quota(cloud: Cloud, spec: LaunchSpec) -> None:
        try:
            check_quota(cloud, spec.accelerators, spot=True)
        except QuotaExceeded:
            if not spec.placement.on_demand_fallback:
                raise
            check_quota(cloud, spec.accelerators, spot=False)

    def launching(self, session_id: str) -> None:
        """A machine may be made from now on: no list of before is half of a proof that it is gone."""
        self._remember(session_id, empty_at=None)

    def after_launch(self, session_id: str) -> None:
        """A machine on demand is not started again after a crash of its host: nothing would be armed on it. SkyPilot 0.14.1
        says so for spot machines only. Raises Unconfirmed, EngineFailed when SkyPilot launched it where nobody looks."""
        found = self._ask(lambda cloud: cloud.ours(session_id))
        if not (found.machines or found.unreachable or self._done(session_id)):
            raise EngineFailed(
                f"SkyPilot says that {session_id} runs, and project {found.project} never had a machine of it",
                f"SkyPilot uses another project: sky status {session_id}; it is being ended by SkyPilot",
            )
        for machine in found.machines:
            if not machine.spot:
                self._stay_down(machine)

    def _done(self, session_id: str) -> tuple[Operation, ...]:
        """What was done to its machines, as far back as Compute Engine remembers."""
        return self._ask(lambda cloud: cloud.operations(session_id, self.now() - KEPT))

    def _stay_down(self, machine: Machine) -> None:
        self._ask(lambda cloud: cloud.no_restart(machine))

    # -- look ----------------------------------------------------------------------------------------------------------

    def look(self, session_id: str, commands: tuple[str, ...] = ()) -> Sight:
        """By label, which is cheap; where nothing has it, by name as well, with disks, addresses and operations."""
        found = self._ask(lambda cloud: cloud.ours(session_id))
        if not found.machines:
            found = self._ask(lambda cloud: cloud.everything()).of(session_id)
        if found.machines:
            return self._there(session_id, found, commands)
        return self._nothing_runs(session_id, found)

    def _there(self, session_id: str, found: Inventory, commands: tuple[str, ...]) -> Sight:
        known = self._known(session_id).get("machines", {})
        told = dict(known)
        for m in found.machines:
            # A stopped machine shows no address any more: the one that it had is billed until it stopped.
            ip = m.external_ip or known.get(f"{m.zone}/{m.name}", {}).get("external_ip", "")
            told[f"{m.zone}/{m.name}"] = {
                "machine_type": m.machine_type,
                "spot": m.spot,
                "external_ip": ip,
                "account": m.account,
            }
        self._remember(session_id, empty_at=None, machines=told)
        running = [m for m in found.machines if m.status == "RUNNING"]
        operations: tuple[Operation, ...] = ()
        if not running:  # stopping, or stopped: what did that?
            operations = self._done(session_id)
        files: tuple[str, ...] = ()
        if running and (there := self.desk_of(session_id)) is not None:
            with contextlib.suppress(Unconfirmed):
                files = ask(there, (*commands, TIMER))
        timer, files = (files[-1] if len(files) > len(commands) else ""), files[: len(commands)]
        why = ", ".join(f"{m.name} in {m.zone} is {m.status}" for m in found.machines)
        return Sight(
            True,
            why,
            tuple(self._resources(session_id, found, operations)),
            tuple(self._layers(found, timer)),
            min(m.began for m in found.machines),
            files,
            stopped=all(m.stopped for m in found.machines),
            lines=tuple(_lines(operations, _accounts(told))),
            at=found.at,
        )

    def _nothing_runs(self, session_id: str, found: Inventory) -> Sight:
        """No machine: left over, proven gone, or neither yet."""
        operations = self._done(session_id)
        remembered = self._known(session_id).get("empty_at")
        empty_at = datetime.fromisoformat(remembered) if remembered else found.at
        resources = (*self._resources(session_id, found, operations), *self._past(session_id, operations, empty_at))
        lines = tuple(_lines(operations, _accounts(self._known(session_id).get("machines", {}))))
        if found.everything:
            left = ", ".join(f"{thing.name} in {thing.zone}" for thing in found.everything)
            return Sight(
                True, f"its machine is gone and left {left}", resources, stopped=True, lines=lines, at=found.at
            )
        proof = proof_of_gone(Inventory(empty_at, found.project), found, operations, self.apart)
        if proof.gone:
            told = {resource.id for resource in resources if resource.ended}
            resources = (*(r for r in self._unseen(session_id, empty_at) if r.id not in told), *resources)
        if not remembered and not found.unreachable:
            self._remember(session_id, empty_at=found.at.isoformat())
        return Sight(False if proof.gone else None, proof.evidence, resources, lines=lines, at=found.at)

    def _resources(
        self, session_id: str, found: Inventory, operations: tuple[Operation, ...]
    ) -> Iterator[SeenResource]:
        """What exists, with its price."""
        for machine in found.machines:
            ended, evidence = machine.ended, f"Compute Engine: {machine.status}"
            if ended is None and machine.stopped and (end := what_ended(machine.name, operations)):
                ended = end[1].ended
            yield self._seen(machine, "machine", machine.began, ended, evidence)
            if machine.external_ip:
                yield self._seen(_address_of(machine), "address", machine.began, ended, f"of {machine.name}")
        for disk in found.disks or self._disks(session_id, found):
            yield self._seen(disk, "disk", disk.began, None, "Compute Engine: it exists")
        for address in found.addresses:
            yield self._seen(address, "address", address.began, None, "Compute Engine: it exists")

    def _disks(self, session_id: str, found: Inventory) -> list[Disk]:
        """The disks of machines that are there. No list of machines has their sizes: they are asked for once."""
        kept = self._known(session_id).get("disks", {})
        names = {f"{m.zone}/{name}": m for m in found.machines for name, _ in m.disks}
        if not names.keys() <= kept.keys():
            listed = self._ask(lambda cloud: cloud.everything()).of(session_id).disks
            # Beside those of machines that are gone: what a disk cost is worked out when the session is over.
            kept = {**kept, **{f"{d.zone}/{d.name}": [d.began.isoformat(), d.size_gib, d.disk_type] for d in listed}}
            self._remember(session_id, disks=kept)
        disks = []
        for key, machine in names.items():
            began, size_gib, disk_type = kept.get(key, [machine.began.isoformat(), 0, ""])
            zone, _, name = key.partition("/")
            disks.append(Disk(name, zone, datetime.fromisoformat(began), size_gib=size_gib, disk_type=disk_type))
        return disks

    def _past(self, session_id: str, operations: tuple[Operation, ...], empty_at: datetime) -> Iterator[SeenResource]:
        """Machines that were, by what made and what ended them; SkyPilot's boot disks are named and go like them."""
        known = self._known(session_id)
        for op in operations:
            if op.kind not in MAKES or not op.target or op.errors or not op.done:
                continue
            key = f"{op.zone}/{op.target}"
            end, deleted = what_ended(op.target, operations), _last(op.target, "delete", operations)
            if end is not None and end[0] == "preempted" and end[1].ended:
                # The operation is the notice: the machine is billed while it stops, and its disk goes with it.
                end = end[0], replace(end[1], ended=min(end[1].ended + NOTICE, max(empty_at, end[1].ended)))
                deleted = deleted or end[1]
            if end is not None and end[1].ended:
                machine = Machine(op.target, op.zone, op.began, **known.get("machines", {}).get(key, {}))
                yield self._seen(machine, "machine", op.began, end[1].ended, _evidence(*end))
                if machine.external_ip:
                    yield self._seen(_address_of(machine), "address", op.began, end[1].ended, _evidence(*end))
                elif key not in known.get("machines", {}):
                    # No list ever had it: whether it was spot, and so what its address cost, is not known.
                    why = "SkyPilot gives every machine an external address; nobody listed this one while it ran"
                    yield SeenResource(f"gcp/{key}/address", "address", op.began, end[1].ended, why, None, "")
            if deleted is not None and deleted.ended:
                _, size_gib, disk_type = known.get("disks", {}).get(key, ["", 0, ""])
                disk = Disk(op.target, op.zone, op.began, size_gib=size_gib, disk_type=disk_type)
                yield self._seen(disk, "disk", op.began, deleted.ended, _evidence("deleted", deleted))

    def _unseen(self, session_id: str, empty_at: datetime) -> Iterator[SeenResource]:
        """What was there once and of whose end Compute Engine tells nothing: gone when a list was first without it."""
        known = self._known(session_id)
        why = "Compute Engine: not in its lists since then, and no operation says why"
        for key, (began, size_gib, disk_type) in known.get("disks", {}).items():
            zone, _, name = key.partition("/")
            disk = Disk(name, zone, datetime.fromisoformat(began), size_gib=size_gib, disk_type=disk_type)
            yield self._seen(disk, "disk", disk.began, empty_at, why)
        for key, words in known.get("machines", {}).items():
            zone, _, name = key.partition("/")
            machine = Machine(name, zone, empty_at, **words)
            yield self._seen(machine, "machine", empty_at, empty_at, why)
            if machine.external_ip:
                yield self._seen(_address_of(machine), "address", empty_at, empty_at, why)

    def _seen(
        self, thing: Machine | Disk | Address, kind: str, began: datetime, ended: datetime | None, evidence: str
    ) -> SeenResource:
        price = self.price(thing)
        suffix = "" if kind == "machine" else f"/{kind}"
        return SeenResource(
            f"gcp/{thing.zone}/{thing.name}{suffix}", kind, began, ended, evidence, price.usd_per_hour, price.ground
        )

    def _layers(self, found: Inventory, timer: str) -> Iterator[Layer]:
        yield timer_layer(timer, found)
        reaper = self._reaper()
        labelled = [m.deadline for m in found.machines if m.deadline]
        if len(labelled) < len(found.machines):
            yield Layer(reaper.name, False, f"{reaper.evidence}; but the machine has no deadline in its labels")
        else:
            label = f"the label says {max(labelled):%Y-%m-%d %H:%M:%S} UTC"
            yield Layer(reaper.name, reaper.armed, f"{reaper.evidence}; {label}")

    def _reaper(self) -> Layer:
        """Asked at most once in REAPER_S: its heartbeat is minutes apart."""
        if self._guarded is None or time.monotonic() - self._guarded[0] > REAPER_S:
            try:
                layer = self._ask(lambda cloud: self.guard(cloud, self.now()))
            except Unconfirmed as error:
                layer = Layer("reaper", False, error.message)
            self._guarded = time.monotonic(), layer
        return self._guarded[1]

    # -- find, reach ---------------------------------------------------------------------------------------------------

    def find(self) -> tuple[Found, ...]:
        """Everything with our labels in the project, whoever began it."""
        found = self._ask(lambda cloud: cloud.ours())
        if found.unreachable:
            _PROGRESS.error("no answer from %s: what runs there is not listed", ", ".join(found.unreachable))
        sessions: dict[str, Found] = {}
        for machine in sorted(found.machines, key=lambda m: m.began):
            sessions.setdefault(machine.session, Found(machine.session, dict(machine.labels), machine.began))
        return tuple(sessions.values())

    def desk(self, session_id: str) -> Remote | None:
        """The machine, by SkyPilot's entry."""
        return self.desk_of(session_id)

    def ssh_config(self, session_id: str, names: tuple[str, ...]) -> str:
        """SkyPilot's entry under our names."""
        return sky_ssh_config(session_id, names)

    # -- move, end -----------------------------------------------------------------------------------------------------

    def prolong(self, session_id: str, deadline: datetime, labels: Mapping[str, str]) -> None:
        """The label first, which the reaper reads, then the machine's own timer; never back."""
        there = self.desk_of(session_id)
        machines = [m for m in self._ask(lambda cloud: cloud.ours(session_id)).machines if m.status == "RUNNING"]
        if not machines or there is None:
            raise UsageMistake(f"session {session_id} has no machine to extend", "kimisession status")
        for machine in machines:
            if machine.deadline is None or machine.deadline < deadline:
                self._label(machine, labels)
        arm = f"{FOLDER}/{session_id}/scripts/deadline/arm.sh"
        moment = int(deadline.timestamp()) + GRACE_S
        told = there.run(f"[ ! -e {arm} ] || sudo {arm} --deadline {moment} 2>&1 || echo REFUSED", within_s=60.0)
        if told.rstrip().endswith("REFUSED"):
            # The label has moved and that layer acts later; the machine's own timer still acts at the old moment.
            last = ([line for line in told.splitlines() if line.strip()] or [""])[-2:][0]
            raise UsageMistake(f"the machine's own timer was not moved: {last}", "the old deadline holds")

    def _label(self, machine: Machine, labels: Mapping[str, str]) -> None:
        self._ask(lambda cloud: cloud.set_labels(machine, labels))

    def end(self, session_id: str, force: bool) -> None:
        """Everything of it that Compute Engine has, by label and by name, in all zones. What SkyPilot remembers of it is
        cleaned up once it is gone: its `down` succeeds where it finds no record (0.14.1), and looks in one zone only."""
        found = self._ask(lambda cloud: cloud.everything()).of(session_id)
        with_machine = {name for machine in found.machines for name, delete in machine.disks if delete}
        for thing in found.everything:
            if isinstance(thing, Disk | Address) and (thing.users or thing.name in with_machine):
                continue  # goes with its machine; looked at again once that is gone
            key = f"{thing.zone}/{thing.name}"
            if time.monotonic() - self._asked.get(key, -AGAIN_S) < AGAIN_S and not force:
                continue
            self._delete(thing)
            self._asked[key] = time.monotonic()

    def tidy(self, session_id: str) -> None:
        """Nothing that lies there is free, so `end` has deleted it."""

    def _delete(self, thing: Machine | Disk | Address) -> None:
        self._ask(lambda cloud: cloud.delete(thing))

    # -- the cloud -----------------------------------------------------------------------------------------------------

    def _ask(self, question: Callable[[Cloud], T]) -> T:
        """An answer of Compute Engine. Whatever keeps it from answering, nothing is proven by it: Unconfirmed."""
        try:
            self._cloud = self._cloud or self.compute()
            return question(self._cloud)
        except Unconfirmed:
            raise
        except KimiError as error:
            raise Unconfirmed(error.message, error.hint) from error

    def _file(self, session_id: str) -> Path:
        return self.home / session_id / "gcp.json"

    def _known(self, session_id: str) -> dict[str, Any]:
        return {**(read_json(self._file(session_id)) or {}), **self._unsaved.get(session_id, {})}

    def _remember(self, session_id: str, **changes: Any) -> None:
        """Keep what saves a question later. What a full disk does not take is kept in memory: a proof still takes its
        minute, and a list of before is still forgotten."""
        path, known = self._file(session_id), self._known(session_id)
        if session_id not in self._unsaved and all(known.get(key) == value for key, value in changes.items()):
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(path, {**known, **changes})
            self._unsaved.pop(session_id, None)
        except OSError:
            self._unsaved[session_id] = {**known, **changes}


def _address_of(machine: Machine) -> Address:
    """The address that a machine has for as long as it runs."""
    return Address(
        machine.name,
        machine.zone,
        machine.began,
        address=machine.external_ip,
        users=(machine.name,),
        spot=machine.spot,
    )


def timer_layer(told: str, found: Inventory) -> Layer:
    """The machine's own timer, as systemd on the machine has it. It must end it no later than the label says, and its grace."""
    name = "timer in the machine"
    active, _, unit = told.strip().partition("\n")
    moment = re.search(r"--deadline-utc (\d+)", unit)
    if active != "active" or moment is None:
        return Layer(name, False, f"systemd says {active}" if active else "not read back from the machine yet")
    ends = datetime.fromtimestamp(int(moment[1]), UTC)
    labels = [m.deadline for m in found.machines if m.deadline]
    late = bool(labels) and ends - timedelta(seconds=2 * GRACE_S) > max(labels)
    words = f"systemd: active, deletes it after {ends:%Y-%m-%d %H:%M:%S} UTC, or without a keeper"
    return Layer(name, not late, f"{words}; that is later than its label" if late else words)


def _accounts(machines: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """As whom these machines act."""
    return frozenset(account for machine in machines.values() if (account := str(machine.get("account", ""))))


def _lines(operations: tuple[Operation, ...], own: frozenset[str]) -> Iterator[Mapping[str, Any]]:
    """What Compute Engine knows of the session's story, as journal lines: attempts that failed, a sudden end, an end that the
    machine told with its deletion, and who deleted a machine that told nothing. `own`: accounts of the session's machines."""
    for op in operations:
        if op.kind in MAKES and op.errors:
            code, message = op.errors[0]
            yield {
                "at": (op.ended or op.began).isoformat(),
                "kind": "attempt",
                "by": "Compute Engine",
                "place": op.zone,
                "why": f"{code} {message}".strip()[:200],
            }
    for target in dict.fromkeys(op.target for op in operations if op.target):
        end, told = what_ended(target, operations), code_told(target, operations)
        line: dict[str, Any] = {"kind": "ended", "by": "Compute Engine", "exit_code": -1}
        if end is not None and end[0] in _SUDDEN:
            yield {**line, "at": end[1].began.isoformat(), "reason": _SUDDEN[end[0]], "evidence": _evidence(*end)}
        elif told is not None and told[0] in _TOLD:
            words = f"its machine asked for its deletion with exit code {told[0]}; {_evidence('deleted', told[1])}"
            yield {
                **line,
                "at": told[1].began.isoformat(),
                "reason": _TOLD[told[0]],
                "evidence": words,
                "exit_code": told[0],
            }
        elif end is not None and end[0] == "deleted":
            code = f" with exit code {told[0]}" if told else ""
            yield {
                "at": end[1].began.isoformat(),
                "kind": "deleted",
                "by": "Compute Engine",
                "itself": told is not None or end[1].user in own,
                "evidence": f"{_evidence(*end)}{code}",
            }


def _evidence(words: str, op: Operation) -> str:
    at = op.ended or op.began
    by = f" by {op.user}" if op.user and op.user != "system" else ""
    return f"Compute Engine: {words}{by} at {at:%H:%M:%S} UTC, operation {op.name} in {op.zone}"


def _last(target: str, kind: str, operations: tuple[Operation, ...]) -> Operation | None:
    return next((op for op in reversed(operations) if (op.target, op.kind) == (target, kind) and not op.errors), None)
