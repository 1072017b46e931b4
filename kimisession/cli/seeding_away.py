"""`kimisession seed` into a bucket in the cloud: quote, question, a rented machine that seeds, then the proof that it is gone."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal

from kimisession.cli import show
from kimisession.cli.asking import agreed
from kimisession.cli.opening import open_controller
from kimisession.cli.seeding import SeedWords, ensure_bucket, print_manifest
from kimisession.cli.sessions import Progress, progress_of, receipt, utc_now, why_text
from kimisession.cli.starting import answering_ctrl_c
from kimisession.controller import Controller
from kimisession.core.catalog import BY_NAME
from kimisession.core.cost import UNPRICED, cents, price_of
from kimisession.core.launch import LaunchSpec, check_name
from kimisession.core.ledger import Session
from kimisession.core.profile import Checkpoint, Profile
from kimisession.core.quote import Choices, Quote, make_quote
from kimisession.core.seeding import (
    MEMORY_GIB_PER_VCPU,
    VCPUS,
    Seeding,
    region_for,
    seed_spec,
    seeding_name,
    seeding_profile,
)
from kimisession.engines.base import open_engine
from kimisession.errors import BudgetRefused, EngineFailed, EngineMissing, Interrupted, KimiError, UsageMistake
from kimisession.store import NameTaken
from kimisession.weights.bucket import open_bucket
from kimisession.weights.errors import NotSeeded
from kimisession.weights.hub import HubSource, token_here
from kimisession.weights.manifest import Manifest
from kimisession.weights.seal import read_seal
from kimisession.weights.seed_plan import sealed_already

#: Where a seeding may run: rented, or here with the same parts, which is for trying it out.
PLACES = ("gcp", "local")


def seed_away(words: SeedWords, profile: Profile, checkpoint: Checkpoint, url: str) -> None:
    """Seed on a machine of its own, and follow it to its end. A seeding that runs already is followed, not begun again."""
    infra = words.infra or PLACES[0]
    if infra not in PLACES:
        raise UsageMistake(f"a seeding cannot be run on {infra}", f"use --infra {' or '.join(PLACES)}, or --here")
    if words.source is not None and not words.source.startswith("hub:"):
        raise UsageMistake(
            f"{words.source} is on this machine, and a rented one cannot read it",
            "add --here to send it from this machine",
        )
    try:
        name = check_name(seeding_name(profile.name))
    except ValueError as mistake:
        raise UsageMistake(str(mistake), "rename the profile") from None
    try:
        open_engine(infra)  # refuse a place that cannot be used before the network is asked
    except EngineMissing as error:
        raise EngineMissing(error.message, f"{error.hint}, or add --here to send it from this machine") from None
    controller = open_controller()
    try:
        live = controller.resume(name)
        if live is not None:
            _rejoin(controller, live, url, words)
            return
        plan = _plan(words, profile, checkpoint, url, infra)
        if isinstance(plan, Manifest):
            show.say(f"{url} is sealed with this revision already: nothing is rented")
            print_manifest(url, plan, words.json)
            return
        quote = plan.quote(name)
        spec = controller.check(quote, plan.spec)
        show.say(show.paint("Quote", "bold", sys.stderr))
        if not show.SETTINGS.quiet:
            show.pairs(_quote_rows(plan, quote), sys.stderr)
        if words.dry_run:
            show.would(f"rent a machine on {infra}{_in(plan.region)} and seed {url} from {plan.seeding.repo}")
            return
        _agree(words.yes)
        if url.startswith("gs://"):
            ensure_bucket(url, words.region, profile.name)
    except KeyboardInterrupt:
        raise Interrupted("interrupted before anything was rented: nothing is billed") from None
    try:
        session = controller.request(quote, spec)
    except NameTaken:  # another command was quicker by a moment
        other = controller.resume(name)
        if other is None:
            raise
        _rejoin(controller, other, url, words)
        return
    _attend(controller, session, lambda: controller.launch(session, spec, hf_token=token_here()), url, words)


@dataclass(frozen=True)
class _Plan:
    """What was found out before the question."""

    words: SeedWords
    profile: Profile
    checkpoint: Checkpoint
    seeding: Seeding
    infra: str
    region: str
    usd_per_hour: Decimal
    ground: str

    @property
    def vcpus(self) -> int:
        """Of the machine."""
        return self.words.cpus or VCPUS

    def quote(self, name: str) -> Quote:
        """Raises UsageMistake for a cap that cannot be meant."""
        pretended = self.infra == "local"
        choices = Choices(
            name=name,
            infra=self.infra,
            accelerator=BY_NAME["CPU"],
            count=self.vcpus,
            bucket_url=self.seeding.bucket_url,
            port=0,
            checkpoint=replace(self.checkpoint, flags={}),
            engine_python="python3",
            usd_per_hour=self.words.price_usd,
            duration_s=self.words.duration_s,
            budget_usd=self.words.budget_usd,
            unguarded=self.words.unguarded,
        )
        profile = seeding_profile(self.profile, self.seeding, self.usd_per_hour, self.ground, pretended)
        try:
            return make_quote(profile, choices, utc_now())
        except ValueError as mistake:
            raise UsageMistake(f"--duration: {mistake}", "kimisession seed --help") from None

    def spec(self, quote: Quote, session_id: str, owner: str) -> LaunchSpec:
        """What is launched."""
        return seed_spec(quote, session_id, owner, self.seeding, self.region)


def _plan(words: SeedWords, profile: Profile, checkpoint: Checkpoint, url: str, infra: str) -> _Plan | Manifest:
    """The commit, the size, the bucket, the region and the price; the seal where there is nothing left to do."""
    repo = words.source.removeprefix("hub:") if words.source else checkpoint.repo
    source = HubSource(repo, words.revision or "main")
    commit = source.revision()
    weights_bytes = sum(file.size for file in source.files())
    location = _location(url, words.region)
    if location is not None and (sealed := sealed_already(open_bucket(url), checkpoint.repo, commit)):
        return sealed
    region = ""
    if infra == "gcp":
        try:
            region = region_for(words.region or location or "")
        except ValueError as mistake:
            raise UsageMistake(f"{url}: {mistake}", "use a bucket in a region, like us-central1") from None
    seeding = Seeding(checkpoint.repo, repo, commit, url, weights_bytes, hub_address(), bool(token_here()))
    usd_per_hour, ground = _price(words, infra, region)
    if ground == UNPRICED and words.budget_usd is not None:
        raise BudgetRefused(
            "nobody here knows what that machine costs, so no budget can be kept",
            "say it with --price, in dollars an hour",
        )
    return _Plan(words, profile, checkpoint, seeding, infra, region, usd_per_hour, ground)


def _location(url: str, region: str | None) -> str | None:
    """Where the bucket is; None while it is still to be made. Raises UsageMistake."""
    if not url.startswith("gs://"):
        return ""
    from kimisession.weights.gcs import GcsBucket

    bucket = GcsBucket.at(url)
    if not bucket.exists():
        if region is None:
            ensure_bucket(url, None, "")  # says what is missing
        return None
    location = bucket.location()
    if region and location and region.lower() != location:
        raise UsageMistake(f"{url} exists, and is in {location}, not in {region}", "leave --region out")
    return location


def _price(words: SeedWords, infra: str, region: str) -> tuple[Decimal, str]:
    if infra == "local":
        return Decimal(0), "your own machine"
    from kimisession.cloud.cpu_prices import cpu_offer

    vcpus = words.cpus or VCPUS
    offer = cpu_offer(vcpus, MEMORY_GIB_PER_VCPU * vcpus, region) if words.price_usd is None else None
    return (offer.usd_per_hour, offer.ground) if offer else (Decimal(0), UNPRICED)


def _in(region: str) -> str:
    return f" in {region}" if region else ""


def _quote_rows(plan: _Plan, quote: Quote) -> list[tuple[str, str]]:
    """What a person agrees to."""
    seeding, rate = plan.seeding, quote.usd_per_hour
    priced = quote.price_ground != UNPRICED
    low, high = seeding.minutes
    dollars = f", {cents(rate * low / 60)} to {cents(rate * high / 60)}" if priced and rate else ""
    spot = ", a spot machine" if plan.infra == "gcp" else ""
    rows = [
        ("seeding", f"{seeding.repo} at {seeding.commit[:16]}, {show.size(seeding.weights_bytes)}"),
        ("into", seeding.bucket_url),
        ("session", quote.choices.name),
        ("where", f"{plan.vcpus} vCPUs, no GPU, on {plan.infra}{_in(plan.region)}{spot}"),
        (
            "price",
            f"{cents(rate)}/h{' (pretended)' if quote.pretended else ''}"
            if priced
            else "not priced: no catalog of SkyPilot here; say it with --price",
        ),
        *([("price from", quote.price_ground)] if priced else []),
        ("expected", f"{low} to {high} minutes{dollars}: 330 MB/s (public write-up, February 2026) to a quarter of it"),
        ("ends", f"when the bucket is sealed; hard cap {show.moment(quote.deadline, quote.at)}"),
    ]
    if quote.budget_at and quote.choices.budget_usd is not None:
        at = show.moment(quote.budget_at, quote.at)
        rows.append(("budget", f"{cents(quote.choices.budget_usd)}, spent at {at}"))
    worst = cents(price_of(rate, quote.at, quote.ends_at)) if priced else "not priced"
    rows.append(("worst case", f"{worst} at the caps"))
    rows.append(
        ("broken off", "once the machine is up, Ctrl-C leaves it running; after whatever end the same command goes on")
    )
    return rows


def _agree(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageMistake("there is no terminal to ask for a yes", "add --yes; nothing was rented")
    if not agreed("Rent it?"):
        raise KimiError("nothing was rented", "kimisession seed --dry-run shows the quote alone")


def hub_address() -> str:
    """HF_ENDPOINT, for the rented machine; empty for the hub itself. It becomes a word of a command there, so one with a name
    or a password in it raises UsageMistake."""
    address = os.environ.get("HF_ENDPOINT", "")
    if "@" in address.partition("://")[2].partition("/")[0]:
        raise UsageMistake(
            "HF_ENDPOINT has a name or a password in it, and everybody on the machine could read it in a list of processes",
            "leave it out of the address; a token goes by HF_TOKEN",
        )
    return address


def _rejoin(controller: Controller, session: Session, url: str, words: SeedWords) -> None:
    """The same command again: follow what runs. Raises UsageMistake when it is another command."""
    asked = dict(word.partition("=")[::2] for word in (session.request.engine_flags if session.request else "").split())
    commit = (
        words.revision if words.revision and re.fullmatch("[0-9a-f]{7,40}", words.revision) else ""
    )  # else a branch
    if asked.get("bucket") != url or not asked.get("revision", "").startswith(commit):
        raise UsageMistake(
            f"session {session.name} seeds {asked.get('bucket', 'something else')} at {asked.get('revision', '?')[:16]} now",
            f"kimisession status {session.name}, or end it with kimisession stop {session.name}",
        )
    if words.dry_run:
        show.would(f"follow session {session.name}, which seeds {url} already")
        return
    show.say(f"session {session.name} seeds {url} already: following it")
    _attend(controller, session, lambda: session, url, words)


def _attend(
    controller: Controller, session: Session, launch: Callable[[], Session], url: str, words: SeedWords
) -> None:
    """Follow to the end. Ctrl-C while the machine is being made takes it down again; afterwards it only stops looking."""
    with answering_ctrl_c():
        try:
            session = _followed(controller, launch())
        except KeyboardInterrupt:
            _left(controller.store.session(session.id))
    show.clear()
    manifest = _seal_of(session, url)
    if manifest is None:
        receipt(session, utc_now())
        message = f"{session.name} ended before {url} was sealed: {why_text(session)}"
        again = "what was sent stays in the bucket: the same command again goes on there"
        if session.reason == "user":
            raise KimiError(message, again)
        raise EngineFailed(message, f"{again}; kimisession logs {session.name} has its words")
    print_manifest(url, manifest, words.json)
    if not words.json:
        receipt(session, utc_now())
        profile = session.request.profile if session.request else "PROFILE"
        show.next_step(f"kimisession start {profile} --bucket {url}")


def _followed(controller: Controller, session: Session) -> Session:
    """The session when it is gone. Off a terminal every tenth is told."""
    progress, told = Progress(countdown=False), 0
    for current, seen in controller.follow(session, every_s=0.5):
        session = current
        moved = progress_of(seen, "weights")
        tenth = int(10 * moved["done"] / moved["total"]) if moved and moved.get("total") else 0
        if told < tenth < 10:
            told = tenth
            show.say(f"  weights   {show.size(moved['done'])} of {show.size(moved['total'])}")
        for line in progress.lines(current, seen, utc_now()):
            show.say(line)
        show.flash(progress.flash(current, seen, utc_now()))
    return session


def _seal_of(session: Session, url: str) -> Manifest | None:
    """The bucket tells whether it was done: a machine may be gone before it could say so."""
    wanted = session.request.engine_flags if session.request else ""
    try:
        manifest = read_seal(open_bucket(url))
    except NotSeeded:
        return None
    return manifest if f"revision={manifest.revision}" in wanted.split() else None


def _left(session: Session) -> None:
    """Say what goes on, and how to come back to it."""
    if not session.live or session.teardown:
        if session.live:
            raise Interrupted(f"{session.name} was being taken down when you left", f"kimisession stop {session.name}")
        receipt(session, utc_now())
        raise Interrupted("the machine was taken down again; nothing is left")
    request = session.request
    moments = [at for at in (session.deadline, request.budget_at if request else None) if at]
    priced = request is not None and request.price_ground != UNPRICED
    price = f" at {cents(request.usd_per_hour)}/h" if request and priced else ""
    armed = f", at {show.moment(min(moments), utc_now())} at the latest" if moments else ""
    raise Interrupted(
        f"{session.name} runs on{price} and ends by itself{armed}",
        f"the same command again comes back to it; kimisession stop {session.name} ends it",
    )
