"""The machine's own end: the real script as a real process, against a pretended metadata server and Compute Engine on
loopback, with a `poweroff` on its PATH that only leaves a note."""

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kimisession.core.audit import code_told
from kimisession.core.inventory import Operation
from kimisession.node import deadline
from tests.hooks.pretended_cloud import Cloud
from tests.hooks.private_mounts import HOOKS, host_fingerprint, needs_namespaces, run_privately

SCRIPT = Path(deadline.__file__)


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    stand_in = Cloud()
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()


class Machine:
    """Where the script runs: only a pretended `poweroff` is on its PATH."""

    def __init__(self, folder: Path, cloud: Cloud) -> None:
        self.folder, self.cloud = folder, cloud
        (folder / "bin").mkdir()
        stub = folder / "bin" / "poweroff"
        stub.write_text(f"#!/bin/sh\necho poweroff $* >> {folder}/off\n", encoding="ascii")
        stub.chmod(0o755)

    def argv(self, *words: str, past: bool = True) -> list[str]:
        at = time.time() - 300 if past else time.time() + 3600
        return [
            *(sys.executable, "-I", "-S", "-B", str(SCRIPT), "--deadline-utc", f"{at:.0f}"),
            *("--longest-uptime-s", "1e9", "--without-keeper-s", "1e9", "--compute", f"http://{self.cloud.host}"),
            *("--pause-s", "0.05", "--off-s", "0", "--call-s", "0.5", "--seen", str(self.folder / "seen")),
            *words,
        ]

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": str(self.folder / "bin"),
            "GCE_METADATA_HOST": self.cloud.host,
            "http_proxy": "http://127.0.0.1:1",
        }

    def start(self, *words: str, **more: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(self.argv(*words), env=self.env, stdout=subprocess.PIPE, text=True, **more)

    def run(self, *words: str, past: bool = True) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.argv(*words, past=past), env=self.env, capture_output=True, text=True, check=False, timeout=30
        )

    @property
    def power_offs(self) -> int:
        path = self.folder / "off"
        return len(path.read_text(encoding="ascii").splitlines()) if path.exists() else 0


@pytest.fixture
def machine(tmp_path: Path, cloud: Cloud) -> Machine:
    return Machine(tmp_path, cloud)


def goes_away(process: "subprocess.Popen[str]") -> str:
    """The machine is deleted: everything on it is cut off."""
    process.send_signal(signal.SIGKILL)
    return process.communicate(timeout=10)[0]


def test_before_the_deadline_nothing_is_asked_of_anybody(machine: Machine) -> None:
    done = machine.run(past=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert machine.cloud.calls == []


def test_past_the_deadline_the_machine_deletes_itself_and_does_not_power_off(machine: Machine) -> None:
    process = machine.start()
    machine.cloud.wait_for_deletions(1)
    assert "ending this machine" in goes_away(process)
    assert machine.power_offs == 0


def test_a_cloud_that_stumbles_is_asked_again_until_it_deletes(machine: Machine) -> None:
    machine.cloud.metadata_faults = [503, 404]
    machine.cloud.script = [503, 429, ["RUNNING", "BAD"], ["RUNNING"]]
    process = machine.start()
    machine.cloud.wait_for_deletions(4)
    said = goes_away(process)
    assert "HTTP 503" in said
    assert "the deletion failed: RESOURCE_NOT_READY not yet" in said
    assert machine.power_offs == 0


def test_an_accepted_deletion_that_does_not_happen_is_asked_for_again(machine: Machine) -> None:
    process = machine.start("--patience-s", "0.3")
    machine.cloud.wait_for_deletions(3)
    assert "deletion is accepted, and this machine still runs: asking again" in goes_away(process)


def test_a_machine_that_may_not_delete_itself_is_powered_off_last(machine: Machine) -> None:
    machine.cloud.script = [403]
    done = machine.run("--try-s", "1")
    assert done.returncode == 1
    assert machine.cloud.deletions() >= 3
    assert machine.power_offs == 3, "asked in order, then by force"
    words = done.stdout.splitlines()
    assert "HTTP 403 said the stand-in" in words[1]
    assert words[-1].endswith("the disk of a machine that was not deleted is still billed")


def told(machine: Machine, *words: str, past: bool = True) -> int:
    """The exit code that Compute Engine's record of the deletion has."""
    process = subprocess.Popen(machine.argv(*words, past=past), env=machine.env, stdout=subprocess.PIPE, text=True)
    machine.cloud.wait_for_deletions(1)
    goes_away(process)
    name = "gpu-1"
    at = datetime.now(UTC)
    asked = Operation("op", "z", "delete", name, "DONE", at, request=machine.cloud.request_ids()[-1])
    found = code_told(name, [asked])
    assert found is not None
    return found[0]


def test_the_deletion_tells_the_exit_code_with_which_the_session_ended(machine: Machine) -> None:
    assert told(machine, "--because", "10") == 10


@pytest.mark.parametrize(("words", "code"), [((), 42), (("--deadline-utc", "9e9", "--without-keeper-s", "0"), 44)])
def test_the_deletion_of_a_timer_that_nobody_told_anything_says_what_it_found(
    machine: Machine, words: tuple[str, ...], code: int
) -> None:
    assert told(machine, *words) == code


def test_no_two_requests_have_one_id_and_each_is_a_uuid() -> None:
    ids = {deadline.request_id(code) for code in (0, 10, 137) for _ in range(100)}
    assert len(ids) == 300
    assert all(str(uuid.UUID(one)) == one and uuid.UUID(one).version == 4 for one in ids)


def test_an_id_that_is_refused_does_not_keep_the_machine(machine: Machine) -> None:
    machine.cloud.script = [400, ["RUNNING"]]
    process = machine.start()
    machine.cloud.wait_for_deletions(2)
    goes_away(process)
    assert [bool(one) for one in machine.cloud.request_ids()] == [True, False]


def test_after_the_end_of_the_session_a_look_waits_for_its_moment_and_before_it_none_does(machine: Machine) -> None:
    soon = f"{time.time() + 2:.3f}"
    words = ("--grace-s", "0", "--deadline-utc", soon)
    assert machine.run(*words).returncode == 0, "it may be extended yet"
    assert machine.cloud.calls == []
    process = machine.start(*words, "--because", "10")
    machine.cloud.wait_for_deletions(1)
    goes_away(process)
    assert time.time() >= float(soon)


def test_a_silent_metadata_server_does_not_keep_the_machine(machine: Machine) -> None:
    machine.cloud.silent.set()
    machine.run("--try-s", "1")
    assert machine.power_offs == 3


def test_a_full_disk_does_not_keep_the_machine(machine: Machine) -> None:
    # No process may write a byte to any file: more than a full disk would forbid.
    process = machine.start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)))
    machine.cloud.wait_for_deletions(1)
    goes_away(process)
    seen = machine.folder / "seen"
    assert not seen.exists() or not seen.read_bytes()


ROW = {"deadline_utc": 1000.0, "grace_s": 180.0, "longest_uptime_s": 7200.0, "without_keeper_s": 900.0}


@pytest.mark.parametrize(
    ("wall", "uptime", "keeper_at", "why"),
    [
        (1000, 100, 100, ""),
        (1179, 100, 100, ""),
        (1180, 100, 100, "the deadline passed 180s ago"),
        (0, 7379, 7379, ""),
        (0, 7380, 7380, "up for 7380s"),  # the wall clock is wrong, the other is not
        (0, 899, 0, ""),
        (0, 900, 0, "no keeper for 900s since the boot"),
        (0, 5899, 5000, ""),
        (0, 5900, 5000, "no keeper for 900s since it was last seen"),
    ],
)
def test_the_moment_comes_at_its_limit_and_not_before(wall: float, uptime: float, keeper_at: float, why: str) -> None:
    found = deadline.due(argparse.Namespace(**ROW), wall, uptime, keeper_at)
    assert found.startswith(why) if why else found == ""


def test_what_was_seen_before_a_reboot_does_not_count_after_it(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    assert deadline.last_seen(seen, True, 5000) == 5000
    assert deadline.last_seen(seen, False, 5100) == 5000
    seen.write_text("another-boot 5000", encoding="ascii")
    assert deadline.last_seen(seen, False, 5100) == 0


@needs_namespaces
def test_no_keeper_after_the_boot_or_after_its_exit_ends_the_machine(machine: Machine, tmp_path: Path) -> None:
    # In a process namespace of its own: other tests' keepers must not be seen here.
    words = " ".join(f"'{word}'" for word in machine.argv("--cloud", "none", past=False))
    script = f"""
    export PATH={machine.folder}/bin:$PATH
    keeper() {{ {sys.executable} -c 'import time; time.sleep(60)' kimisession.node.keeper /machine 3 4 & }}
    look() {{ if {words} --without-keeper-s "$1" > /dev/null; then echo stays; else echo ends; fi; }}
    echo "never came, soon after the boot: $(look 100000000)"
    echo "never came, long after the boot: $(look 1)"
    keeper; pid=$!
    # Until the shell's child has become a keeper by its command line.
    for _ in $(seq 200); do grep -qs kimisession /proc/$pid/cmdline && break; sleep 0.02; done
    echo "lives: $(look 1)"
    kill -9 $pid; wait $pid 2>/dev/null || true
    echo "has just exited: $(look 1)"
    for _ in $(seq 100); do last=$(look 1); [ "$last" = stays ] || break; sleep 0.05; done
    echo "exited: $last"
    """
    done = run_privately(tmp_path, script)
    assert done.stdout.splitlines() == [
        "never came, soon after the boot: stays",
        "never came, long after the boot: ends",
        "lives: stays",
        "has just exited: stays",
        "exited: ends",
    ], done.stderr


@needs_namespaces
def test_arming_writes_units_that_systemd_accepts_and_arming_again_extends(tmp_path: Path) -> None:
    before = host_fingerprint()
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("active", "masked", "units"):
        (tmp_path / "machine" / name).mkdir(parents=True)
    (commands / "poweroff").symlink_to("/bin/false")
    (commands / "systemctl").symlink_to(HOOKS.parents[1] / "tests" / "hooks" / "standins" / "machine.sh")
    first, later = int(time.time()) + 3600, int(time.time()) + 7200
    verify = "systemd-analyze verify /etc/systemd/system/kimisession-deadline.timer" if analyze() else "true"
    script = f"""
    export MACHINE={tmp_path}/machine GCE_METADATA_HOST=127.0.0.1:1
    mount -t tmpfs run /run
    arm="$HOOKS/../deadline/arm.sh"
    "$arm" --deadline {first}
    # As on a machine whose session is over: the folder that deadline.py came from is gone.
    mkdir -p /root/scripts && cp -r "$HOOKS/../deadline" /root/scripts/
    /root/scripts/deadline/arm.sh --deadline {later} --without-keeper-s 600 | tail -n 1
    grep ExecStart /etc/systemd/system/kimisession-deadline.service
    grep -c @ /etc/systemd/system/kimisession-deadline.* || true
    {verify} 2>&1 | sed 's/^/verify: /'
    # As systemd would start it; nothing is due, since the last word on keepers counts.
    $(sed -n 's/^ExecStart=//p' /etc/systemd/system/kimisession-deadline.service) --without-keeper-s 1000000000
    echo "runs: $?"
    ls $MACHINE/units
    [ "$(cut -d ' ' -f 1 /run/kimisession-keeper-seen)" = "$(cat /proc/sys/kernel/random/boot_id)" ] && echo "arming is a sighting"
    unset GCE_METADATA_HOST
    "$arm" --deadline {first} | tail -n 1
    """
    done = run_privately(tmp_path, script, path_first=commands)
    assert host_fingerprint() == before
    out = done.stdout
    assert f"--deadline-utc {later} " in out, out + done.stderr
    assert "--without-keeper-s 600" in out
    assert "deadline: armed for " in out.splitlines()[0]
    assert "runs: 0" in out
    assert "arming is a sighting" in out, "a machine whose set-up by SkyPilot took long goes before its keeper began"
    assert "kimisession-deadline.timer" in out
    assert "verify:" not in out, "systemd-analyze has nothing to say"
    assert "say --cloud none if it may be powered off" in out.splitlines()[-1], "nobody's own machine is armed"


def analyze() -> bool:
    """Whether systemd's own checker can be run here."""
    return bool(shutil.which("systemd-analyze")) and os.geteuid() == 0
