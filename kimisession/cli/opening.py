"""Open the ledger and find the session that a command means."""

from kimisession.cli import show
from kimisession.controller import Controller
from kimisession.core.ledger import Session, SessionRequested, State
from kimisession.core.lifecycle import Observation
from kimisession.errors import KimiError, LeakSuspected, UsageMistake
from kimisession.paths import state_home
from kimisession.profile_file import profile_files
from kimisession.settings import settings
from kimisession.store import Store, open_store

#: Where to look for what this ledger never knew or has lost: no row of it, and no place asked for it, is no proof.
BEYOND = "`kimisession sweep` asks the cloud what this ledger does not know"

#: The ledgers that this process opened.
_OPENED: list[Store] = []


def open_controller() -> Controller:
    """The controller over this user's ledger, which looks on the configured place too."""
    home = state_home()
    store = open_store(home)
    _OPENED.append(store)
    return Controller(store, home / "keys", places=tuple(filter(None, ("local", _infra()))))


def _infra() -> str | None:
    """The configured place. Settings that cannot be read keep nobody from seeing and ending what runs: it is only told."""
    try:
        return settings()["infra"].value
    except UsageMistake as mistake:
        show.say(f"warning: {mistake.message}; going on without settings")
    except OSError as error:  # the folder that this was typed in is gone
        show.say(f"warning: settings cannot be read here: {error.strerror}; going on without")
    return None


def not_proven_gone() -> LeakSuspected | None:
    """What every command says that opened a ledger in which a session is not proven gone; None when all is well."""
    if not _OPENED:
        return None
    loud = [row for row in _OPENED[-1].rows(live_only=True) if row.state == State.UNCONFIRMED.value]
    if not loud:
        return None
    return LeakSuspected(
        f"not proven gone, and perhaps billed: {', '.join(row.name for row in loud)}",
        f"kimisession stop {loud[0].name} tries again",
    )


def pick(controller: Controller, name: str | None, *, gone_too: bool = False) -> Session:
    """The session that is meant: by name or id, or the only live one; with `gone_too` else the newest of all. Raises
    UsageMistake that lists what there is."""
    if name is not None:
        session = controller.store.by_name(name)
        if session is None:
            raise UsageMistake(f"there is no session {name!r}", f"`kimisession status --all` lists them; {BEYOND}")
        return session
    rows = controller.store.rows(live_only=True)
    if not rows and gone_too:
        rows = controller.store.rows(newest=1)
    if not rows:
        raise UsageMistake("no session is running", f"start one with `kimisession start`; {BEYOND}")
    if len(rows) > 1:
        names = ", ".join(sorted(row.name for row in rows))
        raise UsageMistake(f"there are {len(rows)} live sessions: {names}", "name the one that you mean")
    return controller.store.session(rows[0].session)


def pick_ready(controller: Controller, name: str | None) -> tuple[Session, SessionRequested]:
    """`pick_live` of a session whose endpoint serves, with what it was started as. Raises KimiError otherwise."""
    session, _ = pick_live(controller, name)
    if session.state is not State.READY:
        what = f"session {session.name} is {session.state.value}, not ready"
        raise KimiError(what, f"kimisession status {session.name} --watch" if session.live else after_the_end(session))
    if session.request is None:
        raise KimiError(f"the ledger has lost what session {session.id} was")
    return session, session.request


def after_the_end(session: Session) -> str:
    """What people can do about a session that is gone."""
    profile = session.request.profile if session.request else ""
    again = f"kimisession start {profile}" if profile in profile_files() else "kimisession start"
    return f"kimisession cost {session.name} shows what it took, {again} begins another"


def pick_live(controller: Controller, name: str | None) -> tuple[Session, Observation]:
    """`pick`, freshly observed."""
    return controller.refresh(pick(controller, name))
