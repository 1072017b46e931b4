"""Seed and pull under faults: every (phase, fault) pair, many times, from a seed of chance.

    python -m tests.weights.faults [--runs 320] [--record FILE] [--only PHASE/FAULT]

Each run seeds a small model from the stand-in hub into the stand-in store and pulls it, with one fault placed at a
random request of its phase (and a random byte), then once more without faults, and holds:

- the fault was reached;
- whenever the bucket carries a seal, every object is byte for byte the source's;
- whatever the puller called done is byte for byte the source's;
- what was sent twice is at most one shard for every stream that was hit;
- the healed run ends sealed and pulled, with nothing of ours left but the seal.

Runs that a record file already has for this commit and code are not run again. Exits 1 when one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kimisession.node import pull_place as pull
from kimisession.weights.errors import NotSeeded, WeightsError
from kimisession.weights.gcs import GcsBucket
from kimisession.weights.hub import HubSource
from kimisession.weights.manifest import CONTROL, SEAL, Manifest
from kimisession.weights.seal import read_seal
from kimisession.weights.seed import seed
from tests.weights.gcs_server import GcsServer, client_for
from tests.weights.hub_server import HubServer
from tests.weights.making import HASTY, PART_BYTES, same_files, weights_folder
from tests.weights.servers import Call, Fault, serving

ROOT = Path(__file__).parents[2]
STREAMS = 2
SHARDS = 3
SHARD_BYTES = 700_000
"""Several grains of 256 KiB and several parts each."""

REQUESTS = ("429", "503", "503-storm", "cut", "lost")
BODIES = ("429", "503", "503-storm", "cut", "cut-mid", "short", "flip")
SEED_PHASES = {
    "hub.api": ("429", "503", "503-storm", "cut", "denied", "gone", "kill-seeder"),
    "hub.resolve": ("429", "503", "503-storm", "cut", "denied", "gone", "kill-seeder"),
    "hub.body": (*BODIES, "flip-always", "revision", "kill-seeder", "two", "clock"),
    "gcs.list": ("429", "503", "503-storm", "cut", "kill-seeder"),
    "gcs.control": (*REQUESTS, "kill-seeder", "two"),
    "gcs.session": (*REQUESTS, "quota", "denied", "kill-seeder"),
    "gcs.status": (*REQUESTS, "kill-seeder"),
    "gcs.put": (*REQUESTS, "quota", "cut-mid", "flip", "kill-seeder", "two"),
}
PULL_PHASES = {
    "gcs.seal": ("429", "503", "503-storm", "cut"),
    "gcs.get": (*BODIES, "flip-always", "kill-puller", "kill-worker"),
}
PAIRS = [f"{phase}/{fault}" for phase, faults in (SEED_PHASES | PULL_PHASES).items() for fault in faults]
TOLD = {"quota": "BucketFull", "denied": "Denied", "gone": "BadSource", "flip-always": "SourceChanged"}
"""Faults that trying again cannot mend end with this error, in one sentence."""


class Broken(Exception):
    """A promise that did not hold."""


@dataclass
class Trap:
    """One fault waiting for its request; `hit` counts how often it struck."""

    phase: str
    fault: str
    rng: random.Random
    strike: Callable[[], None] = lambda: None
    hit: int = 0
    primed: bool = False

    def __post_init__(self) -> None:
        # Control requests are many, so the trap is set deeper there.
        self.at = self.rng.randint(
            1,
            {"gcs.control": 60, "gcs.list": 5, "gcs.get": 10, "hub.body": 5, "gcs.seal": 1, "gcs.status": 1}.get(
                self.phase, 2
            ),
        )
        self.after = self.rng.randrange(SHARD_BYTES)
        if self.phase == "gcs.get":
            self.after %= PART_BYTES

    def plan(self, call: Call) -> Fault | None:
        if self.phase == "gcs.status" and call.phase == "gcs.put" and not self.primed:
            self.primed = True  # the store is asked how much it has only after an upload was cut
            return Fault("cut", after=self.after)
        phase = "gcs.seal" if call.phase == "gcs.control" and self.phase == "gcs.seal" else call.phase
        if phase != self.phase or (call.number < self.at and not self.hit):
            return None
        body = self.fault in (
            "cut-mid",
            "short",
            "flip",
            "flip-always",
            "kill-seeder",
            "kill-puller",
            "kill-worker",
        )
        if body and not call.name.endswith(".safetensors") and phase in ("hub.body", "gcs.put", "gcs.get"):
            return None  # small files end before the byte where the fault waits
        if self.fault == "503-storm":
            self.hit += 1
            return Fault("status", 503, retry_after=None) if self.hit <= 4 else None
        if self.fault == "flip-always":
            self.hit += 1
            return Fault("flip", after=self.after)
        if self.hit:
            return None
        self.hit += 1
        if self.fault.startswith("kill") or self.fault in ("two", "revision"):
            self.strike()
            return None
        if self.fault in ("429", "503"):
            return Fault("status", int(self.fault))
        if self.fault in ("denied", "gone", "quota"):
            status = {"denied": 401, "gone": 404, "quota": 403}[self.fault]
            return Fault("status", status, retry_after=None, message=self.fault + "Exceeded")
        if self.fault == "clock":
            return None
        return Fault(self.fault.removesuffix("-mid"), after=self.after if self.fault != "cut" else 0)


def check_sealed(gcs: GcsServer, weights: Path) -> bool:
    """Whether there is a seal; if so, every object must be the source's, byte for byte."""
    if SEAL not in gcs.objects:
        return False
    manifest = json.loads(gcs.objects[SEAL].path.read_bytes())
    for entry in manifest["files"]:
        if gcs.objects[entry["path"]].path.read_bytes() != (weights / entry["path"]).read_bytes():
            raise Broken(f"{entry['path']} is sealed with wrong bytes")
    return True


SEEDER = """
import sys
from tests.weights.faults import run_seeder
run_seeder(sys.argv[1], sys.argv[2])
"""


def run_seeder(
    hub_url: str, gcs_url: str, now: Callable[[], datetime] = lambda: datetime.now(UTC), writer: str = ""
) -> Manifest:
    """One seeding as a user's command would do it."""
    bucket = GcsBucket(client_for(gcs_url), "weights")
    source = HubSource("owner/mini", endpoint=hub_url)
    return seed(
        source,
        bucket,
        model="mini",
        part_bytes=PART_BYTES,
        patience=HASTY,
        streams=STREAMS,
        now=now,
        writer=writer or None,
    )


def jumping() -> datetime:
    """A clock that jumps by years between two looks."""
    return datetime.now(UTC) + timedelta(days=random.choice((-3650, -1, 1, 3650)))


def one_run(pair: str, chance: int, folder: Path) -> dict[str, object]:
    """One run of one pair. Raises Broken."""
    phase, fault = pair.split("/")
    rng = random.Random(f"{pair} {chance}")
    weights = weights_folder(folder / "weights", SHARDS, SHARD_BYTES, seed=chance)
    trap = Trap(phase, fault, rng)
    hub, gcs = HubServer(weights), GcsServer(folder / "gcs")
    ended = ""
    seeding = phase in SEED_PHASES
    with serving(hub), serving(gcs):
        if seeding:
            hub.plan = gcs.plan = trap.plan
            for _ in range(6):  # a kill deep in a phase that a short life does not reach: live again
                ended = seed_with(fault, hub, gcs, trap)
                check_sealed(gcs, weights)
                if trap.hit or SEAL in gcs.objects:
                    break
            hub.plan = gcs.plan = None
        run_seeder(hub.url, gcs.url)
        if not check_sealed(gcs, weights):
            raise Broken("the healed run did not seal")
        left = [name for name in gcs.objects if name.startswith(CONTROL) and name != SEAL]
        if left:
            raise Broken(f"left behind: {left}")
        if gcs.seen.refused:
            raise Broken(f"the store refused {gcs.seen.refused[0]}")
        total = sum(entry.size for entry in gcs.objects.values())
        twice = sum(gcs.seen.body_in.values()) - sum(
            gcs.seen.body_in.get(name, 0) and one.size for name, one in gcs.objects.items()
        )
        if twice > STREAMS * (SHARD_BYTES + SHARDS) * (2 if fault == "two" else 1):
            raise Broken(f"{twice} bytes were sent twice")
        to = folder / "to"
        if not seeding:
            gcs.seen.calls.clear()
            gcs.plan = trap.plan
            ended = pull_with(fault, gcs, to, trap, weights)
            gcs.plan = None
        code = run_puller(gcs, to).wait()
        if code != pull.OK or not same_files(weights, to):
            raise Broken(f"the healed pull ended with {code} or other bytes")
    if not trap.hit:
        raise Broken("the fault was not reached")
    return {"pair": pair, "chance": chance, "ended": ended, "twice": twice, "total": total}


def seed_with(fault: str, hub: HubServer, gcs: GcsServer, trap: Trap) -> str:
    """Seed with the trap set; how that ended, in a word or a sentence."""
    if fault == "kill-seeder":
        process = subprocess.Popen(
            [sys.executable, "-c", SEEDER, hub.url, gcs.url], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        trap.strike = process.kill
        return f"exit {process.wait()}"
    second: list[threading.Thread] = []
    if fault == "two":

        def other() -> None:
            with contextlib.suppress(WeightsError):
                run_seeder(hub.url, gcs.url, writer="another-vm/boot/1/1")

        def strike() -> None:
            second.append(threading.Thread(target=other))
            second[0].start()

        trap.strike = strike
    commit = hub.commit
    if fault == "revision":
        trap.strike = lambda: setattr(hub, "commit", "f" * 40)
    try:
        run_seeder(
            hub.url,
            gcs.url,
            now=jumping if fault == "clock" else lambda: datetime.now(UTC),
            writer="this-vm/boot/1/1",
        )
        ended = "sealed"
    except WeightsError as error:
        ended = f"{type(error).__name__}: {error.message}"
        with contextlib.suppress(NotSeeded):
            read_seal(GcsBucket(client_for(gcs.url), "weights"))
            if fault != "two":
                raise Broken(f"a run that failed left a seal: {ended}") from None
    finally:
        for thread in second:
            thread.join()
        hub.commit = commit
    if fault in TOLD and trap.hit and TOLD[fault] not in ended.partition(":")[0]:
        raise Broken(f"expected {TOLD[fault]}, ended with {ended}")
    return ended


def run_puller(gcs: GcsServer, to: Path) -> subprocess.Popen[bytes]:
    """The puller in a process of its own."""
    command = [sys.executable, "-m", "kimisession.node.pull", "--from", "gs://weights", "--to", str(to)]
    return subprocess.Popen(
        [*command, "--processes", "1", "--threads", "3"],
        cwd=ROOT,
        env={**os.environ, "STORAGE_EMULATOR_HOST": gcs.url},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def pull_with(fault: str, gcs: GcsServer, to: Path, trap: Trap, weights: Path) -> str:
    """Pull with the trap set; the exit code must be one that the fault allows."""
    process: list[subprocess.Popen[bytes]] = []

    def kill_worker() -> None:
        children = Path(f"/proc/{process[0].pid}/task/{process[0].pid}/children").read_text().split()
        os.kill(int(children[0]), 9)

    def kill_puller() -> None:
        process[0].kill()

    trap.strike = kill_puller if fault == "kill-puller" else kill_worker
    process.append(run_puller(gcs, to))
    code = process[0].wait()
    allowed = {"flip-always": pull.WRONG_BYTES, "kill-puller": -9}.get(fault, pull.OK)
    if code != allowed:
        raise Broken(f"the puller ended with {code}, not {allowed}")
    if code == pull.OK and not same_files(weights, to):
        raise Broken("the puller called wrong bytes done")
    return f"exit {code}"


def code_digest() -> str:
    """The code that these runs speak about."""
    digest = hashlib.sha256()
    for folder in ("kimisession/weights", "kimisession/node", "tests/weights"):
        for path in sorted((ROOT / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    """Run what the record lacks; print one line per pair; 0 when every run held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=320, help="runs in all, spread over the pairs")
    parser.add_argument("--record", type=Path, help="a JSON lines file to go on with")
    parser.add_argument("--only", help="one PHASE/FAULT")
    chosen = parser.parse_args()
    code = code_digest()
    done: set[tuple[str, int]] = set()
    if chosen.record and chosen.record.exists():
        for line in chosen.record.read_text().splitlines():
            value = json.loads(line)
            if value["code"] == code and not value.get("broken"):
                done.add((value["pair"], value["chance"]))
    pairs = [chosen.only] if chosen.only else PAIRS
    cells = [(pairs[number % len(pairs)], number // len(pairs)) for number in range(chosen.runs)]
    held, broken = Counter(pair for pair, _ in cells if (pair, _) in done), 0
    began = time.monotonic()
    for pair, chance in cells:
        if (pair, chance) in done:
            continue
        folder = Path(tempfile.mkdtemp(prefix="kimisession-faults-"))
        try:
            result = one_run(pair, chance, folder)
            held[pair] += 1
        except Broken as error:
            broken += 1
            result = {"pair": pair, "chance": chance, "broken": str(error)}
            print(f"BROKEN {pair} chance {chance}: {error}", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if chosen.record:
            with chosen.record.open("a") as file:
                file.write(json.dumps({"code": code, **result}) + "\n")
    for pair in pairs:
        print(f"{pair:28} held {held[pair]}")
    print(
        f"{sum(held.values())} runs held, {broken} broken, {len(pairs)} pairs, {time.monotonic() - began:.0f} s, code {code}"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
