"""A cloud project: what of ours exists there, its reaper, its permissions and quotas."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Literal

from typing_extensions import TypedDict

from kimisession.cli.documents.common import Armed, said


class FindingDocument(TypedDict):
    """Something of ours in a cloud project."""

    kind: Literal["machine", "disk", "address"]
    resource: str
    zone: str
    session: str | None
    name: Annotated[str | None, said("what its user called the session")]
    owner: str | None
    verdict: Literal[
        "live",
        "foreign",
        "ending",
        "past-deadline",
        "stopped-with-disk",
        "orphan-disk",
        "orphan-address",
        "unlabelled-ours",
    ]
    leak: Annotated[bool, said("it should not be there")]
    due: Annotated[bool, said("--delete deletes it")]
    why: str
    began: datetime
    since: Annotated[datetime, said("when it began to be what the verdict says")]
    deadline: Annotated[datetime | None, said("in its labels")]
    usd: Annotated[Decimal | None, said("so far, of what has a price")]
    usd_per_hour: Decimal | None
    unpriced: Annotated[list[str], said("what has no price")]


class SweepDocument(TypedDict):
    """One look at a project, after what was deleted."""

    project: str
    at: datetime
    findings: list[FindingDocument]
    unreachable: Annotated[list[str], said("zones that did not answer; then the exit code is 7")]
    deleted: list[str]
    adopted: Annotated[list[str], said("sessions that the ledger knows from now on")]
    left: Annotated[int, said("leaks that are there now; not 0: the exit code is 7")]


class GuardMachineDocument(TypedDict):
    """A reaper's machine."""

    name: str
    zone: str
    status: str
    beat: Annotated[datetime | None, said("when it last looked at everything")]
    did: str | None
    code: str | None
    code_here: Annotated[str, said("what `guard enable` would install")]


class GuardDocument(Armed):
    """The reaper of a project."""

    project: str
    machines: list[GuardMachineDocument]


class PermissionsDocument(TypedDict):
    """What the account lacks in a project."""

    project: str
    wanted: list[str]
    missing: list[str]


class StandingDocument(TypedDict):
    """A quota in a region."""

    market: Literal["spot", "on demand"]
    metric: str
    region: Annotated[str, said("global: of the whole project")]
    needed: int
    limit: Annotated[int | None, said("null where the API does not list it")]
    used: int | None
    enough: bool | None


class QuotaDocument(TypedDict):
    """The quotas that a machine needs."""

    project: str
    accelerators: str
    quotas: list[StandingDocument]
