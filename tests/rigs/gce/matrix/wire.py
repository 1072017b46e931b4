"""How each wire cell is played. A play returns when its seconds count from, and the session where a ledger has one."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from kimisession.cloud.guard import guard_state
from kimisession.cloud.resource_prices import price_of_resource
from kimisession.core.guard import SILENT
from kimisession.core.launch import session_labels
from kimisession.core.ledger import State
from kimisession.errors import LeakSuspected
from kimisession.node import deadline
from tests.rigs.gce.emulator.state import OWNER
from tests.rigs.gce.matrix.cells import SLACK, WIRE, Cell
from tests.rigs.gce.matrix.stage import NEXT_ZONE, NODE_EMAIL, REAPER_EMAIL, ZONE, AtClock, Laptop, Stage, stage

ID = "demo-1a2b3c4d"

#: In cells in which the emulator takes its own time, sleeping goes so much faster.
RATE = 20.0

Play = Callable[[Stage, Cell], float]
PLAYS: dict[str, Play] = {}


@dataclass(frozen=True)
class Outcome:
    """What came of a cell. It held when there are no `problems`."""

    seconds: float
    layer: str
    reason: str
    problems: tuple[str, ...]
    receipt: str = ""


def plays(*keys: str) -> Callable[[Play], Play]:
    """This function plays these cells."""

    def known(play: Play) -> Play:
        PLAYS.update(dict.fromkeys(keys, play))
        return play

    return known


def play(cell: Cell) -> Outcome:
    """Play it on a stage of its own."""
    with tempfile.TemporaryDirectory(prefix="kimi-cell-") as folder, stage(Path(folder)) as on:
        since = PLAYS[cell.key](on, cell)
        laptop = getattr(on, "laptop", None)
        seconds = max(0.0, on.last_end() - since)
        on.check(not on.held(), f"still held: {on.held_keys()}")
        on.check(seconds <= cell.within_s, f"{seconds:.1f} s")
        layer = getattr(on, "acted", "") or on.layer()
        on.check(layer == cell.layer, f"{layer} acted")
        reason, receipt = "-", ""
        if laptop is not None and cell.reason != "-":
            session = laptop.session()
            reason = session.reason or "none"
            on.check(reason == cell.reason, f"the ledger says {reason}")
            receipt = on.compare_receipt(session, cell.receipt_s)
        wrong = on.google.data["violations"]
        on.check(not wrong, f"against Google's documents: {wrong[:1]}")
        return Outcome(seconds, layer, reason, tuple(on.problems), receipt)


def _laptop(on: Stage) -> Laptop:
    on.laptop = Laptop(on, on.folder / "laptop")  # type: ignore[attr-defined]
    made: Laptop = on.laptop  # type: ignore[attr-defined]
    return made


def _ready(on: Stage, **more: Any) -> Laptop:
    """A session that runs since ten minutes."""
    laptop = _laptop(on)
    laptop.start(**more)
    on.clock.sleep(600)
    return laptop


def _labels(on: Stage, in_s: float, session: str = ID, owner: str = "ann") -> dict[str, str]:
    return session_labels(session, "demo", owner, on.clock.now() + timedelta(seconds=in_s))


def _alone(on: Stage, in_s: float = 600, **more: Any) -> float:
    """A machine of which nobody knows; when its deadline is."""
    on.outcome(on.insert(ID, _labels(on, in_s), **more))
    return on.clock.time() + in_s


# -- the launch -----------------------------------------------------------------------------------------------------------


@plays("laptop-closed")
def _(on: Stage, cell: Cell) -> float:
    on.arm_reaper()
    ends = _alone(on)
    on.reap_until_gone(ends + cell.within_s)
    on.check(on.last_end() > ends, "it went before its deadline")
    return ends


@plays("two-inserts")
def _(on: Stage, cell: Cell) -> float:
    on.arm_reaper()
    on.fault("lost_reply", times=1, method="compute.instances.bulkInsert")
    try:
        _alone(on)
    except OSError:
        pass
    else:
        on.problems.append("the reply was not lost")
    ends = _alone(on, zone=NEXT_ZONE)
    on.check(len([key for key in on.held_keys() if key]) >= 2, "there are not two machines")
    on.reap_until_gone(ends + cell.within_s)
    return ends


@plays("lost-reply")
def _(on: Stage, cell: Cell) -> float:
    laptop = _laptop(on)
    on.fault("lost_reply", times=1, method="compute.instances.bulkInsert")
    since = on.clock.time()
    on.check(laptop.failing_start() is not None, "the start did not fail")
    laptop.look_until_gone(180)
    return since


@plays("ctrl-c")
def _(on: Stage, cell: Cell) -> float:
    laptop, on.clock.rate = _laptop(on), RATE
    on.fault("slow_operation", seconds=60 / RATE, times=2, method="compute.instances.bulkInsert")

    def interrupted(task: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    laptop.sky.then = interrupted
    since = on.clock.time()
    on.check(isinstance(laptop.failing_start(), KeyboardInterrupt | LeakSuspected), "it did not end with Ctrl-C")
    with on.google.reading() as data:
        ends = [entry["wire"].get("endTime") for entry in data["operations"].values()]
    on.check(all(ends) or laptop.session().state is not State.GONE, "called gone before all its operations were done")
    laptop.look_until_gone(300)
    return since


@plays("late-insert")
def _(on: Stage, cell: Cell) -> float:
    laptop = _laptop(on)

    def broken(task: dict[str, Any]) -> None:
        name, labels = task["cluster_name"], task["resources"]["labels"]
        on.clock.at(on.clock.time() + 45, lambda: on.outcome(on.insert(name, labels)))
        raise KeyboardInterrupt

    laptop.sky.instead = broken
    since = on.clock.time()
    on.check(laptop.failing_start() is not None, "the start did not fail")
    on.check(bool(on.google.data["bill"]), "called gone before the late insert")
    laptop.look_until_gone(300)
    return since


@plays("stockout")
def _(on: Stage, cell: Cell) -> float:
    laptop = _laptop(on)
    laptop.sky.zones = (ZONE, NEXT_ZONE)
    on.fault("stockout", zone=ZONE)
    laptop.start()
    on.check(NEXT_ZONE in on.held_keys()[0], "it is not in the next zone")
    on.clock.sleep(600)
    return _stopped(on, laptop)


@plays("stockout-everywhere", "quota-late", "quota-at-once")
def _(on: Stage, cell: Cell) -> float:
    laptop = _laptop(on)
    how = {"quota-late": "operation", "quota-at-once": "http"}.get(cell.key)
    on.fault("quota", **{"as": how}) if how else on.fault("stockout")
    since = on.clock.time()
    on.check(laptop.failing_start() is not None, "the start did not fail")
    laptop.look_until_gone(180)
    return since


@plays("no-reaper")
def _(on: Stage, cell: Cell) -> float:
    on.arm_reaper()
    cloud: Any = AtClock(on, OWNER)
    on.check(guard_state(cloud, on.clock.now()).armed, "it is not armed at first")
    on.tell("deny", member=f"serviceAccount:{REAPER_EMAIL}", permission="compute.instances.delete")
    on.clock.sleep(SILENT.total_seconds() / 2)
    on.check(not on.reap_once(), "it looked well without its permission")
    on.clock.sleep(SILENT.total_seconds() / 2 + 1)
    layer = guard_state(cloud, on.clock.now())
    on.check(not layer.armed, f"a start would believe in it: {layer.evidence}")
    on.acted = "start"  # type: ignore[attr-defined]
    return on.clock.time()


# -- stop -----------------------------------------------------------------------------------------------------------------


def _stopped(on: Stage, laptop: Laptop, loud: bool = False, heals: float = 0.0) -> float:
    """`stop`, and looking afterwards where it had to give up; unconfirmed until then."""
    since = on.clock.time()
    error = laptop.stop()
    on.check(isinstance(error, LeakSuspected) == loud, f"stop ended with {error!r}")
    if loud:
        on.check(error is not None and getattr(error, "exit_code", 0) == 7, "not with exit code 7")
        while on.clock.time() < since + heals - 20:
            laptop.look()
            told = laptop.session().state
            on.check(told is State.UNCONFIRMED, f"it said {told.value} before it healed")
            on.clock.sleep(20)
    laptop.look_until_gone(300)
    return since


@plays("record-removed", "5xx", "delete-fails", "delete-lies", "delete-reply-lost")
def _(on: Stage, cell: Cell) -> float:
    laptop = _ready(on)
    delete = {"method": "compute.instances.delete"}
    if cell.key == "5xx":
        on.fault("http_error", status=503, times=4)
    elif cell.key == "delete-fails":
        on.fault("op_error", times=3, **delete)
    elif cell.key == "delete-lies":
        on.fault("delete_ignored", times=2, **delete)
    elif cell.key == "delete-reply-lost":
        on.fault("lost_reply", times=1, **delete)
    return _stopped(on, laptop)


@plays("outage")
def _(on: Stage, cell: Cell) -> float:
    laptop = _ready(on)
    on.fault("http_error", status=503)
    on.clock.at(on.clock.time() + 900, on.heal)
    return _stopped(on, laptop, loud=True, heals=900)


@plays("delete-lies-900s")
def _(on: Stage, cell: Cell) -> float:
    laptop = _ready(on)
    on.fault("delete_ignored", seconds=900)
    since = _stopped(on, laptop, loud=True, heals=900)
    on.acted = "Google"  # type: ignore[attr-defined]
    return since


@plays("stopping")
def _(on: Stage, cell: Cell) -> float:
    laptop = _ready(on)
    on.clock.rate = RATE
    on.tell("settings", stopping_s=60 / RATE)
    return _stopped(on, laptop)


@plays("zone-silent")
def _(on: Stage, cell: Cell) -> float:
    laptop = _ready(on)
    on.fault("unreachable", zone=ZONE)
    on.clock.at(on.clock.time() + 300, on.heal)
    return _stopped(on, laptop)


@plays("other-laptop")
def _(on: Stage, cell: Cell) -> float:
    _ready(on)
    # The second ledger knows of no agreement: its price is that of the lists.
    (machine,) = on.compute().ours().machines
    usd = str(price_of_resource(machine).usd_per_hour)
    on.google.data["bill"] = [
        {**row, "usd_per_hour": usd} if row["kind"] == "instance" else row for row in on.google.data["bill"]
    ]
    second = Laptop(on, on.folder / "second")
    controller = second.controller()
    since = on.clock.time()
    (found,) = [session for session, _ in controller.live()]
    on.laptop = second  # type: ignore[attr-defined]
    controller.stop(found, "kimisession stop", "user")
    second.look_until_gone(180)
    return since


# -- ready ----------------------------------------------------------------------------------------------------------------


def _off(on: Stage) -> float:
    """The guest powers off, and the emulator has seen it."""
    since = on.clock.time()
    on.machines.halt(on.name())
    key = next(key for key in on.google.data["instances"] if key.rpartition("/")[2] == on.name())
    assert on.google.wait_until(lambda data: data["instances"][key]["status"] == "TERMINATED", 20)
    return since


@plays("power-off")
def _(on: Stage, cell: Cell) -> float:
    on.arm_reaper()
    _alone(on, 7200)
    since = _off(on)
    on.check(on.held(), "no disk is billed: this shows nothing")
    on.reap_until_gone(since + cell.within_s)
    return since


@plays("power-off-seen")
def _(on: Stage, cell: Cell) -> float:
    laptop = _ready(on)
    _off(on)
    on.clock.sleep(60)
    since = on.clock.time()
    laptop.look_until_gone(300)
    return since


@plays("host-error")
def _(on: Stage, cell: Cell) -> float:
    on.arm_reaper()
    laptop = _laptop(on)
    laptop.sky.spot = False
    laptop.start()
    since = on.clock.time()
    on.tell("host_error", name=on.name())
    on.check("RUNNING" not in {one["status"] for one in _machines(on)}, "it came back")
    on.reap_until_gone(since + cell.within_s)
    return since


@plays("host-error-early")
def _(on: Stage, cell: Cell) -> float:
    on.arm_reaper()
    ends = _alone(on, spot=False)
    on.tell("host_error", name=on.name())
    on.check("RUNNING" in {one["status"] for one in _machines(on)}, "it did not come back")
    on.reap_until_gone(ends + cell.within_s)
    return ends


def _machines(on: Stage) -> list[dict[str, Any]]:
    with on.google.reading() as data:
        return [one for key, one in data["instances"].items() if "reaper" not in key and "decoy" not in key]


@plays("preempted")
def _(on: Stage, cell: Cell) -> float:
    laptop = _ready(on)
    since = on.clock.time()
    on.tell("preempt", name=on.name(), notice_s=30)
    laptop.look_until_gone(300)
    return since


@plays("vanished")
def _(on: Stage, cell: Cell) -> float:
    laptop = _ready(on)
    laptop.look()
    since = on.clock.time()
    on.tell("vanish", name=on.name())
    laptop.look_until_gone(300, every_s=1)
    return since


@plays("budget")
def _(on: Stage, cell: Cell) -> float:
    on.arm_reaper()
    laptop = _laptop(on)
    began = on.clock.time()
    laptop.start(budget_usd=Decimal(26) * 2 / 3)  # of two hours at $26, a third
    on.tell("prices", **{"a3-highgpu-8g": ["13", "13"]})
    ends = began + 2400
    on.reap_until_gone(ends + cell.within_s)
    on.check(on.last_end() > ends, "it went before its budget was spent")
    return ends


# -- the reaper and sweep -------------------------------------------------------------------------------------------------


@plays("reaper-zone-silent")
def _(on: Stage, cell: Cell) -> float:
    on.arm_reaper()
    ends = _alone(on, zone=NEXT_ZONE)
    on.fault("unreachable", zone=NEXT_ZONE)
    on.clock.at(ends + 900, on.heal)
    on.check(not on.reap_once(), "a heartbeat although a zone is silent")
    on.reap_until_gone(ends + cell.within_s)
    return ends


@plays("reaper-outage")
def _(on: Stage, cell: Cell) -> float:
    on.arm_reaper()
    ends = _alone(on)
    on.clock.sleep(600 + 421)
    on.fault("http_error", status=503)
    on.check(not on.reap_once(), "a heartbeat although nothing answers")
    on.heal()
    on.clock.sleep(180)
    on.reap_until_gone(ends + cell.within_s)
    return ends


@plays("reaper-delete-fails", "reaper-delete-lies")
def _(on: Stage, cell: Cell) -> float:
    on.arm_reaper()
    ends = _alone(on)
    if cell.key == "reaper-delete-fails":
        on.fault("op_error", times=2, method="compute.instances.delete")
    else:
        on.fault("delete_ignored", times=1)
    on.reap_until_gone(ends + cell.within_s)
    return ends


@plays("sweep-others")
def _(on: Stage, cell: Cell) -> float:
    on.insert("old-1a2b3c4d", _labels(on, 10, "old-1a2b3c4d", "bob"))
    on.insert("decoy-1a2b3c4d", _labels(on, 7200, "decoy-1a2b3c4d", "ann"), machine_type="e2-small")
    on.insert("decoy-like-5e6f7a8b", {}, machine_type="e2-small")
    on.clock.sleep(600)
    since = on.clock.time()
    on.sweep("bob")
    with on.google.reading() as data:
        left = [key for key in data["instances"] if "decoy" in key]
    on.check(len(left) == 2, f"it touched what is not its own: {left} is left")
    return since


@plays("sweep-disk")
def _(on: Stage, cell: Cell) -> float:
    _alone(on, 7200, keep_disk=True)
    on.clock.sleep(600)
    on.tell("vanish", name=on.name())
    on.check(on.held(), "no disk is left: this shows nothing")
    since = on.clock.time()
    on.sweep("ann", (ID,))
    return since


# -- the timer in the machine ---------------------------------------------------------------------------------------------


def _timer(on: Stage, within_s: float, *more: str) -> float:
    """Look every second, as systemd has it look every minute, until something came of it; when it was due."""
    python, off = sys.executable, on.folder / "bin"
    off.mkdir()
    (off / "poweroff").write_text(f"#!/bin/sh\ntouch {on.folder}/off\nsleep 30\n", encoding="ascii")
    (off / "poweroff").chmod(0o755)
    env = {"GCE_METADATA_HOST": f"127.0.0.1:{on.metadata_port}", "PATH": f"{off}:{os.environ['PATH']}"}
    words = [python, "-I", "-S", "-B", deadline.__file__, "--compute", on.url, "--grace-s", "0"]
    words += ["--without-keeper-s", "1e12", "--pause-s", "0.2", "--off-s", "1", "--seen", f"{on.folder}/seen", *more]
    until = time.monotonic() + within_s
    while time.monotonic() < until and not (on.folder / "off").exists() and on.held():
        process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL)
        while process.poll() is None and on.held() and not (on.folder / "off").exists():
            time.sleep(0.1)
        process.kill()
        process.wait()
        time.sleep(0.5)
    return on.clock.time()


@plays("timer-deadline", "timer-5xx")
def _(on: Stage, cell: Cell) -> float:
    _alone(on)
    if cell.key == "timer-5xx":
        on.fault("http_error", status=503, times=3, method="compute.instances.delete")
        on.fault("op_error", times=1, method="compute.instances.delete")
    ends = time.time() + 3
    _timer(on, cell.within_s, "--deadline-utc", str(ends), "--longest-uptime-s", "1e12")
    on.check(on.last_end() > ends, "it went before its deadline")
    return ends


@plays("ended-unseen", "ended-untold")
def _(on: Stage, cell: Cell) -> float:
    laptop = _ready(on)
    laptop.look()
    since = on.clock.time()
    if cell.key == "ended-unseen":
        _timer(
            on, cell.within_s, "--deadline-utc", str(time.time() + 2), "--longest-uptime-s", "1e12", "--because", "10"
        )
    else:
        (machine,) = on.compute().ours().machines
        on.compute(f"serviceAccount:{NODE_EMAIL}").delete(machine)
        on.acted = "autodown"  # type: ignore[attr-defined]
    laptop.look_until_gone(300)
    return since


@plays("timer-clock")
def _(on: Stage, cell: Cell) -> float:
    _alone(on)
    ends = time.time() + 3
    uptime = str(deadline.uptime_s() + 3)
    _timer(on, cell.within_s, "--deadline-utc", str(ends + 7200), "--longest-uptime-s", uptime)
    return ends


@plays("timer-denied")
def _(on: Stage, cell: Cell) -> float:
    on.arm_reaper()
    _alone(on, 7200)
    on.tell("deny", member=f"serviceAccount:{NODE_EMAIL}", permission="compute.instances.delete")
    ends = time.time() + 2
    _timer(on, SLACK, "--deadline-utc", str(ends), "--longest-uptime-s", "1e12", "--try-s", "2")
    on.check((on.folder / "off").exists(), "it did not power off")
    _off(on)
    on.reap_until_gone(ends + cell.within_s)
    return ends


assert set(PLAYS) == {cell.key for cell in WIRE}, set(PLAYS) ^ {cell.key for cell in WIRE}
