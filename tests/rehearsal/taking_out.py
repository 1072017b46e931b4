"""Take one layer out of a copy of the package, and see which cell of the matrix notices.

    python tests/rehearsal/mutations.py [WORDS]

Each mutation is an exact edit of the source; where the text is no longer there, the run fails. Layers back each other
up: where one alone is missed by nobody, that is said, and it is taken out together with its backup, which somebody must
miss. A mutation counts as caught only by the problems that were named beforehand, and the same cells must hold on an
unchanged copy.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from matrix import AT_ONCE, CELLS, Cell, Outcome, play, table
from processes import Watch
from stage import seeded_bucket

ROOT = Path(__file__).parents[2]

Edit = tuple[str, str, str]
"""File, text that is there exactly once, what replaces it."""

HEARTBEAT: Edit = (
    "node/keeper.py",
    '            os.write(self.lifeline, b".")',
    "            pass",
)
WRAPPER_KILL: Edit = (
    "node/job.py",
    "    left = leash.kill_descendants(os.getpid(), within_s=10)",
    "    left: list[int] = []",
)
WRAPPER_KILL_GROUP: Edit = ("node/job.py", "    group.kill()\n", "")
GROUP: Edit = ("node/leash.py", "            path.mkdir(exist_ok=True)\n", "            return cls(None)\n")
WRAPPER_DIES_WITH_PARENT: Edit = (
    "node/job.py",
    "    leash.die_with_parent(signal.SIGTERM, parent)\n",
    "",
)
KEEPER_DIES_WITH_PARENT: Edit = (
    "node/keeper.py",
    "    leash.die_with_parent(signal.SIGTERM, wrapper)\n",
    "",
)
SUPERVISOR_CLOSE: Edit = (
    "engines/local_supervisor.py",
    '    closed = machine.close("supervisor")\n',
    "    closed = True\n",
)
SUPERVISOR_KILL: Edit = (
    "engines/local_supervisor.py",
    "        leash.kill_descendants(os.getpid(), within_s=10)\n    closed",
    "    closed",
)
SILENCE: Edit = (
    "node/job.py",
    "        if silent_for_s > config.silent_s:",
    "        if False:",
)
SUBREAPER: Edit = (
    "node/leash.py",
    "    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:",
    "    if False:",
)
TASK_DIES_WITH_KEEPER: Edit = (
    "node/leash.py",
    "    _libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)\n",
    "    _libc.prctl(_PR_SET_PDEATHSIG, 0 if sig == 9 else sig, 0, 0, 0)\n",
)
NO_WRAPPER: Edit = (
    "node/job.py",
    "    keeper = subprocess.Popen(argv,",
    "    os.set_inheritable(beat_end, True)\n"
    "    os.execv(argv[0], [*argv[:-1], str(parent)])\n"
    "    keeper = subprocess.Popen(argv,",
)


@dataclass(frozen=True)
class Mutation:
    """What is taken out; the cells played on it, each with words of the problem that must show (empty: must hold)."""

    name: str
    edits: tuple[Edit, ...]
    caught_by: tuple[tuple[str, str], ...]
    note: str = ""
    quick: bool = False


QUIET_KEEPER, QUIET_WRAPPER, QUIET_SUPERVISOR = "ready-quiet keeper", "ready-quiet wrapper", "ready-quiet supervisor"
HUNG, ENGINE, BOTH, ALL = (
    "ready-quiet keeper hung",
    "ready-quiet engine",
    "ready-quiet supervisor+wrapper",
    "ready-quiet supervisor+wrapper+keeper",
)
TWO = "ready-quiet wrapper+keeper"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation("keeper: no heartbeat", (HEARTBEAT,), (("ready-quiet command", "hung"),), quick=True),
    Mutation("wrapper: does not hear silence", (SILENCE,), ((HUNG, "left after"),), quick=True),
    Mutation("wrapper: outlives its supervisor", (WRAPPER_DIES_WITH_PARENT,), ((QUIET_SUPERVISOR, "left after"),), quick=True),
    Mutation(
        "keeper: outlives its wrapper",
        (KEEPER_DIES_WITH_PARENT,),
        ((BOTH, "left after"), (QUIET_WRAPPER, "")),
        "the wrapper alone killed: the supervisor kills the keeper",
        quick=True,
    ),
    Mutation("supervisor: does not close", (SUPERVISOR_CLOSE,), ((ENGINE, "nobody recorded the end"),), quick=True),
    Mutation(
        "wrapper: does not kill descendants",
        (WRAPPER_KILL,),
        ((QUIET_KEEPER, ""),),
        "not missed alone: its cgroup does it, then the supervisor",
    ),
    Mutation(
        "  + its cgroup",
        (WRAPPER_KILL, WRAPPER_KILL_GROUP),
        ((QUIET_KEEPER, ""),),
        "not missed: the supervisor kills what it has adopted",
    ),
    Mutation(
        "  + the supervisor's kill, no cgroup",
        (WRAPPER_KILL, WRAPPER_KILL_GROUP, SUPERVISOR_KILL, GROUP),
        ((QUIET_KEEPER, "orphan"),),
    ),
    Mutation(
        "  + the supervisor is dead, no cgroup",
        (WRAPPER_KILL, WRAPPER_KILL_GROUP, GROUP),
        (("ready-quiet supervisor+keeper", "orphan"),),
        "what a rented machine has: a wrapper and nobody above it",
        quick=True,
    ),
    Mutation(
        "no cgroup", (GROUP,), ((QUIET_KEEPER, ""), (TWO, ""), (ENGINE, "")), "not missed: as where no cgroup may be made"
    ),
    Mutation("nobody is a subreaper", (SUBREAPER,), ((QUIET_KEEPER, ""),), "not missed alone: the cgroup has the orphan"),
    Mutation("  + no cgroup", (SUBREAPER, GROUP), ((QUIET_KEEPER, "orphan"), (ENGINE, "orphan")), quick=True),
    Mutation(
        "supervisor: kills nothing it adopted", (SUPERVISOR_KILL,), ((TWO, ""),), "not missed alone: the cgroup has the orphan"
    ),
    Mutation("  + no cgroup", (SUPERVISOR_KILL, GROUP), ((TWO, "orphan"),)),
    Mutation("engine: outlives its keeper", (TASK_DIES_WITH_KEEPER,), ((ALL, "left after"), (QUIET_KEEPER, "")),
             "the keeper alone killed: the wrapper kills the engine"),
    Mutation(
        "no wrapper at all",
        (NO_WRAPPER,),
        ((HUNG, "left after"), (QUIET_KEEPER, "reason"), (QUIET_SUPERVISOR, "reason")),
    ),
)  # fmt: skip

#: What `make test` plays. The rest, where several layers back each other up, is in `python tests/rehearsal/mutations.py`.
QUICK = tuple(mutation for mutation in MUTATIONS if mutation.quick)


def copy_without(folder: Path, edits: Iterable[Edit]) -> Path:
    """A folder with a copy of the package with the edits made. Raises AssertionError for a text that is not there."""
    shutil.copytree(ROOT / "kimisession", folder / "kimisession", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in edits:
        path = folder / "kimisession" / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old!r}"
        path.write_text(text.replace(old, new))
    return folder


@dataclass(frozen=True)
class Verdict:
    """One cell on one mutated copy."""

    mutation: Mutation
    cell: Cell
    wanted: str
    outcome: Outcome

    @property
    def holds(self) -> bool:
        """Whether the cell failed with the problem that was named beforehand, or held where it had to."""
        problems = self.outcome.problems
        return any(self.wanted in problem for problem in problems) if self.wanted else not problems


def unchanged(mutations: Sequence[Mutation]) -> Mutation:
    """The same cells on a copy from which nothing was taken: all of them have to hold."""
    names = dict.fromkeys(name for mutation in mutations for name, _ in mutation.caught_by)
    return Mutation("(nothing taken out)", (), tuple((name, "") for name in names))


def play_mutations(mutations: Sequence[Mutation], at_once: int = AT_ONCE) -> list[Verdict]:
    """Play all of it side by side."""
    cells = {cell.name: cell for cell in CELLS}
    root = Path(tempfile.mkdtemp(prefix="kimi-mutations-"))
    watch = Watch()
    try:
        bucket = seeded_bucket(root)
        with ThreadPoolExecutor(at_once) as pool:
            jobs = []
            for number, mutation in enumerate(mutations):
                package = copy_without(root / str(number), mutation.edits)
                for name, wanted in mutation.caught_by:
                    jobs.append((mutation, cells[name], wanted, pool.submit(play, cells[name], watch, bucket, package)))
            return [Verdict(mutation, cell, wanted, job.result()) for mutation, cell, wanted, job in jobs]
    finally:
        watch.end()
        shutil.rmtree(root, ignore_errors=True)


def report(verdicts: Sequence[Verdict]) -> str:
    """Which mutation is caught by what."""
    rows = [("TAKEN OUT", "CELL", "CAUGHT BY", "AS SAID")]
    for verdict in verdicts:
        problems = "; ".join(verdict.outcome.problems)
        caught = problems or (verdict.mutation.note if verdict.mutation.edits else "") or "holds"
        rows.append((verdict.mutation.name, verdict.cell.name, caught[:110], "yes" if verdict.holds else "NO"))
    return table(rows)


def main(words: Sequence[str]) -> int:
    """Print the table; 1 when something was not as said."""
    chosen = [m for m in MUTATIONS if all(word in m.name for word in words)]
    began = time.monotonic()
    verdicts = play_mutations((*chosen, unchanged(chosen)))
    print(report(verdicts))
    wrong = sum(not verdict.holds for verdict in verdicts)
    print(f"\n{len(verdicts)} cells in {time.monotonic() - began:.0f}s, {wrong} not as said")
    return 1 if wrong else 0
