"""Is this machine worth loading weights on? Probes of seconds, before minutes are spent.

    python3 -m kimisession.node.preflight --gpus 8 --min-driver 580 --engine-python /opt/engine/bin/python

Prints one JSON line per probe as it ends:

    {"probe": "ptx", "seconds": 0.46, "verdict": "ok", "evidence": "...", "progress": {"done": 3, "total": 7, ...}}

verdict is ok, failed or skipped (then the evidence is why). Exit codes: 0 nothing failed; 2 usage; 5 something failed,
and then the last line is one sentence: incident, cause, fix. The numbers are those of notes/incidents.md. Probes that
do not need each other run side by side, each with its own time limit; one that hangs is a failed one.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kimisession.node import preflight_disk, preflight_gib, preflight_gpus, preflight_ptx
from kimisession.node.deadline import COMPUTE, METADATA, CloudError, Google
from kimisession.node.preflight_finding import Child, Done, Failed, Skipped, run
from kimisession.node.pull_place import local_ssds

OK, FAILED = 0, 5
DELETE = "compute.instances.delete"


@dataclass
class Machine:
    """What the probes are about, and what one leaves for those after it."""

    args: argparse.Namespace
    environment: Mapping[str, str]
    gpus: list[preflight_gpus.Gpu] = field(default_factory=list)


@dataclass(frozen=True)
class Probe:
    """`look` returns the evidence, or raises Failed or Skipped. It starts when all of `after` have ended; one that
    `needs` what failed is skipped. `limit_s` is its own time limit."""

    name: str
    look: Callable[[Machine], str]
    limit_s: float
    after: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a probe ended. `failure` is there exactly when the verdict is failed."""

    probe: str
    seconds: float
    verdict: str
    evidence: str
    failure: Failed | None = None


# -- the probes --------------------------------------------------------------------------------------------------------


def driver(machine: Machine) -> str:
    """The driver answers, is new enough and shows every GPU."""
    machine.gpus = preflight_gpus.look(30)
    return preflight_gpus.check_driver(machine.gpus, machine.args.gpus, machine.args.min_driver)


def memory(machine: Machine) -> str:
    """Nobody else is on the GPUs. Looked at before our own probes take memory there."""
    return preflight_gpus.check_memory(machine.gpus, machine.args.gpus, machine.args.need_free, 15)


def ptx(machine: Machine) -> str:
    """The driver compiles the PTX that the engine's kernels carry: incident 2, foretold in half a second."""
    branch = preflight_gpus.numbers(machine.args.min_driver)[0]
    wanted = machine.args.ptx or preflight_ptx.of_driver(branch)
    done = run([sys.executable, str(Path(__file__).with_name("preflight_ptx.py"))], 25, machine.environment)
    found = _last_object(done)
    if done.code is None:
        raise Failed("hung driver", "the driver did not answer a module's load in 25s", "take another machine")
    if "highest" not in found:
        raise Failed(
            "no driver", f"libcuda failed: {found.get('error', done.last_line)}", "run scripts/hooks/driver.sh"
        )
    highest = str(found["highest"])
    if not highest or preflight_ptx.order(highest) < preflight_ptx.order(wanted):
        fix = f"run scripts/hooks/driver.sh --min {machine.args.min_driver}"
        cause = f"the driver takes PTX up to {highest or 'none'} and the engine's kernels may carry {wanted}"
        raise Failed(preflight_gpus.OLD_DRIVER, cause, fix)
    return f"PTX up to {highest} loads ({wanted} is wanted), CUDA {found['cuda']}, {found['device']}"


def gib(machine: Machine) -> str:
    """No trace of GIB on a machine that works alone."""
    return preflight_gib.check(machine.args.nodes, machine.environment, 10)


def allgather(machine: Machine) -> str:
    """NCCL between all GPUs: right, and how fast."""
    args, world = machine.args, machine.args.gpus
    if world < 2:
        raise Skipped("one GPU has nobody to gather from")
    script = Path(__file__).with_name("preflight_gather.py")
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - memory, and NCCL needs it too
    with tempfile.TemporaryDirectory(prefix="kimisession-gather-", dir=shared) as folder:
        ranks: list[Child] = []
        try:
            for rank in range(world):
                env = {
                    **{"NCCL_DEBUG": "WARN", **machine.environment},
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "PREFLIGHT_STORE": f"{folder}/store",
                    "PREFLIGHT_TIMEOUT_S": str(args.gather_s),
                    "PYTHONUNBUFFERED": "1",
                }
                ranks.append(Child([args.engine_python, str(script)], env))
            _wait_for_all(ranks, args.gather_s)
        except OSError as error:
            cause = f"the engine's Python {args.engine_python} cannot be run: {error.strerror}"
            raise Failed("broken engine stack", cause, "name it with --engine-python, or run the stack hook") from None
        finally:
            ended = [rank.stop() for rank in ranks]
    return read_gather(ended, args.min_gather_gb_per_s, args.gather_s)


def _wait_for_all(ranks: list[Child], limit_s: float) -> None:
    """Until all have ended, or one has failed: the others would wait for it."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        codes = [rank.poll() for rank in ranks]
        if None not in codes:
            return
        if any(codes):
            time.sleep(1)  # the others may be about to say why
            return
        time.sleep(0.05)


def read_gather(ranks: list[Done], min_gb_per_s: float, limit_s: float) -> str:
    """What the ranks' ends and words mean. Returns the evidence; raises Failed."""
    text = "\n".join(done.text for done in ranks)
    result = _last_object(ranks[0])
    if all(done.code == 0 for done in ranks) and "gb_per_s" in result:
        evidence = (
            f"{result['world']} GPUs gathered 4 MiB each right, then 256 MiB each at {result['gb_per_s']} GB/s per GPU "
            f"(torch {result['torch']}, NCCL {result['nccl']})"
        )
        if result["gb_per_s"] < min_gb_per_s:
            cause = f"GPUs exchange {result['gb_per_s']} GB/s and {min_gb_per_s:g} is wanted"
            raise Failed(
                "slow GPU links", cause, "look at nvidia-smi topo -m and the fabric manager, or take another machine"
            )
        return evidence
    bad = next((n for n, done in enumerate(ranks) if done.code not in (0, None)), None)
    where = ", ".join(f"rank {n} after '{_stage(done)}'" for n, done in enumerate(ranks) if done.code != 0)[:200]
    if "NET plugin" in text or "Internal check failed" in text:
        raise Failed(preflight_gib.INCIDENT, "NCCL failed to start with a network plugin", preflight_gib.FIX)
    if "No module named 'torch'" in text:
        raise Failed("broken engine stack", "the engine's Python has no torch", "run scripts/hooks/stack.sh")
    if "out of memory" in text:
        raise Failed("GPU memory in use", "the all-gather found no memory", "end what holds the GPUs")
    if bad is not None:
        cause = f"the all-gather ended with code {ranks[bad].code} ({ranks[bad].last_line[:200]}), {where}"
        raise Failed(
            "incident 6 (NCCL does not fit driver and engine)", cause, "compare the stack with the profile's lock"
        )
    cause = f"the all-gather hung for {limit_s:.0f}s, {where}"
    raise Failed("incident 5 (NCCL hangs in its first collective)", cause, preflight_gib.FIX)


def _stage(done: Done) -> str:
    stages = [line[6:] for line in done.text.splitlines() if line.startswith("stage ")]
    return stages[-1] if stages else "nothing"


def disk(machine: Machine) -> str:
    """Room and speed where the weights will be."""
    args = machine.args
    if args.disk is None:
        raise Skipped("no folder was named with --disk")
    ssds = local_ssds() if args.spread else []
    return preflight_disk.check(ssds[0] if ssds else args.disk, int(args.disk_gb * 1e9), args.min_disk_mb_per_s)


def permission(machine: Machine) -> str:
    """This machine's identity may delete this machine: the last layer's key fits its lock."""
    cloud = machine.args.cloud
    if cloud == "auto":
        cloud = which_cloud(machine.environment)
    if cloud not in PERMISSION:
        raise Skipped("this is not a machine of a cloud that is known here: whoever lent it has to take it back")
    return PERMISSION[cloud](machine)


def which_cloud(environment: Mapping[str, str]) -> str:
    """By what the firmware says, so that no address is asked where there is no metadata server."""
    if environment.get("GCE_METADATA_HOST"):
        return "gcp"
    try:
        product = Path("/sys/class/dmi/id/product_name").read_text(encoding="utf-8")
    except OSError:
        return "none"
    return "gcp" if "Google" in product else "none"


def google_permission(machine: Machine) -> str:
    """By Compute Engine's own testIamPermissions, with the token that the deadline timer will use."""
    host = machine.environment.get("GCE_METADATA_HOST") or METADATA
    google = Google(host, machine.args.compute, call_s=5)
    fix = "give its service account compute.instances.delete and the scope cloud-platform"
    try:
        allowed = google.may(DELETE)
    except CloudError as error:
        raise Failed("a machine that cannot delete itself", str(error), fix) from None
    if not allowed:
        raise Failed("a machine that cannot delete itself", f"its identity lacks {DELETE} on itself", fix)
    return f"its own identity has {DELETE} on it"


#: How each cloud is asked. A new cloud is one line here and one function.
PERMISSION: dict[str, Callable[[Machine], str]] = {"gcp": google_permission}


def _last_object(done: Done) -> dict[str, Any]:
    for line in reversed(done.text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def probes(args: argparse.Namespace) -> tuple[Probe, ...]:
    """In the order in which a failure explains those after it: the last line names the first."""
    table = (
        Probe("driver", driver, 35),
        Probe("ptx", ptx, 30, after=("memory",), needs=("driver",)),
        Probe("gib", gib, 25),
        Probe("memory", memory, 20, after=("driver",), needs=("driver",)),
        Probe("allgather", allgather, args.gather_s + 5, after=("memory",), needs=("driver",)),
        Probe("disk", disk, 30),
        Probe("permission", permission, 40),
    )
    if args.only is None:
        return table
    return tuple(replace(probe, after=(), needs=()) for probe in table if probe.name == args.only)


# -- running them ------------------------------------------------------------------------------------------------------


def run_probes(table: tuple[Probe, ...], machine: Machine, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Run all, side by side where nothing orders them. `tell` hears each as it ends; the result is in table order."""
    ended: dict[str, Outcome] = {}
    running: dict[str, float] = {}
    began: set[str] = set()
    arrived: queue.Queue[Outcome] = queue.Queue()
    limits = {probe.name: probe.limit_s for probe in table}

    def end(outcome: Outcome) -> None:
        running.pop(outcome.probe, None)
        ended[outcome.probe] = outcome
        tell(outcome)

    while len(ended) < len(table):
        for probe in table:
            if probe.name in began or not ended.keys() >= set(probe.after):
                continue
            began.add(probe.name)
            broken = [name for name in probe.needs if ended[name].verdict != "ok"]
            if broken:
                end(Outcome(probe.name, 0.0, "skipped", f"{broken[0]} has to be right first"))
                continue
            running[probe.name] = time.monotonic()
            # A daemon: a probe that hangs in the kernel must not keep the preflight from ending.
            threading.Thread(target=lambda p=probe: arrived.put(_one(p, machine)), daemon=True).start()
        if len(ended) == len(table):
            break
        wait_s = min((at + limits[name] - time.monotonic() for name, at in running.items()), default=0.0)
        try:
            outcome = arrived.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            for name, at in tuple(running.items()):
                if time.monotonic() - at >= limits[name]:
                    failure = Failed(
                        "hung probe", f"{name} did not answer in {limits[name]:g}s", "take another machine"
                    )
                    end(Outcome(name, round(time.monotonic() - at, 2), "failed", failure.cause, failure))
            continue
        if outcome.probe in running:  # else it came too late and was told as hung
            end(outcome)
    return [ended[probe.name] for probe in table]


def _one(probe: Probe, machine: Machine) -> Outcome:
    began = time.monotonic()

    def outcome(verdict: str, evidence: str, failure: Failed | None = None) -> Outcome:
        return Outcome(probe.name, round(time.monotonic() - began, 2), verdict, evidence, failure)

    try:
        return outcome("ok", probe.look(machine))
    except Skipped as skip:
        return outcome("skipped", str(skip))
    except Failed as failure:
        return outcome("failed", failure.cause, failure)
    except Exception as error:  # not knowing is no reason to spend money
        text = f"{type(error).__name__}: {error}"
        return outcome(
            "failed", text, Failed("broken probe", f"{probe.name} raised {text}", "report it with this line")
        )


def last_line(outcomes: list[Outcome]) -> str:
    """One sentence about what failed; empty when nothing did."""
    failures = [(outcome.probe, outcome.failure) for outcome in outcomes if outcome.failure is not None]
    if not failures:
        return ""
    others = ", ".join(name for name, _ in failures[1:])
    return failures[0][1].sentence + (f" (failed as well: {others})" if others else "") + "."


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="preflight", description="Probes of seconds before minutes of loading.")
    parser.add_argument("--gpus", type=int, required=True, help="how many GPUs the session will use")
    parser.add_argument("--min-driver", default="580")
    parser.add_argument("--ptx", help="newest PTX version in the engine's kernels; default: what --min-driver takes")
    parser.add_argument("--engine-python", default=sys.executable, help="a Python that has the engine's torch")
    parser.add_argument("--need-free", type=float, default=0.95, help="part of each GPU's memory that must be free")
    parser.add_argument("--gather-s", type=float, default=90.0, help="time limit of the all-gather, imports included")
    parser.add_argument("--min-gather-gb-per-s", type=float, default=0.0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--disk", type=Path, help="where the weights will be")
    parser.add_argument("--disk-gb", type=float, default=0.0, help="decimal GB that must be free there")
    parser.add_argument("--min-disk-mb-per-s", type=float, default=0.0)
    parser.add_argument("--spread", action="store_true", help="the weights will be on the mounted local SSDs, if any")
    parser.add_argument("--only", metavar="PROBE", help="this probe alone")
    parser.add_argument("--cloud", choices=("auto", "none", *PERMISSION), default="auto")
    parser.add_argument("--compute", default=COMPUTE)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="as the engine will have it")
    args = parser.parse_args(argv)
    if args.gpus < 1 or not preflight_gpus.numbers(args.min_driver):
        parser.error("--gpus is at least 1, and --min-driver begins with a number")
    if any("=" not in pair for pair in args.env):
        parser.error("--env takes NAME=VALUE")
    if not probes(args):
        parser.error(f"--only takes the name of a probe, and {args.only} is none")
    return args


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    args = parse(argv)
    environment = {**os.environ, **dict(pair.split("=", 1) for pair in args.env)}
    table = probes(args)
    told = 0

    def tell(outcome: Outcome) -> None:
        nonlocal told
        told += 1
        line = {
            "probe": outcome.probe,
            "seconds": outcome.seconds,
            "verdict": outcome.verdict,
            "evidence": outcome.evidence,
            "progress": {"done": told, "total": len(table), "unit": "probes"},
        }
        print(json.dumps(line), flush=True)

    outcomes = run_probes(table, Machine(args, environment), tell)
    sentence = last_line(outcomes)
    if sentence:
        # The keeper quotes such a line, people read the last one.
        print(json.dumps({"failed": {"exit": FAILED, "message": sentence}}), flush=True)
        print(f"preflight: {sentence}", flush=True)
    return FAILED if sentence else OK


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a probe that hangs in the kernel is a thread that would be waited for
