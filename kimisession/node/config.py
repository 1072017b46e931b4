"""What the keeper is told: one JSON file, written by whoever launches the machine.

Times: `*_s` are seconds; `*_utc` are seconds since 1970. Every absolute moment comes with a duration beside it
(`duration_s`), and the shorter of the two holds: a machine whose clock is wrong must not live longer for it.
Text in argv may name `@{disk}`, `@{python}`, `@{port}`, `@{machine}`: paths that only the machine knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """Something to run before the engine; starts when all of `after` are done."""

    name: str
    argv: tuple[str, ...]
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineProcess:
    """The engine: how to start it, where it listens, what to ask for."""

    kind: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    served_name: str


@dataclass(frozen=True)
class Config:
    """All that a keeper knows. See notes/architecture.md for who sets what."""

    session: str
    steps: tuple[Step, ...]
    engine: EngineProcess | None  # None: the session is done when its steps are
    hard_cap_utc: float
    duration_s: float
    budget_utc: float | None
    idle_s: float
    unused_s: float
    ready_within_s: float
    coldstart_stall_s: float
    stall_s: float
    unknown_s: float
    warn_s: float
    tick_s: float
    scrape_s: float
    stop_grace_s: float
    silent_s: float  # how long the keeper may miss its heartbeat before the wrapper ends it
    watch_terminals: bool
    ephemeral_disk: bool


def from_json(text: str) -> Config:
    """Read a config. Raises ValueError, KeyError or TypeError: better no engine than a wrong limit."""
    raw: dict[str, Any] = json.loads(text)
    steps = tuple(Step(s["name"], tuple(s["argv"]), tuple(s.get("after", ()))) for s in raw.pop("steps"))
    e = raw.pop("engine")
    engine = None
    if e is not None:
        engine = EngineProcess(e["kind"], tuple(e["argv"]), dict(e["env"]), int(e["port"]), e["served_name"])
    return Config(steps=steps, engine=engine, **raw)


def load(machine: Path) -> Config:
    """The config of a machine folder."""
    return from_json((machine / "spec.json").read_text(encoding="utf-8"))


def fill(argv: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """Put the machine's own paths into an argv."""

    def one(arg: str) -> str:
        return re.sub(r"@\{(\w+)\}", lambda m: values.get(m[1], m[0]), arg)

    return [one(arg) for arg in argv]
