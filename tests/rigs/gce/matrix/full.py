"""How each full cell is played: a session through real SkyPilot in the world, several at a time, each in a thread of its own.

Who deleted the machine is told by Compute Engine's delete operation: the account, and of the machine's own the request id, in
which its timer says why and SkyPilot's autodown says nothing. Unless the way says so, no command looks before the machine is
gone.
"""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

from tests.rigs.gce.bounds import PATIENCE
from tests.rigs.gce.matrix.cells import Cell
from tests.rigs.gce.matrix.wire import Outcome
from tests.rigs.gce.test_gce import Session, begin, session_of, take_the_timer
from tests.rigs.gce.world.rig import PYTHON, World, wait_for

#: Sessions at a time.
AT_ONCE = 6
READY_S = 240 * PATIENCE

Play = Callable[[World, Session], float]
Tell = Callable[[Cell, Outcome], None]


@dataclass(frozen=True)
class Way:
    """`words` for `start`; `act` once it is ready, returns when the seconds count from. `look_s` after that a command looks
    once; None: nobody does before the machine is gone."""

    act: Play
    words: tuple[str, ...] = ("--idle", "4m")
    look_s: float | None = None


def _now(act: Callable[[World, Session], object]) -> Play:
    def play(world: World, session: Session) -> float:
        since = time.time()
        act(world, session)
        return since

    return play


def _kill(pattern: str, how: str = "KILL") -> Play:
    return _now(lambda world, session: world.on(session.machine, "pkill", f"-{how}", "-f", pattern))


def _skylet_and_keeper(world: World, session: Session) -> None:
    world.run("/run/bin/on", session.machine, "pkill", "-KILL", "-f", "sky.skylet.skylet")
    world.kill_on(session.machine, "kimisession.node.keeper")


def _record(world: World, session: Session) -> None:
    code = "import sqlite3, sys; c = sqlite3.connect('/root/.sky/state.db', timeout=60);"
    code += "c.execute('delete from clusters where name = ?', (sys.argv[1],)); c.commit()"
    world.out(str(PYTHON), "-c", code, session.id)
    done = world.kimisession("stop", session.id)
    assert done.returncode == 0, done.stdout + done.stderr


def _ssh(world: World, session: Session) -> None:
    world.begin(session.id, "sleep 900", program="ssh")
    wait_for("the ssh session", lambda: "sleep 900" in world.on(session.machine, "ps", "-eo", "args"), 30)


def _other_job(world: World, session: Session) -> None:
    done = world.run("sky", "exec", "-d", session.id, "--cpus", "1", "sleep inf")
    assert done.returncode == 0, done.stderr


def _request(world: World, session: Session) -> None:
    done = world.kimisession("test", session.id, "--json")
    assert done.returncode == 0, done.stdout + done.stderr


def _then_request(act: Callable[[World, Session], object]) -> Play:
    """From the request on: idle, where it would be never used without one."""

    def play(world: World, session: Session) -> float:
        act(world, session)
        since = time.time()
        _request(world, session)
        return since

    return play


def _request_then(act: Callable[[World, Session], object]) -> Play:
    def play(world: World, session: Session) -> float:
        since = time.time()
        _request(world, session)
        act(world, session)
        return since

    return play


IDLE = ("--idle", "75s", "--duration", "10m")

READY = {
    "full-keeper-killed": Way(_kill("kimisession.node.keeper")),
    "full-wrapper-killed": Way(_kill("kimisession[.]node[.](job|keeper)")),
    "full-skylet-killed": Way(_now(_skylet_and_keeper)),
    "full-disk": Way(_request_then(lambda world, session: world.fill_disk(session.machine)), IDLE),
    "full-disk-stays": Way(_request_then(lambda world, session: world.keep_disk_full(session.machine)), IDLE),
    "full-clock": Way(_then_request(lambda world, session: world.step_clock(session.machine, 100)), IDLE),
    "full-stalled": Way(_kill("kimisession.node.standin", "STOP")),
    "full-other-job": Way(_then_request(_other_job), IDLE),
    "full-timer-off": Way(_then_request(take_the_timer), IDLE, look_s=75.0 + 20.0),
    "full-ssh-open": Way(_then_request(_ssh), IDLE),
    "full-reboot": Way(_now(lambda world, session: world.reboot(session.machine))),
    "full-power-off": Way(
        _now(lambda world, session: world.run("/run/bin/on", session.machine, "sh", "-c", "kill -38 1"))
    ),
    "full-record-removed": Way(_now(_record)),
    "full-preempted": Way(_now(lambda world, session: world.admin("/admin/preempt", {"name": session.machine}))),
    "full-vanished": Way(
        _now(lambda world, session: world.admin("/admin/vanish", {"name": session.machine})), look_s=0.0
    ),
}


def _started(world: World, name: str, *words: str) -> Session:
    command = begin(world, name, *words)
    told = command.communicate(timeout=READY_S)[0]
    assert command.returncode == 0, told[-600:]
    return session_of(world, name)


def _launching(world: World, name: str, *words: str) -> "tuple[subprocess.Popen[str], Session]":
    command = begin(world, name, *words)
    session = session_of(world, name)
    wait_for("a machine", lambda: session.machine, READY_S, every_s=0.1)
    return command, session


def _ctrl_c(world: World, name: str) -> tuple[Session, float]:
    command, session = _launching(world, name)
    since = time.time()
    world.signal(f"kimisession start .* {name}", signal.SIGINT)
    command.communicate(timeout=300)
    assert command.returncode == 130
    return session, since


def _laptop_closed(world: World, name: str) -> tuple[Session, float]:
    command, session = _launching(world, name, "--duration", "2m")
    # The session's label, and not our guess.
    label = next(
        one["labels"]["kimisession-deadline"]
        for key, one in world.admin("/admin/state")["instances"].items()
        if f"/{session.id}-" in key
    )
    world.signal(f"kimisession start .* {name}", signal.SIGKILL)
    world.kill_the_server()
    command.wait(timeout=30)
    ends = datetime.strptime(f"{label}+0000", "%Y%m%dt%H%M%Sz%z")
    return session, ends.timestamp()


def _lost_reply(world: World, name: str) -> tuple[Session, float]:
    world.admin("/admin/faults", {"kind": "lost_reply", "times": 1, "method": "compute.instances.bulkInsert"})
    command, session = _launching(world, name)
    since = time.time()
    command.communicate(timeout=400)
    with contextlib.suppress(AssertionError):
        world.out(str(PYTHON), "-m", "kimisession", "stop", session.id, within_s=300)
    return session, since


def _stockout(world: World, name: str) -> tuple[Session, float]:
    world.admin("/admin/faults", {"kind": "stockout", "times": 1})
    session = _started(world, name, "--idle", "4m")
    since = time.time()
    done = world.kimisession("stop", session.id)
    assert done.returncode == 0, done.stderr
    return session, since


#: With faults that hit whoever comes first, or that all sessions feel: one at a time, the last one without an API server.
ALONE: dict[str, Callable[[World, str], tuple[Session, float]]] = {
    "full-stockout": _stockout,
    "full-lost-reply": _lost_reply,
    "full-ctrl-c": _ctrl_c,
    "full-laptop-closed": _laptop_closed,
}


def _ended(world: World, session: Session) -> float:
    lines = world.billed(session.id)
    assert lines, "nothing of it was ever billed"
    assert all(line["end"] for line in lines), "it is still billed"
    return max(datetime.fromisoformat(line["end"]).timestamp() for line in lines)


def _play(world: World, cell: Cell) -> tuple[Session, Outcome]:
    """Until nothing of it is billed."""
    name = cell.key.removeprefix("full-")
    problems: list[str] = []
    if cell.key in ALONE:
        session, since = ALONE[cell.key](world, name)
    else:
        way = READY[cell.key]
        session = _started(world, name, *way.words)
        since = way.act(world, session)
        if way.look_s is not None:
            time.sleep(max(0.0, since + way.look_s - time.time()))
            world.kimisession("status", session.id, "--json")
    limit = cell.within_s * PATIENCE
    try:
        wait_for("its end", lambda: not world.exists(session.id), since + limit + 60 - time.time(), every_s=1)
        seconds = max(0.0, _ended(world, session) - since)
    except AssertionError as error:
        return session, Outcome(time.time() - since, "-", "-", (str(error),))
    if seconds > cell.within_s:
        problems.append(f"{seconds:.1f} s")
    acted = world.deleted_by(session.id)
    # Keeper and wrapper end the session, and say so (`reason`); the machine then goes by its timer.
    # A preempted one may go by it as well, in the second in which Google takes it.
    allowed = {"keeper": ("timer",), "wrapper": ("timer",)}.get(cell.layer, (cell.layer,))
    if acted not in ((*allowed, "timer") if cell.reason == "preempted" else allowed):
        problems.append(f"{acted} acted")
    return session, Outcome(seconds, acted, "-", tuple(problems))


def _apart_s(left: str, right: str) -> float:
    return abs((datetime.fromisoformat(left) - datetime.fromisoformat(right)).total_seconds())


def _settled(world: World, cell: Cell, session: Session, outcome: Outcome) -> Outcome:
    """With the reason that the ledger has, and the receipt beside the bill. Two looks, a minute apart, came before."""
    if outcome.problems:
        return outcome
    problems = []
    data = json.loads(world.kimisession("cost", session.id, "--json").stdout)["data"]
    reason = str(data["reason"])
    if data["state"] != "gone":
        problems.append(f"the ledger says {data['state']}")
    if cell.reason not in ("-", reason):
        problems.append(f"the ledger says {reason}")
    lines, billed, worst = 0, world.billed(session.id), 0.0
    for kind, theirs_kind in (("machine", "instance"), ("disk", "disk"), ("address", "address")):
        ours = sorted((line["began"], line["ended"]) for line in data["lines"] if line["kind"] == kind)
        theirs = sorted((line["start"], line["end"]) for line in billed if line["kind"] == theirs_kind)
        if len(ours) != len(theirs):
            problems.append(f"{len(ours)} lines of ours of the kind {kind}, {len(theirs)} of Google's")
            continue
        for mine, its in zip(ours, theirs, strict=False):
            offs = map(_apart_s, mine, its)
            lines, worst = lines + 1, max(worst, *offs)
    if worst > cell.receipt_s:
        problems.append(f"the receipt is {worst:.1f} s off Google's bill")
    return Outcome(outcome.seconds, outcome.layer, reason, tuple(problems), f"{lines} lines, {worst:.2f} s off")


def play_all(cells: Sequence[Cell], tell: Tell) -> None:
    """All of them in one world."""
    world = World()
    try:
        world.prepare(("rehearsal",))
        together = [cell for cell in cells if cell.key in READY]
        for first in range(0, len(together), AT_ONCE):
            _batch(world, together[first : first + AT_ONCE], tell)
        for key in ALONE:
            _batch(world, [cell for cell in cells if cell.key == key], tell)
    finally:
        world.close()


def _batch(world: World, cells: Sequence[Cell], tell: Tell) -> None:
    played: list[tuple[Cell, Session, Outcome]] = []

    def one(cell: Cell) -> None:
        try:
            session, outcome = _play(world, cell)
        except Exception as error:
            tell(cell, Outcome(0.0, "-", "-", (f"{type(error).__name__}: {str(error)[-300:]}",)))
            return
        played.append((cell, session, outcome))
        print(f"{cell.key}: {outcome.seconds:.1f} s, {outcome.layer}, {outcome.problems}", flush=True)

    if not cells:
        return
    with ThreadPoolExecutor(len(cells)) as crew:
        list(crew.map(one, cells))
    for pause_s in (62, 0):
        world.kimisession("status", "--json")
        time.sleep(pause_s)
    for cell, session, outcome in played:
        try:
            tell(cell, _settled(world, cell, session, outcome))
        except Exception as error:
            tell(cell, Outcome(outcome.seconds, outcome.layer, "-", (f"{type(error).__name__}: {str(error)[-300:]}",)))
