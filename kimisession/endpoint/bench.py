"""Measure a session's endpoint, as an event of the ledger; and set two such events side by side.

The measuring is `kimisession.node.benchmark`, which also runs alone on a machine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kimisession.core.ledger import Benched, Session, SessionRequested
from kimisession.errors import EngineFailed
from kimisession.node.benchmark import ROWS, Endpoint, Load, NoAnswer, Told, figure, measure

#: What `--compare` shows of each pass, by the names of `ROWS`.
COMPARED = frozenset(
    {
        "errors",
        "null content",
        "s per request",
        "latency s, mean",
        "tok/s a request, mean",
        "output tok/s",
        "TTFT ms, mean",
        "TTFT ms, p99",
        "TPOT ms, mean",
        "ITL ms, mean",
        "ITL ms, p99",
        "completion tokens",
        "reasoning tokens",
    }
)


def bench(
    base_url: str,
    key: str,
    session: Session,
    request: SessionRequested,
    load: Load,
    label: str,
    at: datetime,
    told: Told,
) -> Benched:
    """Measure, and say what was measured. Raises EngineFailed when the endpoint does not answer at all; single requests
    that fail are counted in the result."""
    try:
        result = measure(Endpoint(base_url, key), request.served_name, load, told)
    except NoAnswer as error:
        raise EngineFailed(str(error), f"kimisession logs {session.name} shows its log") from None
    return Benched(
        at=at,
        label=label,
        result=json.dumps(result),
        profile=request.profile,
        flags=flags_now(session),
        engine_version=result["engine_version"] or "",
        accelerators=request.accelerators,
        stand_in=request.stand_in,
    )


def flags_now(session: Session) -> str:
    """The engine flags of the start that answers now: those of the request, and after them what each restart changed."""
    first = session.request.engine_flags if session.request else ""
    return "; restarted with ".join([first, *(restart.flags for restart in session.restarts)])


def result_of(event: Benched) -> dict[str, Any] | None:
    """The measured figures; None when the record holds none that this version can read."""
    try:
        result = json.loads(event.result)
        return result if result["passes"][0]["at_once"] else None
    except (ValueError, KeyError, IndexError, TypeError):
        return None


@dataclass(frozen=True)
class Line:
    """One figure of both benches at the same number at once; `ratio` is b / a, None where it says nothing."""

    at_once: int
    name: str
    a: float | None
    b: float | None
    ratio: float | None
    digits: int


def side_by_side(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Line]:
    """The passes that both have, figure by figure, in the units of the names."""
    second = {one["at_once"]: one for one in b["passes"]}
    lines = []
    for first in a["passes"]:
        other = second.get(first["at_once"])
        if other is None:
            continue
        for name, path, digits, factor in ROWS:
            if name in COMPARED:
                left, right = figure(first, path), figure(other, path)
                ratio = right / left if left and right is not None else None
                lines.append(Line(first["at_once"], name, scaled(left, factor), scaled(right, factor), ratio, digits))
    return lines


def scaled(value: float | None, factor: float) -> float | None:
    """`value` in another unit."""
    return None if value is None else value * factor


def conditions(event: Benched, result: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """What it was measured on and asked for: figures compare only where these are the same."""
    thinking = {True: "on", False: "off"}.get(result["thinking"], "as the model has it")
    return (
        ("model", str(result["model"])),
        ("profile", event.profile),
        ("engine", event.engine_version or "unknown"),
        ("flags", event.flags or "none"),
        ("accelerators", event.accelerators),
        ("stand-in", "yes: no model was run" if event.stand_in else "no"),
        ("tokens at most", str(result["max_tokens"])),
        ("thinking", thinking),
        ("past the end", "yes" if result["ignore_eos"] else "no"),
        ("rounds", str(result["rounds"])),
    )
