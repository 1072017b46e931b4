"""`start --recover`: what is gone on with, where, and under which caps."""

from dataclasses import replace
from typing import TYPE_CHECKING

from kimisession.cloud.prices import market
from kimisession.controller import Controller
from kimisession.core.catalog import parse_accelerators
from kimisession.core.cost import STATED
from kimisession.core.ledger import Session
from kimisession.core.plan.prices import Offer
from kimisession.core.recovery import RECOVERABLE, next_zones, zones_of
from kimisession.errors import UsageMistake

if TYPE_CHECKING:
    from kimisession.cli.starting import StartOptions


#: What a recovery never changes.
_AGREED = frozenset({"--duration", "--budget", "--gpus", "--idle"})


def find_lost(controller: Controller, name: str, profile: str, typed: tuple[str, ...]) -> tuple[Session, ...]:
    """The session of this name that was lost, and those that it went on from, newest first, each proven gone. Raises
    UsageMistake when there is nothing to go on with, LeakSuspected when the lost machine is not proven gone."""
    if caps := [flag for flag in typed if flag in _AGREED]:
        raise UsageMistake(
            f"--recover keeps what was agreed to, so {', '.join(caps)} cannot be given with it",
            f"kimisession start --recover --name {name}",
        )
    session = controller.store.by_name(name)
    if session is None or session.request is None:
        raise UsageMistake(f"there is no session {name!r} to go on with", "`kimisession status --all` lists them")
    if session.request.profile != profile:
        raise UsageMistake(
            f"session {name} runs profile {session.request.profile}",
            f"kimisession start {session.request.profile} --recover --name {name}",
        )
    if session.live:
        session, _ = controller.refresh(session)
    if session.live and (session.ended is not None or session.teardown is not None):
        session = controller.stop(session, "start --recover", session.reason)
    if session.reason not in RECOVERABLE:
        why = f"ended: {session.reason}" if not session.live else f"is {session.state.value}"
        raise UsageMistake(f"session {name} {why}; only a machine that was lost is gone on from", "kimisession start")
    return controller.chain(session)


def same_again(options: "StartOptions", lost: Session) -> "StartOptions":
    """The options of the lost session. A price that a person stated is kept; another one is looked up again. Engine flags
    are those of this command line: the ledger has them as text for people only."""
    request = lost.request
    assert request is not None  # find_lost saw it
    return replace(
        options,
        infra=request.infra,
        gpus=request.accelerators,
        idle_s=request.idle_s,
        checkpoint=request.checkpoint,
        price_usd=options.price_usd or (request.usd_per_hour if request.price_ground == STATED else None),
    )


def elsewhere(lost: tuple[Session, ...]) -> tuple[Offer, ...]:
    """Where to try next by the price list; empty where there is none, or no zones: the place chooses."""
    request = lost[0].request
    assert request is not None
    if request.infra != "gcp":
        return ()
    accelerator, count = parse_accelerators(request.accelerators)
    found = market("gcp", accelerator.name, count)
    return next_zones(found.offers, zones_of(lost), request.usd_per_hour) if found else ()
