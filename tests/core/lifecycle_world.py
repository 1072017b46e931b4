"""Sessions on a pretended cloud with every layer that ends them, each the real decision of its real file, and no I/O.

| who | decides by | where it lives |
|---|---|---|
| keeper | node/policy.decide | on the machine; its clock is the uptime |
| wrapper | a keeper that hangs for a minute is killed | on the machine |
| autodown | once no job runs | on the machine; a reboot disarms it |
| timer | node/deadline.due | on the machine; survives a reboot |
| reaper | core/audit.audit | elsewhere in the project, by labels alone |
| whoever looks | core/lifecycle.news and must_tear_down, engines/gcp.GcpPlace | a laptop, now and then |

A `Mutation` takes one rule, layer or confirmation out. `Leak` says which promise was broken. Time goes in minutes.
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from good_values import NOON, requested
from memory_compute import MemoryCompute

from kimisession.core import lifecycle
from kimisession.core.audit import APART, FRESH, GRACE, audit
from kimisession.core.inventory import Inventory, Machine, Operation
from kimisession.core.launch import LABEL_DEADLINE, deadline_label, session_labels
from kimisession.core.ledger import (
    Event,
    Extended,
    LaunchFailed,
    LaunchRequested,
    Session,
    TeardownRequested,
    Unconfirmed,
    apply,
)
from kimisession.core.lifecycle import Layer, Observation
from kimisession.engines.gcp import GcpPlace
from kimisession.errors import Unconfirmed as UnconfirmedError
from kimisession.node import deadline, policy

MINUTE = timedelta(minutes=1)
IDLE_S, CAP_S, READY_S, WITHOUT_KEEPER_S, GRACE_S = 600.0, 1800.0, 120.0, 900.0, 300.0

#: How much later than its moment an end may come: ticks of a minute, the reaper's three, and a fault that lasts five.
LATE = timedelta(minutes=15)

#: ... of what acts on the machine itself.
SLACK_S = 480.0


class Leak(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Mutation:
    """What is taken out. The names are the table of lifecycle_mutations.py."""

    name: str = "nothing"
    no_rule: str = ""  # of the policy
    no_layer: str = ""  # autodown, timer, reaper, wrapper
    no_due: str = ""  # of the timer: deadline, uptime, keeper
    no_verdict: str = ""  # of the reaper: stopped
    no_proof: str = ""  # apart, pending, silent, stopped
    no_teardown: str = ""  # of whoever looks: unguarded, past-deadline, asked
    never_loud: bool = False
    unchecked: bool = False  # start does not ask for a reaper
    label_stays: bool = False  # extend moves the keeper's cap and not the label


@dataclass
class Vm:
    """What runs on one machine. Uptime and moments on it are seconds since its boot."""

    name: str
    session: str
    uptime: float = 0.0
    keeper: str = "alive"  # alive; hung; stuck: it beats and ends nothing; dead; none: SkyPilot never got to it
    began: float = 0.0  # the keeper's start
    hung_at: float = 0.0
    job_ended: float | None = None
    used: float = 0.0
    was_used: bool = False
    seen_keeper: float = 0.0
    autodown: bool = True
    timer: bool = True
    rebooted: bool = False
    timer_killed: bool = False
    cap: float = CAP_S
    clock_off: float = 0.0  # of its wall clock, in seconds
    timer_utc: float = 0.0
    timer_uptime: float = 0.0


class World:
    """See the module's text."""

    def __init__(self, mutation: Mutation | None = None) -> None:
        self.mutation = mutation or Mutation()
        self.now = NOON
        self.cloud = MemoryCompute(lambda: self.now)
        self.cloud.stopping_s = 0.0
        # In memory where that can be: a disk that is waited for at every look is not what is tried here.
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.TemporaryDirectory(prefix="kimisession-test-", dir=shm)
        self.ledger: dict[str, Session] = {}
        self.vms: dict[str, Vm] = {}
        self.on_its_way: list[str] = []  # inserts whose command is dead and which the cloud has not got yet
        self.pending: list[tuple[datetime, Operation, str]] = []  # ... has got, and when their machine comes
        self.reaper = True
        self.place = GcpPlace(
            Path(self.folder.name),
            lambda: _Answers(self.cloud, self.mutation.no_proof),
            guard=lambda cloud, now: Layer("reaper", self.reaper, ""),
            desk=lambda session_id: None,
            now=lambda: self.now,
            apart=timedelta(0) if self.mutation.no_proof == "apart" else APART,
        )

    def close(self) -> None:
        """Let go of the folder."""
        self.folder.cleanup()

    # -- users ---------------------------------------------------------------------------------------------------------

    def start(self, lost: bool) -> None:
        """`start`; `lost`: the reply to the insert is lost and the command with it, and the machine comes minutes later."""
        if any(session.live for session in self.ledger.values()):
            return
        if not self.reaper and not self.mutation.unchecked:
            return  # GcpPlace.check refuses
        number = len(self.ledger)
        session_id = f"demo-{number:08x}"
        until = self.now + timedelta(seconds=CAP_S)
        request = requested(self.now, infra="gcp", deadline=until, latest=self.now + timedelta(hours=2))
        self._learn(session_id, [request, LaunchRequested(self.now)])
        if lost:
            self.on_its_way.append(session_id)
            self._learn(session_id, [LaunchFailed(self.now, "the reply was lost")])
            self._learn(session_id, [TeardownRequested(self.now, "launch-failed", "command")])
            return
        self._boot(session_id, until)

    def _boot(self, session_id: str, until: datetime) -> Vm:
        labels = session_labels(session_id, "demo", "me", until)
        machine = self.cloud.insert(session_id, labels)
        vm = Vm(machine.name, session_id)
        left = (until - self.now).total_seconds()
        vm.cap, vm.timer_utc, vm.timer_uptime = left, until.timestamp() + 120, left + 120
        vm.timer = self.mutation.no_layer != "timer"
        vm.autodown = self.mutation.no_layer != "autodown"
        self.vms[machine.name] = vm
        return vm

    def stop(self) -> None:
        """`stop`, whose command dies after its first call: whoever looks has to finish it."""
        for session in self._live():
            if session.teardown is None:
                self._learn(session.id, [TeardownRequested(self.now, "user", "me")])

    def extend(self) -> None:
        """`extend 10m`: label, timer, keeper."""
        for vm in self._running():
            session = self.ledger[vm.session]
            if session.deadline is None or session.teardown or vm.keeper != "alive" or self._down():
                continue
            moved = session.deadline + 10 * MINUTE
            if session.request is None or moved > session.request.latest:
                continue
            if not self.mutation.label_stays:
                self.cloud.set_labels(self.cloud.machines[vm.name], {LABEL_DEADLINE: deadline_label(moved)})
            vm.timer_utc, vm.timer_uptime, vm.cap = vm.timer_utc + 600, vm.timer_uptime + 600, vm.cap + 600
            self._learn(session.id, [Extended(self.now, moved, "me")])

    def use(self) -> None:
        """A request."""
        for vm in self._running():
            if vm.keeper == "alive" and vm.uptime - vm.began > READY_S:
                vm.used, vm.was_used = vm.uptime, True

    def busy(self) -> None:
        """A request every five minutes."""
        for _ in range(6):
            self.use()
            self.wait(5)

    def minutes_left(self) -> int:
        """Until a minute before the next deadline."""
        left = [self._deadline(vm.session) - self.now for vm in self._running()]
        return max(0, (min(left) - MINUTE) // MINUTE) if left else 0

    # -- faults --------------------------------------------------------------------------------------------------------

    def kill_keeper(self, hang: bool) -> None:
        """kill -9, or it hangs."""
        for vm in self._running():
            if vm.keeper == "alive":
                vm.keeper, vm.hung_at = ("hung" if hang else "dead"), vm.uptime
                vm.job_ended = None if hang else vm.uptime

    def stick(self) -> None:
        """A keeper that beats, and that never ends anything: to wrapper, timer and whoever looks it lives."""
        for vm in self._running():
            if vm.keeper == "alive":
                vm.keeper = "stuck"

    def reboot(self) -> None:
        """Keeper and autodown do not come back; the timer's unit does."""
        for vm in self._running():
            vm.keeper, vm.job_ended, vm.autodown, vm.rebooted = "dead", None, False, True
            vm.uptime = vm.seen_keeper = 0.0

    def step_clock(self, seconds: float) -> None:
        """The machines' wall clocks step."""
        for vm in self._running():
            vm.clock_off += seconds

    def power_off(self) -> None:
        """From inside: the machine stays, stopped, with a billed disk. Only the reaper, or who looks, can end that."""
        if self.reaper:
            for vm in self._running():
                self.cloud.stop(vm.name)

    def kill_timer(self) -> None:
        """Root on the machine, or a full disk at the wrong moment. Never with the reaper dead: nobody survives both."""
        if self.reaper:
            for vm in self._running():
                vm.timer, vm.timer_killed = False, True

    def kill_reaper(self) -> None:
        """... and the other way round."""
        alone = [m for m in self.cloud.machines.values() if m.stopped or self.vms[m.name].timer_killed]
        if not (self.on_its_way or self.pending or alone):
            self.reaper = False

    def cloud_fails(self, how: str) -> None:
        """For five minutes nothing answers, deletes are refused, deletes lie, or a zone is silent; then ten without."""
        if self.now < self.ill_until + 10 * MINUTE:
            return
        if how == "unreachable":
            self.cloud.unreachable = True
        elif how == "deletes fail":
            self.cloud.deletes_fail = 10**6
        elif how == "deletes lie":
            self.cloud.lies = True
        else:
            self.cloud.silent = ("us-central1-a",)
        self.ill_until = self.now + 5 * MINUTE

    ill_until = NOON - timedelta(hours=1)

    def heal(self) -> None:
        """The cloud behaves."""
        self.cloud.unreachable, self.cloud.deletes_fail, self.cloud.lies, self.cloud.silent = False, 0, False, ()

    def _down(self) -> bool:
        return self.cloud.unreachable or bool(self.cloud.silent)

    # -- time ----------------------------------------------------------------------------------------------------------

    def wait(self, minutes: int) -> None:
        """Everybody does what they do; the promises are checked every minute."""
        for _ in range(minutes):
            self.now += MINUTE
            if self.now >= self.ill_until:
                self.heal()
            for at, operation, session_id in list(self.pending):
                if at <= self.now:
                    self.pending.remove((at, operation, session_id))
                    self.cloud.finish(operation)
                    vm = self._boot(session_id, self._deadline(session_id))
                    vm.keeper, vm.timer, vm.autodown, vm.timer_killed, vm.rebooted = "none", False, False, True, True
            for session_id in self.on_its_way:
                operation = self.cloud.did("bulkInsert", "", status="RUNNING", group=session_id)
                self.pending.append((self.now + 4 * MINUTE, operation, session_id))
            self.on_its_way = []
            for vm in self._running():
                self._on_machine(vm)
            if (self.now - NOON) // MINUTE % 3 == 0:
                self._reap()
            self.check()

    def _on_machine(self, vm: Vm) -> None:
        vm.uptime += 60
        if vm.keeper == "alive":
            vm.seen_keeper = vm.uptime
            if self._keeper_says(vm) is policy.Action.END:
                vm.keeper, vm.job_ended = "dead", vm.uptime
        elif vm.keeper in ("hung", "stuck"):
            vm.seen_keeper = vm.uptime
            if vm.keeper == "hung" and vm.uptime - vm.hung_at >= 60 and self.mutation.no_layer != "wrapper":
                vm.keeper, vm.job_ended = "dead", vm.uptime
        gone = vm.autodown and vm.job_ended is not None and vm.uptime - vm.job_ended >= 60
        if gone or (vm.timer and self._timer_says(vm)):
            self._delete(vm.name)

    def _keeper_says(self, vm: Vm) -> policy.Action:
        ready = vm.uptime - vm.began > READY_S
        seen = policy.Seen(
            started_at=vm.began,
            progressed_at=vm.uptime,
            ready_at=READY_S if ready else None,
            activity=policy.Activity.QUIET if ready else policy.Activity.UNKNOWN,
            used=vm.was_used,
            active_at=vm.used if vm.was_used else READY_S,
            known_at=vm.uptime,
        )
        limits = policy.Limits(IDLE_S, IDLE_S, vm.cap, None, 1200, 600, 300, 300, 0)
        rules = [(reason, rule) for reason, rule in policy.RULES if rule.__name__ != self.mutation.no_rule]
        dues = [due for _, rule in rules if (due := rule(seen, limits, vm.uptime)) and due.at <= vm.uptime]
        return policy.Action.END if dues else policy.Action.KEEP

    def _timer_says(self, vm: Vm) -> str:
        far = 1e12
        args = Namespace(
            deadline_utc=far if self.mutation.no_due == "deadline" else vm.timer_utc,
            longest_uptime_s=far if self.mutation.no_due == "uptime" else vm.timer_uptime,
            without_keeper_s=far if self.mutation.no_due == "keeper" else WITHOUT_KEEPER_S,
            grace_s=180.0,
        )
        return deadline.due(args, self.now.timestamp() + vm.clock_off, vm.uptime, vm.seen_keeper)

    def _reap(self) -> None:
        if not self.reaper or self.mutation.no_layer == "reaper" or self._down():
            return
        for finding in audit(self.cloud.everything(), self.now):
            if finding.due and not (self.mutation.no_verdict == "stopped" and "stopped" in finding.verdict):
                self._delete(finding.resource.name)

    def _delete(self, name: str) -> None:
        thing = self.cloud.machines.get(name) or self.cloud.disks.get(name)
        if thing is not None:
            try:
                self.cloud.delete(thing)
            except UnconfirmedError:
                return

    # -- whoever looks -------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """`status` on a laptop: what is new, what has to be torn down, what has to be said aloud."""
        ids = [session.id for session in self._live()]
        if not self._down():
            ids += [one.session_id for one in self.place.find() if one.session_id not in ids]
        for session_id in ids:
            seen = self._seen(session_id)
            session = self._learn(session_id, self._news(self.ledger[session_id], seen))
            why = lifecycle.must_tear_down(session, seen)
            kind = "asked" if session.teardown else why
            well = self.now >= self.ill_until
            if why and kind != self.mutation.no_teardown:
                if session.teardown is None:
                    self._learn(session_id, [TeardownRequested(self.now, why, "kimisession")])
                try:
                    self.place.end(session_id, force=True)
                except UnconfirmedError as error:
                    self._learn(session_id, [Unconfirmed(self.now, error.message)])
            left = [m.name for m in self.cloud.machines.values() if m.session == session_id]
            _holds(not (why and left and well), f"{left} had to be ended ({why}), somebody looked, and it is there")
            self._check_after(session_id, seen)
        self.check()

    def _seen(self, session_id: str) -> Observation:
        try:
            sight = self.place.look(session_id)
        except UnconfirmedError as error:
            return Observation(self.now, None, error.message)
        alive = any(vm.keeper in ("alive", "stuck") for vm in self._running() if vm.session == session_id)
        young = sight.since is not None and self.now - sight.since < timedelta(seconds=WITHOUT_KEEPER_S)
        unguarded = bool(sight.present) and (sight.stopped or not (alive or young))
        return Observation(self.now, sight.present, sight.why, sight.resources, sight.lines, (), unguarded)

    def _news(self, session: Session, seen: Observation) -> list[Event]:
        events = lifecycle.news(session, seen)
        return [e for e in events if not (self.mutation.never_loud and isinstance(e, Unconfirmed))]

    def _learn(self, session_id: str, events: list[Event]) -> Session:
        session = self.ledger.get(session_id) or Session(session_id)
        for event in events:
            session = apply(session, event)
        self.ledger[session_id] = session
        return session

    # -- promises ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What holds at every moment."""
        for machine in self.cloud.machines.values():
            self._covered(machine)
        for session in self.ledger.values():
            there = [m.name for m in self.cloud.machines.values() if m.name.startswith(session.id)]
            coming = [sid for _, _, sid in self.pending if sid == session.id]
            coming += [sid for sid in self.on_its_way if sid == session.id]
            if not session.live:
                _holds(not there and not coming, f"{session.id} was called gone, and {there or 'a request'} is there")

    def _covered(self, machine: Machine) -> None:
        ill = max(timedelta(0), self.ill_until - self.now)
        late, agreed = LATE + ill, self._deadline(machine.session)
        assert machine.deadline is not None
        _holds(self.now <= agreed + GRACE + late, f"{machine.name} is past what was agreed")
        _holds(machine.deadline >= agreed - timedelta(seconds=1), "the label would end it before what was agreed")
        if machine.stopped:
            stopped = machine.ended or machine.began
            _holds(
                not self.reaper or self.now <= stopped + FRESH + late, f"{machine.name} is stopped, its disk is billed"
            )
            return
        self._ends_by_itself(self.vms[machine.name], SLACK_S + ill.total_seconds(), agreed)

    def _ends_by_itself(self, vm: Vm, slack_s: float, agreed: datetime) -> None:
        """Each reason acts within its bound, as long as who has to act was not killed."""
        if vm.keeper == "alive":
            last = max(vm.used, READY_S)
            _holds(vm.uptime <= last + IDLE_S + 120, f"{vm.name} is idle and goes on")
            _holds(vm.uptime <= vm.cap + 120, f"{vm.name} is past its hard cap and goes on")
        if vm.keeper == "hung":
            _holds(vm.uptime <= vm.hung_at + slack_s, f"the keeper of {vm.name} hangs and nobody minds")
        if vm.job_ended is not None and not vm.rebooted:
            _holds(vm.uptime <= vm.job_ended + slack_s, f"the job of {vm.name} has ended and the machine goes on")
        if vm.timer_killed:
            return
        alone_s = vm.uptime - vm.seen_keeper
        _holds(alone_s <= WITHOUT_KEEPER_S + slack_s, f"{vm.name} has no keeper and goes on")
        # Either of its two clocks is enough, and a reboot takes one of them away.
        if (vm.clock_off >= 0 or not vm.rebooted) and self.now >= self.ill_until + 10 * MINUTE:
            _holds(self.now <= agreed + timedelta(seconds=GRACE_S) + 2 * MINUTE, f"the timer of {vm.name} is late")

    def _check_after(self, session_id: str, seen: Observation) -> None:
        session = self.ledger[session_id]
        if not session.live or seen.present is not None:
            return
        ends = [m for m in (session.teardown and session.teardown.at, session.deadline) if m]
        overdue = self.now - min(ends) > lifecycle.PROOF_WITHIN if ends else False
        _holds(not overdue or bool(session.unconfirmed), f"{session_id} is not proven gone, and nobody says so")

    def settle(self) -> None:
        """However it went: the cloud answers again, somebody looks now and then, and nothing is left."""
        self.ill_until = self.now
        self.heal()
        for _ in range(50):  # the longest that a session may be extended to, and the slowest layer
            self.wait(3)
            self.look()
            if not self._live():
                break
        _holds(not self.cloud.machines, f"{list(self.cloud.machines)} is left")
        _holds(not self._live(), f"{[s.id for s in self._live()]} is never proven gone")

    def _deadline(self, session_id: str) -> datetime:
        moment = self.ledger[session_id].deadline
        assert moment is not None
        return moment

    def _live(self) -> list[Session]:
        return [session for session in self.ledger.values() if session.live]

    def _running(self) -> Iterator[Vm]:
        for name, vm in list(self.vms.items()):
            if name in self.cloud.machines and not self.cloud.machines[name].stopped:
                yield vm


class _Answers:
    """Compute Engine's answers, with what a careless proof would overlook taken out of them."""

    def __init__(self, cloud: MemoryCompute, overlooked: str) -> None:
        self._cloud, self._overlooked = cloud, overlooked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cloud, name)

    def ours(self, session_id: str = "") -> Inventory:
        return self._without(self._cloud.ours(session_id))

    def everything(self) -> Inventory:
        return self._without(self._cloud.everything())

    def operations(self, session_id: str, since: datetime) -> tuple[Operation, ...]:
        silent, self._cloud.silent = self._cloud.silent, ()
        try:
            found = self._cloud.operations(session_id, since)
        finally:
            self._cloud.silent = silent
        if silent and self._overlooked != "silent":
            raise UnconfirmedError(f"could not list the operations of {', '.join(silent)}")
        return tuple(op for op in found if op.done) if self._overlooked == "pending" else found

    def _without(self, found: Inventory) -> Inventory:
        if self._overlooked == "silent":
            found = replace(found, unreachable=())
        if self._overlooked == "stopped":
            gone = {m.name for m in found.machines if m.stopped}
            machines = tuple(m for m in found.machines if m.name not in gone)
            found = replace(found, machines=machines, disks=tuple(d for d in found.disks if d.name not in gone))
        return found


def _holds(promise: bool, broken: str) -> None:
    if not promise:
        raise Leak(broken)


#: Everything that may happen, by name.
STEPS: Mapping[str, Callable[[World], None]] = {
    "start": lambda w: w.start(lost=False),
    "start whose reply is lost": lambda w: w.start(lost=True),
    "stop": lambda w: w.stop(),
    "extend": lambda w: w.extend(),
    "use": lambda w: w.use(),
    "busy for half an hour": lambda w: w.busy(),
    "until the deadline": lambda w: w.wait(w.minutes_left()),
    "look": lambda w: w.look(),
    "a minute": lambda w: w.wait(1),
    "five minutes": lambda w: w.wait(5),
    "an hour": lambda w: w.wait(60),
    "keeper killed": lambda w: w.kill_keeper(hang=False),
    "keeper hangs": lambda w: w.kill_keeper(hang=True),
    "keeper beats and ends nothing": lambda w: w.stick(),
    "reboot": lambda w: w.reboot(),
    "clock an hour back": lambda w: w.step_clock(-3600),
    "clock an hour on": lambda w: w.step_clock(3600),
    "power off": lambda w: w.power_off(),
    "timer killed": lambda w: w.kill_timer(),
    "reaper killed": lambda w: w.kill_reaper(),
    "cloud does not answer": lambda w: w.cloud_fails("unreachable"),
    "deletes fail": lambda w: w.cloud_fails("deletes fail"),
    "deletes lie": lambda w: w.cloud_fails("deletes lie"),
    "a zone is silent": lambda w: w.cloud_fails("silent"),
}
