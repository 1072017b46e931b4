"""`extend`, `stop`, `cost`: moving the end, the end, and what it took."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from kimisession.cli import show
from kimisession.cli.looking import raise_if_loud
from kimisession.cli.opening import BEYOND, after_the_end, open_controller, pick, pick_live
from kimisession.cli.sessions import REASONS, receipt, receipt_data, utc_now
from kimisession.core.cost import cents, cost_of, per_million
from kimisession.core.ledger import Session
from kimisession.errors import Interrupted, KimiError, LeakSuspected, UsageMistake
from kimisession.node.policy import span
from kimisession.store import Row

if TYPE_CHECKING:
    from kimisession.weights.errors import WeightsError
    from kimisession.weights.kept import Kept

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
    else:  # stopping twice is fine, also without a name
        sessions = [pick(controller, name)] if name or controller.open_ids() else []
    if not sessions:
        (show.say if json else show.out)("no session is running")
        show.next_step(BEYOND)
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
            except KeyboardInterrupt:
                told = f"interrupted while {session.name} was being stopped: whether it is gone is not known"
                raise Interrupted(told, f"kimisession stop {session.name} goes on") from None
        receipt(session, utc_now(), controller.chain(session))
    if failed:
        raise failed
    if sessions and not dry_run and not json:
        show.next_step("kimisession cost", "kimisession start")


@dataclass(frozen=True)
class Group:
    """What several sessions took together; those with a pretended price, or a lost one, left out."""

    name: str
    sessions: int
    usd: Decimal
    tokens: int | None

    @property
    def usd_per_million(self) -> Decimal | None:
        """Dollars for a million tokens, of all that was spent: cold starts and idle hours too."""
        return per_million(self.usd, self.tokens)


def groups(rows: Iterable[Row], tokens: Mapping[str, int], name: Callable[[Row], str]) -> list[Group]:
    """By what `name` says of each, sorted by that."""
    together: dict[str, list[Row]] = {}
    for row in rows:
        if not row.pretended and row.profile != UNKNOWN:
            together.setdefault(name(row), []).append(row)
    return [
        Group(
            key,
            len(found),
            sum((row.usd for row in found), Decimal(0)),
            sum(tokens.get(row.session, 0) for row in found) or None,
        )
        for key, found in sorted(together.items())
    ]


def week_of(row: Row) -> str:
    """The Monday of the week in which it was asked for, in UTC."""
    at = row.requested_at
    return f"{at - timedelta(days=at.weekday()):%Y-%m-%d}"


def _until_now(row: Row, live: Mapping[str, Session], now: datetime) -> Row:
    """A row as of this moment: the ledger has what a live session had taken when something last happened to it, and every
    total must be the sum of what is listed."""
    session = live.get(row.session)
    if session is None:
        return row
    cost = cost_of(session, now)
    return replace(row, usd=cost.usd, seconds=round(max((line.seconds for line in cost.lines), default=Decimal(0))))


def run_cost(name: str | None, newest: int, json: bool, storage: bool = False) -> None:
    """A list with its totals, or the receipt of one session. `storage`: ask the buckets too."""
    controller = open_controller()
    if name is not None:
        session = pick(controller, name)
        if session.live:
            try:
                session, _ = controller.refresh(session)
            except KimiError as error:  # what the ledger has is better than nothing, and says what it counts
                show.warn("not looked:", f"{error.message}; {error.hint}" if error.hint else error.message)
        receipt(session, utc_now(), controller.chain(session))
        raise_if_loud([session])
        if not json:
            show.next_step(*([f"kimisession status {session.name}"] if session.live else []), "kimisession cost")
        return
    looked, now = controller.live(), utc_now()
    live = {session.id: session for session, _ in looked}
    unseen = {session.id for session, seen in looked if seen.present is None}
    every, tokens = [_until_now(row, live, now) for row in controller.store.rows()], controller.store.tokens()
    rows = every[:newest]
    billed = [row for row in every if not row.pretended and row.profile != UNKNOWN]
    count, total = len(billed), sum((row.usd for row in billed), Decimal(0))
    weeks, profiles = groups(every, tokens, week_of), groups(every, tokens, lambda row: row.profile)
    kept_ = _ask_buckets(controller.store.buckets()) if storage else []
    if json:
        sessions = [live.get(row.session) or controller.store.session(row.session) for row in rows]
        receipts = [receipt_data(s, now, controller.chain(s)) for s in sessions]
        show.as_json(
            "costs",
            {
                "sessions": receipts,
                "usd": total,
                "count": count,
                "weeks": [{"week": g.name, **_group_data(g)} for g in weeks],
                "profiles": [{"profile": g.name, **_group_data(g)} for g in profiles],
                "storage": [_kept_data(url, found) for url, found in kept_] if storage else None,
            },
        )
        return
    if not rows:
        show.out("no session yet")
        show.next_step("kimisession start", BEYOND)
        return
    lines = []
    for row in rows:
        end = f"{row.state}, so far" if row.live else REASONS.get(row.reason, row.reason)
        end += ", cannot be seen now" if row.session in unseen else ""
        end += ", pretended" if row.pretended else ""
        began = f"{row.requested_at:%Y-%m-%d %H:%M}"
        took = "?" if row.profile == UNKNOWN else cents(row.usd)
        lines.append((row.name, began, span(float(row.seconds)), took, row.profile, end))
    show.table(("NAME", "BEGAN (UTC)", "UP", "COST", "PROFILE", "END"), lines, frozenset({1, 2, 3}))
    show.out(
        f"{count} {'session' if count == 1 else 'sessions'} took {cents(total)} in all"
        if count
        else "nothing was billed: every price here was pretended"
    )
    if count:
        show.table(("WEEK OF (UTC)", *_GROUP), [_group_row(group) for group in weeks], frozenset({1, 2, 3, 4}))
        show.table(("PROFILE", *_GROUP), [_group_row(group) for group in profiles], frozenset({1, 2, 3, 4}))
    _tell_storage(controller.store.buckets(), kept_, storage)
    if lost := sum(row.profile == UNKNOWN for row in rows):
        show.out(f"{lost} of these with ?: the ledger has lost the price, and no total has it")
    show.next_step("kimisession cost NAME shows a receipt")
    raise_if_loud(list(live.values()))


_GROUP = ("SESSIONS", "COST", "TOKENS", "$/MILLION")


def _group_row(group: Group) -> tuple[str, ...]:
    each = group.usd_per_million
    tokens = f"{group.tokens:,}" if group.tokens else "-"
    return group.name, str(group.sessions), cents(group.usd), tokens, cents(each) if each is not None else "-"


def _group_data(group: Group) -> dict[str, object]:
    return {
        "sessions": group.sessions,
        "usd": group.usd,
        "tokens": group.tokens,
        "usd_per_million_tokens": group.usd_per_million,
    }


# -- storage --------------------------------------------------------------------------------------------------------------


def _ask_buckets(urls: Iterable[str]) -> "list[tuple[str, Kept | WeightsError]]":
    """What each bucket holds, or why it does not say. Buckets and not their folders: all of a bucket is billed."""
    from kimisession.weights.errors import WeightsError
    from kimisession.weights.kept import kept

    found: list[tuple[str, Kept | WeightsError]] = []
    for url in dict.fromkeys("gs://" + url.removeprefix("gs://").partition("/")[0] for url in urls):
        try:
            found.append((url, kept(url)))
        except WeightsError as error:
            found.append((url, error))
    return found


def _tell_storage(urls: Sequence[str], found: "Sequence[tuple[str, Kept | WeightsError]]", asked: bool) -> None:
    from kimisession.weights.errors import WeightsError
    from kimisession.weights.kept import NOT_LISTED

    if urls and not asked:
        show.out("storage: kimisession cost --storage asks what the weights cost a month")
    for url, one in found:
        if isinstance(one, WeightsError):
            show.out(f"storage: {url} is not priced: {one.message}")
            continue
        beside = [f"{show.size(one.old_bytes)} in old generations"] if one.old_bytes else []
        beside += [f"{show.size(one.deleted_bytes)} deleted and still billed"] if one.deleted_bytes else []
        held = show.size(one.total_bytes) + (f" ({', '.join(beside)})" if beside else "")
        usd = f"not priced: {one.why}" if one.usd_per_month is None else f"{cents(one.usd_per_month)} a month"
        where = f" in {one.location}" if one.location else f" ({one.why})"
        show.out(f"storage: {url} holds {held}{where}: {usd}; not in it: {NOT_LISTED}")


def _kept_data(url: str, one: "Kept | WeightsError") -> dict[str, Any]:
    from kimisession.weights.errors import WeightsError
    from kimisession.weights.kept import NOT_LISTED

    if isinstance(one, WeightsError):
        empty = dict.fromkeys(("location", "live_bytes", "old_bytes", "deleted_bytes", "usd_per_month"))
        return {"bucket": url, **empty, "why": one.message, "unpriced": [url]}
    return {
        "bucket": one.bucket,
        "location": one.location or None,
        "live_bytes": one.live_bytes,
        "old_bytes": one.old_bytes,
        "deleted_bytes": one.deleted_bytes,
        "usd_per_month": one.usd_per_month,
        "why": one.why or None,
        "unpriced": [NOT_LISTED],
    }
