"""What a session's end, the audit and the reaper need of a Google Cloud project, whoever answers it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from kimisession.core.inventory import Firewall, Inventory, Machine, Operation, Resource


@dataclass(frozen=True)
class Quota:
    """A limit of a region, or of the project ("global")."""

    region: str
    metric: str
    limit: float
    usage: float

    @property
    def free(self) -> float:
        """How much more may be had."""
        return max(0.0, self.limit - self.usage)


class Cloud(Protocol):
    """One project. Every method may raise NoCredentials, Denied or Unconfirmed (cloud/google_errors.py)."""

    @property
    def project(self) -> str:
        """The project's id."""

    def ours(self, session_id: str = "") -> Inventory:
        """The machines with our labels, of one session or of all; no disks, no addresses. Cheap: filtered by the server."""

    def labelled(self, key: str, value: str = "") -> Inventory:
        """The machines with this label, with any value if none is given. `ours` is this for a session's label."""

    def everything(self) -> Inventory:
        """Machines, disks and addresses of the whole project, each in one aggregated list per page of 500. With
        `.of(session_id)` also what has no label and is a session's by its name or its machine."""

    def operations(self, session_id: str, since: datetime) -> tuple[Operation, ...]:
        """What was done to machines of this session from `since` on, in all zones, oldest first: inserts, bulkInserts that
        may still make one, deletes, `compute.instances.preempted`, `compute.instances.guestTerminate`, stops. Of all
        sessions' and all others' machines with an empty id."""

    def delete(self, resource: Resource) -> Operation | None:
        """Ask for its deletion; None: it is gone already. Returns before it is gone."""

    def wait(self, operation: Operation, patience_s: float) -> Operation:
        """The operation once it is DONE, or as it is after `patience_s`. One that is no longer known is DONE."""

    def set_labels(self, machine: Machine, changes: Mapping[str, str]) -> Machine | None:
        """Set these labels beside those it has, whoever else writes labels at the same time. None: the machine is gone."""

    def no_restart(self, machine: Machine) -> None:
        """From now on a crash of its host does not start it again. What is gone is fine."""

    def machine(self, zone: str, name: str) -> Machine | None:
        """One machine; None when there is none."""

    def firewalls(self, prefix: str) -> tuple[Firewall, ...]:
        """Firewall rules by the beginning of their names."""

    def may(self, machine: Machine, permission: str) -> bool:
        """Whether the account has a permission on one machine (instances.testIamPermissions)."""

    def create_machine(self, zone: str, body: Mapping[str, Any]) -> None:
        """Insert an instance from a body as in the REST API, and wait until it is done. What exists already is left as it
        is. Raises QuotaExceeded, Unconfirmed when it is not done in two minutes."""

    def quotas(self) -> tuple[Quota, ...]:
        """Limits and use of every region, and of the project as region "global"."""

    def permitted(self, permissions: Iterable[str]) -> frozenset[str]:
        """Which of these the account has on the project (Cloud Resource Manager, projects.testIamPermissions)."""
