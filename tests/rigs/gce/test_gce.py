"""`kimisession start --infra gcp` through real SkyPilot, on an emulated Google. In this order: the cases share one world, and
sessions are launched at once because a launch takes most of a minute."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kimisession.cloud.permissions import USER
from tests.rigs.gce.bounds import bound
from tests.rigs.gce.world.rig import PROJECT, World, wait_for

Measure = Callable[[str, float], None]
REHEARSAL = "rehearsal"
INT4 = "gs://weights/kimi-k2.5-int4"
#: Of the two sessions that end by themselves. The second must not be over before all four are there.
IDLE_S, UNTIMED_S = 120 if os.environ.get("KIMISESSION_RIG_ALL") else 90, 60
GPUS = str(Path(__file__).with_name("rehearsal-gpus.toml"))
everything = pytest.mark.skipif(not os.environ.get("KIMISESSION_RIG_ALL"), reason="make test-gce ALL=1")


@dataclass(frozen=True)
class Session:
    """A session, as its machine and the emulator tell it."""

    world: World
    id: str

    @property
    def machine(self) -> str:
        return self.world.machine(self.id)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """What its journal on the machine says of a kind; nothing when there is no machine."""
        if not self.machine:
            return []
        file = f"/home/gcpuser/.kimisession/{self.id}/run/journal.jsonl"
        told = self.world.run("/run/bin/on", self.machine, "cat", file).stdout.splitlines()
        return [line for line in map(json.loads, told) if line["kind"] == kind]

    def place(self) -> tuple[str, str]:
        """The zone of its machine, and the deadline in its label."""
        instances = self.world.admin("/admin/state")["instances"].items()
        key, machine = next((key, one) for key, one in instances if f"/{self.id}-" in key)
        return key.partition("/")[0], machine["labels"]["kimisession-deadline"]

    def gone(self, case: str, began: float) -> float:
        """Wait until nothing of it is billed; the seconds since `began` (a time.time)."""
        left_s = began + bound(case).latest_s - time.time()
        wait_for(f"{self.id} to be gone", lambda: not self.world.exists(self.id), left_s, every_s=0.5)
        ends = [datetime.fromisoformat(line["end"]) for line in self.world.billed(self.id)]
        return max(ends).timestamp() - began

    def receipt(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.world.kimisession("cost", self.id, "--json").stdout)["data"]
        return found


def begin(world: World, name: str, *more: str, profile: str = REHEARSAL) -> "subprocess.Popen[str]":
    """`kimisession start`, not waited for."""
    place = ("--infra", "gcp", "--bucket", "gs://weights/rehearsal")
    return world.begin("start", profile, *place, "-y", "--name", name, *more)


def session_of(world: World, name: str) -> Session:
    """The newest session of this name, once there is one."""
    folder = world.home / ".local" / "state" / "kimisession" / "rented"

    def look() -> Session | None:
        found = sorted(folder.glob(f"{name}-????????"), key=lambda path: path.stat().st_mtime)
        return Session(world, found[-1].name) if found else None

    found = wait_for(f"session {name}", look, 60)
    assert found
    return found


@dataclass
class Played:
    """Four ready sessions: one with a real profile's set-up on eight pretended GPUs, three of the rehearsal; and a fifth, whose
    set-up fails, with its `start`, which goes on and says why in the end. `untimed_at`: the idle limit of the one that loses
    its timer; `rebooted_at`: when another was rebooted."""

    int4: Session
    orphan: Session
    untimed: Session
    rebooted: Session
    bad: Session
    bad_start: "subprocess.Popen[str]"
    began_at: float
    rebooted_at: float
    untimed_at: float = 0.0
    bad_told: str = ""


@pytest.fixture(scope="module")
def played(world: World, measure: Measure) -> Played:
    """All at once. The weights were seeded (conftest.py)."""
    began, at = time.monotonic(), time.time()
    words = ("start", "--int4", "--infra", "gcp", "--bucket", INT4, "-y", "--name", "int4")
    starts = {
        "int4": world.begin(*words, "--idle", f"{IDLE_S}s", "--duration", "15m"),
        "bad": begin(world, "bad", profile=GPUS),
        "orphan": begin(world, "orphan", "--idle", "4m"),
        "untimed": begin(world, "untimed", "--idle", f"{UNTIMED_S}s", "--duration", "10m"),
        "rebooted": begin(world, "rebooted", "--idle", "4m"),
    }
    rebooted_at = 0.0
    waiting = ["int4", "rebooted", "orphan", "untimed"]
    wait_until = began + bound("start to ready").latest_s + 60
    while waiting and time.monotonic() < wait_until:
        name = next((name for name in waiting if starts[name].poll() is not None), "")
        if not name:
            time.sleep(0.2)
            continue
        waiting.remove(name)
        told = starts[name].communicate()[0]
        if name == "int4":
            print(told)
            measure("start to ready", time.monotonic() - began)
        assert f"{name} is ready" in told, told
        if name == "rebooted":
            rebooted_at = time.time()
            world.reboot(session_of(world, name).machine)
    assert not waiting
    int4, orphan, untimed, rebooted, bad = (
        session_of(world, name) for name in ("int4", "orphan", "untimed", "rebooted", "bad")
    )
    return Played(int4, orphan, untimed, rebooted, bad, starts["bad"], at, rebooted_at)


def test_a_session_answers_through_its_tunnel_with_every_layer_armed(world: World, played: Played) -> None:
    for name in ("int4", "untimed"):
        done = world.kimisession("test", name, "--json")
        assert done.returncode == 0, done.stderr

    def armed() -> set[str]:
        page = json.loads(world.kimisession("status", "int4", "--json").stdout)["data"][0]
        return {layer["name"] for layer in page["layers"] if layer["armed"]}

    wanted = {"keeper", "SkyPilot autodown", "timer in the machine", "reaper"}
    wait_for("all layers", lambda: armed() >= wanted, 60, every_s=1)
    assert world.out("ssh", "int4", "hostname").strip() == played.int4.machine


def test_the_real_hooks_set_its_machine_up(world: World, played: Played) -> None:
    """Its image has driver 570 and GIB planted; the engine's stack is the locked one, from an index that is a stand-in."""
    machine = played.int4.machine
    assert world.on(machine, "cat", "/sys/module/nvidia/version").startswith("580.")
    assert "/gib" not in world.on(machine, "ldconfig", "-p")
    assert world.run("/run/bin/on", machine, "test", "-e", "/usr/local/gib").returncode == 1
    done = {line["phase"] for line in played.int4.lines("phase") if line["state"] == "ended"}
    assert done >= {"disk", "driver", "gib", "stack", "preflight", "weights"}, played.int4.lines("phase")


def test_no_credentials_of_the_user_and_no_key_are_where_they_do_not_belong(world: World, played: Played) -> None:
    machine = played.int4.machine
    account = json.loads((world.home / "account.json").read_text(encoding="utf-8"))
    piece = account["private_key"].splitlines()[3]
    found = world.run(
        "/run/bin/on", machine, "grep", "-rlsF", "-e", piece, "/home/gcpuser", "/root", "/etc", "/run", "/tmp"
    )
    assert found.stdout == "", "the service account's key was uploaded"
    key = world.on(machine, "sh", "-c", f"cat /home/gcpuser/.kimisession/{played.int4.id}/api_key").strip()
    assert len(key) > 20
    (world.home / "its-key").write_text(key, encoding="ascii")  # never in an argument: that is looked through as well
    places = "/root/.sky /root/sky_logs /root/.sky_clusters /root/.sky_provision /proc/[0-9]*/cmdline"
    assert world.run("sh", "-c", f"grep -rlFs -f /root/its-key {places}").stdout == ""


def test_with_everything_of_the_user_dead_every_machine_ends_by_the_layer_that_is_left(
    world: World, played: Played, measure: Measure, wire: Callable[[], object]
) -> None:
    # Nobody looks until all are gone: why each ended has to be found out afterwards.
    for name in ("untimed", "int4"):
        assert world.kimisession("test", name, "--json").returncode == 0
        if name == "untimed":
            played.untimed_at = time.time() + UNTIMED_S
            take_the_timer(world, played.untimed)
    since = time.time() + IDLE_S
    world.step_clock(played.int4.machine, 100)  # which disarms SkyPilot's autodown
    world.fill_disk(played.orphan.machine)
    world.kill_on(played.orphan.machine, "kimisession.node.keeper")
    killed = time.time()
    world.kill_the_server()
    world.signal("kimisession (start|status|test) .*(int4|orphan|untimed)", signal.SIGKILL)
    wire()
    case = "kill -9 of the keeper, disk full"
    measure(case, played.orphan.gone(case, killed))
    assert world.deleted_by(played.orphan.id) == "timer"
    # The one command that is left ends, and starts SkyPilot's server once more to have its record removed.
    played.bad_told = played.bad_start.communicate(timeout=300)[0]
    case = "a step of the set-up fails"
    measure(case, played.bad.gone(case, played.began_at))
    with contextlib.suppress(AssertionError):
        world.kill_the_server()
    case = "idle to gone, no API server"
    measure(case, played.int4.gone(case, since))
    assert world.deleted_by(played.int4.id) == "timer"


def test_a_failed_set_up_is_told_with_its_reason(world: World, played: Played) -> None:
    told = played.bad_told
    assert played.bad_start.returncode not in (0, 7), told
    assert "preflight" in told.splitlines()[-2], told
    # On its way there the hooks did their work on the machine: the driver was swapped, GIB taken out of the linker's way.
    assert " driver " in told, told
    assert "gib " in told, told


def test_ctrl_c_during_the_launch_leaves_nothing(world: World, measure: Measure) -> None:
    command, session = _launching(world, "broken")
    began = time.time()
    world.signal("kimisession start .* broken", signal.SIGINT)
    told = command.communicate(timeout=300)[0]
    assert command.returncode == 130, told
    assert not world.exists(session.id), told
    measure("Ctrl-C during the launch", time.time() - began)


def test_without_its_timer_skypilots_autodown_ends_a_machine(world: World, played: Played, measure: Measure) -> None:
    case = "idle, its timer taken away"
    measure(case, played.untimed.gone(case, played.untimed_at))
    assert world.deleted_by(played.untimed.id) == "autodown"


def test_a_machine_that_reboots_ends_by_its_own_timer(world: World, played: Played, measure: Measure) -> None:
    """No command that looks at all sessions may run before: it would see that nothing guards this one, and end it."""
    case = "reboot of the machine"
    measure(case, played.rebooted.gone(case, played.rebooted_at))
    assert world.deleted_by(played.rebooted.id) == "timer"


def test_the_receipts_say_why_it_ended_and_what_google_bills_and_nothing_is_left(world: World, played: Played) -> None:
    reasons = (
        (played.int4, "idle"),
        (played.orphan, "keeper-died"),
        (played.untimed, "self-deleted"),  # autodown does not say why
        (played.bad, "setup-failed"),
    )
    for session, reason in reasons:
        wait_for(f"the proof of {session.id}", lambda session=session: proven(session), 150, every_s=2)  # type: ignore[misc]
        receipt = session.receipt()
        assert receipt["reason"] == reason, receipt
        (machine,) = [line for line in receipt["lines"] if line["kind"] == "machine"]
        (billed,) = [line for line in world.billed(session.id) if line["kind"] == "instance"]
        for ours, theirs in ((machine["began"], billed["start"]), (machine["ended"], billed["end"])):
            assert abs((datetime.fromisoformat(ours) - datetime.fromisoformat(theirs)).total_seconds()) < 1.5
    print(world.kimisession("cost", played.int4.id).stdout, file=sys.__stdout__)
    left = [line["resource"] for line in world.admin("/admin/bill")["lines"] if line["end"] is None]
    assert {one.rpartition("/")[2] for one in left} == {"kimisession-reaper"}
    assert world.admin("/admin/violations") == []


def proven(session: Session) -> bool:
    """Looks at all that is not proven gone yet; whether this one is."""
    session.world.kimisession("status", "--json")
    return bool(session.receipt()["state"] == "gone")


def take_the_timer(world: World, session: Session) -> None:
    """The machine's own timer is disarmed, and cannot be armed again."""
    arm = f"/home/gcpuser/.kimisession/{session.id}/scripts/deadline/arm.sh"
    world.on(session.machine, "sh", "-c", f"{arm} off && rm {arm}")


@everything
def test_skypilot_alone_launched_and_takes_down_eight_pretended_gpus(world: World) -> None:
    place = ("--infra", "gcp", "--gpus", "H100:8", "--use-spot")
    told = world.out("sky", "launch", "-y", "-c", "plain", *place, "nvidia-smi -L; hostname", within_s=300)
    assert "Job finished (status: SUCCEEDED)" in told
    assert told.count("NVIDIA H100 80GB") == 8, told
    assert world.exists("plain")
    world.out("sky", "down", "-y", "plain", within_s=240)
    assert not world.exists("plain")


def _launching(world: World, name: str, *more: str) -> "tuple[subprocess.Popen[str], Session]":
    """A command in the middle of its launch: the machine exists, the keeper did not begin."""
    command = begin(world, name, *more)
    session = session_of(world, name)
    wait_for("a machine", lambda: session.machine, 120, every_s=0.1)
    return command, session


@everything
@pytest.mark.timeout(900)
def test_a_preempted_session_goes_on_in_the_next_zone_under_the_same_caps(world: World, measure: Measure) -> None:
    words = ("start", "--int4", "--infra", "gcp", "--bucket", INT4, "-y", "--name", "taken")
    done = world.kimisession(*words, "--idle", "4m", "--duration", "40m")
    assert done.returncode == 0, done.stdout + done.stderr
    first = session_of(world, "taken")
    zone, label = first.place()
    began = time.time()
    world.admin("/admin/preempt", {"name": first.machine})
    measure("preempted", first.gone("preempted", began))
    # No waiting for the proof: the command does that.
    began = time.time()
    again = world.kimisession(*words, "--recover")
    assert again.returncode == 0, again.stdout + again.stderr
    measure("recovered in the next zone", time.time() - began)
    second = session_of(world, "taken")
    next_zone, same_label = second.place()
    assert first.id != second.id
    assert next_zone != zone
    assert same_label == label, "the hard cap moved"
    assert first.receipt()["reason"] == "preempted"
    assert world.kimisession("test", "taken", "--json").returncode == 0
    assert world.kimisession("stop", "taken").returncode == 0
    told = world.kimisession("cost", "taken").stdout
    assert "per useful hour" in told, told
    print(told)


@everything
def test_a_session_needs_exactly_the_documented_permissions_and_names_one_that_is_missing(world: World) -> None:
    member, role = (
        f"serviceAccount:laptop@{PROJECT}.iam.gserviceaccount.com",
        f"projects/{PROJECT}/roles/kimisession_user",
    )
    world.admin("/admin/role", {"role": role, "permissions": list(USER)})
    world.admin("/admin/bind", {"member": member, "role": role})
    world.admin("/admin/unbind", {"member": member, "role": "roles/owner"})
    try:
        start = begin(world, "narrow", "--idle", "4m")
        told = start.communicate(timeout=300)[0]
        assert start.returncode == 0, told
        assert world.kimisession("test", "narrow", "--json").returncode == 0
        done = world.kimisession("stop", "narrow")
        assert done.returncode == 0, done.stderr
        without = {"member": member, "permission": "compute.instances.setMetadata"}
        world.admin("/admin/deny", without)
        start = begin(world, "narrower")
        told = start.communicate(timeout=300)[0]
        world.admin("/admin/allow", without)
        assert start.returncode != 0, told
        assert "compute.instances.setMetadata" in told, told
        assert not world.billed("narrower")
    finally:
        world.admin("/admin/bind", {"member": member, "role": "roles/owner"})


@everything
@pytest.mark.timeout(900)
def test_what_nobody_guards_is_ended_by_the_reaper(world: World, measure: Measure) -> None:
    command, session = _launching(world, "unseen", "--duration", "2m")
    deadline = time.time() + 120
    world.signal("kimisession start .* unseen", signal.SIGKILL)
    world.kill_the_server()
    command.wait(timeout=10)
    case = "kill -9 of command and API server before anything ran"
    measure(case, session.gone(case, deadline))
    assert not session.lines("started")
