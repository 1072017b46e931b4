"""Kill -9 (or stop) real vLLM in each phase of its life, and hold what was written down beforehand.

python tests/rigs/vllm/vllm_kills.py               the whole table, played
python tests/rigs/vllm/vllm_kills.py --beforehand  only what is expected, as in notes/real-vllm-on-cpu.md
python tests/rigs/vllm/vllm_kills.py core load     only cells whose line has all these words

Each cell is a session of its own, begun with the real commands: supervisor, wrapper, keeper, vLLM's API server and its
EngineCore. mini-kimi passes most phases in a fraction of a second, so vLLM's log is read a thousand times a second, and
at the first line of the phase both its processes are stopped (SIGSTOP) until the victim is hit; whoever is not the
victim goes on at once. The phase is then read in the keeper's journal, before the hit and after it; a cell that missed
its phase says nothing and is played again.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "rehearsal"))

from matrix import Missed, current_phase, table
from processes import Process, Watch, kill_all, same, signal_exactly, wait_until
from vllm_stage import VllmStage, moment, seeded_mini_kimi, staged

#: Cells at a time: a start of vLLM takes one core for some ten seconds, and most of the rest is waiting.
AT_ONCE = 3
TRIES = 3

#: vLLM's exit codes and times behind the bounds were measured before (notes/real-vllm-on-cpu.md, "Processes").
_AT_ONCE = 4.0  # a tick of 0.1 s, a kill, the supervisor's poll of 0.2 s; the rest is a busy machine
_API_ENDS = 12.0  # the API server of a dead EngineCore ended after 1.8 s while loading; 7.8 s at a load of 18 (was: 7)
_API_NOTICES = 15.0  # and after 3.9 to 4.5 s when it served (was: 9, and was kept at a load of 25)
_UNKNOWN = 12.0  # 5 s without a scrape, 3 s of grace that a stopped process cannot use
_STALLED = 12.0  # 5 s without a token, 3 s of grace
_COLD_STALL = 30.0  # 20 s without a line of its log, 3 s of grace, the rest of a line before it was stopped
_UNUSED = 14.0  # 6 s of patience with an unused session
_IN_ORDER = 8.0  # 3 s of grace for an engine that was asked to end


@dataclass(frozen=True)
class Cell:
    """What was written down before anything was killed.

    `how`: `kill` is SIGKILL, `hang` is SIGSTOP, `stop` is `kimisession stop` while nothing else happens. `layer` is who
    must end the session (the `by` of the journal's `ended` line), `within_s` counts from the hit until no process of the
    machine is left by our own scan, `reason` is what a fresh `status --all` says.
    """

    phase: str
    victim: str
    how: str
    layer: str
    within_s: float
    reason: str
    limits: Mapping[str, str | float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Phase, victim and what is done to it."""
        return f"{self.phase} {self.victim} {self.how}"


_PATIENT = {"coldstart_stall": "20s"}

#: `api` is vLLM's API server, which the keeper started; `core` its EngineCore, which loads and computes. `import` is
#: before vLLM has said a word, `compile` is with torch.compile on and an empty cache; the other names are the keeper's.
CELLS: tuple[Cell, ...] = (
    Cell("import", "api", "kill", "keeper", _AT_ONCE, "engine-dead"),
    Cell("boot", "api", "kill", "keeper", _AT_ONCE, "engine-dead"),
    Cell("boot", "core", "kill", "keeper", _API_ENDS, "engine-dead"),
    Cell("boot", "api", "hang", "keeper", _COLD_STALL, "never-ready", _PATIENT),
    Cell("load", "api", "kill", "keeper", _AT_ONCE, "engine-dead"),
    Cell("load", "core", "kill", "keeper", _API_ENDS, "engine-dead"),
    Cell("load", "core", "hang", "keeper", _COLD_STALL, "never-ready", _PATIENT),
    Cell("load", "keeper", "kill", "wrapper", _AT_ONCE, "keeper-died"),
    Cell("load", "session", "stop", "keeper", _IN_ORDER, "user"),
    Cell("compile", "api", "kill", "keeper", _AT_ONCE, "engine-dead"),
    Cell("compile", "core", "kill", "keeper", _API_ENDS, "engine-dead"),
    Cell("memory", "api", "kill", "keeper", _AT_ONCE, "engine-dead"),
    Cell("memory", "core", "kill", "keeper", _API_ENDS, "engine-dead"),
    Cell("serve", "api", "kill", "keeper", _AT_ONCE, "engine-dead"),
    Cell("serve", "core", "kill", "keeper", _API_NOTICES, "engine-dead"),
    Cell("ready-quiet", "api", "kill", "keeper", _AT_ONCE, "engine-dead"),
    Cell("ready-quiet", "core", "kill", "keeper", _API_NOTICES, "engine-dead"),
    Cell("ready-quiet", "api", "hang", "keeper", _UNKNOWN, "unknown-too-long"),
    # A hung EngineCore that nobody asks anything looks like one that nobody asks anything.
    Cell("ready-quiet", "core", "hang", "keeper", _UNUSED, "never-used", {"unused": "6s"}),
    Cell("ready-busy", "api", "kill", "keeper", _AT_ONCE, "engine-dead"),
    Cell("ready-busy", "core", "kill", "keeper", _API_NOTICES, "engine-dead"),
    Cell("ready-busy", "api", "hang", "keeper", _UNKNOWN, "unknown-too-long"),
    Cell("ready-busy", "core", "hang", "keeper", _STALLED, "stalled"),
    Cell("ready-busy", "keeper", "kill", "wrapper", _AT_ONCE, "keeper-died"),
    Cell("ready-busy", "keeper", "hang", "wrapper", 8.0 + _AT_ONCE, "keeper-hung"),
    Cell("ready-busy", "wrapper", "kill", "keeper|supervisor", _IN_ORDER, "wrapper-died"),
    Cell("ready-busy", "session", "stop", "keeper", _IN_ORDER, "user"),
)

#: The line of vLLM's log at which a phase has just begun.
_FIRST_LINE = {
    "boot": "non-default args",
    "load": "Starting to load model",
    "compile": "Warming up model for the compilation",
    "memory": "Explicitly set (",
    "serve": "Starting vLLM server on",
}


@dataclass
class Outcome:
    """What came of a cell. `problems` is empty when everything held."""

    cell: Cell
    took_s: float = 0.0
    reason: str = ""
    layer: str = ""
    evidence: str = ""
    problems: list[str] = field(default_factory=list)
    tries: int = 1


def play(cell: Cell, watch: Watch, bucket: str) -> Outcome:
    """Play one cell on a stage of its own."""
    outcome = Outcome(cell)
    for attempt in range(1, TRIES + 1):
        outcome = Outcome(cell, tries=attempt)
        eager = {} if cell.phase != "compile" else {"enforce-eager": False}
        stage = VllmStage(watch, bucket, limits=cell.limits, flags=eager, fresh_cache=cell.phase == "compile")
        with staged(stage):
            try:
                _Play(cell, stage, outcome).run()
            except Missed as missed:
                outcome.problems.append(f"missed the phase: {missed}")
                continue
            except Exception as error:  # a cell that breaks is a cell that failed, with its name
                outcome.problems.append(f"{type(error).__name__}: {error}")
        break
    return outcome


class Said:
    """Whether a growing log has a text yet; asked often, and read only when it has grown."""

    def __init__(self, log: Path, text: str) -> None:
        self._log, self._text, self._read, self._found = log, text.encode(), -1, False

    def yet(self) -> bool:
        """Whether it has; once it had, always."""
        if not self._found and (size := self._log.stat().st_size) != self._read:
            self._read, self._found = size, self._text in self._log.read_bytes()
        return self._found


class _Play:
    def __init__(self, cell: Cell, stage: VllmStage, outcome: Outcome) -> None:
        self.cell, self.stage, self.outcome = cell, stage, outcome
        self.held: list[Process] = []

    def run(self) -> None:
        """Reach the phase, hit, wait for nothing to be left, look with a fresh command, compare."""
        self.start = self.stage.start()
        try:
            self._reach()
            hit_at = self._hit()
        finally:
            self._let_go()
        self._wait_for_nothing(hit_at)
        self._check()

    def problem(self, text: str) -> None:
        """Note what did not hold, on one line."""
        self.outcome.problems.append(" ".join(text.split())[:200])

    # -- reach ---------------------------------------------------------------------------------------------------------

    def _reach(self) -> None:
        stage, cell = self.stage, self.cell
        if cell.phase == "import":
            # It maps torch's libraries, and has not said a word yet.
            self._need(self._imports_torch, 60, "never imported torch")
            if "INFO" in stage.engine_log():
                raise Missed("it had spoken already")
        elif cell.phase.startswith("ready"):
            self._need(stage.quiet, 180, "not ready", every_s=0.05)
            self.start.wait(timeout=20)
            if cell.phase == "ready-busy":
                stage.keep_asking()
                self._need(self._busy, 10, "not busy")
        elif cell.phase == "boot" and cell.victim == "core":
            self._need(lambda: stage.process("core") is not None, 90, "no EngineCore")
            self._hold("core")
        else:
            self._need(lambda: bool(stage.engine_log()), 60, "no log")
            first_line = Said(stage.machine / "run" / "engine.log", _FIRST_LINE[cell.phase])
            self._need(first_line.yet, 150, f"never in {cell.phase}", every_s=0.001)
            self._hold("core", "api")
            self._need(lambda: current_phase(stage.journal()) == cell.phase, 3, "the keeper saw another phase")

    def _need(self, done: Callable[[], bool], within_s: float, what: str, every_s: float = 0.02) -> None:
        if not wait_until(lambda: done() or self.start.poll() not in (None, 0), within_s, every_s):
            raise Missed(what)
        if not done():
            raise AssertionError(f"`start` ended before the phase: {self.stage.told(self.start)[-300:]}")

    def _imports_torch(self) -> bool:
        api = self.stage.process("api")
        try:
            return api is not None and "libtorch" in Path(f"/proc/{api.pid}/maps").read_text()
        except OSError:
            return False

    def _busy(self) -> bool:
        beats = self.stage.beats()
        return bool(beats) and beats[-1]["activity"] == "busy" and beats[-1]["running"] >= 1

    def _hold(self, *roles: str) -> None:
        for role in roles:
            process = self.stage.process(role)
            if process is not None:
                signal_exactly(process, signal.SIGSTOP)
                self.held.append(process)

    def _let_go(self) -> None:
        for process in self.held:
            signal_exactly(process, signal.SIGCONT)
        self.held.clear()

    # -- hit -----------------------------------------------------------------------------------------------------------

    def _hit(self) -> float:
        """Strike; the wall clock at that moment. The victim lives, and the journal has the phase before and after."""
        stage, cell = self.stage, self.cell
        wanted = {"import": "boot"}.get(cell.phase, cell.phase.partition("-")[0])
        target = None if cell.how == "stop" else stage.process(cell.victim)
        before = current_phase(stage.journal())
        if before != wanted or (cell.how != "stop" and not same(target)):
            raise Missed(f"in phase {before}, victim {target}")
        hit_at = time.time()
        if target is None:
            stage.command("stop", "cell")
        else:
            stage.watch.add(stage.mark, target)
            signal_exactly(target, signal.SIGKILL if cell.how == "kill" else signal.SIGSTOP)
        if cell.how == "hang" and target is not None:
            self.held = [process for process in self.held if process.identity != target.identity]
        told = [line for line in stage.journal() if moment(line) <= hit_at]
        if current_phase(told) != before:
            raise Missed(f"the journal says {current_phase(told)}")
        if cell.how == "kill" and not wait_until(lambda: not same(target), 2):
            self.problem("the victim survived kill -9")
        return hit_at

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _wait_for_nothing(self, hit_at: float) -> None:
        stage, cell = self.stage, self.cell
        patience_s = cell.within_s + 3
        wait_until(lambda: stage.nothing_runs(hit_at) is not None, patience_s)
        gone_at = stage.nothing_runs(hit_at)
        if gone_at is None:
            left = stage.watch.living(stage.mark)
            self.problem(f"left after {patience_s:g}s: {', '.join(sorted(' '.join(s.argv)[-60:] for s in left))}")
            kill_all(left)
            wait_until(lambda: stage.nothing_runs() is not None, 2)
        self.outcome.took_s = max(0.0, (gone_at or time.time()) - hit_at)
        if self.outcome.took_s > cell.within_s:
            self.problem(f"took {self.outcome.took_s:.1f}s")
        if not wait_until(lambda: bool(stage.gone()), 2):
            self.problem("nobody recorded the end")
        elif stage.gone()["by"] != "supervisor":
            self.problem(f"closed by {stage.gone()['by']}")

    def _check(self) -> None:
        stage, cell = self.stage, self.cell
        for command in stage.commands:
            if not wait_until(lambda c=command: c.poll() is not None, 30):  # type: ignore[misc]
                self.problem("a command did not come back")
        ended: dict[str, object] = next((line for line in stage.journal() if line["kind"] == "ended"), {})
        self.outcome.layer, self.outcome.evidence = str(ended.get("by", "-")), str(ended.get("evidence", ""))
        self.outcome.reason = stage.reason()
        if self.outcome.reason != cell.reason:
            self.problem(f"reason {self.outcome.reason}")
        if self.outcome.layer not in cell.layer.split("|"):
            self.problem(f"ended by {self.outcome.layer}")
        # 6: the engine failed; 124: it did not get ready in time; 1: a person stopped what was starting.
        failed = 124 if cell.reason == "never-ready" else 6
        wanted = 0 if cell.phase.startswith("ready") else 1 if cell.how == "stop" else failed
        if self.start.returncode != wanted:
            self.problem(f"`start` exited with {self.start.returncode}: {stage.told(self.start)[-200:]}")
        if stage.litter():
            self.problem(f"left in TMPDIR: {', '.join(stage.litter())}")


# -- the table ---------------------------------------------------------------------------------------------------------


def beforehand() -> str:
    """What was written down before anything was killed."""
    rows = [(c.phase, c.victim, c.how, c.layer, f"{c.within_s:g}", c.reason) for c in CELLS]
    return table([("PHASE", "VICTIM", "HOW", "LAYER", "BOUND s", "REASON"), *rows])


def report(outcomes: Sequence[Outcome]) -> str:
    """The table as it was played."""
    rows = [("PHASE", "VICTIM", "HOW", "LAYER", "BOUND s", "TOOK s", "REASON", "OK", "EVIDENCE")]
    for outcome in outcomes:
        cell = outcome.cell
        verdict = "; ".join(outcome.problems) or ("ok" if outcome.tries == 1 else f"ok at try {outcome.tries}")
        times = (f"{cell.within_s:g}", f"{outcome.took_s:.1f}")
        what = (cell.phase, cell.victim, cell.how, outcome.layer)
        rows.append((*what, *times, outcome.reason, verdict, outcome.evidence))
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    return f"{table(rows)}\n{failed} of {len(outcomes)} did not hold; load average {os.getloadavg()[0]:.1f}"


def main(words: Sequence[str]) -> int:
    """Print the table; 1 when a cell did not hold."""
    if "--beforehand" in words:
        print(beforehand())
        return 0
    chosen = [cell for cell in CELLS if all(word in cell.name.split() for word in words)]
    watch, root, began = Watch(), Path(tempfile.mkdtemp(prefix="kimi-vllm-")), time.monotonic()
    try:
        bucket = seeded_mini_kimi(root)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            outcomes = list(pool.map(lambda cell: play(cell, watch, bucket), chosen))
    finally:
        watch.end()
        shutil.rmtree(root, ignore_errors=True)
    print(f"{report(outcomes)}\n\n{len(outcomes)} cells in {time.monotonic() - began:.0f}s")
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
