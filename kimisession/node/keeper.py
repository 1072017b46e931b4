"""The keeper: starts the engine, watches real traffic, and ends the session when the policy says so.

    python3 -m kimisession.node.keeper MACHINE_FOLDER LIFELINE_FD WRAPPER_PID

One loop, one exit. A tick is observe, decide, record, act, heartbeat; a step that raises is noted and the loop lives;
nothing skips the heartbeat. Exit codes are in `policy.EXIT_CODES`. SIGTERM means: finish tearing down.

It obeys files in MACHINE_FOLDER/control, both written whole and renamed into place:
`stop.json` {"by", "reason"}, `extend.json` {"hard_cap_utc", "added_s": since the first cap, in all} and `restart.json`
{"id", "argv", "flags"}. A cap never moves back, and who misses one of two extensions misses nothing. A restart
keeps the machine, its weights and its caches; when the engine then dies before it is ready, it goes back to the arguments of
before.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Callable

from kimisession.node import asking, leash, preemption
from kimisession.node.config import Config, fill, load
from kimisession.node.job import write_pid
from kimisession.node.journal import Journal
from kimisession.node.phases import PHASES, Mark, log_reader
from kimisession.node.policy import EXIT_CODES, Action, Activity, Decision, Limits, Reason, Seen, decide
from kimisession.node.task import Task, without_secrets
from kimisession.node.traffic import Counters

_FIRST_ANSWER_S = 300.0  # the first completion may wait for kernels to compile


def boot_clock() -> float:
    """Seconds on a clock that never steps and goes on during suspend: a closed laptop must not stretch a cap."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Keeper:
    """See the module's text. `machine` is the folder; `lifeline` a descriptor that gets a byte per tick."""

    def __init__(self, machine: Path, config: Config, lifeline: int, wrapper: int) -> None:
        self.machine = machine
        self.config = config
        self.lifeline = lifeline
        self.wrapper = wrapper
        self.journal = Journal(machine / "run" / "journal.jsonl", "keeper", echo=True)
        # Unlike an Event, this may be put into by a signal's handler while the loop is inside of it.
        self.woken: queue.SimpleQueue[int] = queue.SimpleQueue()  # a signal's number, 0 for the cloud's notice
        self.reader = log_reader(config.engine.kind) if config.engine else None
        self.key = (machine / "api_key").read_text(encoding="ascii").strip()
        now = boot_clock()
        self.limits = self._limits(now)
        self.first_cap_at = self.limits.hard_cap_at
        self.seen = Seen(started_at=now, progressed_at=now, phase="setup")
        self.tasks: dict[str, Task] = {}
        self.done: set[str] = set()
        self.engine: Task | None = None
        self.probe: asking.Background[tuple[int, Counters | None]] = asking.Background()
        self.scrape: asking.Background[Counters] = asking.Background()
        self.counters: Counters | None = None
        self.next_scrape = now
        self.warned: tuple[Reason, float] = (Reason.USER, 0.0)
        self.stop_reason = ""
        self.extended = ""
        self.began: dict[str, float] = {}
        self.run_number = 1
        self.argv = config.engine.argv if config.engine else ()
        self.argv_before: tuple[str, ...] | None = None  # to go back to while a restart has not come up
        self.argv_undo: tuple[str, ...] | None = None  # what ran before what runs
        self.restart_asked = ""
        self.webhook: asking.Background[None] = asking.Background()
        self.on_google = preemption.on_google()
        self.notice: asking.Background[bool] = asking.Background()
        self.next_notice = now

    def _limits(self, now: float) -> Limits:
        """Moments come onto the clock that never steps once, here; the duration bounds a wrong wall clock."""
        c = self.config
        wall = time.time()
        # The budget may reach further than the first cap, and holds for a cap that was extended up to it.
        began_utc = c.hard_cap_utc - c.duration_s
        budget = None if c.budget_utc is None else now + min(c.budget_utc - wall, c.budget_utc - began_utc)
        return Limits(
            idle_s=c.idle_s,
            unused_s=c.unused_s,
            hard_cap_at=now + min(c.hard_cap_utc - wall, c.duration_s),
            budget_at=budget,
            ready_within_s=c.ready_within_s,
            coldstart_stall_s=c.coldstart_stall_s,
            stall_s=c.stall_s,
            unknown_s=c.unknown_s,
            warn_s=c.warn_s,
        )

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until the policy ends it. Returns the exit code."""
        self.journal.write("started", session=self.config.session, pid=os.getpid())
        for step in self.config.steps:  # there from the beginning, for whoever follows the logs
            with contextlib.suppress(OSError):
                (self.machine / "run" / f"step-{step.name}.log").touch(0o600)
        while True:
            now = boot_clock()
            for observe in (self._control, self._preemption, self._terminals, self._setup, self._engine, self._traffic):
                self._noting(observe, now)
            decision = decide(self.seen, self.limits, now)
            if decision.action is Action.END and decision.reason is Reason.NEVER_READY and self.argv_before is not None:
                self._go_back(f"the engine did not get ready with these flags ({decision.evidence})")
                continue
            self._noting(self._tell, decision)
            self._pulse()
            if decision.action is Action.END:
                return self._end(decision)
            self._wait(max(0.01, min(self.config.tick_s, decision.look_again_at - now)))

    def _noting(self, step: Callable[[Any], None], about: Any) -> None:
        try:
            step(about)
        except Exception as error:
            self.journal.write("note", text=f"{step.__name__}: {type(error).__name__}: {error}")

    def _wait(self, within_s: float) -> None:
        """So long, or until a signal or the cloud's notice comes."""
        with contextlib.suppress(queue.Empty):
            number = self.woken.get(timeout=within_s)
            if number:
                self._signalled(number)
            else:
                self.seen = replace(self.seen, preempted_at=boot_clock())

    def _pulse(self) -> None:
        with contextlib.suppress(OSError):  # full pipe: beats enough
            os.write(self.lifeline, b".")

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """SIGTERM: finish tearing down. SIGUSR1: the wrapper's launcher died. Only remembered here: the loop may be about to
        replace `seen` by what it read before, and the signal would be lost."""
        self.woken.put(number)

    def _signalled(self, number: int) -> None:
        if self.seen.stop_at is None:
            who = signal.Signals(number).name
            self.stop_reason = "wrapper-died" if os.getppid() != self.wrapper else ""
            if number == signal.SIGUSR1:
                self.stop_reason, who = "supervisor-died", "the wrapper: the supervisor is gone"
            self.seen = replace(self.seen, stop_at=boot_clock(), stop_by=who)

    # -- observe -------------------------------------------------------------------------------------------------------

    def _control(self, now: float) -> None:
        stop = self._read_control("stop.json")
        if stop is not None and self.seen.stop_at is None:
            self.stop_reason = str(stop.get("reason", ""))
            self.seen = replace(self.seen, stop_at=now, stop_by=str(stop.get("by", "unknown")))
        extend = self._read_control("extend.json")
        if extend is not None and (text := json.dumps(extend, sort_keys=True)) != self.extended:
            self.extended = text
            added, wall = float(extend["added_s"]), time.time()
            cap = min(now + float(extend["hard_cap_utc"]) - wall, self.first_cap_at + added)
            if not math.isfinite(cap):
                raise ValueError("control/extend.json names no moment")
            if cap <= self.limits.hard_cap_at:  # of two commands at once the slower one wrote last
                return
            self.limits = replace(self.limits, hard_cap_at=cap)
            self.journal.write("extended", hard_cap_utc=extend["hard_cap_utc"], left_s=round(cap - now))
        again = self._read_control("restart.json")
        if again is not None and self.engine is not None and str(again["id"]) != self.restart_asked:
            self.restart_asked = str(again["id"])
            self.argv_before = self.argv_before or self.argv  # of two in a row, what came up last is gone back to
            self._restart(tuple(again["argv"]), str(again["flags"]))

    def _preemption(self, now: float) -> None:
        """Wait for the cloud's notice, in a thread that wakes the loop."""
        if not self.on_google or self.seen.preempted_at is not None:
            return
        answer = self.notice.take()
        if answer is not None and answer[1] is not None:
            self.next_notice = now + preemption.PAUSE_S
        if not self.notice.asking and now >= self.next_notice:
            self.notice.ask(self._wait_for_notice)

    def _wait_for_notice(self) -> bool:
        told = preemption.wait_for_notice()
        if told:
            self.woken.put(0)
        return told

    def _was_preempted(self, decision: Decision) -> bool:
        """Whether the signal that ends it came because the cloud takes the machine back: its shutdown may be quicker than
        the notice."""
        if not self.on_google or decision.reason is not Reason.USER or not self.seen.stop_by.startswith("SIG"):
            return False
        try:
            return preemption.is_preempted()
        except OSError:
            return False

    def _read_control(self, name: str) -> dict[str, Any] | None:
        try:
            found = json.loads((self.machine / "control" / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        if not isinstance(found, dict):
            raise ValueError(f"control/{name} is not an object")
        return found

    def _terminals(self, now: float) -> None:
        """Typing in a terminal of this machine is use; an open connection is not."""
        if not self.config.watch_terminals:
            return
        wall = time.time()
        for pts in Path("/dev/pts").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                typed_at = now - max(0.0, wall - pts.stat().st_atime)
                self.seen = replace(self.seen, active_at=max(self.seen.active_at, typed_at))

    def _setup(self, now: float) -> None:
        """Run the steps, each when those before it are done, side by side where nothing orders them."""
        if self.engine is not None or self.seen.failed_step is not None or self.seen.done_at is not None:
            return
        for name, task in self.tasks.items():
            if name in self.done:
                continue
            for line in task.lines():
                self._moved(now)
                self._step_line(task, line)
            code = task.process.poll()
            if code is None:
                continue
            for line in task.lines(last=True):
                self._step_line(task, line)
            if code != 0:
                self._phase_ends(name, now, failed=True)
                self.seen = replace(self.seen, failed_step=f"{name}: {task.telling or f'exit code {code}'}")
                return
            self.done.add(name)
            self._phase_ends(name, now)
        try:
            self._start_next(now)
        except OSError as error:
            self._not_started(error)

    def _start_next(self, now: float) -> None:
        """The steps that wait for nothing any more, and after all of them the engine. Raises OSError."""
        values = self._values()
        for step in self.config.steps:
            if step.name not in self.tasks and self.done.issuperset(step.after):
                self._phase_begins(step.name, now)
                log = self.machine / "run" / f"step-{step.name}.log"
                self.tasks[step.name] = Task(step.name, fill(step.argv, values), dict(os.environ), log)
        if len(self.done) == len(self.config.steps) and self.config.engine is None:
            self.seen = replace(self.seen, done_at=now)
        elif len(self.done) == len(self.config.steps):
            self._start_engine(now)

    def _not_started(self, error: OSError) -> None:
        """A full disk, say, in the phase that has just begun: trying again each tick would look like progress."""
        self.seen = replace(self.seen, failed_step=f"{self.seen.phase}: it could not be started: {error}")

    def _start_engine(self, now: float) -> None:
        assert self.config.engine is not None
        env = {**without_secrets(os.environ), **self.config.engine.env, "VLLM_API_KEY": self.key}
        self._phase_begins("boot", now)
        self.engine = Task("engine", fill(self.argv, self._values()), env, self.machine / "run" / "engine.log")
        with contextlib.suppress(OSError):
            who = leash.identity(self.engine.process.pid)
            (self.machine / "run" / "pid.engine").write_text(who, encoding="ascii")
            running = json.dumps({"argv": self.argv, "before": self.argv_before or self.argv_undo})
            (self.machine / "run" / "argv.json").write_text(running, encoding="utf-8")

    def _restart(self, argv: tuple[str, ...], flags: str) -> None:
        """Stop the engine and start it with other arguments. Weights, page cache and compile cache stay."""
        self.run_number += 1
        self.journal.write("restarted", run=self.run_number, flags=flags)
        self._stop_tasks()
        self.began.clear()
        log = self.machine / "run" / "engine.log"
        with contextlib.suppress(OSError):
            log.rename(log.with_name(f"engine-{self.run_number - 1}.log"))
        assert self.config.engine is not None
        self.argv, self.counters, self.reader = argv, None, log_reader(self.config.engine.kind)
        self.probe, self.scrape = asking.Background(), asking.Background()
        now = boot_clock()
        self.seen = replace(
            self.seen,
            run_at=now,
            progressed_at=now,
            ready_at=None,
            engine_exit=None,
            activity=Activity.UNKNOWN,
            running=0,
        )
        self._start_engine(now)

    def _go_back(self, why: str) -> None:
        """To the arguments from before a restart that did not come up: the warm machine is not lost for it. Once."""
        before, self.argv_before = self.argv_before, None
        assert before is not None
        self.journal.write("warn", reason="restart", text=f"{why}; going back")
        try:
            self._restart(before, "as before")
        except OSError as error:
            self._not_started(error)

    def _values(self) -> dict[str, str]:
        return {
            "machine": str(self.machine),
            "disk": str(self.machine / "disk"),
            "python": sys.executable,
            "port": str(self.config.engine.port if self.config.engine else 0),
        }

    def _step_line(self, task: Task, line: str) -> None:
        """Steps may say how far they are, and why they failed, as JSON (see node/pull.py). What they say otherwise, such as
        a progress that names a journal line's own fields, is only a line of their log."""
        with contextlib.suppress(ValueError, TypeError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("progress"), dict):
                self.journal.write("progress", phase=task.name, **record["progress"])
            elif isinstance(record, dict) and isinstance(record.get("failed"), dict):
                task.quote(str(record["failed"].get("message", line)))

    def _engine(self, now: float) -> None:
        """Follow the engine's log through its phases, and take one completion as readiness."""
        engine = self.config.engine
        if self.engine is None or engine is None or self.reader is None or self.seen.engine_exit is not None:
            return
        for line in self.engine.lines():
            if self.seen.ready_at is None:
                self._moved(now)
                mark = self.reader.read(line)
                if mark is not None:
                    self._mark(mark, now)
        code = self.engine.process.poll()
        if code is not None and self.seen.ready_at is None and self.argv_before is not None:
            self._go_back(f"the engine did not start with these flags ({self.engine.telling})")
            return
        self.seen = replace(self.seen, engine_exit=code)
        if self.seen.engine_exit is not None or self.seen.ready_at is not None:
            return
        port = engine.port
        answer = self.probe.take()
        if answer is not None and answer[0] is not None:
            tokens, self.counters = answer[0]
            self._phase_ends(self.seen.phase, now)
            self.seen = replace(
                self.seen,
                phase="ready",
                ready_at=now,
                active_at=max(now, self.seen.active_at),
                tokens_at=now,
                known_at=now,
                activity=Activity.QUIET if self.counters else Activity.UNKNOWN,
            )
            self.next_scrape = now + self.config.scrape_s
            self.argv_undo, self.argv_before = self.argv_before or self.argv_undo, None
            began_at = self.seen.started_at if self.seen.run_at is None else self.seen.run_at
            after_s = round(now - began_at, 3)
            self.journal.write("ready", run=self.run_number, port=port, completion_tokens=tokens, after_s=after_s)
        elif not self.probe.asking and asking.listening(port):
            self.probe.ask(
                lambda: asking.first_completion(engine.kind, port, self.key, engine.served_name, _FIRST_ANSWER_S)
            )

    def _mark(self, mark: Mark, now: float) -> None:
        # Forward only: a late line of an earlier phase (a draft model's shards, say) begins nothing anew.
        if self.seen.phase not in PHASES or PHASES.index(mark.phase) > PHASES.index(self.seen.phase):
            self._phase_ends(self.seen.phase, now)
            self._phase_begins(mark.phase, now)
        if mark.total:
            self.journal.write(
                "progress", phase=self._numbered(mark.phase), done=mark.done, total=mark.total, unit=mark.unit
            )
        for name, value in mark.facts.items():
            self.journal.write("fact", name=name, value=value)

    def _traffic(self, now: float) -> None:
        """Read the counters. A scrape that failed, or has not come back, leaves traffic unknown."""
        engine = self.config.engine
        if engine is None or self.seen.ready_at is None or self.seen.engine_exit is not None:
            return
        answer = self.scrape.take()
        if answer is not None:
            counters = answer[0]
            if counters is None:
                self.seen = replace(self.seen, activity=Activity.UNKNOWN)
            else:
                self._counted(counters, now)
        elif self.scrape.asking and now - self.seen.known_at > 2 * self.config.scrape_s + 3:
            self.seen = replace(self.seen, activity=Activity.UNKNOWN)
        if now >= self.next_scrape and not self.scrape.asking:
            self.next_scrape = now + self.config.scrape_s
            timeout = max(2.0, self.config.scrape_s)
            self.scrape.ask(lambda: asking.scrape(engine.kind, engine.port, self.key, timeout))

    def _counted(self, new: Counters, now: float) -> None:
        """Only requests and tokens are activity: a client that polls /metrics or /v1/models changes none of these."""
        old, self.counters = self.counters or new, new
        tokens = new.generation_tokens + new.prompt_tokens > old.generation_tokens + old.prompt_tokens
        running = int(new.running + new.waiting)
        busy = bool(running) or tokens or new.finished > old.finished or new.aborted > old.aborted
        seen = replace(self.seen, known_at=now, running=running, activity=Activity.BUSY if busy else Activity.QUIET)
        if tokens or not running:
            seen = replace(seen, tokens_at=now)
        if busy:
            seen = replace(seen, used=True, active_at=now, last_request=time.strftime("%H:%M:%S UTC", time.gmtime()))
        self.seen = seen

    # -- record --------------------------------------------------------------------------------------------------------

    def _moved(self, now: float) -> None:
        self.seen = replace(self.seen, progressed_at=now)

    def _phase_begins(self, name: str, now: float) -> None:
        self._moved(now)
        self.began[name] = now
        self.seen = replace(self.seen, phase=name)
        self.journal.write("phase", phase=self._numbered(name), state="began")

    def _phase_ends(self, name: str, now: float, failed: bool = False) -> None:
        self._moved(now)
        if name in self.began:
            took = round(now - self.began.pop(name), 3)
            self.journal.write("phase", phase=self._numbered(name), state="failed" if failed else "ended", took_s=took)
        # Steps run side by side: what is shown, and blamed for a stall, is one that still runs.
        if self.began and self.seen.phase not in self.began:
            self.seen = replace(self.seen, phase=next(iter(self.began)))

    def _numbered(self, phase: str) -> str:
        """Phases of a restarted engine carry the number of the run, so that the first start's stay as they were."""
        return phase if self.run_number == 1 else f"{phase}.{self.run_number}"

    def _tell(self, decision: Decision) -> None:
        now, wall = boot_clock(), time.time()
        counters = self.counters
        self.journal.write(
            "beat",
            phase="ready" if self.seen.ready_at is not None else self._numbered(self.seen.phase),
            activity=self.seen.activity.value,
            running=self.seen.running,
            tokens=int(counters.generation_tokens) if counters else 0,
            next=decision.reason.value,
            evidence=decision.evidence,
            ends_utc=round(wall + decision.ends_at - now, 1),
            cap_utc=round(wall + self.limits.hard_cap_at - now, 1),
        )
        # Each scrape moves the moment a little; a person wants one warning an end.
        if decision.action is Action.WARN and (self.warned[0], round(self.warned[1])) != (
            decision.reason,
            round(decision.ends_at),
        ):
            self.warned = (decision.reason, decision.ends_at)
            text = f"ends in {max(0, round(decision.ends_at - now))}s: {decision.evidence}"
            self.journal.write("warn", reason=decision.reason.value, text=text)
            self._tell_outside(f"session {self.config.session} {text}")

    def _tell_outside(self, text: str) -> None:
        """The user's webhook, if there is one; it may be slow or dead without holding up the loop."""
        # No file, no text in it, no thread to be had: whoever is told nothing is told nothing, and the session ends all the same.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            url = (self.machine / "webhook").read_text(encoding="utf-8").strip()
            self.webhook = asking.Background()
            self.webhook.ask(lambda: asking.tell(url, text))

    # -- act -----------------------------------------------------------------------------------------------------------

    def _end(self, decision: Decision) -> int:
        """End the engine in order, then by force, then say so. The heartbeat goes on meanwhile."""
        if self._was_preempted(decision):
            self.seen = replace(self.seen, preempted_at=boot_clock(), stop_at=None)
            decision, self.stop_reason = decide(self.seen, self.limits, boot_clock()), ""
        reason = self.stop_reason or decision.reason.value
        self.journal.write("ending", reason=reason, evidence=decision.evidence)
        self._tell_outside(f"session {self.config.session} is ending ({reason}): {decision.evidence}")
        left = self._stop_tasks()
        # This process is about to end, and the message with it: a webhook that answers at all has this long.
        self._wait_for(lambda: not self.webhook.asking or self.webhook.take() is not None, asking.TELL_S)
        code = EXIT_CODES[decision.reason]
        self.journal.write("ended", reason=reason, evidence=decision.evidence, exit_code=code, left=len(left))
        return code

    def _stop_tasks(self) -> list[int]:
        """Every step and the engine, in order, then by force, then whatever they left. Returns what cannot be killed."""
        running = [t.process for t in (*self.tasks.values(), *([self.engine] if self.engine else []))]
        self._signal_all(running, signal.SIGTERM)
        self._wait_for(lambda: all(p.poll() is not None for p in running), self.config.stop_grace_s)
        self._signal_all(running, signal.SIGKILL)
        self._wait_for(lambda: all(p.poll() is not None for p in running), 5)
        self._pulse()
        return leash.kill_descendants(os.getpid(), within_s=5)

    def _signal_all(self, processes: list[subprocess.Popen[bytes]], number: int) -> None:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)

    def _wait_for(self, done: Callable[[], bool], within_s: float) -> None:
        until = boot_clock() + within_s
        while not done() and boot_clock() < until:
            self._pulse()
            time.sleep(0.05)


def main() -> int:
    """Entry point."""
    machine, lifeline, wrapper = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    leash.become_subreaper()
    os.set_blocking(lifeline, False)
    os.set_inheritable(lifeline, False)
    keeper = Keeper(machine, load(machine), lifeline, wrapper)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, keeper.on_signal)
    leash.die_with_parent(signal.SIGTERM, wrapper)
    write_pid(machine, "keeper")
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main())
