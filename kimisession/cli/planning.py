"""`kimisession plan`: know before you pay. Reads profiles, data files, price lists and the ledger; changes nothing."""

import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeVar

from kimisession.cli import show
from kimisession.cli.completing import PLACES
from kimisession.core.catalog import parse_accelerators
from kimisession.core.cost import cents
from kimisession.core.launch import flags_to_argv
from kimisession.core.plan.coldstart import ColdStartPlan, history_of
from kimisession.core.plan.from_flags import tokens_of
from kimisession.core.plan.models import ModelCard, ModelUnknown
from kimisession.core.plan.prices import Offer
from kimisession.core.plan.session_cost import (
    API_GROUND,
    API_USD_PER_MILLION_OUTPUT,
    BUCKET_USD_PER_GIB_MONTH,
    SEED_HOURS,
    SEED_VM_USD_PER_HOUR,
)
from kimisession.core.plan.session_plan import UNBILLED, Question, SessionPlan, is_at_home, known_price, plan_session
from kimisession.core.plan.setup import Figure
from kimisession.core.plan.stack import Contradiction, Lock
from kimisession.core.profile import FlagValue, Profile, choose_checkpoint
from kimisession.errors import DoesNotFit, KimiError, UsageMistake
from kimisession.flag_file import known_flags
from kimisession.model_file import card_named
from kimisession.node.policy import span
from kimisession.paths import state_home
from kimisession.profile_file import load_profile

T = TypeVar("T")

#: Past starts that are looked at for one's own times.
NEWEST = 20

_MARK: dict[str, show.Style] = {"starts": "bold", "borderline": "warn", "does not start": "bad", "not known": "warn"}


@dataclass(frozen=True)
class PlanOptions:
    """The command's options, parsed. None means: what the profile says."""

    profile: str
    infra: str | None = None
    gpus: str | None = None
    context: int | None = None
    concurrency: int | None = None
    checkpoint: str | None = None
    sets: Mapping[str, FlagValue] | None = None
    duration_s: int | None = None
    ram_gib: int | None = None
    price_usd: Decimal | None = None
    preemptions_per_hour: Decimal | None = None
    api_usd_per_million: Decimal | None = None
    explain: bool = False
    json: bool = False
    lock: bool = False
    manifests: bool = False
    as_profile: bool = False


def run_plan(options: PlanOptions) -> None:
    """One profile on one screen. Ends with exit code 5 when it does not start."""
    show_plan(make_plan(load_profile(options.profile), options), options)


def show_plan(plan: SessionPlan, options: PlanOptions, source: tuple[str, ...] = ()) -> None:
    """A plan as the options ask for it; `source` says where the model's sizes are from. Raises DoesNotFit."""
    refuse_idle_ram([plan], options)
    if options.lock:
        _print_lock(plan)
    elif options.manifests:
        _print_manifests(plan)
    elif options.json:
        show.as_json("plan", {**as_data(plan), **({"model": source[0]} if source else {})})
    else:
        _print_screen(plan, options, source)
    if plan.answer == "does not start":
        way_out = "the same with --explain shows the arithmetic" if source else _way_out(plan, options)
        raise DoesNotFit(f"{plan.question.profile.name} would not start: {plan.reason}", way_out)


def run_compare(first: str, second: str, options: PlanOptions) -> None:
    """Two profiles side by side."""
    plans = [make_plan(load_profile(name), options) for name in (first, second)]
    refuse_idle_ram(plans, options)
    if options.json:
        show.as_json("plans", [as_data(plan) for plan in plans])
        return
    columns = [dict(_rows(plan)) for plan in plans]
    for column, plan in zip(columns, plans, strict=True):
        steps = plan.holding.advice.steps if plan.holding.advice else ()
        column.update(
            {name: " and ".join(s.name for s in steps) for name in ("change", "to be sure") if name in column}
        )
    names = list(dict.fromkeys(name for column in columns for name in column))
    table = [(name, *(_narrow(column.get(name, "-")) for column in columns)) for name in names]
    show.table(("", first, second), table)
    show.next_step(f"kimisession plan {first} --explain")


def refuse_idle_ram(plans: Sequence[SessionPlan], options: PlanOptions) -> None:
    """`--ram` where nothing goes by it: no plan keeps experts in host memory, and no manifest asks for so much. Raises
    UsageMistake."""
    if options.ram_gib is None or options.manifests or any(plan.holding.host for plan in plans):
        return
    first, *others = (plan.question.profile.name for plan in plans)
    who = f"neither {first} nor {others[0]} keeps" if others else f"{first} keeps no"
    raise UsageMistake(f"--ram would change nothing: {who} experts in host memory", "leave --ram out")


def _narrow(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 58, break_long_words=False, break_on_hyphens=False)


def make_plan(profile: Profile, options: PlanOptions, card: ModelCard | None = None) -> SessionPlan:
    """The plan of a profile with the user's wishes; `card` describes its model where no shipped card does.
    Raises UsageMistake."""
    accelerator, count = checked(lambda: parse_accelerators(options.gpus or profile.hardware.accelerators[0]), "--gpus")
    blamed = "--gpus" if options.gpus and not options.checkpoint else "--checkpoint"
    checkpoint = checked(lambda: choose_checkpoint(profile, accelerator.architecture, options.checkpoint), blamed)
    infra = options.infra or profile.hardware.infra
    if infra not in PLACES:
        raise UsageMistake(f"--infra: {infra!r} is not a place that is known here", f"use one of {', '.join(PLACES)}")
    if options.ram_gib is not None:
        profile = replace(profile, hardware=replace(profile.hardware, ram_gib=options.ram_gib))
    question = Question(
        profile=profile,
        accelerator=accelerator,
        count=count,
        infra=infra,
        checkpoint=checkpoint,
        flags={**profile.engine.flags, **checkpoint.flags, **(options.sets or {})},
        tables=known_flags,
        now=datetime.now(UTC),
        card=card or card_of(checkpoint.repo),
        context=options.context,
        concurrency=options.concurrency,
        usd_per_hour=options.price_usd,
        duration_s=options.duration_s,
        market=_market(infra, accelerator.name, count),
        history=_history(profile.name),
        preemptions_per_hour=options.preemptions_per_hour,
        **({"api_usd_per_million": options.api_usd_per_million} if options.api_usd_per_million is not None else {}),
    )
    return checked(lambda: plan_session(question), "this cannot be planned")


def parse_sets(texts: Sequence[str] | None) -> dict[str, FlagValue]:
    """The flags of `--set NAME=VALUE`, as `start` reads them."""
    if not texts:
        return {}
    from kimisession.cli.starting import parse_set  # brings the controller along: only where it is needed

    return dict(parse_set(text) for text in texts)


def parse_tokens(flag: str, text: str | None) -> int | None:
    """Tokens of an option; a mistake names the flag."""
    return None if text is None else checked(lambda: tokens_of(text), f"--{flag}")


def checked(make: Callable[[], T], flag: str) -> T:
    """A value, or the mistake with the flag that it is about."""
    try:
        return make()
    except ValueError as mistake:
        raise UsageMistake(f"{flag}: {mistake}", "kimisession plan --help") from None


def card_of(repo: str) -> ModelCard | None:
    """The model's card, if there is one: shipped, or left by an earlier `plan --model`."""
    try:
        return card_named(repo)
    except ModelUnknown:
        from kimisession.weights.headers import kept_card  # only for what no card describes

        return kept_card(repo) if "/" in repo else None


def price_elsewhere(profile: Profile, machine: str, infra: str) -> tuple[Decimal, str] | None:
    """What another machine than the profile's own costs an hour, and where that is from; None where the profile's own
    figure stands. Raises UsageMistake where nobody here knows."""
    own = is_at_home(profile, infra) and (machine == profile.hardware.accelerators[0] or infra in UNBILLED)
    if profile.price.pretended or (own and (profile.price.usd_per_hour or infra in UNBILLED)):
        return None
    accelerator, count = parse_accelerators(machine)
    market = _market(infra, accelerator.name, count)
    usd, ground = known_price(profile, machine, infra, market, datetime.now(UTC))
    if usd is None:
        raise UsageMistake(
            f"--gpus {machine}: {ground}", f"kimisession start {profile.name} --gpus {machine} --price 20"
        )
    return usd, ground


def _market(infra: str, accelerator: str, count: int) -> Any:
    if infra in ("local", "slurm", "kubernetes"):
        return None
    from kimisession.cloud.prices import market

    return market(infra, accelerator, count)


def _history(profile: str) -> dict[str, list[float]]:
    """Phases of this user's past starts of the profile; nothing where there is no ledger yet, or it cannot be read."""
    if not (state_home() / "ledger.db").exists():
        return {}
    from kimisession.store import open_store

    try:
        store = open_store(state_home())
    except KimiError:
        return {}
    try:
        rows = [row for row in store.rows() if row.profile == profile][:NEWEST]
        return history_of([store.session(row.session) for row in rows])
    finally:
        store.close()


def fit_line(plan: SessionPlan) -> str | None:
    """The plan's verdict for a quote, in one line; None where memory is not foretold."""
    fit, host = plan.holding.fit, plan.holding.host
    if fit:
        return f"{plan.answer}: {_span(fit.kv_gib_per_gpu)} GiB of KV cache per GPU, {_span(fit.kv_tokens, 0)} tokens"
    return f"{plan.answer}: {plan.reason}" if host else None


# --- the screen ------------------------------------------------------------------------------------------------------


def _print_screen(plan: SessionPlan, options: PlanOptions, source: tuple[str, ...]) -> None:
    question = plan.question
    device = plan.holding.gpu or question.accelerator.name
    head = f"{question.profile.name} on {device} x {question.count} ({question.infra})"
    answer = {"starts": "fits", "borderline": "may fit", "does not start": "DOES NOT START"}.get(plan.answer, "unknown")
    painted = show.paint(answer, _MARK[plan.answer], sys.stdout)
    show.out(f"{show.paint(head, 'bold', sys.stdout)}: {painted}")
    show.pairs([*_rows(plan), *(("sizes", _wrapped(text)) for text in source)])
    if options.explain:
        for title, lines in explained(plan):
            show.out(f"\n{show.paint(title, 'bold', sys.stdout)}")
            for line in lines:
                room = (show.columns(sys.stdout) or 120) - 2
                show.out(textwrap.fill(line, room, initial_indent="  ", subsequent_indent="    "))
    if plan.answer != "does not start" and not source:
        show.next_step(_next(plan, options))


def _rows(plan: SessionPlan) -> list[tuple[str, str]]:
    question, holding, cost = plan.question, plan.holding, plan.cost
    rows = [("verdict", _wrapped(f"{plan.answer}: {plan.reason}"))]
    engine = question.profile.engine
    version = holding.engine_version or engine.version
    rows.append(
        ("engine", f"{engine.kind} {version}, checkpoint {question.checkpoint.name} ({question.checkpoint.repo})")
    )
    rows += _memory_rows(plan)
    seen = next((p for p in question.profile.provenance if p.verdict in ("measured", "reported")), None)
    if seen:
        rows.append(("seen", _wrapped(f"{seen.verdict}: {seen.claim} ({seen.source})")))
    if holding.advice and holding.advice.steps:
        rows.append(("change" if holding.changes else "to be sure", "\n".join(_steps(plan))))
    rows.append(("flags", _wrapped(shlex.join(flags_to_argv(plan.flags)))))
    for refusal in plan.refused:
        rows.append(("refused", _wrapped(str(refusal))))
    rows += _stack_rows(plan)
    if plan.start:
        rows.append(("ready in", _wrapped(_ready(plan.start))))
    rows.append(("price", _wrapped(_price(plan))))
    rows.append(("costs", _wrapped(_costs(plan))))
    if plan.price_known and cost.usd_per_hour > 0 and not question.profile.price.pretended:
        rows.append(
            (
                "or an API",
                f"break-even at {cost.break_even_tokens_per_hour:,} output tokens an hour, "
                f"{cost.break_even_tokens_per_s:,.0f} a second all the time",
            )
        )
    return rows


def _memory_rows(plan: SessionPlan) -> list[tuple[str, str]]:
    fit, host, vram = plan.holding.fit, plan.holding.host, plan.holding.vram
    rows: list[tuple[str, str]] = []
    if fit:
        budget = fit.resolved.total_gib * fit.resolved.utilisation
        rows.append(
            (
                "per GPU",
                f"{fit.resolved.total_gib:.2f} GiB x {fit.resolved.utilisation:g} = {budget:.2f}; weights "
                f"{_span(fit.weights_gib_per_gpu)}, KV cache {_span(fit.kv_gib_per_gpu)} GiB",
            )
        )
        rows.append(
            (
                "holds",
                _wrapped(
                    f"{_span(fit.kv_tokens, 0)} tokens; {fit.resolved.max_model_len:,} at once "
                    f"{_span(fit.concurrency, 1)} times; one request alone may have {fit.longest_context.value:,.0f}"
                ),
            )
        )
        rows.append(("needs", f"host RAM {_span(fit.host_ram_gib, 0)} GiB, disk {_span(fit.disk_gib, 0)} GiB"))
        rows.append(("trust", _wrapped(fit.kv_gib_per_gpu.ground)))
    if host:
        rows.append(
            (
                "host RAM",
                _wrapped(
                    f"{_span(host.loaded_gib, 0)} GiB to serve, up to {host.loading_gib.high:.0f} while loading; "
                    f"{plan.question.profile.hardware.ram_gib} are there; trust: {host.loading_gib.ground}"
                ),
            )
        )
    if vram:
        rows.append(("per GPU", _wrapped(f"{_span(vram, 0)} GiB: {vram.ground}")))
    return rows


def _steps(plan: SessionPlan) -> list[str]:
    advice = plan.holding.advice
    lines = []
    for step in advice.steps if advice else ():
        lines.append(f"{step.name}: {step.gib_bought:+.2f} GiB, {step.tokens_bought:+,} tokens")
        lines += show.wrapped(f"  costs: {step.costs}", _room())
        lines += show.wrapped(f"  ground: {step.evidence}", _room())
    return lines


def _stack_rows(plan: SessionPlan) -> list[tuple[str, str]]:
    stack = plan.question.profile.stack
    parts = [
        f"{name} {value}"
        for name, value in (
            ("driver", stack.driver),
            ("CUDA", stack.cuda),
            ("torch", stack.torch),
            ("NCCL", stack.nccl),
        )
        if value
    ]
    if stack.gib:
        parts.append("GIB removed" if stack.gib == "remove" else "GIB kept")
    if isinstance(plan.stack, Contradiction):
        return [("stack", _wrapped(f"contradiction: {finding.sentence}")) for finding in plan.stack.findings]
    text = ", ".join(parts) or "whatever the machine has"
    notes = len(plan.stack.warnings)
    return [("stack", f"{text}; no contradiction" + (f", {notes} to know of (--explain)" if notes else ""))]


def _ready(start: ColdStartPlan) -> str:
    minutes = f"{start.total.value / 60:.0f} minutes ({start.total.low / 60:.0f} to {start.total.high / 60:.0f})"
    if start.total.high < 120:
        minutes = f"{start.total.value:.0f} s ({start.total.low:.0f} to {start.total.high:.0f})"
    by_name = {phase.name: phase for phase in start.phases}
    path = ", ".join(f"{n} {_short(by_name[n].seconds.value)}" for n in start.path if by_name[n].seconds.value >= 1)
    return f"{minutes}: {path}; {start.total.ground}"


def _short(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 90 else f"{seconds / 60:.1f}m"


def _price(plan: SessionPlan) -> str:
    if not plan.price_known:
        return f"not known: {plan.price_ground}"
    return f"{cents(plan.cost.usd_per_hour)}/h: {plan.price_ground}"


def _costs(plan: SessionPlan) -> str:
    cost = plan.cost
    if plan.price_known and not cost.usd_per_hour:
        return "nothing by the hour"
    parts = []
    if not plan.price_known:
        parts.append("the session: not known without a price per hour")
        cost = replace(cost, cold_start=None, preemption=None)
    if cost.cold_start:
        low, value, high = cost.cold_start
        parts.append(f"cold start {cents(value)} ({cents(low)} to {cents(high)})")
    if plan.price_known:
        parts.append(f"{cents(cost.worst)} at worst for {span(int(cost.hours * 3600))}")
    if cost.preemption is not None:
        parts.append(f"{cents(cost.preemption)} expected for starts again after preemption")
    if cost.seeding_once is not None and cost.bucket_per_month is not None:
        parts.append(f"seeding once {cents(cost.seeding_once)}, bucket {cents(cost.bucket_per_month)} a month")
    return ", ".join(parts)


def _span(figure: Figure, digits: int = 2) -> str:
    if figure.low == figure.high:
        return f"{figure.value:,.{digits}f}"
    return f"{figure.value:,.{digits}f} ({figure.low:,.{digits}f} to {figure.high:,.{digits}f})"


def _wrapped(text: str) -> str:
    return "\n".join(show.wrapped(text, _room()))


def _room() -> int:
    """Off a terminal lines end at 100 columns; on one its own width decides, and that is for `show` to do."""
    return 0 if show.columns(sys.stdout) else 100


# --- what follows ----------------------------------------------------------------------------------------------------


def _next(plan: SessionPlan, options: PlanOptions) -> str:
    """What people type next: the start that this plan is about."""
    holding = plan.holding
    if holding.engine_version:
        version, torch = holding.engine_version, plan.question.profile.stack.torch
        pins = f'engine.version = "{version}"' + (f', stack.torch = "{torch}"' if torch else "")
        return (
            f"a profile of your own with {pins} and these flags (kimisession profiles {options.profile} shows this one)"
        )
    gpus = f"{holding.gpu}:{plan.question.count}" if holding.gpu else options.gpus
    return " ".join(("kimisession start", options.profile, *_asked(options, gpus, holding.changes)))


def _asked(options: PlanOptions, gpus: str | None, changes: Mapping[str, FlagValue]) -> list[str]:
    """The options that `plan` and `start` share, as they were given, and what a wish changed, as words to type."""
    stated = (
        ("--gpus", gpus),
        ("--infra", options.infra),
        ("--checkpoint", options.checkpoint),
        ("--duration", f"{options.duration_s}s" if options.duration_s else None),
        ("--price", None if options.price_usd is None else f"{options.price_usd:f}"),
    )
    sets = {**(options.sets or {}), **changes}
    return [
        *(f"{flag} {shlex.quote(value)}" for flag, value in stated if value),
        *(f"--set {shlex.quote(f'{name}={_as_set(value)}')}" for name, value in sets.items()),
    ]


def _as_set(value: FlagValue) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _way_out(plan: SessionPlan, options: PlanOptions) -> str:
    wish = (("--context", options.context), ("--concurrency", options.concurrency))
    wished = [f"{flag} {value}" for flag, value in wish if value]
    again = " ".join(("kimisession plan", options.profile, *wished, *_asked(options, options.gpus, {})))
    if plan.refused or isinstance(plan.stack, Contradiction):
        return f"mend the profile, then kimisession plan {options.profile}"
    advice = plan.holding.advice
    if advice and advice.reached == "starts" and not plan.holding.changes and not wished:
        context = plan.holding.fit.resolved.max_model_len if plan.holding.fit else ""
        return f"{again} --context {context} says what to change"
    return f"{again} --explain"


def _print_lock(plan: SessionPlan) -> None:
    if isinstance(plan.stack, Lock):
        show.out(plan.stack.text.rstrip("\n"))
        show.next_step(f"kimisession plan {plan.question.profile.name} --lock > kimisession.lock.toml")


def _print_manifests(plan: SessionPlan) -> None:
    """For `kubectl apply -f -`. Rendered and checked against the published schemas; no cluster has run them."""
    from kimisession.core.plan.kubernetes import manifests, to_yaml

    question = plan.question
    if "/" not in question.checkpoint.repo:
        raise UsageMistake(
            f"--manifests: {question.profile.name} has no model on the hub that a pod could download",
            "kimisession plan kimi-k2.5 --manifests",
        )
    count = question.count if question.accelerator.architecture != "cpu" else 0
    made = manifests(question.profile, question.checkpoint, plan.flags, count, question.duration_s)
    show.out(to_yaml(made).rstrip("\n"))
    show.say("never run on a cluster; they have the hard cap only: kimisession start watches idleness as well")
    name = question.profile.name.replace(".", "-")
    show.next_step(
        f"kubectl apply -f FILE; kubectl wait --for=condition=complete --timeout=12h job/{name}-download; "
        f'kubectl patch job/{name}-serve -p \'{{"spec":{{"suspend":false}}}}\'; '
        f"kubectl port-forward job/{name}-serve 8000:8000"
    )


def explained(plan: SessionPlan) -> list[tuple[str, list[str]]]:
    """The arithmetic, line by line, under a title for each part."""
    parts: list[tuple[str, list[str]]] = []
    if plan.holding.fit:
        parts.append(("memory", list(plan.holding.fit.explain)))
    if plan.holding.host:
        parts.append(("host memory", list(plan.holding.host.explain)))
    findings = plan.stack.findings if isinstance(plan.stack, Contradiction) else ()
    notes = [f"{f.rule}: {f.sentence} [{f.source}]" for f in (*findings, *plan.stack.warnings)]
    if notes:
        parts.append(("stack", notes))
    if plan.start:
        lines = [
            f"{phase.name}: {_span(phase.seconds, 0)} s, after {', '.join(phase.after) or 'nothing'}: {phase.what} "
            f"[{phase.seconds.ground}]"
            for phase in plan.start.phases
        ]
        lines.append(f"path: {' > '.join(plan.start.path)} = {plan.start.total.value:.0f} s")
        parts.append(("cold start", lines))
    parts.append(("cost", _cost_lines(plan)))
    return parts


def _cost_lines(plan: SessionPlan) -> list[str]:
    cost, gib = plan.cost, plan.question.checkpoint.bytes / 2**30
    lines = [f"price: {_price(plan)}"]
    if plan.price_known:
        lines.append(f"at worst: {span(int(cost.hours * 3600))} x {_exact(cost.usd_per_hour)}/h = {cents(cost.worst)}")
    lines += [f"offer: {_offer(offer)}" for offer in (plan.question.market.offers if plan.question.market else ())[:5]]
    if cost.seeding_once is not None and cost.bucket_per_month is not None:
        lines.append(f"seeding: {SEED_HOURS} h x ${SEED_VM_USD_PER_HOUR} [public write-up, February 2026]")
        lines.append(
            f"bucket: {gib:.1f} GiB x ${BUCKET_USD_PER_GIB_MONTH} = {cents(cost.bucket_per_month)} a month "
            "[Google's price list, Standard, us-central1, read 2026-09-20]"
        )
    if plan.price_known and cost.usd_per_hour:
        lines.append(
            f"break-even: {_exact(cost.usd_per_hour)} / ${plan.question.api_usd_per_million} x 1,000,000 = "
            f"{cost.break_even_tokens_per_hour:,} tokens an hour [{_api_ground(plan.question.api_usd_per_million)}]"
        )
    if plan.question.preemptions_per_hour is None:
        lines.append("preemption: no rate was stated (--preemptions-per-hour), so nothing is added for it")
    elif cost.preemption is not None and cost.cold_start and plan.price_known:
        lines.append(
            f"preemption: {plan.question.preemptions_per_hour} an hour x {span(int(cost.hours * 3600))} x a cold start of "
            f"{_exact(cost.cold_start[1])} = {cents(cost.preemption)}"
        )
    return lines


def _exact(usd: Decimal) -> str:
    """Dollars with as many digits as it takes to calculate on with them, four at most."""
    return cents(usd) if usd == usd.quantize(Decimal("0.01")) else f"${usd:,.4f}"


def _api_ground(usd: Decimal) -> str:
    """Where the API's price is from."""
    return API_GROUND if usd == API_USD_PER_MILLION_OUTPUT else "stated by you with --api-price"


def _offer(offer: Offer) -> str:
    """One zone: what a catalog asks for there."""
    kinds = (("spot", offer.spot_usd), ("on demand", offer.on_demand_usd))
    asks = ", ".join(f"{cents(usd)}/h {kind}" for kind, usd in kinds if usd is not None)
    return f"{offer.zone} {offer.instance}: {asks}"


def as_data(plan: SessionPlan) -> dict[str, Any]:
    """The plan for --json: figures with interval and ground, money as strings."""
    question, holding, cost = plan.question, plan.holding, plan.cost
    fit = holding.fit
    figures = {}
    if fit:
        for name in (
            "weights_gib_per_gpu", "overhead_gib", "cudagraph_gib", "kv_gib_per_gpu", "kv_tokens", "longest_context",
            "concurrency", "host_ram_gib", "disk_gib",
        ):  # fmt: skip
            figures[name] = figure_data(getattr(fit, name))
    if holding.host:
        figures["host_ram_gib"] = figure_data(holding.host.loaded_gib)
        figures["host_ram_loading_gib"] = figure_data(holding.host.loading_gib)
    if holding.vram:
        figures["vram_gib_per_gpu"] = figure_data(holding.vram)
    findings = plan.stack.findings if isinstance(plan.stack, Contradiction) else ()
    return {
        "profile": question.profile.name,
        "accelerators": f"{question.accelerator.name}:{question.count}",
        "infra": question.infra,
        "checkpoint": question.checkpoint.name,
        "verdict": plan.answer,
        "reason": plan.reason,
        "calibrated": fit.calibrated if fit else False,
        "figures": figures,
        "engine": {
            "kind": question.profile.engine.kind,
            "version": holding.engine_version or question.profile.engine.version,
        },
        "flags": dict(plan.flags),
        "argv": list(flags_to_argv(plan.flags)),
        "changes": dict(holding.changes),
        "advice": _advice_data(plan),
        "refused_flags": [{"flag": r.flag, "why": r.why, "replacement": r.replacement} for r in plan.refused],
        "stack": {
            "contradictions": [f.sentence for f in findings],
            "warnings": [f.sentence for f in plan.stack.warnings],
        },
        "cold_start": _start_data(plan.start),
        "price": {"usd_per_hour": cost.usd_per_hour if plan.price_known else None, "ground": plan.price_ground},
        "cost": {
            "cold_start_usd": cost.cold_start[1] if cost.cold_start and plan.price_known else None,
            "worst_usd": cost.worst if plan.price_known else None,
            "hours": cost.hours,
            "seeding_once_usd": cost.seeding_once,
            "bucket_usd_per_month": cost.bucket_per_month,
            "preemption_usd": cost.preemption if plan.price_known else None,
            "break_even_output_tokens_per_hour": cost.break_even_tokens_per_hour if plan.price_known else None,
        },
        "offers": [
            {"zone": o.zone, "instance": o.instance, "spot_usd": o.spot_usd, "on_demand_usd": o.on_demand_usd}
            for o in (question.market.offers if question.market else ())
        ],
    }


def figure_data(figure: Figure) -> dict[str, Any]:
    """A figure with its interval and its ground."""
    return {"value": figure.value, "low": figure.low, "high": figure.high, "ground": figure.ground}


def _advice_data(plan: SessionPlan) -> dict[str, Any] | None:
    advice = plan.holding.advice
    if advice is None:
        return None
    steps = [
        {"name": s.name, "gib": s.gib_bought, "tokens": s.tokens_bought, "costs": s.costs, "evidence": s.evidence}
        for s in advice.steps
    ]
    return {
        "wish": advice.wish,
        "reached": advice.reached,
        "sentence": advice.sentence,
        "steps": steps,
        "flags": advice.flags,
    }


def _start_data(start: ColdStartPlan | None) -> dict[str, Any] | None:
    if start is None:
        return None
    phases = [{"name": p.name, "after": list(p.after), **figure_data(p.seconds)} for p in start.phases]
    return {"seconds": figure_data(start.total), "path": list(start.path), "phases": phases}
