"""`kimisession start`: quote, question, launch, cold start, ready."""

import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

from kimisession.cli import show
from kimisession.cli.asking import agreed
from kimisession.cli.opening import open_controller
from kimisession.cli.planning import PlanOptions, fit_line, make_plan, price_elsewhere
from kimisession.cli.recovering import elsewhere, find_lost, same_again
from kimisession.cli.seeding import MADE_HERE, bucket_url
from kimisession.cli.sessions import EXPECTED, Progress, page, receipt, spent, summary, utc_now, why_text
from kimisession.cloud.prices import market
from kimisession.controller import Controller
from kimisession.core.catalog import parse_accelerators
from kimisession.core.cost import cents
from kimisession.core.diagnose import diagnose
from kimisession.core.launch import check_name
from kimisession.core.ledger import Session, State
from kimisession.core.lifecycle import Observation
from kimisession.core.node_steps import engine_python
from kimisession.core.profile import FlagValue, Profile, choose_checkpoint
from kimisession.core.quote import Choices, Quote, make_quote
from kimisession.core.recovery import RECOVERABLE, under_the_same_caps
from kimisession.engines.base import open_engine
from kimisession.errors import DoesNotFit, EngineFailed, EngineMissing, Interrupted, KimiError, TimedOut, UsageMistake
from kimisession.node.policy import span
from kimisession.profile_file import load_profile
from kimisession.store import NameTaken
from kimisession.weights.bucket import open_bucket
from kimisession.weights.seal import read_seal, verify

T = TypeVar("T")

#: Up to this much is read back and compared before a start; larger weights are checked while they are pulled.
READ_BACK_BYTES = 4 << 30


@dataclass(frozen=True)
class StartOptions:
    """The command's options, parsed."""

    profile: str
    name: str | None
    infra: str | None
    gpus: str | None
    idle_s: int | None
    duration_s: int | None
    budget_usd: Decimal | None
    price_usd: Decimal | None
    checkpoint: str | None
    bucket: str | None
    port: int | None
    engine_python: str
    on_demand_fallback: bool
    webhook_file: str | None
    sets: tuple[str, ...]
    typed: tuple[str, ...]  # flags on this command line that only a new session can obey
    yes: bool
    dry_run: bool
    json: bool
    force_fit: bool = False
    unguarded: bool = False
    recover: bool = False


def run_start(options: StartOptions) -> None:
    """From options to a ready session, or to one sentence."""
    profile = load_profile(options.profile)
    name = _checked(
        lambda: check_name(profile.name.replace(".", "-") if options.name is None else options.name), "--name"
    )
    infra = options.infra or profile.hardware.infra
    try:
        open_engine(infra)  # refuse a place that does not exist before anything else is looked at
    except EngineMissing:
        if not options.dry_run:  # else said below the quote
            raise
    controller = open_controller()
    try:
        lost = find_lost(controller, name, profile.name, options.typed) if options.recover else ()
        if lost and lost[0].request:
            options, infra = same_again(options, lost[0]), lost[0].request.infra
        resumed = controller.resume(name)
        if resumed is not None:
            _resume(controller, resumed, profile.name, options)
            return
        quote = _quote(profile, options, name, infra, controller.ports_in_use())
        if lost:
            agreed = quote
            quote = _checked(lambda: under_the_same_caps(agreed, lost, elsewhere(lost)), "--recover")
        fit = _check_plan(quote, options.force_fit)
        try:
            spec = controller.check(quote)
            _check_weights(quote)
        except KimiError:
            if options.dry_run:  # what it would take is worth knowing, also where something is still missing
                _print_quote(quote, fit)
            raise
        _print_quote(quote, fit)
        if options.dry_run:
            if options.json:
                show.as_json("quote", quote_data(quote, fit))
            show.say("dry run: nothing was created")
            return
        _agree(options.yes)
    except KeyboardInterrupt:
        raise Interrupted("interrupted before anything was created: nothing is billed") from None
    webhook = _read_webhook(options.webhook_file)
    try:
        session = controller.request(quote, spec)
    except NameTaken:  # another command was quicker by a moment
        other = controller.resume(name)
        if other is None:
            raise
        _resume(controller, other, profile.name, options)
        return
    _attended(controller, session, lambda: controller.launch(session, spec, webhook), options.json)


def _checked(make: Callable[[], T], flag: str) -> T:
    try:
        return make()
    except ValueError as mistake:
        raise UsageMistake(f"{flag}: {mistake}", "kimisession start --help") from None


def _quote(profile: Profile, options: StartOptions, name: str, infra: str, taken: set[int]) -> Quote:
    if options.on_demand_fallback and options.price_usd is None:
        raise UsageMistake(
            "--on-demand-fallback: machines on demand cost several times the spot price",
            "say with --price what an hour may cost at most",
        )
    accelerator, count = _checked(
        lambda: parse_accelerators(options.gpus or profile.hardware.accelerators[0]), "--gpus"
    )
    blamed = "--gpus" if options.gpus and not options.checkpoint else "--checkpoint"
    checkpoint = _checked(lambda: choose_checkpoint(profile, accelerator.architecture, options.checkpoint), blamed)
    elsewhere = price_elsewhere(profile, f"{accelerator.name}:{count}", infra) if options.price_usd is None else None
    dearest = _dearest(infra, accelerator.name, count) if options.price_usd is None else None
    choices = Choices(
        name=name,
        infra=infra,
        accelerator=accelerator,
        count=count,
        bucket_url=bucket_url(profile.name, options.bucket),
        port=options.port or _free_port(infra, taken),
        checkpoint=checkpoint,
        engine_python=options.engine_python or (sys.executable if infra == "local" else engine_python(infra)),
        on_demand_fallback=options.on_demand_fallback,
        unguarded=options.unguarded,
        usd_per_hour=elsewhere[0] if elsewhere else options.price_usd,
        price_ground=elsewhere[1] if elsewhere else "",
        idle_s=options.idle_s,
        duration_s=options.duration_s,
        dearest_usd=dearest[0] if dearest else None,
        budget_usd=options.budget_usd,
        sets=dict(parse_set(text) for text in options.sets),
    )
    quote = _checked(lambda: make_quote(profile, choices, utc_now()), "--duration")
    # A budget out of the settings is for places that bill; one that was typed must not be a cap that never acts.
    meant = "--budget" in options.typed or infra == "gcp"
    if meant and quote.choices.budget_usd is not None and quote.usd_per_hour <= 0:
        raise UsageMistake(
            f"--budget: at {cents(quote.usd_per_hour)} an hour {cents(quote.choices.budget_usd)} are never spent",
            "say with --price what an hour costs, or leave --budget out: the hard cap ends it",
        )
    return quote


#: What a session decides itself: where the engine listens, under which key and name, and what it serves.
OURS = ("host", "port", "model", "served-model-name", "api-key", "uds", "root-path")


def parse_set(text: str) -> tuple[str, FlagValue]:
    """`max_model_len=16384`: the engine's own spelling, underscores allowed. true and false are switches."""
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("-").replace("_", "-")
    if not key or not equals:
        raise UsageMistake(f"--set: {text!r} is not NAME=VALUE", "for example --set max-model-len=16384")
    if any(own.startswith(key) for own in OURS) or key.endswith(("key", "token", "password", "secret")):
        raise UsageMistake(
            f"--set: {key} is not for --set: the session sets it itself, or it is a secret, which no flag may hold",
            "the endpoint stays on loopback with a key of its own; see kimisession start --help",
        )
    return key, {"true": True, "false": False}.get(value, value)


def _read_webhook(path: str | None) -> str | None:
    """The webhook's address out of its file: such addresses are secrets, so they are never in argv or config."""
    if path is None:
        return None
    try:
        url = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageMistake(f"--webhook-file: {path}: {error.strerror}", "nothing was created") from None
    if not url.startswith(("https://", "http://")):
        raise UsageMistake(f"--webhook-file: {path} holds no http address", "nothing was created")
    return url


def _free_port(infra: str, taken: set[int]) -> int:
    """The first port from 8000 that nobody listens on and no live session was promised. A node under Slurm may be shared
    with people whose ports nobody here can know: there it is drawn by lot."""
    if infra == "slurm":
        return 20000 + secrets.randbelow(10000)
    from kimisession.engines.local import promise_port

    return next((port for port in range(8000, 8100) if port not in taken and promise_port(port)), 8000)


def _check_plan(quote: Quote, force: bool) -> str | None:
    """What `plan` says of this quote, in one line. A flag that the engine's own parser refuses, a stack that contradicts
    itself and a model that surely does not fit are refused before anything exists; `force` lets the last two pass."""
    choices = quote.choices
    plan = make_plan(
        quote.profile,
        PlanOptions(
            profile=quote.profile.name,
            infra=choices.infra,
            gpus=f"{choices.accelerator.name}:{choices.count}",
            checkpoint=choices.checkpoint.name,
            sets=choices.sets,
            price_usd=quote.usd_per_hour,
        ),
    )
    if plan.refused:
        said = "; ".join(str(refusal) for refusal in plan.refused)
        engine = f"{quote.profile.engine.kind} {quote.profile.engine.version}"
        raise UsageMistake(f"{engine} would not take its flags: {said}", "mend the profile or --set, then try again")
    if plan.answer == "does not start" and not force:
        raise DoesNotFit(
            f"{quote.profile.name} would not start: {plan.reason}",
            f"kimisession plan {quote.profile.name} --explain; --force-fit starts it all the same",
        )
    return fit_line(plan)


def _check_weights(quote: Quote) -> None:
    """A bucket without a seal, or with a wrong byte, is refused before a machine exists. A folder of a Slurm cluster need not
    be here: its login node was asked for it, and what lies there for an engine that reads it in place may have no seal."""
    url = quote.choices.bucket_url
    local = url.startswith("file://")
    folder = Path(url.removeprefix("file://"))
    on_cluster = quote.choices.infra == "slurm" and local
    if on_cluster and not folder.exists():
        return
    bucket = open_bucket(url)
    try:
        manifest = read_seal(bucket)
        verify(bucket, manifest, deep=local and manifest.total_bytes <= READ_BACK_BYTES)
    except DoesNotFit as error:
        if on_cluster and quote.profile.load == "in-place" and (folder / "config.json").exists():
            show.say(f"{folder} has no seal: nobody has checked these weights")
            return
        raise DoesNotFit(error.message, _seed_command(quote.profile.name)) from None


def _seed_command(profile: str) -> str:
    return f"kimisession seed {profile}" + ("" if profile in MADE_HERE else " --from FOLDER")


def _print_quote(quote: Quote, fit: str | None = None) -> None:
    if not show.SETTINGS.quiet:
        show.say(show.paint("Quote", "bold", sys.stderr))
        show.pairs(quote_rows(quote, fit), sys.stderr)


def quote_rows(quote: Quote, fit: str | None = None) -> list[tuple[str, str]]:
    """What a person agrees to."""
    choices, profile = quote.choices, quote.profile
    rows = [
        ("session", f"{choices.name}, profile {profile.name} ({profile.status})"),
        ("where", f"{choices.accelerator.name} x {choices.count} on {choices.infra}"),
        ("engine", f"{profile.engine.kind} {profile.engine.version}, checkpoint {choices.checkpoint.name}"),
        ("weights", choices.bucket_url),
        *([("fit", fit)] if fit else []),
        ("price", f"{cents(quote.usd_per_hour)}/h{' (pretended)' if quote.pretended else ''}"),
        ("price from", quote.price_ground),
        *_dearer(quote),
    ]
    if profile.coldstart:
        low, high = profile.coldstart.minutes
        usd_low, usd_high = (cents(quote.usd_per_hour * minutes / 60) for minutes in (low, high))
        rows.append(("cold start", f"{low} to {high} minutes, {usd_low} to {usd_high}: {profile.coldstart.source}"))
    rows.append(("ends", f"after {span(quote.idle_s)} idle; hard cap {show.moment(quote.deadline, quote.at)}"))
    if quote.budget_at and choices.budget_usd is not None:
        rows.append(("budget", f"{cents(choices.budget_usd)}, spent at {show.moment(quote.budget_at, quote.at)}"))
    rows.append(("worst case", f"{cents(quote.worst_usd)} at the caps"))
    return rows


def _dearest(infra: str, accelerator: str, count: int) -> tuple[Decimal, str, datetime] | None:
    """What the dearest zone asks that spot may be found in: dollars an hour, the zone, and the list's moment."""
    found = market("gcp", accelerator, count) if infra == "gcp" else None
    asked = [(offer.spot_usd, offer.zone) for offer in found.offers if offer.spot_usd is not None] if found else []
    return (*max(asked), found.as_of) if found and asked else None


def _dearer(quote: Quote) -> Iterator[tuple[str, str]]:
    """The dearest price, where budget and worst case go by it."""
    choices = quote.choices
    dearest = _dearest(choices.infra, choices.accelerator.name, choices.count)
    if dearest and choices.dearest_usd is not None and choices.dearest_usd > quote.usd_per_hour:
        usd, zone, as_of = dearest
        words = f"{cents(usd)}/h in {zone}, list of {as_of:%Y-%m-%d}, should spot be found nowhere else"
        yield "up to", f"{words}; budget and worst case go by it"


def quote_data(quote: Quote, fit: str | None) -> dict[str, object]:
    """A quote for --json."""
    choices, coldstart = quote.choices, quote.profile.coldstart
    return {
        "name": choices.name,
        "profile": quote.profile.name,
        "infra": choices.infra,
        "accelerators": f"{choices.accelerator.name}:{choices.count}",
        "checkpoint": choices.checkpoint.name,
        "bucket": choices.bucket_url,
        "fit": fit,
        "usd_per_hour": quote.usd_per_hour,
        "price_ground": quote.price_ground,
        "pretended": quote.pretended,
        "cold_start_minutes": list(coldstart.minutes) if coldstart else None,
        "idle_s": quote.idle_s,
        "deadline": quote.deadline,
        "budget_usd": choices.budget_usd,
        "budget_at": quote.budget_at,
        "worst_usd": quote.worst_usd,
    }


def _agree(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageMistake("there is no terminal to ask for a yes", "add --yes; nothing was created")
    if not agreed("Start it?"):
        raise KimiError("nothing was created", "kimisession start --dry-run shows the quote alone")


def _unheard(options: StartOptions, session: Session) -> tuple[str, ...]:
    """The flags that a session that exists cannot obey. Place, checkpoint and port may be typed again as they are."""
    had = session.request
    same = (
        {
            "--infra": had.infra == options.infra,
            "--checkpoint": had.checkpoint == options.checkpoint,
            "--port": had.port == options.port,
        }
        if had
        else {}
    )
    return tuple(flag for flag in options.typed if not same.get(flag))


def _resume(controller: Controller, session: Session, profile: str, options: StartOptions) -> None:
    """`start` of a name that exists goes on with it."""
    if session.request and session.request.profile != profile:
        raise UsageMistake(
            f"session {session.name} exists already and runs profile {session.request.profile}",
            f"choose another --name, or run: kimisession stop {session.name}",
        )
    if asked := _unheard(options, session):
        raise UsageMistake(
            f"session {session.name} exists already, so {', '.join(asked)} would change nothing",
            f"leave it out to go on with {session.name}; extend, restart or stop change a session",
        )
    if options.dry_run:
        show.would(f"go on with session {session.name}, which exists already")
        return
    show.say(f"session {session.name} exists already: going on with it")
    _attended(controller, session, lambda: session, options.json)


def _attended(controller: Controller, session: Session, launch: Callable[[], Session], json: bool) -> None:
    """Launch and follow to ready. Ctrl-C before that tears down; a second one leaves at once and says what is armed."""
    with answering_ctrl_c() as heard:
        try:
            session, seen = _follow_to_ready(controller, launch())
            if session.request and session.request.infra != "local":
                controller.engines(session.request.infra).base_url(session.id, session.request.port)
                session, seen = controller.refresh(session)
        except KeyboardInterrupt:
            _interrupted(controller, controller.store.session(session.id), heard)
        else:
            _ready(session, seen, json)


@contextmanager
def answering_ctrl_c() -> Iterator[list[int]]:
    """Answer the first Ctrl-C at once: what it begins may take a while. Yields the list of those heard."""
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        heard.append(number)
        if len(heard) == 1:
            os.write(2, b"\ninterrupted (Ctrl-C again leaves at once)\n")  # may be in the middle of a print
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else somebody wants it otherwise, as a shell does of what it runs with &
        signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)


def _follow_to_ready(controller: Controller, session: Session) -> tuple[Session, Observation]:
    progress = Progress(countdown=False)
    for current, seen in controller.follow(session, every_s=0.1):
        now = utc_now()
        for line in progress.lines(current, seen, now):
            show.say(line)
        if current.state is State.READY:
            show.clear()
            return current, seen
        if not current.live:
            _failed(controller, current)
        show.flash(progress.flash(current, seen, now))
    raise EngineFailed(f"session {session.name} ended", "kimisession cost shows its receipt")


def _failed(controller: Controller, session: Session) -> None:
    """It ended instead of getting ready: say why, with cause and fix where the log is known; print the receipt."""
    lines: list[str] = []
    with suppress(KimiError):  # a machine that is gone took its log with it; its journal was heard before
        lines = list(controller.engines(session.request.infra).logs(session.id, False)) if session.request else []
    known = diagnose(lines[-400:])
    show.clear()
    for line in lines[-6:]:
        show.say(f"  | {line[:160]}")
    receipt(session, utc_now())
    message = f"session {session.name} ended before it was ready: {why_text(session)}"
    if session.reason == "user":
        raise KimiError(f"session {session.name} was stopped before it was ready", "kimisession cost")
    failure = TimedOut if session.reason == "never-ready" else EngineFailed
    if session.reason in RECOVERABLE:
        profile = session.request.profile if session.request else ""
        raise EngineFailed(message, f"kimisession start {profile} --recover --name {session.name}")
    if session.reason in EXPECTED:
        raise failure(message, f"kimisession logs {session.name}")
    if known:
        raise failure(f"{message}; cause: {known.cause}", known.fix)
    raise failure(message, f"kimisession logs {session.name}")


def _interrupted(controller: Controller, session: Session, heard: list[int]) -> None:
    if not session.launched_at and not session.resources:
        raise Interrupted("interrupted before anything was created: nothing is billed")
    if session.state is State.READY:
        raise Interrupted(f"detached: {session.name} runs on", f"kimisession stop {session.name}")
    try:
        if len(heard) < 2 and session.live:
            show.say(f"tearing down {_ids(session)}, {cents(spent(session, utc_now()))} so far")
            session = controller.stop(session, "Ctrl-C", "user")
    except KeyboardInterrupt:
        session = controller.store.session(session.id)
    if session.live:
        raise Interrupted(_left_alone(session, utc_now()), f"kimisession stop {session.name}")
    receipt(session, utc_now())
    raise Interrupted(f"session {session.name} was torn down; nothing is left")


def _ids(session: Session) -> str:
    return ", ".join(r.id for r in session.resources) or "what may exist of it"


def _left_alone(session: Session, now: datetime) -> str:
    """What a second Ctrl-C leaves behind: the ids, what they cost, and what ends them if nobody does."""
    request = session.request
    moments = [at for at in (session.deadline, request.budget_at if request else None) if at]
    usd = f"{cents(spent(session, now))} so far" + (f" at {cents(request.usd_per_hour)}/h" if request else "")
    armed = f"; if nobody does, it ends by itself at {show.moment(min(moments), now)}" if moments else ""
    return f"left while {_ids(session)} was being torn down: {usd}{armed}"


def _ready(session: Session, seen: Observation, json: bool) -> None:
    told_ready(session, seen, utc_now(), json)


def told_ready(session: Session, seen: Observation, now: datetime, json: bool = False) -> None:
    """What `start` ends with."""
    if json:
        show.as_json("session", summary(session, seen, now))
        return
    show.out(show.paint(f"{session.name} is ready", "bold", sys.stdout))
    show.pairs(page(session, seen, now))
    name = session.name
    show.next_step(f"kimisession test {name}", f"kimisession connect {name}", f"kimisession status {name} --watch")
