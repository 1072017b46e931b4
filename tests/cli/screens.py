"""What people see, drawn from fixed sessions, moments and dollars through the program's own functions.

`python tests/cli/screens.py NAME` draws one screen on this terminal, or into this pipe. Screens of the ledger's own commands
run the real program on a ledger that was written here; those that show a session that lives are given what an engine would
have observed, and the time.
"""

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from good_values import choices, requested

from kimisession.cli import show
from kimisession.cli.benching import compare
from kimisession.cli.ending import run_cost
from kimisession.cli.looking import FIGURES, HEAD, row
from kimisession.cli.sessions import Progress, page
from kimisession.cli.starting import _print_quote, told_ready
from kimisession.cli.watching import frame
from kimisession.core.ledger import (
    Benched,
    EndedOnNode,
    Event,
    Fact,
    LaunchRequested,
    PhaseBegan,
    PhaseEnded,
    Ready,
    ResourceCreated,
    ResourceGone,
    Session,
    SessionRequested,
    TeardownConfirmed,
    Unconfirmed,
    fold,
)
from kimisession.core.lifecycle import Layer, Observation
from kimisession.core.quote import Quote, make_quote
from kimisession.profile_file import load_profile
from kimisession.store import open_store

AT = datetime(2026, 3, 5, 14, 0, 0, tzinfo=UTC)
PHASES = {"weights": 0.2, "boot": 0.8, "load": 2.0, "compile": 0.8, "memory": 0.6, "graphs": 0.8, "serve": 0.4}
LAYERS = (
    Layer("keeper", True, "its process lives"),
    Layer("wrapper", True, "holds its lock"),
    Layer("supervisor", True, "holds its lock"),
)


def after(seconds: float) -> datetime:
    """A moment so long after the start."""
    return AT + timedelta(seconds=seconds)


def the_quote() -> Quote:
    """What `start rehearsal --name demo --budget 10` quotes."""
    profile = load_profile("rehearsal")
    chosen = choices(
        infra="local",
        bucket_url="file:///home/ada/.local/share/kimisession/buckets/rehearsal",
        budget_usd=Decimal(10),
        checkpoint=profile.checkpoints[0],
    )
    return make_quote(profile, chosen, AT)


def wanted() -> SessionRequested:
    """That quote, agreed to."""
    quote = the_quote()
    event: SessionRequested = requested(
        AT,
        infra="local",
        profile="rehearsal",
        checkpoint="stand-in",
        price_ground=quote.price_ground,
        idle_s=quote.idle_s,
        deadline=quote.deadline,
        latest=quote.latest,
        budget_usd=Decimal(10),
        budget_at=quote.budget_at,
        pretended=True,
    )
    return event


def started(until: str = "serve") -> Session:
    """The session of `the_quote`, up to the end of a phase; after the last it is ready."""
    events: list[Event] = [
        wanted(),
        LaunchRequested(AT),
        ResourceCreated(AT, "local/demo-9f3a6c1e", "machine", Decimal("26.00"), "pretended"),
    ]
    passed = 0.4
    for name, took in PHASES.items():
        events.append(PhaseBegan(after(passed), name))
        passed += took
        if name == until and until != "serve":
            return fold("demo-9f3a6c1e", events)
        events.append(PhaseEnded(after(passed), name, False))
    return fold("demo-9f3a6c1e", [*events, Fact(after(passed), "kv_tokens", "32768"), Ready(after(passed))])


def seen(now: datetime, ends_in: float, journal: tuple[dict[str, Any], ...] = (), **beat: Any) -> Observation:
    """What the engine observes: a heartbeat of now after other lines of the journal."""
    line = {"at": now.isoformat(), "kind": "beat", "ends_utc": (now + timedelta(seconds=ends_in)).timestamp(), **beat}
    return Observation(now, True, journal=(*journal, line), layers=LAYERS)


LOADING = tuple(
    {
        "at": after(1.6 + n / 10).isoformat(),
        "kind": "progress",
        "phase": "load",
        "done": 4 * n,
        "total": 64,
        "unit": "shards",
    }
    for n in range(8)
)
TRAFFIC = ({"at": after(20).isoformat(), "kind": "beat", "activity": "busy", "running": 2, "tokens": 1000},)
UNUSED: dict[str, Any] = {"phase": "ready", "activity": "quiet", "running": 0, "tokens": 0, "next": "never-used"}
IDLE: dict[str, Any] = {"phase": "ready", "activity": "quiet", "running": 0, "tokens": 3140, "next": "idle"}
BUSY: dict[str, Any] = {"phase": "ready", "activity": "busy", "running": 2, "tokens": 3140, "next": "hard-cap"}


def loading() -> Observation:
    """Two seconds into the start."""
    told = {"phase": "load", "next": "never-ready", "evidence": "not ready 2s after the start, in phase load"}
    return seen(after(2.4), 57.6, LOADING, **told)


def start() -> None:
    """`kimisession start rehearsal --name demo --budget 10 -y`, from the quote until it is ready."""
    _print_quote(the_quote())
    session, now = started(), after(6.0)
    observed = seen(now, 12, **UNUSED, evidence="ready for 0s of 12s, no request yet")
    for line in Progress(countdown=False).lines(session, observed, now):
        show.say(line)
    told_ready(session, observed, now)


def status() -> None:
    """`kimisession status` with a ready, a starting, a busy and an unconfirmed session."""
    now = after(400)
    others = {
        "kimi-k2-5": ("Ready", seen(now, 5000, **{**BUSY, "running": 14}, evidence="hard cap, up for 40s")),
        "long-named-experiment": (
            "",
            seen(now, 2100, LOADING, phase="load", evidence="no progress in phase load for 3s"),
        ),
        "lost": ("Unconfirmed", Observation(now, None, "us-central1 does not answer: timed out after 20 s")),
    }
    rows = [row(started(), seen(now, 300, **IDLE, evidence="idle 15m of 20m, last request 13:51:40 UTC"), now)]
    for name, (state, observed) in others.items():
        events: list[Event] = [
            dataclasses.replace(wanted(), name=name, pretended=False),
            LaunchRequested(AT),
            ResourceCreated(AT, f"gcp/{name}", "machine", Decimal("26.00"), "agreed"),
            *([Ready(after(90))] if state == "Ready" else []),
            *([Unconfirmed(after(300), "the zone could not be asked")] if state == "Unconfirmed" else []),
        ]
        rows.append(row(fold(name, events), observed, now))
    show.table(HEAD, rows, FIGURES)
    show.next_step("kimisession status NAME", "kimisession connect NAME", "kimisession stop NAME")
    show.error("not proven gone: lost: the zone could not be asked", "kimisession stop lost tries again", 7)


def status_one() -> None:
    """`kimisession status demo`."""
    now = after(13)
    show.out(show.paint("demo", "bold", sys.stdout))
    show.pairs(page(started(), seen(now, 3, **IDLE, evidence="idle 3s of 6s, last request 14:00:10 UTC"), now))


def _watch(session: Session, observed: Observation, now: datetime) -> None:
    """One frame where there is a screen, lines elsewhere: as `kimisession.cli.watching` chooses."""
    if show.moves_cursor(sys.stderr):
        title, *rows = frame(session, observed, now, show.columns(sys.stderr))
        show.Screen().draw([show.paint(title, "bold", sys.stderr), *rows])
    else:
        for line in Progress(countdown=True).lines(session, observed, now):
            show.say(line)


def watch_starting() -> None:
    """`kimisession status --watch` while it loads."""
    _watch(started("load"), loading(), after(2.4))


def watch_idle() -> None:
    """`kimisession status --watch` while the idle countdown runs."""
    now = after(33)
    _watch(started(), seen(now, 3, TRAFFIC, **IDLE, evidence="idle 3s of 6s, last request 14:00:30 UTC"), now)


def watch_busy() -> None:
    """`kimisession status --watch` while it answers."""
    now = after(33)
    _watch(started(), seen(now, 267, TRAFFIC, **BUSY, evidence="hard cap, up for 33s"), now)


def _ledger() -> None:
    """Three sessions that are gone, and two benches."""
    store = open_store(Path(os.environ["KIMISESSION_STATE_HOME"]))
    rows = (
        ("demo", 14.1, "idle", "idle 6s of 6s, last request 14:00:08 UTC", True),
        ("kimi-k2-5", 6127.3, "budget", "the budget is spent at the price that was agreed at start", False),
        ("long-named-experiment", 7200.0, "hard-cap", "hard cap, up for 2h", False),
    )
    for number, (name, took, reason, evidence, pretended) in enumerate(rows):
        at = AT + timedelta(days=number)
        end, machine = at + timedelta(seconds=took), f"local/{name}"
        asked = dataclasses.replace(wanted(), at=at, name=name, pretended=pretended, stand_in=pretended)
        store.append(
            f"{name}-0000000{number}",
            [
                asked,
                LaunchRequested(at),
                ResourceCreated(at, machine, "machine", Decimal("26.00"), "agreed"),
                Ready(at + timedelta(seconds=6)),
                EndedOnNode(end, reason, evidence, 10),
                ResourceGone(end, machine, "test"),
                TeardownConfirmed(end, "test"),
            ],
        )
    for label, flags, faster in (
        ("as shipped", "max-model-len=8192", 1.0),
        ("longer context", "max-model-len=65536", 1.2),
    ):
        store.append("kimi-k2-5-00000001", [_bench(label, flags, faster)])
    store.close()


def _bench(label: str, flags: str, slower: float) -> Benched:
    def spread(mean: float) -> dict[str, float]:
        return {"mean": mean, "min": mean * 0.9, "max": mean * 1.3, "p50": mean, "p99": mean * 1.2}

    passes = [
        {
            "at_once": at_once, "requests": 3 * at_once, "errors": 0, "first_error": None, "null_contents": 0,
            "wall_s": 4.5 * slower, "wall_per_request_s": 1.5 * slower / at_once, "latency_s": spread(1.5 * slower),
            "tokens_per_s": spread(85.3 / slower), "output_tokens_per_s": 85.3 * at_once / slower,
            "ttft_s": spread(0.12), "tpot_s": spread(0.0117 * slower), "itl_s": spread(0.0117 * slower),
            "prompt_tokens": 60 * at_once, "completion_tokens": 384 * at_once, "reasoning_tokens": 0,
        }
        for at_once in (1, 16)
    ]  # fmt: skip
    result = {
        "began_at": after(600).isoformat(), "model": "kimi-k2.5", "engine_version": "0.15.0", "rounds": 3, "max_tokens": 128,
        "thinking": False, "ignore_eos": False, "passes": passes,
    }  # fmt: skip
    return Benched(after(600), label, json.dumps(result), "kimi-k2.5", flags, "0.15.0", "H100:8", False)


def cost() -> None:
    """`kimisession cost`."""
    run_cost(None, 20, False)


def cost_one() -> None:
    """`kimisession cost kimi-k2-5`."""
    run_cost("kimi-k2-5", 20, False)


def bench_compare() -> None:
    """`kimisession bench --compare 1 2`."""
    compare("1", "2", False)


SCREENS: dict[str, Callable[[], None]] = {
    "start": start,
    "status": status,
    "status-one": status_one,
    "watch-starting": watch_starting,
    "watch-idle": watch_idle,
    "watch-busy": watch_busy,
    "cost": cost,
    "cost-one": cost_one,
    "bench-compare": bench_compare,
}


#: Between two screens of one run.
NEXT = "\f\n"


def main(names: list[str]) -> None:
    """Draw screens, on a ledger of their own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KIMISESSION_STATE_HOME"] = os.environ["KIMISESSION_CONFIG_HOME"] = folder
        _ledger()
        for number, name in enumerate(names):
            sys.stdout.write(NEXT if number else "")
            sys.stdout.flush()
            SCREENS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
