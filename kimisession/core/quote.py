"""What a session would be and cost, worked out before anything exists; and the launch that follows from it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal

from kimisession.core.catalog import Accelerator
from kimisession.core.cost import STATED, budget_deadline, price_of
from kimisession.core.durations import parse_duration
from kimisession.core.launch import (
    EngineProcess,
    LaunchSpec,
    NodeLimits,
    Placement,
    flags_to_argv,
    session_labels,
)
from kimisession.core.node_steps import disk_check, setup_steps, weights_step
from kimisession.core.profile import Checkpoint, FlagValue, Profile

#: A session whose budget does not reach this far would end before it is ready: refused before it is created.
FIRST_MINUTES = timedelta(minutes=10)

_STAND_IN = "kimisession.node.standin"


@dataclass(frozen=True)
class Choices:
    """What the user chose; None means: what the profile says."""

    name: str
    infra: str
    accelerator: Accelerator
    count: int
    bucket_url: str
    port: int
    checkpoint: Checkpoint
    engine_python: str
    usd_per_hour: Decimal | None = None
    price_ground: str = ""  # where that price is from, if the user did not state it
    idle_s: int | None = None
    duration_s: int | None = None
    dearest_usd: Decimal | None = None  # an hour in the dearest zone that it may end up in: caps in dollars go by it
    budget_usd: Decimal | None = None
    sets: Mapping[str, FlagValue] = field(default_factory=dict)
    on_demand_fallback: bool = False
    unguarded: bool = False
    zones: tuple[str, ...] = ()


#: vLLM's documentation, "Loading models with Run:ai Model Streamer": each rank reads its share and they exchange them.
STREAM_FLAGS: dict[str, FlagValue] = {
    "load-format": "runai_streamer",
    "model-loader-extra-config": '{"distributed": true}',
}


@dataclass(frozen=True)
class Quote:
    """What is agreed to. Moments are aware UTC; money is in dollars."""

    profile: Profile
    choices: Choices
    at: datetime
    usd_per_hour: Decimal
    price_ground: str
    idle_s: int
    deadline: datetime
    latest: datetime
    budget_at: datetime | None
    worst_usd: Decimal
    recovers: str = ""  # the session whose caps it goes on under

    @property
    def stand_in(self) -> bool:
        """Whether no model will be run."""
        return _STAND_IN in self.profile.engine.command

    @property
    def pretended(self) -> bool:
        """Whether the price is one that nobody will bill. A price that the user stated is taken seriously."""
        return self.profile.price.pretended and self.choices.usd_per_hour is None

    @property
    def served_name(self) -> str:
        """The model's name for clients; a stand-in's says so."""
        name = self.profile.model.served_name
        return f"{name}-stand-in" if self.stand_in and "stand-in" not in name else name

    @property
    def ends_at(self) -> datetime:
        """The earlier of hard cap and budget."""
        return min(self.deadline, self.budget_at) if self.budget_at else self.deadline

    @property
    def flags(self) -> dict[str, FlagValue]:
        """The engine's flags: the profile's, over them the checkpoint's, over them the user's."""
        streams = STREAM_FLAGS if self.profile.load == "stream" else {}
        return {**streams, **self.profile.engine.flags, **self.choices.checkpoint.flags, **self.choices.sets}


def make_quote(profile: Profile, choices: Choices, now: datetime) -> Quote:
    """Work out deadlines and the worst case. Raises ValueError, one sentence, for a cap that cannot be meant."""
    limits = profile.limits
    if profile.load == "stream" and not choices.bucket_url.startswith("gs://"):
        raise ValueError(
            f"profile {profile.name} streams its weights, and {choices.bucket_url} is no bucket in the cloud"
        )
    price = profile.price.usd_per_hour if choices.usd_per_hour is None else choices.usd_per_hour
    ground = profile.price.ground if choices.usd_per_hour is None else choices.price_ground or STATED
    longest_s = parse_duration(limits.longest)
    duration_s = choices.duration_s or parse_duration(limits.duration)
    if duration_s > longest_s:
        raise ValueError(f"it is longer than the {limits.longest} that profile {profile.name} allows")
    deadline = now + timedelta(seconds=duration_s)
    # The dollar cap becomes a moment at the dearest price that may be asked; no cheaper price later moves it.
    dearest = max(price, choices.dearest_usd or price)
    budget_at = None
    if choices.budget_usd is not None and dearest > 0:
        budget_at = budget_deadline(now, dearest, choices.budget_usd)
    ends_at = min(deadline, budget_at) if budget_at else deadline
    return Quote(
        profile,
        choices,
        now,
        price,
        ground,
        choices.idle_s or parse_duration(limits.idle),
        deadline,
        now + timedelta(seconds=longest_s),
        budget_at,
        price_of(dearest, now, ends_at),
    )


def launch_spec(quote: Quote, session_id: str, owner: str) -> LaunchSpec:
    """The launch that a quote stands for. The same for this machine and for every cloud."""
    profile, choices = quote.profile, quote.choices
    limits = profile.limits
    copies = profile.load == "copy"
    model = "@{disk}/model" if copies else choices.bucket_url.removeprefix("file://")
    setup = setup_steps(profile, choices.infra, choices.count, choices.engine_python)
    if copies and choices.infra != "local":  # one's own disk is known
        check = disk_check(choices.checkpoint.bytes, parse_duration(limits.ready_within), setup)
        setup = (*setup, check)
    pull = ("@{python}", "-m", "kimisession.node.pull", "--from", choices.bucket_url, "--to", model)
    argv = (
        *(arg.replace("@{engine_python}", choices.engine_python) for arg in profile.engine.command),
        *("--model", model, "--served-model-name", quote.served_name, "--host", "127.0.0.1", "--port", "@{port}"),
        *flags_to_argv(quote.flags),
    )
    idle_was, unused_was = parse_duration(limits.idle), parse_duration(limits.unused)
    return LaunchSpec(
        session_id=session_id,
        name=choices.name,
        owner=owner,
        profile=profile.name,
        deadline=quote.ends_at,
        accelerators=f"{choices.accelerator.name}:{choices.count}",
        usd_per_hour=quote.usd_per_hour,
        price_ground=quote.price_ground,
        steps=(*setup, weights_step(pull, setup)) if copies else setup,
        engine=EngineProcess(profile.engine.kind, argv, profile.engine.env, choices.port, quote.served_name),
        limits=NodeLimits(
            hard_cap_utc=quote.deadline.timestamp(),
            duration_s=(quote.deadline - quote.at).total_seconds(),
            budget_utc=quote.budget_at.timestamp() if quote.budget_at else None,
            idle_s=quote.idle_s,
            # A user who changes --idle means the patience with an unused session as well.
            unused_s=unused_was
            if quote.idle_s == idle_was
            else max(quote.idle_s, quote.idle_s * unused_was / idle_was),
            ready_within_s=parse_duration(limits.ready_within),
            coldstart_stall_s=parse_duration(limits.coldstart_stall),
            stall_s=parse_duration(limits.stall),
            unknown_s=parse_duration(limits.unknown),
            warn_s=min(parse_duration(limits.warn), quote.idle_s / 2),
            tick_s=limits.tick,
            scrape_s=limits.scrape,
            stop_grace_s=parse_duration(limits.stop_grace),
            silent_s=parse_duration(limits.silent),
            # Typing in a terminal is use on a rented machine. On one's own, and on a node under Slurm that others may be on,
            # it is not about the session.
            watch_terminals=choices.infra not in ("local", "slurm"),
        ),
        ephemeral_disk=copies,
        labels=session_labels(session_id, choices.name, owner, quote.ends_at),
        placement=Placement(
            longest_s=(quote.latest - quote.at).total_seconds(),
            disk_gib=profile.hardware.disk_gib,
            on_demand_fallback=choices.on_demand_fallback,
            unguarded=choices.unguarded,
            zones=choices.zones,
            slurm=profile.slurm,
        ),
    )
