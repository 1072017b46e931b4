"""Kill -9 (or stop) each part of a session in each phase where it exists, and hold what was written down beforehand.

python tests/rehearsal/matrix.py               the whole matrix, as a table
python tests/rehearsal/matrix.py --beforehand  only what is expected, as in notes/kill-matrix.md
python tests/rehearsal/matrix.py keeper load   only cells whose line has all these words
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from processes import Process, Watch, argv, kill_all, same, signal_exactly, wait_until
from stage import ROLES, Stage, seeded_bucket

#: Cells at a time. They mostly wait; more would make two cores the thing that is measured.
AT_ONCE = 6
#: A cell that misses its phase (the machine was busy) is played again; each report says how often.
TRIES = 3
#: The receipt's end and our own observation agree within this.
AGREE_S = 1.0


_ORPHAN = ("fault=orphan",)  # the engine leaves a daemon behind: forked twice, own session, empty environment
_DEAF = ("fault=deaf",)  # the engine does not hear SIGTERM, which holds the ending for its grace
_LONG_GRACE = {"stop_grace": "3s"}
_UNUSED = {"unused": "2s"}
_COLD = 20.0  # the rest of the cold start, 2 s of patience with an unused session, 2 s to end
_GRACE = 6.0  # 3 s of grace for the engine, then -9


@dataclass(frozen=True)
class Cell:
    """What was written down before anything was killed.

    `layer` is who must end the session (the `by` of its `ended` line; `command` where the next command does it, `-`
    where nothing exists). `within_s`: seconds after the kill until no process of the machine is left. `closed_by`: who
    records that it is gone. `exit_code` is that of the `start` that was following, where one was.
    """

    phase: str
    victim: str
    layer: str
    within_s: float
    reason: str
    closed_by: str
    sets: tuple[str, ...] = _ORPHAN
    limits: Mapping[str, str | float] = field(default_factory=dict)
    signal: int = signal.SIGKILL

    @property
    def name(self) -> str:
        """Phase and victim."""
        return f"{self.phase} {self.victim}"


# Phases of the launch: `asked` (a command is making the machine), `armed` (the supervisor is there, nothing else),
# `wrapped` (the wrapper is there, the keeper not yet in its loop).
CELLS: tuple[Cell, ...] = (
    Cell("launch-asked", "command", "-", 0.5, "user", "-", ()),
    Cell("launch-armed", "command", "keeper", _COLD, "never-used", "supervisor", _ORPHAN, _UNUSED),
    Cell("launch-armed", "supervisor", "command", 2.5, "launch-failed", "command"),
    Cell("launch-wrapped", "command", "keeper", _COLD, "never-used", "supervisor", _ORPHAN, _UNUSED),
    Cell("launch-wrapped", "supervisor", "keeper", 3.5, "supervisor-died", "command"),
    Cell("launch-wrapped", "wrapper", "keeper|supervisor", 2.5, "wrapper-died", "supervisor"),
    Cell("launch-wrapped", "keeper", "wrapper", 2.5, "keeper-died", "supervisor"),
    Cell("weights", "command", "keeper", _COLD, "never-used", "supervisor", _ORPHAN, _UNUSED),
    Cell("weights", "supervisor", "keeper", 4.5, "supervisor-died", "command"),
    Cell("weights", "wrapper", "keeper|supervisor", 2.5, "wrapper-died", "supervisor"),
    Cell("weights", "keeper", "wrapper", 2.5, "keeper-died", "supervisor"),
    Cell("boot", "command", "keeper", _COLD, "never-used", "supervisor", _ORPHAN, _UNUSED),
    Cell("boot", "supervisor", "keeper", 3.5, "supervisor-died", "command"),
    Cell("boot", "wrapper", "keeper|supervisor", 2.5, "wrapper-died", "supervisor"),
    Cell("boot", "keeper", "wrapper", 2.5, "keeper-died", "supervisor"),
    Cell("boot", "engine", "keeper", 2.5, "engine-dead", "supervisor"),
    Cell("load", "command", "keeper", _COLD, "never-used", "supervisor", _ORPHAN, _UNUSED),
    Cell("load", "supervisor", "keeper", 3.5, "supervisor-died", "command"),
    Cell("load", "wrapper", "keeper|supervisor", 2.5, "wrapper-died", "supervisor"),
    Cell("load", "keeper", "wrapper", 2.5, "keeper-died", "supervisor"),
    Cell("load", "engine", "keeper", 2.5, "engine-dead", "supervisor"),
    Cell("compile", "command", "keeper", _COLD, "never-used", "supervisor", _ORPHAN, _UNUSED),
    Cell("compile", "supervisor", "keeper", 3.5, "supervisor-died", "command"),
    Cell("compile", "wrapper", "keeper|supervisor", 2.5, "wrapper-died", "supervisor"),
    Cell("compile", "keeper", "wrapper", 2.5, "keeper-died", "supervisor"),
    Cell("compile", "engine", "keeper", 2.5, "engine-dead", "supervisor"),
    Cell("memory", "command", "keeper", _COLD, "never-used", "supervisor", _ORPHAN, _UNUSED),
    Cell("memory", "supervisor", "keeper", 3.5, "supervisor-died", "command"),
    Cell("memory", "wrapper", "keeper|supervisor", 2.5, "wrapper-died", "supervisor"),
    Cell("memory", "keeper", "wrapper", 2.5, "keeper-died", "supervisor"),
    Cell("memory", "engine", "keeper", 2.5, "engine-dead", "supervisor"),
    Cell("graphs", "command", "keeper", _COLD, "never-used", "supervisor", _ORPHAN, _UNUSED),
    Cell("graphs", "supervisor", "keeper", 3.5, "supervisor-died", "command"),
    Cell("graphs", "wrapper", "keeper|supervisor", 2.5, "wrapper-died", "supervisor"),
    Cell("graphs", "keeper", "wrapper", 2.5, "keeper-died", "supervisor"),
    Cell("graphs", "engine", "keeper", 2.5, "engine-dead", "supervisor"),
    # In `ready` the command is `kimisession status --watch`.
    Cell("ready-quiet", "command", "keeper", 8.0, "never-used", "supervisor", _ORPHAN, {"unused": "4s"}),
    Cell("ready-quiet", "supervisor", "keeper", 3.5, "supervisor-died", "command"),
    Cell("ready-quiet", "wrapper", "keeper|supervisor", 2.5, "wrapper-died", "supervisor"),
    Cell("ready-quiet", "keeper", "wrapper", 2.5, "keeper-died", "supervisor"),
    Cell("ready-quiet", "engine", "keeper", 2.5, "engine-dead", "supervisor"),
    Cell("ready-busy", "command", "keeper", 7.0, "idle", "supervisor", _ORPHAN, {"idle": "2s"}),
    Cell("ready-busy", "supervisor", "keeper", 3.5, "supervisor-died", "command"),
    Cell("ready-busy", "wrapper", "keeper|supervisor", 2.5, "wrapper-died", "supervisor"),
    Cell("ready-busy", "keeper", "wrapper", 2.5, "keeper-died", "supervisor"),
    Cell("ready-busy", "engine", "keeper", 2.5, "engine-dead", "supervisor"),
    # In `ending` the command is `kimisession stop`, and the reason stays what it was when the ending began.
    Cell("ending", "command", "keeper", _GRACE, "user", "supervisor", _DEAF, _LONG_GRACE),
    Cell("ending", "supervisor", "keeper", _GRACE, "user", "command", _DEAF, _LONG_GRACE),
    Cell("ending", "wrapper", "keeper|supervisor", 2.5, "user", "supervisor", _DEAF, _LONG_GRACE),
    Cell("ending", "keeper", "wrapper", 2.5, "user", "supervisor", _DEAF, _LONG_GRACE),
    Cell("ending", "engine", "keeper", 2.5, "user", "supervisor", _DEAF, _LONG_GRACE),
    # Several at once: who is left has to do.
    Cell("ready-quiet", "wrapper+keeper", "supervisor", 2.5, "wrapper-died", "supervisor"),
    Cell("ready-quiet", "supervisor+wrapper", "keeper", 3.5, "wrapper-died", "command"),
    Cell("ready-quiet", "supervisor+keeper", "wrapper", 2.5, "keeper-died", "command"),
    Cell("ready-quiet", "supervisor+wrapper+keeper", "kernel", 1.5, "unguarded", "command", ()),
    # Hung, not dead.
    Cell("ready-quiet", "keeper hung", "wrapper", 6.0, "keeper-hung", "supervisor", (), {}, signal.SIGSTOP),
    Cell("ready-quiet", "engine hung", "keeper", 9.5, "unknown-too-long", "supervisor", (), {}, signal.SIGSTOP),
    Cell("ready-busy", "engine stalls", "keeper", 7.0, "stalled", "supervisor", ("fault=stall",), {}, 0),
    Cell("ready-quiet", "supervisor hung, stop", "keeper", 10.0, "user", "command", (), {}, signal.SIGSTOP),
)  # fmt: skip

#: Cells that cannot be, and why.
VOID: Mapping[str, str] = {
    "launch-asked supervisor": "the command has not started it yet",
    "launch-asked wrapper": "the supervisor, which starts it, is not there yet",
    "launch-asked keeper": "the wrapper, which starts it, is not there yet",
    "launch-asked engine": "the keeper, which starts it, is not there yet",
    "launch-armed wrapper": "the supervisor has not started it yet",
    "launch-armed keeper": "the wrapper, which starts it, is not there yet",
    "launch-armed engine": "the keeper, which starts it, is not there yet",
    "launch-wrapped engine": "the keeper starts it after the steps",
    "weights engine": "it starts when the weights are here",
}

_ENGINE_PHASES = ("boot", "load", "compile", "memory", "graphs")
_LONG_S = 1.6
_SHORT_S = 0.05


class Missed(Exception):
    """The phase was over before the signal was sent: the cell says nothing and is played again."""


@dataclass
class Outcome:
    """What came of a cell. `problems` is empty when everything held."""

    cell: Cell
    took_s: float = 0.0
    reason: str = ""
    layer: str = ""
    problems: list[str] = field(default_factory=list)
    tries: int = 1


def play(cell: Cell, watch: Watch, bucket: str, package: Path | None = None) -> Outcome:
    """Play one cell on a stage of its own."""
    outcome = Outcome(cell)
    for attempt in range(1, TRIES + 1):
        outcome = Outcome(cell, tries=attempt)
        stage = Stage(watch, bucket, limits=cell.limits, package=package)
        try:
            _Play(cell, stage, outcome).run()
        except Missed as missed:
            outcome.problems.append(f"missed the phase: {missed}")
            continue
        except Exception as error:  # a cell that breaks is a cell that failed, with its name
            outcome.problems.append(f"{type(error).__name__}: {error}")
        finally:
            if outcome.problems and os.environ.get("REHEARSAL_KEEP"):
                kept = Path(os.environ["REHEARSAL_KEEP"]) / cell.name.replace(" ", "_")
                shutil.copytree(stage.root, kept, dirs_exist_ok=True)
            stage.close()
        break
    return outcome


class _Play:
    def __init__(self, cell: Cell, stage: Stage, outcome: Outcome) -> None:
        self.cell, self.stage, self.outcome = cell, stage, outcome
        self.held: list[Process] = []
        self.stopping = None
        kind = cell.victim.split(" ")[0]
        self.victims = kind.split("+")

    def run(self) -> None:
        """Reach the phase, hit, wait for nothing to be left, look with a fresh command, compare."""
        stage, cell = self.stage, self.cell
        long = {phase: _LONG_S if phase == cell.phase else _SHORT_S for phase in _ENGINE_PHASES}
        phases = ",".join(f"{name}={seconds}" for name, seconds in long.items())
        sets = [word for text in (f"phase-seconds={phases}", *cell.sets) for word in ("--set", text)]
        self.start = stage.start(*sets)
        self.command = self.start
        try:
            reach = _REACH.get(cell.phase, _reach_phase)
            reach(self)
            hit_at = self._hit()
        finally:
            self._let_go()
        self._wait_for_nothing(hit_at)
        self._check(hit_at)

    def problem(self, text: str) -> None:
        """Note what did not hold."""
        self.outcome.problems.append(text)

    # -- hit -----------------------------------------------------------------------------------------------------------

    def hold(self, process: Process | None) -> None:
        """Stop a process so that the phase lasts until we have struck; it goes on right after."""
        if process is not None:
            signal_exactly(process, signal.SIGSTOP)
            self.held.append(process)

    def _let_go(self) -> None:
        for process in self.held:
            signal_exactly(process, signal.SIGCONT)
        self.held.clear()

    def _hit(self) -> float:
        """Signal the victims; the wall clock at that moment. Asserts who they are and that it is their phase."""
        targets = [self._find(role) for role in self.victims]
        before = current_phase(self.stage.journal())
        if not all(map(same, targets)) or before != self.cell.phase.partition("-")[0]:
            raise Missed(f"in phase {before}, victims {targets}")
        for role, target in zip(self.victims, targets, strict=True):
            written = self._written(role)
            if written and target and written != f"{target.pid}:{target.ticks}":
                self.problem(f"run/pid.{role} says {written}, /proc says {target.pid}:{target.ticks}")
        if len(targets) > 1:
            # Held first, so that none of them can act on the death of another.
            for target in targets:
                signal_exactly(target, signal.SIGSTOP) if target else None
        hit_at = time.time()
        for target in targets:
            if target and target.pid != self.command.pid:
                self.stage.watch.add(self.stage.mark, target)
            if target and self.cell.signal:
                signal_exactly(target, self.cell.signal)
        if self.cell.signal == signal.SIGSTOP and self.cell.victim.endswith("stop"):
            self.stage.command("stop", "cell")
        # Afterwards the journal tells which phase it was at that moment, whatever was read before it.
        told = [line for line in self.stage.journal() if datetime.fromisoformat(line["at"]).timestamp() <= hit_at]
        if current_phase(told) != before:
            raise Missed(f"the journal says {current_phase(told)}")
        if self.cell.signal == signal.SIGKILL and not wait_until(lambda: not any(map(same, targets)), 2):
            self.problem("a victim survived kill -9")
        self.stage.hang_up() if "command" in self.victims else None
        return hit_at

    def _find(self, role: str) -> Process | None:
        from processes import look

        if role == "command":
            found = look(self.command.pid)
            return found if found and "kimisession" in argv(found.pid) and self.command.poll() is None else None
        process = self.stage.process(role)
        if process and role != "engine" and str(self.stage.machine) not in argv(process.pid):
            return None
        return process

    def _written(self, role: str) -> str:
        try:
            return (self.stage.machine / "run" / f"pid.{role}").read_text().strip()
        except (OSError, AssertionError):
            return ""

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _wait_for_nothing(self, hit_at: float) -> None:
        stage, cell = self.stage, self.cell
        nothing_yet = cell.layer == "-"
        if not nothing_yet:
            wait_until(lambda: stage.nothing_runs(hit_at) is not None, cell.within_s + 1.5)
        gone_at = stage.nothing_runs(hit_at)
        if gone_at is None and not nothing_yet:
            left = stage.watch.living(stage.mark)
            self.problem(
                f"left after {cell.within_s + 1.5:g}s: {', '.join(sorted(_who(argv(s.process.pid)) for s in left))}"
            )
            kill_all(left)
            wait_until(lambda: stage.nothing_runs() is not None, 2)
        self.outcome.took_s = max(0.0, (gone_at or hit_at) - hit_at)
        self.gone_at = gone_at or hit_at
        if self.outcome.took_s > cell.within_s:
            self.problem(f"took {self.outcome.took_s:.1f}s")
        if cell.closed_by == "supervisor" and not wait_until(lambda: bool(stage.gone()), 0.5):
            self.problem("nobody recorded the end")
        # A look that came at once would hide that nobody had recorded the end.
        time.sleep(AGREE_S + 0.3)

    def _check(self, hit_at: float) -> None:
        stage, cell = self.stage, self.cell
        for command in stage.commands:
            if not wait_until(lambda c=command: c.poll() is not None, 30):  # type: ignore[misc]
                self.problem(f"{' '.join(map(str, command.args[3:5]))} did not come back")  # type: ignore[index]
        if cell.layer == "-":
            # For a minute a launch may still be on its way; whoever will not wait for that says so.
            code, text = stage.run("stop", "cell")
            if code:
                self.problem(f"`stop` exited with {code}: {text}")
        rows = stage.ask("status", "--all")
        if [row["state"] for row in rows] != ["gone"]:
            self.problem(f"the ledger says {[row['state'] for row in rows]}")
            return
        row = rows[0]
        self.outcome.reason = row["reason"]
        if row["reason"] != cell.reason:
            self.problem(f"reason {row['reason']}")
        if row["damage"] or row["unconfirmed"]:
            self.problem(f"damage {row['damage']} unconfirmed {row['unconfirmed']}")
        self._check_layer()
        self._check_receipt()
        following = self.start if self.start.poll() not in (0, -9) and "command" not in self.victims else None
        if following is not None and following.returncode != (124 if cell.reason == "never-ready" else 6):
            self.problem(f"`start` exited with {following.returncode}: {stage.told(following)[-200:]}")
        for orphan in stage.root.glob("state/machines/*/run/engine.log"):
            self._check_orphan(orphan)
        for path in stage.root.glob("state/machines/*/run/cgroup"):
            if (group := path.read_text().strip()) and Path(group).exists():
                self.problem("the control group is left")

    def _check_layer(self) -> None:
        ended = next((line for line in self.stage.journal() if line["kind"] == "ended"), None)
        gone = self.stage.gone() if self.cell.layer != "-" else {"by": "-"}
        nobody = "-" if self.cell.layer == "-" else "kernel" if "keeper" in self.victims else "command"
        self.outcome.layer = ended["by"] if ended else nobody
        if self.outcome.layer not in self.cell.layer.split("|"):
            self.problem(f"ended by {self.outcome.layer}")
        if gone.get("by") != self.cell.closed_by:
            self.problem(f"closed by {gone.get('by')}")

    def _check_receipt(self) -> None:
        receipt = self.stage.ask("cost", "cell")
        ends = [line["ended"] for line in receipt["lines"]]
        if not receipt["final"] or None in ends:
            self.problem("the receipt is not final")
            return
        if self.cell.layer == "-":
            if ends:
                self.problem(f"a receipt over {ends}, and nothing was made")
            return
        # Who records the end cannot record its own: it may be later than the last of the others, never earlier.
        others = [s.last for s in self.stage.watch.machine(self.stage.mark) if _who(s.argv) != "supervisor"]
        end = datetime.fromisoformat(ends[0]).timestamp()
        off_s = max(0.0, max(others, default=self.gone_at) - end, end - self.gone_at)
        recorded = self.cell.closed_by == "supervisor" or any(x["kind"] == "closed" for x in self.stage.journal())
        if recorded and off_s > AGREE_S:
            self.problem(f"the receipt's end is {off_s:.1f}s off")
        if not recorded and "seen by the command" not in self.stage.gone()["evidence"]:
            self.problem(f"nobody recorded the end, and the ledger says {self.stage.gone()['evidence']!r}")

    def _check_orphan(self, log: Path) -> None:
        """The engine's daemon: forked twice, own session, empty environment. It must be gone by its own pid too."""
        from processes import look

        for line in log.read_text(errors="replace").splitlines():
            if "orphan pid=" in line:
                pid = int(line.rpartition("=")[2])
                if look(pid) and "kimisession-stand-in-orphan" in argv(pid):
                    self.problem(f"the orphan {pid} lives")
                    os.kill(pid, signal.SIGKILL)


def _who(words: Sequence[str]) -> str:
    for role, module in ROLES.items():
        if module in words:
            return role
    return "orphan" if "kimisession-stand-in-orphan" in words else " ".join(words)[-60:]


def current_phase(lines: Sequence[Mapping[str, Any]]) -> str:
    """The phase that a journal is in: launch, a phase that began and has not ended, ready, ending, ended."""
    now = "launch"
    for line in lines:
        if line["kind"] == "phase" and line["state"] == "began":
            now = str(line["phase"])
        elif line["kind"] in ("ready", "ending", "ended"):
            now = str(line["kind"])
    return now


# -- reaching a phase --------------------------------------------------------------------------------------------------


def _need(play: _Play, done: Callable[[], bool], within_s: float, what: str, every_s: float = 0.02) -> None:
    reached = False  # it may have passed by the next look

    def reached_or_over() -> bool:
        nonlocal reached
        reached = reached or done()
        return reached or play.start.poll() not in (None, 0)

    if not wait_until(reached_or_over, within_s, every_s):
        raise Missed(what)
    if not reached:
        code, told = play.start.poll(), play.stage.told(play.start)[-300:]
        raise AssertionError(f"`start` ended with {code} before the phase: {told}")


def _reach_asked(play: _Play) -> None:
    """The command is held (SIGSTOP) as soon as the machine's folder is there and machine.json is not."""
    from processes import look

    stage = play.stage
    _need(play, lambda: bool(stage.machines()), 30, "no folder", every_s=0.0005)
    play.hold(look(play.start.pid))
    if list(stage.root.glob("state/machines/*/machine.json")):
        raise Missed("the machine was made before the command could be held")


def _reach_armed(play: _Play) -> None:
    """The supervisor is held (SIGSTOP) as soon as it is there."""
    stage = play.stage
    found: list[Process] = []

    def there() -> bool:
        supervisor = stage.child(play.start.pid, "supervisor")
        found.extend([supervisor] if supervisor else [])
        return bool(found)

    _need(play, there, 30, "no supervisor", every_s=0.005)
    play.hold(found[0])
    if stage.process("wrapper"):
        raise Missed("the wrapper was there already")


def _reach_wrapped(play: _Play) -> None:
    """The keeper is held (SIGSTOP) before it enters its loop."""
    stage = play.stage
    found: list[Process] = []

    def there() -> bool:
        supervisor = stage.child(play.start.pid, "supervisor")
        wrapper = stage.child(supervisor.pid, "wrapper") if supervisor else None
        keeper = stage.child(wrapper.pid, "keeper") if wrapper else None
        found.extend([keeper] if keeper else [])
        return bool(found)

    _need(play, there, 30, "no keeper", every_s=0.005)
    play.hold(found[0])
    _need(play, lambda: not stage.launching(), 10, "the command still holds the launch")
    if stage.journal():
        raise Missed("the keeper was in its loop already")


def _reach_weights(play: _Play) -> None:
    """The puller is held (SIGSTOP), so that a few kilobytes take as long as we like."""
    stage = play.stage
    _need(play, lambda: stage.process("puller") is not None, 30, "no puller")
    play.hold(stage.process("puller"))
    _need(play, lambda: current_phase(stage.journal()) == "weights", 2, "not in weights")


def _reach_phase(play: _Play) -> None:
    stage, phase = play.stage, play.cell.phase
    _need(play, lambda: current_phase(stage.journal()) in (phase, "ready"), 40, f"never in {phase}")
    _need(play, lambda: stage.process("engine") is not None, 2, "no engine")


def _reach_ready(play: _Play) -> None:
    _need(play, play.stage.quiet, 40, "not ready")
    play.start.wait(timeout=20)
    if "command" in play.victims:
        play.command = play.stage.command("status", "cell", "--watch")
        _need(play, lambda: bool(play.stage.told(play.command)), 10, "the watching command says nothing")


def _reach_busy(play: _Play) -> None:
    _need(play, play.stage.quiet, 40, "not ready")
    play.start.wait(timeout=20)
    if "command" in play.victims:
        play.command = play.stage.command("status", "cell", "--watch")
    play.stage.keep_asking()

    def busy() -> bool:
        beats = [line for line in play.stage.journal() if line["kind"] == "beat"]
        return bool(beats) and beats[-1]["activity"] == "busy" and beats[-1]["running"] >= 1

    _need(play, busy, 10, "not busy")
    if "command" in play.victims:
        _need(play, lambda: bool(play.stage.told(play.command)), 10, "the watching command says nothing")


def _reach_ending(play: _Play) -> None:
    _reach_ready(play)
    play.command = play.stage.command("stop", "cell")
    _need(play, lambda: current_phase(play.stage.journal()) == "ending", 20, "not ending")


_REACH: Mapping[str, Callable[[_Play], None]] = {
    "launch-asked": _reach_asked,
    "launch-armed": _reach_armed,
    "launch-wrapped": _reach_wrapped,
    "weights": _reach_weights,
    "ready-quiet": _reach_ready,
    "ready-busy": _reach_busy,
    "ending": _reach_ending,
}


# -- the table ---------------------------------------------------------------------------------------------------------


def play_all(cells: Sequence[Cell], package: Path | None = None, at_once: int = AT_ONCE) -> list[Outcome]:
    """Play cells side by side, the slow ones first; outcomes in the order of `cells`."""
    watch = Watch()
    root = Path(tempfile.mkdtemp(prefix="kimi-matrix-"))
    try:
        bucket = seeded_bucket(root)
        with ThreadPoolExecutor(at_once) as pool:
            slow_first = sorted(cells, key=lambda cell: -cell.within_s)
            jobs = {cell.name: pool.submit(play, cell, watch, bucket, package) for cell in slow_first}
            return [jobs[cell.name].result() for cell in cells]
    finally:
        watch.end()
        shutil.rmtree(root, ignore_errors=True)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def beforehand() -> str:
    """What was written down before anything was killed."""
    head = ("PHASE", "VICTIM", "LAYER", "BOUND s", "REASON", "RECORDED BY")
    rows = [(c.phase, c.victim, c.layer, f"{c.within_s:g}", c.reason, c.closed_by) for c in CELLS]
    void = [(*name.split(" "), "void", "-", why, "-") for name, why in VOID.items()]
    return table([head, *rows, *void])


def report(outcomes: Sequence[Outcome]) -> str:
    """The matrix as it was played."""
    rows = [("PHASE", "VICTIM", "LAYER", "BOUND s", "TOOK s", "REASON", "OK")]
    for outcome in outcomes:
        cell = outcome.cell
        verdict = "; ".join(outcome.problems) or ("ok" if outcome.tries == 1 else f"ok at try {outcome.tries}")
        layer, took = outcome.layer or cell.layer, f"{outcome.took_s:.1f}"
        rows.append((cell.phase, cell.victim, layer, f"{cell.within_s:g}", took, outcome.reason, verdict))
    for name, why in VOID.items():
        phase, victim = name.split(" ")
        rows.append((phase, victim, "void", "", "", why, ""))
    return table(rows)


def main(words: Sequence[str]) -> int:
    """Print the matrix; 1 when a cell did not hold."""
    if "--beforehand" in words:
        print(beforehand())
        return 0
    chosen = [cell for cell in CELLS if all(word in cell.name for word in words)]
    began = time.monotonic()
    outcomes = play_all(chosen)
    print(report(outcomes))
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    print(f"\n{len(outcomes)} cells in {time.monotonic() - began:.0f}s, {failed} did not hold")
    return 1 if failed else 0


if __name__ == "__main__":
    print(json.dumps({"watch": "own /proc scan, 20 Hz"}))
    sys.exit(main(sys.argv[1:]))
