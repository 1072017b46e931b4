"""`kimisession status --watch`: a live screen on a terminal, plain lines elsewhere, NDJSON with --json."""

import shutil
import subprocess
import sys
from datetime import datetime

from kimisession.cli import show
from kimisession.cli.sessions import Progress, page, phase_table, receipt, summary, utc_now
from kimisession.controller import Controller
from kimisession.core.ledger import Session, State
from kimisession.core.lifecycle import Observation
from kimisession.errors import LeakSuspected


def watch(controller: Controller, session: Session, json: bool) -> None:
    """Follow until it is gone, then print the receipt. Ctrl-C stops watching, not the session."""
    try:
        if json:
            _ndjson(controller, session)
        elif sys.stdout.isatty() and show.moves_cursor(sys.stderr) and not show.SETTINGS.quiet:
            _screen(controller, session)
        else:
            _lines(controller, session)
    except KeyboardInterrupt:
        show.say(f"no longer watching; {session.name} runs on and ends by itself (kimisession stop {session.name})")
        sys.exit(130)


def _ndjson(controller: Controller, session: Session) -> None:
    for current, seen in controller.follow(session, every_s=1.0):
        show.as_json("session", summary(current, seen, utc_now()))
        _loud(current)


def _lines(controller: Controller, session: Session) -> None:
    progress = Progress(countdown=True)
    for current, seen in controller.follow(session):
        for line in progress.lines(current, seen, utc_now()):
            show.say(line)
        _loud(current)
    _over(controller, session)


def _screen(controller: Controller, session: Session) -> None:
    warned = 0
    with show.Screen() as screen:
        for current, seen in controller.follow(session, every_s=0.5):
            warnings = [str(line.get("text", "")) for line in seen.journal if line.get("kind") == "warn"]
            for text in warnings[warned:]:
                screen.clear()
                show.warn("warning", text)
                notify(f"kimisession {current.name}", text)
            warned = len(warnings)
            title, *rows = frame(current, seen, utc_now(), show.columns(sys.stderr))
            screen.draw([show.paint(title, "bold", sys.stderr), *rows])
            _loud(current)
    _over(controller, session)


def frame(session: Session, seen: Observation, now: datetime, columns: int) -> list[str]:
    """The lines of the live screen for a terminal of so many columns: a title, the phases while it starts, the page."""
    starting = session.state is State.STARTING
    rows = page(session, seen, now)
    rows += [] if starting else [("traffic", traffic(seen))]
    phases = [line[: columns - 1] for line in phase_table(session, seen, now)] if starting else []
    return [f"{session.name}  (Ctrl-C stops watching, not the session)", *phases, *show.pair_lines(rows, columns)]


def traffic(seen: Observation, over_s: float = 10.0) -> str:
    """Requests and tokens per second over the last heartbeats, out of the engine's own counters."""
    beats = [line for line in seen.journal if line.get("kind") == "beat"]
    if not beats or beats[-1].get("activity") == "unknown":
        return "unknown"
    last = beats[-1]
    then = datetime.fromisoformat(last["at"])
    for first in reversed(beats):
        passed = (then - datetime.fromisoformat(first["at"])).total_seconds()
        if passed >= over_s:
            break
    rate = (last["tokens"] - first["tokens"]) / passed if passed > 0 else 0.0
    requests = f"{last['running']} {'request' if last['running'] == 1 else 'requests'}"
    return f"{last['activity']}, {requests}, {max(0.0, rate):.0f} tokens/s"


def notify(title: str, text: str) -> None:
    """A bell, and a desktop notification where there is a desktop."""
    sys.stderr.write("\a")
    program = shutil.which("notify-send")
    if program:
        subprocess.Popen([program, "--", title, text], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _loud(session: Session) -> None:
    if session.state is State.UNCONFIRMED:
        message = f"not proven gone: {session.name}: {session.unconfirmed}"
        raise LeakSuspected(message, f"kimisession stop {session.name} tries again")


def _over(controller: Controller, session: Session) -> None:
    show.clear()
    receipt(controller.store.session(session.id), utc_now())
    show.next_step("kimisession cost", "kimisession start")
