"""`kimisession start --infra gcp` through real SkyPilot, on an emulated Google. In this order: the cases share one world, and
sessions are launched at once because a launch takes most of a minute."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.gce.bounds import bound
from tests.rigs.gce.world.rig import World, wait_for

Measure = Callable[[str, float], None]
REHEARSAL = "rehearsal"
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

    def journal(self, kind: str) -> dict[str, Any]:
        """The first line of a kind on the machine; empty when there is none, or no machine."""
        if not self.machine:
            return {}
        file = f"/home/gcpuser/.kimisession/{self.id}/run/journal.jsonl"
        lines = self.world.run("/run/bin/on", self.machine, "cat", file).stdout.splitlines()
        return next((line for line in map(json.loads, lines) if line["kind"] == kind), {})

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


@dataclass(frozen=True)
class Four:
    """Two ready sessions; one whose set-up fails, still on its way; what SkyPilot told of a cluster of its own."""

    calm: Session
    orphan: Session
    bad: Session
    bad_start: "subprocess.Popen[str]"
    bad_began: float
    sky: str


@pytest.fixture(scope="module")
def four(world: World, measure: Measure) -> Four:
    """All at once."""
    began = time.monotonic()
    words = (
        "launch",
        "-y",
        "-c",
        "plain",
        "--infra",
        "gcp",
        "--gpus",
        "H100:8",
        "--use-spot",
        "nvidia-smi -L; hostname",
    )
    sky = world.begin(*words, program="sky")
    bad, bad_began = begin(world, "bad", profile=GPUS), time.time()
    starts = {name: begin(world, name, "--idle", "75s", "--duration", "10m") for name in ("calm", "orphan")}
    for name, start in starts.items():
        told = start.communicate(timeout=bound("start to ready").latest_s + 60)[0]
        assert start.returncode == 0, told
        assert f"{name} is ready" in told
        if name == "calm":
            print(told)
    measure("start to ready", time.monotonic() - began)
    calm, orphan, failing = (session_of(world, name) for name in (*starts, "bad"))
    return Four(calm, orphan, failing, bad, bad_began, sky.communicate(timeout=200)[0])


def test_a_session_answers_through_its_tunnel_with_every_layer_armed(world: World, four: Four) -> None:
    for name in ("calm", "orphan"):
        done = world.kimisession("test", name, "--json")
        assert done.returncode == 0, done.stderr

    def armed() -> set[str]:
        page = json.loads(world.kimisession("status", "calm", "--json").stdout)["data"][0]
        return {layer["name"] for layer in page["layers"] if layer["armed"]}

    wanted = {"keeper", "SkyPilot autodown", "timer in the machine", "reaper"}
    wait_for("all layers", lambda: armed() >= wanted, 60, every_s=1)
    assert world.out("ssh", "calm", "hostname").strip() == four.calm.machine


def test_no_credentials_of_the_user_and_no_key_are_where_they_do_not_belong(world: World, four: Four) -> None:
    machine = four.calm.machine
    account = json.loads((world.home / "account.json").read_text(encoding="utf-8"))
    piece = account["private_key"].splitlines()[3]
    found = world.run(
        "/run/bin/on", machine, "grep", "-rlsF", "-e", piece, "/home/gcpuser", "/root", "/etc", "/run", "/tmp"
    )
    assert found.stdout == "", "the service account's key was uploaded"
    key = world.on(machine, "sh", "-c", f"cat /home/gcpuser/.kimisession/{four.calm.id}/api_key").strip()
    assert len(key) > 20
    (world.home / "its-key").write_text(key, encoding="ascii")  # never in an argument: that is looked through as well
    places = "/root/.sky /root/sky_logs /root/.sky_clusters /root/.sky_provision /proc/[0-9]*/cmdline"
    assert world.run("sh", "-c", f"grep -rlFs -f /root/its-key {places}").stdout == ""


def test_what_dies_ends_its_session_and_what_is_not_needed_does_not(world: World, four: Four, measure: Measure) -> None:
    killed = time.time()
    world.kill_on(four.orphan.machine, "kimisession.node.keeper")
    assert world.kimisession("test", "calm", "--json").returncode == 0
    last = time.time()
    world.kill_the_server()
    # Somebody looks: what a machine says of its end goes with its disk, and a command that comes later finds it gone.
    for session, reason in ((four.orphan, "keeper-died"), (four.calm, "idle")):
        wait_for(f"the end of {session.id}", lambda session=session: seen_ending(session), 150, every_s=1)  # type: ignore[misc]
        assert session.receipt()["reason"] == reason
    wait_for("the end of the failed set-up", lambda: four.bad_start.poll() is not None, 300, every_s=1)
    for session, case, since in (
        (four.orphan, "kill -9 of the keeper", killed),
        (four.calm, "idle, and no API server", last),
        (four.bad, "a step of the set-up fails", four.bad_began),
    ):
        measure(case, session.gone(case, since))


def test_skypilot_alone_launched_and_takes_down_eight_pretended_gpus(world: World, four: Four) -> None:
    assert "Job finished (status: SUCCEEDED)" in four.sky, four.sky
    assert four.sky.count("NVIDIA H100 80GB") == 8, four.sky
    assert world.exists("plain")
    world.out("sky", "down", "-y", "plain", within_s=240)
    assert not world.exists("plain")


def test_a_failed_set_up_is_told_with_its_reason(world: World, four: Four) -> None:
    told = four.bad_start.communicate(timeout=60)[0]
    assert four.bad_start.returncode not in (0, 7), told
    assert "preflight" in told.splitlines()[-2], told
    # On its way there the hooks did their work on the machine: the driver was swapped, GIB taken out of the linker's way.
    assert " driver " in told, told
    assert "gib " in told, told


def test_the_receipts_say_what_google_bills_and_nothing_is_left(world: World, four: Four) -> None:
    for session, reason in ((four.calm, "idle"), (four.orphan, "keeper-died"), (four.bad, "setup-failed")):
        wait_for(
            f"the proof of {session.id}",
            lambda session=session: (
                world.kimisession("status", session.id, "--json").returncode == 0  # type: ignore[misc]
                and session.receipt()["state"] == "gone"
            ),
            150,
            every_s=2,
        )
        receipt = session.receipt()
        assert receipt["reason"] == reason, receipt
        (machine,) = [line for line in receipt["lines"] if line["kind"] == "machine"]
        (billed,) = [line for line in world.billed(session.id) if line["kind"] == "instance"]
        for ours, theirs in ((machine["began"], billed["start"]), (machine["ended"], billed["end"])):
            assert abs((datetime.fromisoformat(ours) - datetime.fromisoformat(theirs)).total_seconds()) < 1.5
    print(world.kimisession("cost", four.calm.id).stdout)
    left = [line["resource"] for line in world.admin("/admin/bill")["lines"] if line["end"] is None]
    assert {one.rpartition("/")[2] for one in left} == {"kimisession-reaper"}
    assert world.admin("/admin/violations") == []


def seen_ending(session: Session) -> bool:
    """Whether a command of the user has met its end."""
    session.world.kimisession("status", session.id, "--json")
    return session.receipt()["reason"] is not None


def _launching(world: World, name: str, *more: str) -> "tuple[subprocess.Popen[str], Session]":
    """A command in the middle of its launch: the machine exists, the keeper did not begin."""
    command = begin(world, name, *more)
    session = session_of(world, name)
    wait_for("a machine", lambda: session.machine, 120, every_s=0.1)
    return command, session


def test_ctrl_c_during_the_launch_leaves_nothing(world: World, measure: Measure) -> None:
    command, session = _launching(world, "broken")
    began = time.time()
    world.signal("kimisession start .* broken", signal.SIGINT)
    told = command.communicate(timeout=300)[0]
    assert command.returncode == 130, told
    assert not world.exists(session.id), told
    measure("Ctrl-C during the launch", time.time() - began)


@everything
def test_a_preempted_session_says_so(world: World, measure: Measure) -> None:
    command = begin(world, "taken", "--idle", "4m")
    assert command.wait(timeout=300) == 0
    session = session_of(world, "taken")
    began = time.time()
    world.admin("/admin/preempt", {"name": session.machine})
    measure("preempted", session.gone("preempted", began))
    wait_for("the proof", lambda: "gone" in world.kimisession("status", "taken").stdout, 120, every_s=2)
    assert session.receipt()["reason"] == "preempted"


@everything
@pytest.mark.timeout(900)
def test_a_machine_that_reboots_or_is_held_by_another_job_ends_by_its_own_timer(world: World, measure: Measure) -> None:
    starts = {name: begin(world, name, "--idle", "20s" if name == "held" else "4m") for name in ("booted", "held")}
    for name, start in starts.items():
        assert start.wait(timeout=300) == 0, name
    booted, held = (session_of(world, name) for name in starts)
    done = world.run("sky", "exec", "-d", held.id, "--cpus", "1", "sleep inf")
    assert done.returncode == 0, done.stderr
    world.reboot(booted.machine)
    at_boot = time.time()
    wait_for("the keeper's end", lambda: held.journal("ended"), 90, every_s=1)
    at_end = time.time()
    measure("reboot of the machine", booted.gone("reboot of the machine", at_boot))
    measure("another job on the machine", held.gone("another job on the machine", at_end))


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
    assert not session.journal("started")
