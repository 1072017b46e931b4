"""`extend`, `stop`, `cost`: moving the end, the end, and what it took."""

from datetime import timedelta
from decimal import Decimal

from kimisession.cli import show
from kimisession.cli.looking import raise_if_loud
from kimisession.cli.opening import after_the_end, open_controller, pick, pick_live
from kimisession.cli.sessions import REASONS, receipt, receipt_data, utc_now
from kimisession.core.cost import cents, cost_of
from kimisession.core.ledger import Session
from kimisession.errors import LeakSuspected, UsageMistake
from kimisession.node.policy import span

#: The profile of a session that was found by its labels alone: what was agreed of it, the price too, is lost.
UNKNOWN = "?"


def run_extend(name: str | None, added_s: int, dry_run: bool, json: bool) -> None:
    """Move the hard cap."""
    controller = open_controller()
    session, _ = pick_live(controller, name)
    if not session.live:
        raise UsageMistake(f"session {session.name} is gone: there is nothing to extend", after_the_end(session))
    if dry_run:
        moved = session.deadline + timedelta(seconds=added_s) if session.deadline else None
        show.would(f"move the hard cap of {session.name} to {show.moment(moved) if moved else 'nowhere'}")
        return
    session = controller.extend(session, added_s)
    if json:
        show.as_json("extended", extended_data(session, added_s))
    elif session.deadline:
        show.out(f"{session.name}: hard cap moved to {show.moment(session.deadline)}")
        show.next_step(f"kimisession status {session.name}")


def extended_data(session: Session, added_s: int) -> dict[str, object]:
    """An extension for --json."""
    latest = session.request.latest if session.request else None
    return {
        "session": session.id,
        "name": session.name,
        "added_s": added_s,
        "deadline": session.deadline,
        "latest": latest,
    }


def run_stop(name: str | None, everything: bool, dry_run: bool, json: bool) -> None:
    """Tear down, prove it, print the receipt."""
    controller = open_controller()
    if everything:
        sessions = [controller.store.session(session_id) for session_id in controller.open_ids()]
    else:
        sessions = [pick(controller, name, gone_too=name is not None)]
    if not sessions:
        (show.say if json else show.out)("no session is running")
    failed: LeakSuspected | None = None
    for session in sessions:
        if dry_run:
            show.would(f"stop {session.name}: {', '.join(r.id for r in session.resources) or 'nothing exists yet'}")
            continue
        if not session.live:
            show.say(f"{session.name} is gone already")
        else:
            show.say(f"stopping {session.name}")
            try:
                session = controller.stop(session, "kimisession stop", "user")  # noqa: PLW2901
            except LeakSuspected as error:  # the others must be stopped all the same
                failed = error
                continue
        receipt(session, utc_now(), controller.chain(session))
    if failed:
        raise failed


def run_cost(name: str | None, newest: int, json: bool) -> None:
    """A list, or the receipt of one session."""
    controller = open_controller()
    if name is not None:
        session = pick(controller, name)
        if session.live:
            session, _ = controller.refresh(session)
        receipt(session, utc_now(), controller.chain(session))
        raise_if_loud([session])
        return
    live = {session.id: session for session, _ in controller.live()}
    rows, now = controller.store.rows(newest=newest), utc_now()
    count, total = controller.store.totals()
    if json:
        sessions = [controller.store.session(row.session) for row in rows]
        show.as_json("costs", {"sessions": [receipt_data(s, now) for s in sessions], "usd": total, "count": count})
        return
    if not rows:
        show.out("no session yet")
        show.next_step("kimisession start")
        return
    lines = []
    for row in rows:
        session_now = live.get(row.session)
        cost = cost_of(session_now, now) if session_now else None
        usd = cost.usd if cost else row.usd
        seconds = max((line.seconds for line in cost.lines), default=Decimal(0)) if cost else Decimal(row.seconds)
        end = f"{row.state}, so far" if row.live else REASONS.get(row.reason, row.reason)
        end += ", pretended" if row.pretended else ""
        began = f"{row.requested_at:%Y-%m-%d %H:%M}"
        took = "?" if row.profile == UNKNOWN else cents(usd)
        lines.append((row.name, began, span(float(seconds)), took, row.profile, end))
    show.table(("NAME", "BEGAN (UTC)", "UP", "COST", "PROFILE", "END"), lines, frozenset({1, 2, 3}))
    show.out(
        f"{count} {'session' if count == 1 else 'sessions'} took {cents(total)} in all"
        if count
        else "nothing was billed: every price here was pretended"
    )
    if lost := sum(row.profile == UNKNOWN for row in rows):
        show.out(f"{lost} of these with ?: the ledger has lost the price, and no total has it")
    show.next_step("kimisession cost NAME shows a receipt")
    raise_if_loud(list(live.values()))
