"""An engine with nothing behind it but a clock: what a provider may do to a session, without a provider.

`MemoryCloud` is the provider: what exists, and how it misbehaves. `MemoryEngine` is the engine, which keeps nothing of its
own, so that any number of them, made and lost at any time, see the same cloud. It passes the contract that every engine
passes (tests/contract) and is what the controller is tried with where no process may be started.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from kimisession.core.launch import (
    LABEL_DEADLINE,
    LABEL_SESSION,
    LaunchSpec,
    deadline_label,
    flags_to_argv,
    parse_deadline_label,
)
from kimisession.core.lifecycle import Layer, Observation, SeenResource
from kimisession.core.profile import FlagValue
from kimisession.engines.base import Found
from kimisession.errors import EngineFailed, NoCapacity, NotYetGone, Unconfirmed, UsageMistake

#: From launch, or from a restart, to ready.
READY_AFTER = timedelta(seconds=60)


@dataclass
class Faults:
    """How the provider misbehaves. Counts go down as they happen; switches hold until they are turned off."""

    no_capacity: int = 0  # launches that find no machine
    fails_after_creating: int = 0  # launches that create the machine and then fail
    lost_replies: int = 0  # calls that change something, and whose reply is lost
    delete_calls: int = 0  # further calls that each `down` needs before the machine goes
    lies_about_deletion: bool = False  # "it is gone", while it runs on unseen until the lie ends
    unreachable: bool = False  # no question is answered
    refuses_extend: bool = False  # like a Slurm site that lets only operators lengthen a job


@dataclass
class MemoryMachine:
    """A machine in the cloud. `ended` is the truth, whatever the provider says."""

    labels: dict[str, str]
    began: datetime
    idle_s: float
    hard_cap: datetime
    ended: datetime | None = None
    evidence: str = ""
    end: tuple[str, str, int] | None = None  # what the keeper said: reason, evidence, exit code
    extended: list[tuple[datetime, datetime]] = field(default_factory=list)
    restarts: list[tuple[datetime, str]] = field(default_factory=list)
    used_at: datetime | None = None
    guarded: bool = True  # whether its own layers live
    hidden: bool = False  # the provider says that it is gone
    deletes: int = 0


class MemoryCloud:
    """The provider. `now` is the clock of everything in it."""

    def __init__(self, now: Callable[[], datetime], faults: Faults | None = None) -> None:
        self.now = now
        self.faults = faults or Faults()
        self.machines: dict[str, MemoryMachine] = {}
        self.refused: set[str] = set()  # stopped before they existed: never to be made

    def settle(self) -> None:
        """Let happen what the machines' own layers have done by now: the keeper ends it when it is idle or at its cap,
        and what guards the label's deadline ends it whatever the keeper does."""
        for machine in self.machines.values():
            if machine.ended is None and machine.guarded:
                at, reason = self._next_end(machine)
                if at <= self.now():
                    machine.end = (reason, f"{reason}, by the layers of the machine", 10)
                    machine.ended, machine.evidence = at, f"ended by itself: {reason}"

    def _next_end(self, machine: MemoryMachine) -> tuple[datetime, str]:
        ready = [machine.began, *(at for at, _ in machine.restarts)][-1] + READY_AFTER
        idle = max(ready, machine.used_at or ready) + timedelta(seconds=machine.idle_s)
        label = parse_deadline_label(machine.labels[LABEL_DEADLINE])
        return min((idle, "idle"), (machine.hard_cap, "hard-cap"), (max(machine.began, label), "past-deadline"))

    def exists(self) -> list[str]:
        """The truth: what runs and is billed now."""
        self.settle()
        return [name for name, machine in self.machines.items() if machine.ended is None]

    def use(self, session_id: str) -> None:
        """A request came."""
        self.settle()
        machine = self.machines.get(session_id)
        if machine is not None and machine.ended is None:
            machine.used_at = self.now()

    def kill_layers(self, session_id: str) -> None:
        """Everything that would end this machine by itself dies."""
        self.settle()
        if session_id in self.machines:
            self.machines[session_id].guarded = False

    def heal(self) -> None:
        """The provider behaves again; what it hid is seen again."""
        self.faults = Faults()
        for machine in self.machines.values():
            machine.hidden = False


class MemoryEngine:
    """See the module's text."""

    name = "memory"
    confirm_within_s = 120.0

    def __init__(self, cloud: MemoryCloud) -> None:
        self.cloud = cloud

    def check(self, spec: LaunchSpec) -> None:
        """Everything fits."""

    def launch(self, spec: LaunchSpec, secrets: Mapping[str, str]) -> None:
        """Make the machine, or find it made. One that was stopped is not made again."""
        self._reach("launch")
        cloud, faults = self.cloud, self.cloud.faults
        if spec.session_id in cloud.machines or spec.session_id in cloud.refused:
            return
        if faults.no_capacity:
            faults.no_capacity -= 1
            raise NoCapacity(f"no {spec.accelerators} in zones a, b", "try later", tried=("zone-a", "zone-b"))
        cloud.machines[spec.session_id] = MemoryMachine(
            labels=dict(spec.labels),
            began=cloud.now(),
            idle_s=spec.limits.idle_s,
            hard_cap=min(spec.deadline, cloud.now() + timedelta(seconds=spec.limits.duration_s)),
        )
        if faults.fails_after_creating:
            faults.fails_after_creating -= 1
            raise EngineFailed("the machine came up and its setup failed", "kimisession logs")
        self._reply("launch")

    def observe(self, session_id: str) -> Observation:
        """What the provider says."""
        now = self.cloud.now()
        self.cloud.settle()
        if self.cloud.faults.unreachable:
            return Observation(now, None, "the provider does not answer")
        machine = self.cloud.machines.get(session_id)
        if machine is None:
            return Observation(now, False, "no such machine")
        there = machine.ended is None and not machine.hidden
        ended = machine.ended or (now if machine.hidden else None)
        evidence = machine.evidence or ("the provider says deleted" if machine.hidden else "")
        resource = SeenResource(f"memory/{session_id}", "machine", machine.began, ended, evidence)
        word = "lives" if machine.guarded else "died"
        layers = tuple(Layer(name, there and machine.guarded, word) for name in ("keeper", "deadline"))
        journal = tuple(self._journal(machine))
        return Observation(now, there, evidence, (resource,), journal, layers, there and not machine.guarded)

    def _journal(self, machine: MemoryMachine) -> Iterator[Mapping[str, Any]]:
        """What its keeper has written by now."""
        until = machine.ended or self.cloud.now()
        starts = [(machine.began, ""), *machine.restarts]
        for run, (began, flags) in enumerate(starts, 1):
            phase = "load" if run == 1 else f"load.{run}"
            over = starts[run][0] if run < len(starts) else None  # the next start ended this one
            if run > 1:
                yield {"at": began.isoformat(), "kind": "restarted", "run": run, "flags": flags}
            yield {"at": began.isoformat(), "kind": "phase", "phase": phase, "state": "began"}
            ready = began + READY_AFTER
            if ready <= until and (over is None or ready <= over):
                yield {"at": ready.isoformat(), "kind": "phase", "phase": phase, "state": "ended"}
                yield {"at": ready.isoformat(), "kind": "ready", "run": run}
        for at, deadline in machine.extended:
            yield {"at": at.isoformat(), "kind": "extended", "hard_cap_utc": deadline.timestamp()}
        if machine.end and machine.ended:
            reason, evidence, code = machine.end
            yield {
                "at": machine.ended.isoformat(),
                "kind": "ended",
                "reason": reason,
                "evidence": evidence,
                "exit_code": code,
            }

    def find(self) -> tuple[Found, ...]:
        """What carries our labels."""
        self._reach("list")
        return tuple(
            Found(machine.labels[LABEL_SESSION], dict(machine.labels), machine.began)
            for machine in self.cloud.machines.values()
            if machine.ended is None and not machine.hidden
        )

    def logs(self, session_id: str, follow: bool, run: int | None = None) -> Iterator[str]:
        """A line a journal line. Kept after the end; `follow` adds nothing, for nothing happens while one waits."""
        machine = self.cloud.machines.get(session_id)
        self.cloud.settle()
        for line in self._journal(machine) if machine else ():
            yield f"{session_id} {line['at']} {line['kind']}"

    def base_url(self, session_id: str, port: int) -> str:
        """Nobody listens there."""
        return f"http://127.0.0.1:{port}"

    def extend(self, session_id: str, deadline: datetime, added_s: float) -> None:
        """The label first, then the keeper."""
        self._reach("extend")
        machine = self.cloud.machines.get(session_id)
        if machine is None or machine.ended is not None or machine.hidden:
            raise UsageMistake(f"session {session_id} has no machine to extend", "kimisession status")
        if self.cloud.faults.refuses_extend:
            raise UsageMistake("the provider does not lengthen it", "start another session")
        if deadline <= machine.hard_cap:
            return
        machine.labels[LABEL_DEADLINE] = deadline_label(deadline)
        machine.hard_cap = deadline
        machine.extended.append((self.cloud.now(), deadline))
        self._reply("extend")

    def restart(self, session_id: str, sets: Mapping[str, FlagValue] | None) -> None:
        """Start again, which always comes up."""
        self._reach("restart")
        machine = self.cloud.machines[session_id]
        if sets is None and not machine.restarts:
            raise UsageMistake("this engine was not restarted: there are no flags of before", "restart it with --set")
        flags = "as before" if sets is None else " ".join(flags_to_argv(sets))
        machine.restarts.append((self.cloud.now(), flags))

    def down(self, session_id: str, by: str, reason: str) -> None:
        """Delete, as often as the provider wants to be asked."""
        self._reach("delete")
        faults, machine = self.cloud.faults, self.cloud.machines.get(session_id)
        if machine is None:
            self.cloud.refused.add(session_id)
            return
        if machine.ended is not None or machine.hidden:
            return
        if machine.deletes < faults.delete_calls:
            machine.deletes += 1
            raise NotYetGone("it is being deleted")
        if faults.lies_about_deletion:
            machine.hidden = True
            return
        machine.ended = self.cloud.now()
        machine.end, machine.evidence = (reason, f"stop asked by {by}", 0), f"deleted for {by}"
        self._reply("delete")

    def _reach(self, what: str) -> None:
        self.cloud.settle()
        if self.cloud.faults.unreachable:
            raise Unconfirmed(f"the provider does not answer ({what})", "try again when it does")

    def _reply(self, what: str) -> None:
        if self.cloud.faults.lost_replies:
            self.cloud.faults.lost_replies -= 1
            raise Unconfirmed(f"the reply was lost ({what})", "try again")
