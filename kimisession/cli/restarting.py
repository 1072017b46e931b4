"""`kimisession restart`: other engine flags on the machine that runs."""

from collections.abc import Mapping

from kimisession.cli import show
from kimisession.cli.opening import open_controller, pick_ready
from kimisession.cli.sessions import Progress, began_at, page, receipt, seconds_since, spent, summary, utc_now, why_text
from kimisession.cli.starting import parse_set
from kimisession.core.cost import cents, price_of
from kimisession.core.launch import flags_to_argv
from kimisession.core.ledger import Session
from kimisession.core.profile import FlagValue
from kimisession.errors import EngineFailed, Interrupted, UsageMistake


def run_restart(name: str | None, sets: tuple[str, ...], undo: bool, dry_run: bool, json: bool) -> None:
    """Restart, follow, and say what it saved against a fresh start."""
    if bool(sets) == undo:
        raise UsageMistake("say either what to change or --undo", "kimisession restart --set max-model-len=16384")
    changes = None if undo else dict(parse_set(text) for text in sets)
    controller = open_controller()
    before, _ = pick_ready(controller, name)
    if dry_run:
        what = "the flags of before" if changes is None else " ".join(f"{k}={v}" for k, v in changes.items())
        show.would(f"restart the engine of {before.name} with {what}; weights and caches stay")
        return
    progress = Progress(countdown=False)
    list(progress.lines(before, controller.refresh(before)[1], utc_now()))  # what was told when it started
    session, seen = before, None
    try:
        for session, seen in controller.restart(before, changes):
            for line in progress.lines(session, seen, utc_now()):
                show.say(line)
            show.flash(progress.flash(session, seen, utc_now()))
    except KeyboardInterrupt:
        raise Interrupted(
            "no longer watching; the engine restarts all the same", f"kimisession status {before.name}"
        ) from None
    show.clear()
    if not session.live or seen is None:
        receipt(session, utc_now())
        raise EngineFailed(f"session {session.name} ended: {why_text(session)}", f"kimisession logs {session.name}")
    if json:
        show.as_json("session", summary(session, seen, utc_now()))
    else:
        show.pairs(page(session, seen, utc_now()))
    if session.run > before.run + 1:
        raise EngineFailed(
            "the engine did not start with these flags and runs with those of before",
            f"kimisession logs {session.name} --run {before.run + 1} shows why",
        )
    if changes is not None and overtaken(session, changes):
        raise EngineFailed(
            f"another restart came between: the engine runs with {session.restarts[-1].flags}",
            f"kimisession status {session.name}",
        )
    if not json:
        show.out(saved(session))
        show.next_step(f"kimisession test {session.name}", f"kimisession restart {session.name} --undo")


def overtaken(session: Session, changes: Mapping[str, FlagValue]) -> bool:
    """Whether the engine was last started with other flags than these: two commands asked, and the keeper heard one."""
    return session.restarts[-1].flags != " ".join(flags_to_argv(changes))


def saved(session: Session) -> str:
    """What the restart took, and what this session's own cold start took: measured, not estimated."""
    began, restarted = began_at(session), session.restarts[-1].at
    if began is None or session.ready_at is None or session.first_ready_at is None or session.request is None:
        return "what it saved cannot be told: the ledger lacks the first start"
    took, cold = seconds_since(restarted, session.ready_at), seconds_since(began, session.first_ready_at)
    usd = price_of(
        session.request.usd_per_hour, session.request.at, session.request.at + (session.first_ready_at - began)
    )
    usd -= price_of(session.request.usd_per_hour, restarted, session.ready_at)
    word = "saved" if took <= cold else "lost"
    return (
        f"ready again after {took:.1f} s; this session's cold start took {cold:.1f} s: "
        f"{word} {abs(cold - took):.1f} s, {cents(abs(usd))}; {cents(spent(session, utc_now()))} so far"
    )
