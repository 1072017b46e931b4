"""`kimisession bench`: measure a session, list what was measured, set two of them side by side."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kimisession.cli import show
from kimisession.cli.opening import open_controller, pick_ready
from kimisession.cli.sessions import utc_now
from kimisession.core.ledger import Benched
from kimisession.endpoint.bench import bench, conditions, result_of, side_by_side
from kimisession.errors import EngineFailed, Interrupted, KimiError, UsageMistake
from kimisession.node.benchmark import Load, as_table, figure, first_errors, heading, parse_at_once
from kimisession.store import Store

NO_MODEL = "stand-in engine: no model was run"


def load_of(
    rounds: int, concurrent: Sequence[str], max_tokens: int, thinking: str | None, ignore_eos: bool = False
) -> Load:
    """The options as a load. Raises UsageMistake."""
    try:
        at_once = tuple(number for text in concurrent for number in parse_at_once(text))
    except ValueError:
        raise UsageMistake(
            f"--concurrent: {','.join(concurrent)!r} is not a list of numbers from 1 on",
            "for example --concurrent 2,16",
        ) from None
    return Load(rounds, at_once, max_tokens, {"on": True, "off": False}.get(thinking or ""), ignore_eos)


def run_bench(name: str | None, load: Load, label: str | None, json: bool) -> None:
    """Measure, record, show."""
    controller = open_controller()
    session, request = pick_ready(controller, name)
    base = controller.engines(request.infra).base_url(session.id, request.port)

    def tell(at_once: int, answered: int, requests: int) -> None:
        show.flash(f"  {at_once} at once: {answered} of {requests} answered" if at_once else "  warming up")

    try:
        event = bench(base, controller.key_of(session), session, request, load, label or session.name, utc_now(), tell)
    except KeyboardInterrupt:
        raise Interrupted("the bench was broken off and is not recorded", f"kimisession bench {session.name}") from None
    controller.store.append(session.id, [event])
    show.clear()
    number = len(controller.store.benches())
    result = result_of(event)
    if result is None:
        raise KimiError("the bench could not be read back", "kimisession bench --list")
    if json:
        show.as_json("bench", Kept(number, session.id, event, result).as_data())
    else:
        show.out(show.paint(heading(result), "bold", sys.stdout) + (f"  {NO_MODEL}" if event.stand_in else ""))
        head, *rows = as_table(result)
        show.table(tuple(cell.upper() for cell in head), rows, frozenset(range(1, len(head))))
        before = number - 1
        show.next_step(f"kimisession bench --compare {before} {number}" if before else "kimisession bench --list")
    failed = first_errors(result)
    if failed:
        raise EngineFailed(failed[0], f"kimisession logs {session.name}")


@dataclass(frozen=True)
class Kept:
    """A bench as the ledger has it. `number` counts from 1 over all sessions."""

    number: int
    session: str
    event: Benched
    result: dict[str, Any]

    def as_data(self) -> dict[str, Any]:
        """For --json."""
        event = self.event
        return {
            "bench": self.number,
            "session": self.session,
            "label": event.label,
            "profile": event.profile,
            "flags": event.flags,
            "accelerators": event.accelerators,
            "stand_in": event.stand_in,
            **self.result,
            "began_at": str(self.result.get("began_at", "")).replace("+00:00", "Z"),
        }


def kept(store: Store) -> list[Kept]:
    """Every bench that can be read, oldest first; the others are told of."""
    found = []
    for number, (session, event) in enumerate(store.benches(), 1):
        result = result_of(event) if isinstance(event, Benched) else None
        if isinstance(event, Benched) and result is not None:
            found.append(Kept(number, session, event, result))
        else:
            show.warn("damaged", f"bench {number} cannot be read")
    return found


def list_benches(json: bool) -> None:
    """Every bench of this ledger, oldest first."""
    found = kept(open_controller().store)
    if json:
        show.as_json("benches", [one.as_data() for one in found])
    elif not found:
        show.out("nothing was measured yet")
        show.next_step("kimisession bench")
    else:
        show.table(
            ("BENCH", "UTC", "TOK/S ALONE", "OUTPUT TOK/S", "ENGINE", "LABEL"),
            [_row(one) for one in found],
            frozenset({0, 2, 3}),
        )
        show.next_step("kimisession bench --compare A B")


def _row(one: Kept) -> tuple[str, ...]:
    first, last = one.result["passes"][0], one.result["passes"][-1]
    alone, output = figure(first, ("tokens_per_s", "mean")), figure(last, ("output_tokens_per_s",))
    return (
        str(one.number),
        f"{one.event.at:%Y-%m-%d %H:%M}",
        "-" if alone is None else f"{alone:.1f}",
        ("-" if output is None else f"{output:.1f}") + f" at {last['at_once']}",
        "stand-in" if one.event.stand_in else one.event.engine_version or "unknown",
        one.event.label,
    )


def compare(a: str, b: str, json: bool) -> None:
    """Two benches side by side. Each is named by its number, or by its label, session's name or id: then the newest."""
    store = open_controller().store
    found = kept(store)
    names = {row.session: row.name for row in store.rows()}

    def meant(text: str) -> Kept:
        for called in (
            lambda one: (str(one.number), one.event.label),
            lambda one: (one.session, names.get(one.session)),
        ):
            for one in reversed(found):
                if text in called(one):
                    return one
        raise UsageMistake(f"there is no bench {text!r}", "`kimisession bench --list` shows their numbers")

    left, right = meant(a), meant(b)
    lines = side_by_side(left.result, right.result)
    if json:
        both = {"a": left.as_data(), "b": right.as_data()}
        show.as_json("bench-compare", {**both, "lines": [asdict(line) for line in lines]})
        return
    if not lines:
        raise UsageMistake("they have no number of requests at once in common", "measure one of them again")
    pairs = zip(conditions(left.event, left.result), conditions(right.event, right.result), strict=True)
    same = [(letter, f"bench {one.number}, {one.event.label}") for letter, one in (("A", left), ("B", right))]
    different = []
    for (what, one), (_, other) in pairs:
        if one == other:
            same.append((what, one))
        else:
            different.append((f"{what} DIFFERS", f"A: {one}\nB: {other}"))
    show.pairs(same + different)
    rows, before = [], 0
    for line in lines:
        at_once, before = str(line.at_once) if line.at_once != before else "", line.at_once
        figures = ("-" if value is None else f"{value:.{line.digits}f}" for value in (line.a, line.b))
        rows.append((at_once, line.name, *figures, "-" if line.ratio is None else f"{line.ratio:.3f}"))
    show.table(("AT ONCE", "", "A", "B", "B / A"), rows, frozenset({0, 2, 3, 4}))
    show.next_step("kimisession bench --list")
