"""A whole session worked out before it exists: what fits, with which flags, on which stack, how soon, for how much. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import Literal

from kimisession.core.catalog import ACCELERATORS, Accelerator
from kimisession.core.cost import STATED
from kimisession.core.durations import parse_duration
from kimisession.core.plan.advice import Advice, advise
from kimisession.core.plan.coldstart import ColdStartPlan, cold_start
from kimisession.core.plan.cpu_fit import HostFit, host_fit, hybrid_vram
from kimisession.core.plan.fit import Fit, predict
from kimisession.core.plan.flags import FlagTable, Refused, check_flags
from kimisession.core.plan.from_flags import changed_flags, setup_of, speculative, whole
from kimisession.core.plan.gpus import Gpu, gpu_named
from kimisession.core.plan.models import ModelCard
from kimisession.core.plan.prices import Market
from kimisession.core.plan.session_cost import API_USD_PER_MILLION_OUTPUT, SessionCost, session_cost
from kimisession.core.plan.setup import CannotPlan, Figure, Setup
from kimisession.core.plan.stack import Case, Contradiction, Lock, resolve
from kimisession.core.profile import Checkpoint, FlagValue, Profile

#: Where nobody sends a bill by the hour, so that a price of 0 is a price.
UNBILLED = ("local", "slurm", "kubernetes")

#: Flags that move memory in ways that are not modelled: with one of them no figure would be true.
UNMODELLED = (
    "cpu-offload-gb",
    "kv-cache-memory-bytes",
    "num-gpu-blocks-override",
    "hf-overrides",
    "prefill-context-parallel-size",
)

Answer = Literal["starts", "borderline", "does not start", "not known"]


@dataclass(frozen=True)
class Question:
    """What is asked. `flags` are the profile's, the checkpoint's and the user's together; `tables` finds the parser of
    an engine's version. `context` and `concurrency` are wishes; without one it is about the flags as they are."""

    profile: Profile
    accelerator: Accelerator
    count: int
    infra: str
    checkpoint: Checkpoint
    flags: Mapping[str, FlagValue]
    tables: Callable[[str, str], FlagTable | None]
    now: datetime
    card: ModelCard | None = None
    context: int | None = None
    concurrency: int | None = None
    usd_per_hour: Decimal | None = None
    duration_s: int | None = None
    market: Market | None = None
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    preemptions_per_hour: Decimal | None = None
    api_usd_per_million: Decimal = API_USD_PER_MILLION_OUTPUT


@dataclass(frozen=True)
class Holding:
    """Whether the model fits. `fit` is for GPU engines, `host` and `vram` for those with experts in host memory."""

    answer: Answer
    reason: str
    fit: Fit | None = None
    host: HostFit | None = None
    vram: Figure | None = None
    advice: Advice | None = None
    changes: Mapping[str, FlagValue] = field(default_factory=dict)
    engine_version: str = ""
    gpu: str = ""


@dataclass(frozen=True)
class SessionPlan:
    """The answer. `flags` are those to start with: what a wish changed is in them."""

    question: Question
    holding: Holding
    flags: Mapping[str, FlagValue]
    refused: tuple[Refused, ...]
    stack: Lock | Contradiction
    start: ColdStartPlan | None
    price_ground: str
    cost: SessionCost
    price_known: bool = True

    @property
    def answer(self) -> Answer:
        """Whether it starts, all things taken together."""
        if self.refused or isinstance(self.stack, Contradiction):
            return "does not start"
        return self.holding.answer

    @property
    def reason(self) -> str:
        """Why, in one sentence, the first thing that stops it before all else."""
        if self.refused:
            return f"the engine refuses {self.refused[0]}"
        if isinstance(self.stack, Contradiction):
            return self.stack.findings[0].sentence
        return self.holding.reason


def plan_session(question: Question) -> SessionPlan:
    """Work everything out. Raises ValueError (CannotPlan among them), one sentence, for a setup that cannot be meant."""
    holding = _holding(question)
    profile = question.profile
    flags = {name: value for name, value in {**question.flags, **holding.changes}.items() if value is not False}
    version = holding.engine_version or profile.engine.version
    table = question.tables(profile.engine.kind, version)
    if holding.engine_version:
        profile = _moved(profile, version, table)
        question = replace(question, profile=profile)
    case = Case(
        profile=profile,
        accelerator=question.accelerator,
        count=question.count,
        checkpoint=question.checkpoint,
        flags=flags,
        infra=question.infra,
        container=question.infra == "kubernetes",
        table=table,
        card=question.card,
    )
    start = cold_start(
        profile,
        question.checkpoint.bytes,
        infra=question.infra,
        eager=flags.get("enforce-eager") is True,
        history=question.history,
    )
    stated, ground = _price(question)
    if holding.gpu and question.usd_per_hour is None:
        other = f"{holding.gpu}:{question.count}"
        stated, ground = None, f"{ground}; that is not for {other}: kimisession plan {profile.name} --gpus {other}"
    price = Decimal(0) if stated is None else stated
    hours = Decimal(question.duration_s or parse_duration(profile.limits.duration)) / 3600
    return SessionPlan(
        question=question,
        holding=holding,
        flags=flags,
        refused=check_flags(table, flags) if table else (),
        stack=resolve(case),
        start=start,
        price_ground=ground,
        price_known=stated is not None,
        cost=session_cost(
            price,
            hours,
            weights_bytes=question.checkpoint.bytes,
            bucket=question.infra == "gcp" and profile.load != "in-place",
            start=start,
            preemptions_per_hour=question.preemptions_per_hour,
            api_usd_per_million=question.api_usd_per_million,
        ),
    )


def _moved(profile: Profile, version: str, table: FlagTable | None) -> Profile:
    """The profile with another version of its engine, and with the torch that this is compiled against."""
    wanted = table.requires.get("torch", "") if table else ""
    torch = wanted[2:] if wanted.startswith("==") and profile.stack.torch else profile.stack.torch
    return replace(profile, engine=replace(profile.engine, version=version), stack=replace(profile.stack, torch=torch))


def _price(question: Question) -> tuple[Decimal | None, str]:
    """Dollars per hour and where they are from: what the user says before all else."""
    if question.usd_per_hour is not None:
        return question.usd_per_hour, STATED
    machine = f"{question.accelerator.name}:{question.count}"
    return known_price(question.profile, machine, question.infra, question.market, question.now)


def known_price(
    profile: Profile, machine: str, infra: str, market: Market | None, now: datetime
) -> tuple[Decimal | None, str]:
    """Dollars per hour of a machine like H100:8, and where they are from; None where nobody here knows them, because no
    figure is made up.

    In this order: SkyPilot's catalog on this machine; the profile, for the machine that it is about; the list that is
    shipped, which is older than any catalog.
    """
    best = market.offers[0] if market and market.offers else None
    listed = None
    if market and best and best.usd_per_hour is not None:
        kind = "spot" if best.usd_per_hour == best.spot_usd else "on demand"
        age = _age(market.age(now).total_seconds())
        if not market.shipped:
            return best.usd_per_hour, f"{best.zone}, {kind}, {best.instance}; {market.source} of {age} ago"
        listed = best.usd_per_hour, f"{best.zone}, {kind}, {best.instance}; {read_on(market)}, {age} ago or more"
    price = profile.price
    at_home = price.pretended or is_at_home(profile, infra)
    unbilled = at_home and (infra in UNBILLED or price.pretended)
    if at_home and machine == profile.hardware.accelerators[0] and (price.usd_per_hour or unbilled):
        beside = f"; by the list: {cents_of(market)}" if market and listed else ""
        return price.usd_per_hour, price.ground + beside
    if listed:
        return listed
    if unbilled:
        return price.usd_per_hour, price.ground
    if infra in UNBILLED:
        return Decimal(0), f"nothing is billed by the hour on {infra}; --price says what yours asks"
    return None, f"no price of {machine} on {infra} is known here; --price says what you pay"


def is_at_home(profile: Profile, infra: str) -> bool:
    """Whether the profile's own price is about this place: the same, or both of those that bill nobody by the hour."""
    return infra == profile.hardware.infra or (infra in UNBILLED and profile.hardware.infra in UNBILLED)


def cents_of(market: Market) -> str:
    """The cheapest and the dearest zone of a market, each at the cheaper of spot and on demand."""
    ends = [market.offers[0], market.offers[-1]]
    return " to ".join(f"${offer.usd_per_hour:,.2f} ({offer.zone})" for offer in ends) + f"; {read_on(market)}"


def read_on(market: Market) -> str:
    """What a shipped list is and of when."""
    return f"{market.source}, read {market.as_of:%Y-%m-%d}"


def _age(seconds: float) -> str:
    hours = seconds / 3600
    return (
        f"{hours * 60:.0f} minutes" if hours < 1 else f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.0f} days"
    )


def _holding(question: Question) -> Holding:
    if question.card is None:
        repo = question.checkpoint.repo
        machine = f"{question.accelerator.name}:{question.count}"
        how = f"; kimisession plan --model {repo} --gpus {machine} reads it" if "/" in repo else ""
        return Holding("not known", f"there is no card of {repo}: memory is not foretold{how}")
    if "kt-method" in question.flags or question.profile.engine.kind == "sglang":
        return _host_holding(question, question.card)
    gpu = gpu_named(question.accelerator.name) if question.accelerator.architecture != "cpu" else None
    if gpu is None:
        return Holding("not known", f"memory on {question.accelerator.name} is not foretold")
    engine = question.profile.engine
    setup = setup_of(engine.version, question.flags, engine.env)
    if setup.n_gpus != question.count:
        split = f"tensor x pipeline x data parallel is {setup.n_gpus}"
        said = f"{split} and the machine has {question.count} GPUs; set --tensor-parallel-size {question.count}"
        return Holding("does not start", said) if setup.n_gpus > question.count else Holding("not known", said)
    wished = question.context is not None or question.concurrency is not None
    unmodelled = _unmodelled(question.flags)
    if unmodelled:
        return Holding(
            "not known", f"--{unmodelled} moves memory in a way that is not modelled; leave it out to know more"
        )
    if str(question.flags.get("max-model-len")) in ("auto", "-1") and question.context is None:
        return _fitted_by_the_engine(question.card, gpu, setup)
    fit = predict(question.card, gpu, setup)
    if not wished and fit.verdict == "starts":
        return Holding(fit.verdict, fit.reason, fit=fit)
    advice = advise(question.card, gpu, setup, question.context, question.concurrency)
    if not wished:  # as it stands, and what would make it sure
        return Holding(fit.verdict, fit.reason, fit=fit, advice=advice)
    changes = changed_flags(setup, advice.setup)
    version = advice.setup.engine_version if advice.setup.engine_version != engine.version else ""
    other = _catalogued(advice.gpu.name) if advice.gpu.name != gpu.name else ""
    return Holding(advice.reached, advice.sentence, advice.fit, None, None, advice, changes, version, other)


def _unmodelled(flags: Mapping[str, FlagValue]) -> str:
    """The first flag that makes every figure untrue; empty if there is none."""
    said = {name.replace("_", "-"): value for name, value in flags.items() if value is not False}
    if speculative(said.get("eplb-config")).get("num_redundant_experts"):
        return "eplb-config with redundant experts"
    return next((name for name in UNMODELLED if name in said), "")


def _fitted_by_the_engine(card: ModelCard, gpu: Gpu, setup: Setup) -> Holding:
    """--max-model-len auto: the engine takes the longest context that what is left holds."""
    longest = predict(card, gpu, replace(setup, max_model_len=1)).longest_context
    fit = predict(card, gpu, replace(setup, max_model_len=max(1, int(longest.low))))
    if fit.verdict != "starts":
        return Holding(fit.verdict, fit.reason, fit=fit)
    return Holding(
        "starts", f"the engine chooses {longest.low:,.0f} to {longest.high:,.0f} tokens of context.", fit=fit
    )


def _catalogued(name: str) -> str:
    """The name under which `--gpus` knows a GPU of the plan's own table."""
    known = ((a.name, gpu_named(a.name)) for a in ACCELERATORS if a.architecture != "cpu")
    return next((ours for ours, gpu in known if gpu is not None and gpu.name == name), name)


def _host_holding(question: Question, card: ModelCard) -> Holding:
    """Engines that keep experts in host memory: KT-Kernel beside GPUs, or a CPU alone."""
    flags, ram = question.flags, question.profile.hardware.ram_gib
    if "kt-method" not in flags and flags.get("device") != "cpu":
        return Holding("not known", "memory of SGLang on GPUs alone is not foretold")
    if not ram:
        return Holding(
            "not known", "hardware.ram_gib is not stated: write the memory of the machine, or the quota on it"
        )
    if question.context and question.context > card.max_context:
        raise CannotPlan(f"{card.name} holds {card.max_context:,} tokens at most, not {question.context:,}")
    if question.concurrency:
        raise CannotPlan("--concurrency is not foretold with experts in host memory; leave it out")
    changes: dict[str, FlagValue] = {"context-length": question.context} if question.context else {}
    cpu_only = flags.get("device") == "cpu"
    experts = whole(flags, "kt-num-gpu-experts") or 0
    split = next((n for name in ("tensor-parallel-size", "tp-size") if (n := whole(flags, name)) is not None), 1)
    if experts < 0 or split < 1:
        raise CannotPlan("--kt-num-gpu-experts must be 0 or more and --tensor-parallel-size 1 or more")
    host = host_fit(
        card,
        ram,
        gpu_experts=0 if cpu_only else experts,
        stored_as="int8" if str(flags.get("kt-method", "")).endswith("INT8") else "checkpoint",
        cpu_only=cpu_only,
    )
    if cpu_only:
        return Holding(host.verdict, host.reason, host=host, changes=changes)
    context = question.context or whole(flags, "context-length") or question.checkpoint.context
    vram = hybrid_vram(card, gpu_experts=experts, context=context, gpus=split)
    has = question.accelerator.memory_gib or 0.0
    if vram.low > has:
        reason = f"{vram.value:.0f} GiB per GPU are needed and {has:.0f} are there; lower --kt-num-gpu-experts"
        return Holding("does not start", reason, host=host, vram=vram)
    answer: Answer = "borderline" if host.verdict == "starts" and vram.high > has else host.verdict
    return Holding(answer, host.reason, host=host, vram=vram, changes=changes)
