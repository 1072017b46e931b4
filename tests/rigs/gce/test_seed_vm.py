"""`kimisession seed` on a machine that real SkyPilot rents from the emulated Google: left with Ctrl-C, joined again, sealed,
gone. The cases share one seeding, in this order.

The machine has no package index, so it is an image that has the seeder's packages: the case plants them while SkyPilot still
sets the machine up, as `seeder.sh` finds them on a real one.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.gce.bounds import PATIENCE
from tests.rigs.gce.world.rig import PYTHON, World, wait_for
from tests.weights.hub_server import COMMIT

pytestmark = pytest.mark.skipif(not os.environ.get("KIMISESSION_RIG_ALL"), reason="make test-gce ALL=1")

NAME, TOKEN, HUB = "seed-kimi-k2-5", "hf_of_the_rig", "http://10.128.0.1:8090"
BUCKET = "gs://weights/seeded"
WORDS = ("seed", "kimi-k2.5", "--from", "hub:owner/mini", "--bucket", BUCKET)

#: What the seeder needs and SkyPilot's own environment on a machine lacks.
PACKAGES = ("tenacity", "crc32c")

#: A python3.12 that has them, on a machine whose process 1 is its own already.
_PLANT = """
set -e
cd {site}
tar -cf - {packages} | /run/bin/on {machine} sh -ec '
    mkdir -p /opt/seeder
    tar -xf - -C /opt/seeder
    cat > /usr/local/bin/python3.12 <<EOF
#!/bin/sh
export PYTHONPATH=\\$PYTHONPATH:/opt/seeder:/home/gcpuser/skypilot-runtime/lib/python3.11/site-packages
exec /usr/bin/python3 "\\$@"
EOF
    chmod 755 /usr/local/bin/python3.12'
"""


@dataclass
class Seeding:
    """A command that seeds, and what its machine says."""

    world: World
    command: "subprocess.Popen[bytes]"
    output: Path

    def told(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    @property
    def id(self) -> str:
        folder = self.world.home / ".local" / "state" / "kimisession" / "rented"
        return next((path.name for path in folder.glob(f"{NAME}-????????")), "")

    @property
    def machine(self) -> str:
        return self.world.machine(self.id) if self.id else ""

    def journal(self) -> list[dict[str, Any]]:
        if not self.machine:
            return []
        file = f"/home/gcpuser/.kimisession/{self.id}/run/journal.jsonl"
        lines = self.world.run("/run/bin/on", self.machine, "cat", file).stdout.splitlines()
        return [json.loads(line) for line in lines]


def typed(world: World, *words: str) -> "subprocess.CompletedProcess[str]":
    """A command of ours with the hub and its token in the environment."""
    env = {"HF_ENDPOINT": HUB, "HF_TOKEN": TOKEN}
    return world.run(str(PYTHON), "-m", "kimisession", *words, within_s=600 * PATIENCE, env=env)


def sent(world: World, output: Path, *argv: str, **env: str) -> "subprocess.Popen[bytes]":
    """A program of the world, not waited for."""
    with output.open("wb") as file:
        return subprocess.Popen(world._enter(argv, env), stdin=subprocess.DEVNULL, stdout=file, stderr=file)


@pytest.fixture(scope="module")
def seeding(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeding]:
    """Begun, and its machine given the packages."""
    folder = tmp_path_factory.mktemp("seeding")
    hub = sent(world, folder / "hub", str(PYTHON), "-m", "tests.rigs.gce.hub", "/run/hub", "8090", TOKEN, "5000")
    wait_for("the hub", lambda: world.run("curl", "-s", "-o", "/dev/null", HUB).returncode == 0, 20)
    dry = typed(world, *WORDS, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    print(dry.stderr)
    argv = (str(PYTHON), "-m", "kimisession", *WORDS, "-y")
    output = folder / "command"
    one = Seeding(world, sent(world, output, *argv, HF_ENDPOINT=HUB, HF_TOKEN=TOKEN), output)
    try:
        wait_for("a machine", lambda: bool(one.machine) or one.command.poll() is not None, 200 * PATIENCE)
        assert one.command.poll() is None, one.told()
        site = next((PYTHON.parents[1] / "lib").glob("python3.*/site-packages"))
        names = " ".join(p.name for name in PACKAGES for p in site.glob(f"{name}*"))
        plant = _PLANT.format(site=site, packages=names, machine=one.machine)
        wait_for("packages on the machine", lambda: world.run("sh", "-c", plant).returncode == 0, 60 * PATIENCE)
        yield one
    finally:
        hub.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            world.kimisession("stop", "--all", within_s=300)


def test_ctrl_c_leaves_the_rented_machine_seeding(seeding: Seeding) -> None:
    def moving() -> bool:
        assert seeding.command.poll() is None, seeding.told()
        return any(line["kind"] == "progress" and line["phase"] == "weights" for line in seeding.journal())

    def followed() -> bool:
        return "\n  stack " in seeding.told() or seeding.command.poll() is not None

    wait_for("bytes that move", moving, 200 * PATIENCE, every_s=1)
    wait_for("the command to follow", followed, 60 * PATIENCE)
    seeding.world.signal("kimisession seed", signal.SIGINT)
    seeding.command.wait(timeout=60 * PATIENCE)
    told = seeding.told()
    print(told)
    assert seeding.command.returncode == 130, told
    assert f"{NAME} runs on at $0.19/h" in told
    assert seeding.world.exists(seeding.id)


def test_every_layer_of_a_session_with_gpus_is_armed_on_it(seeding: Seeding) -> None:
    def armed() -> set[str]:
        (page,) = json.loads(seeding.world.kimisession("status", NAME, "--json").stdout)["data"]
        return {layer["name"] for layer in page["layers"] if layer["armed"]}

    wanted = {"keeper", "SkyPilot autodown", "timer in the machine", "reaper"}
    wait_for("all layers", lambda: armed() >= wanted, 60 * PATIENCE, every_s=1)


def test_the_token_is_one_file_of_its_user_on_the_machine(seeding: Seeding) -> None:
    world, places = seeding.world, ("/home/gcpuser", "/root", "/tmp", "/var/log")
    found = world.on(seeding.machine, "sh", "-c", f"grep -rlF {TOKEN} {' '.join(places)} 2>/dev/null || true").split()
    assert found == [f"/home/gcpuser/.kimisession/{seeding.id}/hf_token"]
    assert world.on(seeding.machine, "stat", "-c", "%a", found[0]).strip() == "600"
    itself = f"[{TOKEN[0]}]{TOKEN[1:]}"  # a pattern that does not match the words of this very search
    look = f"cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c '{itself}' || true"
    assert world.on(seeding.machine, "sh", "-c", look).split() == ["0"]
    # Of what this side keeps, nothing has it either.
    kept = [p for p in (world.home / ".local").rglob("*") if p.is_file() and TOKEN.encode() in _bytes(p)]
    assert kept == []


def _bytes(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def test_the_same_command_comes_back_to_it_and_ends_with_a_seal_and_no_machine(seeding: Seeding) -> None:
    began = time.monotonic()
    done = typed(seeding.world, *WORDS, "-y")
    print(
        done.stderr, done.stdout, f"{time.monotonic() - began:.0f} s, most of it the end of the machine and its proof"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "following it" in done.stderr
    assert f"revision {COMMIT[:16]}" in done.stdout
    assert "done: every step ended well" in done.stdout
    assert not seeding.world.exists(seeding.id)


def test_what_is_sealed_rents_nothing(seeding: Seeding) -> None:
    again = typed(seeding.world, *WORDS, "-y")
    assert (again.returncode, "nothing is rented" in again.stderr) == (0, True), again.stderr
    assert typed(seeding.world, *WORDS[:-1], "gs://weights/other", "--revision", "f" * 40, "-y").returncode == 2
    assert json.loads(seeding.world.kimisession("status", "--json").stdout)["data"] == []
