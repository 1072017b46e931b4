"""One good value of each kind that tests vary one field of, and Hypothesis strategies around them."""

import secrets
import typing
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

from kimisession.core.catalog import BY_NAME
from kimisession.core.ledger import EVENTS, Event, SessionRequested
from kimisession.core.profile import Checkpoint, Engine, Hardware, Limits, Model, Price, Profile
from kimisession.core.quote import Choices

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)

PROFILE = Profile(
    name="good",
    summary="one good profile",
    status="runs here",
    model=Model("kimi-k2.5"),
    engine=Engine("vllm", "stand-in", ("@{python}", "-m", "kimisession.node.standin"), {"max-model-len": 8192}),
    hardware=Hardware(("CPU:1",), "memory"),
    checkpoints=(Checkpoint("only", "stand-in", 1, ("cpu",), 8192),),
    price=Price(Decimal("26.00"), "a test's"),
    limits=Limits(),
)


def an_id(name: str) -> str:
    """An id for a session with real processes: they are found by it, and ended by it, on all of this machine."""
    return f"{name}-{secrets.token_hex(4)}"


def choices(**changes: Any) -> Choices:
    """Choices on the CPU of the in-memory engine, varied."""
    good: dict[str, Any] = {
        "name": "demo",
        "infra": "memory",
        "accelerator": BY_NAME["CPU"],
        "count": 1,
        "bucket_url": "file:///weights",
        "port": 8000,
        "checkpoint": PROFILE.checkpoints[0],
        "engine_python": "python3",
    }
    return Choices(**{**good, **changes})


def requested(at: datetime = NOON, **changes: Any) -> SessionRequested:
    """The first event of a good session, varied."""
    good: dict[str, Any] = {
        "name": "demo",
        "owner": "someone",
        "profile": "good",
        "checkpoint": "only",
        "infra": "memory",
        "accelerators": "CPU:1",
        "served_name": "kimi-k2.5-stand-in",
        "port": 8000,
        "usd_per_hour": Decimal("26.00"),
        "price_ground": "a test's",
        "idle_s": 1200,
        "deadline": at + timedelta(hours=2),
        "latest": at + timedelta(hours=8),
        "budget_usd": None,
        "budget_at": None,
        "engine_flags": "max-model-len=8192",
        "stand_in": True,
        "pretended": False,
    }
    return SessionRequested(at, **{**good, **changes})


MOMENTS = st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
MONEY = st.decimals(0, 1000, places=4, allow_nan=False, allow_infinity=False)
#: Few, so that the events of a random ledger speak of the same things.
WORDS = st.sampled_from(["a", "b", "machine", "load"]) | st.text(max_size=20)


def _value(hint: Any) -> st.SearchStrategy[Any]:
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if options:
        return st.none() | _value(options[0])
    strategies: dict[Any, st.SearchStrategy[Any]] = {
        datetime: MOMENTS,
        Decimal: MONEY,
        int: st.integers(-(2**40), 2**40),
        bool: st.booleans(),
        str: WORDS,
    }
    return strategies[hint]


def events_of(kind: str) -> st.SearchStrategy[Event]:
    """Any event of one kind."""
    cls = EVENTS[kind]
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: _value(hints[f.name]) for f in fields(cls)})


#: Any event at all, the same number of each kind.
ANY_EVENT = st.sampled_from(sorted(EVENTS)).flatmap(events_of)
