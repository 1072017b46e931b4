"""Find what is left over in a project, delete it, and look again until it is gone. The same code for a person's
`kimisession sweep`, its timer, and the reaper."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from kimisession.cloud.base import Cloud
from kimisession.core.audit import Finding, PriceOf, Verdict, audit, kind_of, unpriced
from kimisession.core.clocks import quarrel
from kimisession.core.inventory import Disk, Inventory, Machine, Operation
from kimisession.errors import KimiError, Unconfirmed

#: So many deletions are asked for at a time; Compute Engine allows 20 requests a second and user in a region by default.
AT_ONCE = 8

#: How far back operations are looked at. Compute Engine keeps them for about two weeks.
KEPT = timedelta(days=14)

#: Between two looks; the first ones come sooner.
PAUSE_S = 5.0


@dataclass(frozen=True)
class Look:
    """One look at a project. `unreachable` zones did not answer: what is there is not known."""

    at: datetime
    project: str
    findings: tuple[Finding, ...]
    unreachable: tuple[str, ...] = ()

    @property
    def due(self) -> tuple[Finding, ...]:
        """What may be deleted."""
        return tuple(f for f in self.findings if f.due)

    @property
    def leaks(self) -> tuple[Finding, ...]:
        """What should not be there, whether or not it may be deleted here."""
        return tuple(f for f in self.findings if f.leak)


@dataclass(frozen=True)
class Failure:
    """A deletion that could not be asked for."""

    finding: Finding
    error: KimiError


@dataclass
class Sweeper:
    """Who looks, and what for. `owner`: whose live sessions are one's own; `only`: look at nobody else's things; `known`:
    ids of sessions that the asker's ledger knows; `spare`: names that are never deleted, such as the reaper's own."""

    cloud: Cloud
    owner: str = ""
    only: str = ""
    known: Iterable[str] = ()
    spare: Iterable[str] = ()
    price: PriceOf = unpriced
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    sleep: Callable[[float], None] = time.sleep

    def look(self) -> Look:
        """What there is now. Raises Unconfirmed by a clock that is not the cloud's: deadlines are judged by it."""
        here, found = self.now(), self.cloud.everything()
        if wrong := quarrel(here, found.at):
            raise Unconfirmed(f"{wrong}: no deadline is judged by it", "set this machine's clock, then the same again")
        findings = audit(found, self.now(), self.owner, self.known, self.price)
        if any(f.verdict is Verdict.UNLABELLED_OURS and isinstance(f.resource, Disk) for f in findings):
            findings = self._with_operations(found, findings)
        mine = (f for f in findings if f.resource.name not in self.spare and self._asked_for(f))
        return Look(found.at, found.project, tuple(mine), found.unreachable)

    def _with_operations(self, found: Inventory, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings once more, with what was done to machines as far back as Compute Engine remembers. Where it does not
        say, nothing more is ours, and the findings say why."""
        try:
            done: tuple[Operation, ...] = self.cloud.operations("", self.now() - KEPT)
        except KimiError as error:
            lost = f"; whose machine it was of could not be looked up: {error.message}"
            return tuple(replace(f, why=f.why + lost) if f.verdict is Verdict.UNLABELLED_OURS else f for f in findings)
        return audit(found, self.now(), self.owner, self.known, self.price, done=done)

    def _asked_for(self, finding: Finding) -> bool:
        return not self.only or finding.owner == self.only or (not finding.owner and self.only == self.owner)

    def delete(self, findings: Sequence[Finding]) -> tuple[Failure, ...]:
        """Ask for the deletion of all that is due among these, machines first; one that fails does not keep the others."""
        failed: list[Failure] = []
        due = [f for f in findings if f.due]
        for round_ in ([f for f in due if _is_machine(f)], [f for f in due if not _is_machine(f)]):
            with ThreadPoolExecutor(AT_ONCE) as crew:
                failed += [failure for failure in crew.map(self._delete, round_) if failure]
        return tuple(failed)

    def _delete(self, finding: Finding) -> Failure | None:
        try:
            self.cloud.delete(finding.resource)
        except KimiError as error:
            return Failure(finding, error)
        return None

    def delete_until_gone(
        self, patience_s: float, say: Callable[[str], None] = lambda _: None
    ) -> tuple[Look, tuple[Failure, ...]]:
        """Delete what is due, look, and again, until nothing is due or for `patience_s`. Each round starts from a new list:
        a deadline that was moved meanwhile counts. Returns the last look, and what failed last."""
        waited_s, failed = 0.0, tuple[Failure, ...]()
        asked: set[tuple[str, str, str]] = set()
        look = self.look()
        while look.due:
            # One that is on its way out is not asked again; one that stays, whatever its deletion said, is.
            round_ = [f for f in look.due if _thing(f) not in asked or not _is_stopping(f)]
            for thing in (_thing(finding) for finding in round_):
                if thing not in asked:
                    say("deleting {} {} in {}".format(*thing))
                    asked.add(thing)
            failed = self.delete(round_)
            if waited_s >= patience_s:
                break
            pause_s = min(PAUSE_S, 1.0 + waited_s)
            self.sleep(pause_s)
            waited_s += pause_s
            look = self.look()
        return look, failed if look.due else ()


def _thing(finding: Finding) -> tuple[str, str, str]:
    return kind_of(finding.resource), finding.resource.name, finding.resource.zone


def _is_stopping(finding: Finding) -> bool:
    return isinstance(finding.resource, Machine) and finding.resource.status == "STOPPING"


def _is_machine(finding: Finding) -> bool:
    return isinstance(finding.resource, Machine)
