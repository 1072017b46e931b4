"""A profile: one model on one kind of hardware with one engine. What may be said in a profile's TOML is what is here.

The dataclasses are the schema: `kimisession.profile_file` validates text against them and names the key of every
mistake. A figure that a profile shows to people stands in `provenance` with its source.
"""

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

FlagValue = bool | int | float | str | list[int | float | str] | dict[str, int | float | str | bool]


@dataclass(frozen=True)
class Model:
    """What is served. `served_name` is the name that clients ask for."""

    served_name: str


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights and what the engine needs for it. The first whose `architectures` has the accelerator's is
    taken; `--checkpoint NAME` overrides. `bytes` are decimal bytes of all files."""

    name: str
    repo: str
    bytes: int
    architectures: tuple[str, ...]
    context: int  # tokens that one request may have
    flags: dict[str, FlagValue] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Engine:
    """The serving program. `command` may name @{python} and @{engine_python}; `flags` are spelled as the engine spells
    them, without the dashes."""

    kind: Literal["vllm", "sglang"]
    version: str
    command: tuple[str, ...]
    flags: dict[str, FlagValue] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Hardware:
    """Where it can run, the best first, as `NAME:COUNT`; `infra` is where it is started unless --infra says otherwise.
    `ram_gib` is the machine's memory or the quota on it, 0 where it is not stated; `cpu` what the host's CPU offers."""

    accelerators: tuple[str, ...]
    infra: str = "gcp"
    disk_gib: int = 0
    ram_gib: int = 0
    cpu: Literal["amx", "avx512", ""] = ""


@dataclass(frozen=True)
class Stack:
    """The software below the engine. Empty means: whatever the machine has."""

    driver: str = ""
    cuda: str = ""
    torch: str = ""
    nccl: str = ""
    gib: Literal["remove", "keep", ""] = ""


@dataclass(frozen=True)
class Limits:
    """When a session ends by itself. Durations as people write them."""

    idle: str = "20m"
    unused: str = "30m"  # ready, and never asked anything
    duration: str = "2h"  # the hard cap of a session unless the user says otherwise
    longest: str = "8h"  # what `extend` can reach
    ready_within: str = "45m"
    coldstart_stall: str = "10m"
    stall: str = "5m"
    unknown: str = "5m"
    warn: str = "2m"
    silent: str = "60s"
    stop_grace: str = "20s"
    tick: float = 1.0
    scrape: float = 5.0


@dataclass(frozen=True)
class Price:
    """Dollars per hour of the whole machine, and where that figure is from. `pretended`: nobody will send a bill."""

    usd_per_hour: Decimal
    ground: str
    pretended: bool = False


@dataclass(frozen=True)
class ColdStart:
    """What a start is expected to take, in minutes from launch to ready, and who measured it."""

    minutes: tuple[int, int]
    source: str


@dataclass(frozen=True)
class Provenance:
    """One claim, its source, and whether anybody here saw it."""

    claim: str
    source: str
    verdict: Literal["measured", "reported", "not reproduced", "does not hold", "predicted"]
    note: str = ""


@dataclass(frozen=True)
class Slurm:
    """What a Slurm site wants to be told; empty means the site's own default. Everything is installed inside the job,
    nothing on a login node. `conda` is an environment's prefix; it and `scratch` may name variables of the job, like
    `$SLURM_JOB_ACCOUNT`. `scratch` is where copied weights lie instead of the shared home."""

    cluster: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    modules: tuple[str, ...] = ()
    conda: str = ""
    scratch: str = ""
    cpus: int = 0  # of the whole job
    memory_gib: int = 0


@dataclass(frozen=True)
class Profile:
    """See the module's text. `status` tells what was ever run: shown by `kimisession profiles`."""

    name: str
    summary: str
    status: Literal["runs here", "reported by others", "rendered, never run"]
    model: Model
    engine: Engine
    hardware: Hardware
    checkpoints: tuple[Checkpoint, ...]
    price: Price
    limits: Limits = field(default_factory=Limits)
    stack: Stack = field(default_factory=Stack)
    slurm: Slurm = field(default_factory=Slurm)
    coldstart: ColdStart | None = None
    #: copy: onto the machine's own disk, every byte checked. in-place: the engine reads the folder where it is. stream: vLLM's
    #: runai_streamer reads the bucket straight into GPU memory; its bytes are not held against the seal on the way.
    load: Literal["copy", "in-place", "stream"] = "copy"
    provenance: tuple[Provenance, ...] = ()


def choose_checkpoint(profile: Profile, architecture: str, override: str | None = None) -> Checkpoint:
    """The weights for this architecture, or those that the user named. Raises ValueError, one sentence."""
    names = ", ".join(c.name for c in profile.checkpoints)
    if override is not None:
        for checkpoint in profile.checkpoints:
            if checkpoint.name == override:
                return checkpoint
        raise ValueError(f"profile {profile.name} has no checkpoint {override!r}; it has {names}")
    for checkpoint in profile.checkpoints:
        if architecture in checkpoint.architectures:
            return checkpoint
    raise ValueError(
        f"profile {profile.name} has no checkpoint for {architecture} devices; --checkpoint forces one of {names}"
    )
