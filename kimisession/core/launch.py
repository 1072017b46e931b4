"""What an engine is asked to launch: a LaunchSpec, the same for this machine and for every cloud."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from decimal import Decimal

from kimisession.core.profile import FlagValue, Slurm

_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,29}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")

LABEL_SESSION = "kimisession-session"
LABEL_NAME = "kimisession-name"
LABEL_OWNER = "kimisession-owner"
LABEL_DEADLINE = "kimisession-deadline"


def check_name(name: str) -> str:
    """A session's name is also a host name and part of paths. Raises ValueError, one sentence."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name a session; use up to 31 small letters, digits and dashes, a letter first, no dash last"
        )
    return name


def label_value(text: str) -> str:
    """Text as a cloud label's value (`[a-z0-9_-]`, 63 at most; the rule of Compute Engine)."""
    return re.sub(r"[^a-z0-9_-]", "-", text.lower())[:63]


def deadline_label(deadline: datetime) -> str:
    """An absolute moment as a label's value, to the second, in UTC."""
    return deadline.astimezone(UTC).strftime("%Y%m%dt%H%M%Sz")


def parse_deadline_label(text: str) -> datetime:
    """The moment in a deadline label. Raises ValueError when it is not one."""
    return datetime.strptime(text, "%Y%m%dt%H%M%Sz").replace(tzinfo=UTC)


def session_labels(session_id: str, name: str, owner: str, deadline: datetime) -> dict[str, str]:
    """The labels that every resource of a session carries from the very first call on."""
    labels = {
        LABEL_SESSION: session_id,
        LABEL_NAME: name,
        LABEL_OWNER: label_value(owner),
        LABEL_DEADLINE: deadline_label(deadline),
    }
    bad = [key for key, value in labels.items() if not _LABEL_VALUE.fullmatch(value)]
    if bad:
        raise ValueError(f"label {bad[0]} would be {labels[bad[0]]!r}, which no cloud takes")
    return labels


def flags_to_argv(flags: Mapping[str, FlagValue]) -> tuple[str, ...]:
    """Engine flags as arguments: true is a bare flag, false is left out, tables and lists become JSON."""
    argv: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        argv.append(f"--{name}")
        if value is not True:
            argv.append(json.dumps(value) if isinstance(value, dict | list) else str(value))
    return tuple(argv)


def edit_argv(argv: Sequence[str], sets: Mapping[str, FlagValue]) -> tuple[str, ...]:
    """An engine's arguments with some flags changed: the old form of each goes, the new one is put at the end."""
    kept: list[str] = []
    dropping = False
    for arg in argv:
        if arg.startswith("--"):
            dropping = arg[2:].partition("=")[0].replace("_", "-") in sets
        if not dropping:
            kept.append(arg)
    return (*kept, *flags_to_argv(sets))


@dataclass(frozen=True)
class Step:
    """Something that the machine runs before the engine, once all of `after` are done."""

    name: str
    argv: tuple[str, ...]
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineProcess:
    """The engine on the machine. The API key is not here: it travels in a file of its own."""

    kind: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    served_name: str


@dataclass(frozen=True)
class NodeLimits:
    """The keeper's limits. `*_s` seconds; `*_utc` seconds since 1970, each bounded by a duration as well."""

    hard_cap_utc: float
    duration_s: float
    budget_utc: float | None
    idle_s: float
    unused_s: float
    ready_within_s: float
    coldstart_stall_s: float
    stall_s: float
    unknown_s: float
    warn_s: float
    tick_s: float
    scrape_s: float
    stop_grace_s: float
    silent_s: float
    watch_terminals: bool


@dataclass(frozen=True)
class Placement:
    """What only rented machines need to be told. `longest_s`: no layer lets the machine live longer than this, `extend`
    or not; 0 means the deadline. `on_demand_fallback`: pay the full price where no spot machine is to be had. `unguarded`: a
    person wants it although nothing outside of the machine watches over it. `zone`: only there, a region or `region/zone`.
    `memory_gib`: at least that much memory, for a machine without GPUs. `zones`: only there and in this order, `region/zone`."""

    longest_s: float = 0.0
    disk_gib: int = 0
    on_demand_fallback: bool = False
    unguarded: bool = False
    zone: str = ""
    zones: tuple[str, ...] = ()
    memory_gib: int = 0
    slurm: Slurm = field(default_factory=Slurm)


@dataclass(frozen=True)
class LaunchSpec:
    """Everything that an engine needs to bring one session up, and nothing secret."""

    session_id: str
    name: str
    owner: str
    profile: str
    deadline: datetime  # after this the machine must be gone, whoever is dead
    accelerators: str
    usd_per_hour: Decimal
    price_ground: str
    steps: tuple[Step, ...]
    engine: EngineProcess | None  # None: the session is done when its steps are
    limits: NodeLimits
    ephemeral_disk: bool
    labels: Mapping[str, str] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)

    def node_config(self) -> str:
        """The JSON that the keeper reads (`kimisession.node.config`)."""
        config = {
            "session": self.session_id,
            "steps": [asdict(step) for step in self.steps],
            "engine": asdict(self.engine) if self.engine else None,
            "ephemeral_disk": self.ephemeral_disk,
            **asdict(self.limits),
        }
        return json.dumps(config, indent=1)
