"""How long `kimisession plan` takes once its caches are warm, without a network, against two peers in the same run.

    python benchmarks/plan_latency.py [ROUNDS]

Every command runs in a network namespace of its own that has no interface up (`unshare -rn`; where that is not allowed it
says so and runs as it is). The peers: importing httpx, rich and typer, which is less than any command of that kind does, and
`sky --help` where `.venv-sky` is there (benchmarks/startup.py makes it). Runs are interleaved, medians quoted with their
spread. Exits 1 if a plan takes 0.5 s or more (of processor time, where more wants to run than there are cores: then the clock
measures the others), more than five times the first peer, or loads sky, google, pandas or httpx.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kimisession.rehearsal.mini_kimi import make_mini_kimi

ROOT = Path(__file__).parent.parent
SKY = ROOT / ".venv-sky/bin/sky"
HEAVY = ("sky", "google", "pandas", "numpy", "httpx")
LIMIT_S, RATIO = 0.5, 5.0
PEER = "import httpx, rich, typer"

LOADED = """\
import sys
from kimisession.cli.app import main
try:
    main()
finally:
    heavy = sorted({%s} & {name.partition(".")[0] for name in sys.modules})
    print("LOADED", *heavy, file=sys.stderr)
"""


def main() -> int:
    """Measure, print, and compare with the bounds."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory(prefix="kimisession-latency-") as scratch:
        home = Path(scratch)
        make_mini_kimi(home / "mini")
        env = {**os.environ, "HOME": scratch, "NO_COLOR": "1"}
        env |= {f"KIMISESSION_{name}_HOME": str(home / name) for name in ("STATE", "CONFIG", "DATA", "CACHE")}
        ours = [sys.executable, "-m", "kimisession", "plan"]
        sealed = ["unshare", "-rn"]
        if subprocess.run([*sealed, "true"], capture_output=True, check=False).returncode:
            print("no network namespaces here: the commands run with whatever network there is")
            sealed = []
        commands = {
            "plan kimi-k2.5": [*sealed, *ours, "kimi-k2.5"],
            "plan --context 64k": [*sealed, *ours, "kimi-k2.5", "--context", "64k"],
            "plan --compare": [*sealed, *ours, "--compare", "kimi-k2.5", "kimi-k2.5-int4"],
            "plan --model FOLDER": [*sealed, *ours, "--model", str(home / "mini"), "--gpus", "H100:1"],
            PEER: [*sealed, sys.executable, "-c", PEER],
            **({"sky --help": [*sealed, str(SKY), "--help"]} if SKY.exists() else {}),
        }
        times, cpu = measured(commands, rounds, env)
        loaded = heavy_modules(env)
    return verdict(times, cpu, loaded)


def measured(
    commands: dict[str, list[str]], rounds: int, env: dict[str, str]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds by the clock and of processor time of each command, a run of each per round; the first round warms the
    caches and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    cpu: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, argv in commands.items():
            began, used = time.perf_counter(), processor_s()
            subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if number:
                times[name].append(time.perf_counter() - began)
                cpu[name].append(processor_s() - used)
    return times, cpu


def processor_s() -> float:
    """Processor time of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def heavy_modules(env: dict[str, str]) -> list[str]:
    """Which heavy modules a plan loads."""
    code = LOADED % ", ".join(repr(name) for name in HEAVY)
    done = subprocess.run([sys.executable, "-c", code, "plan"], env=env, capture_output=True, text=True, check=True)
    return next(line for line in done.stderr.splitlines() if line.startswith("LOADED")).split()[1:]


def verdict(times: dict[str, list[float]], cpu: dict[str, list[float]], loaded: list[str]) -> int:
    """Print medians and ratios; 1 if a bound is missed."""
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    peer, sky = medians[PEER], medians.get("sky --help")
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    missed = [f"plan loads {', '.join(loaded)}"] if loaded else []
    for name, taken in times.items():
        beside = f"  {medians[name] / peer:5.2f} x the imports"
        beside += f", {medians[name] / sky:.3f} x sky --help" if sky else ""
        processor = statistics.median(cpu[name])
        print(
            f"{name:<28} median {medians[name]:.3f} s [{min(taken):.3f} to {max(taken):.3f}], n {len(taken)}, "
            f"processor {processor:.3f} s{beside}"
        )
        if name.startswith("plan") and (processor if busy else medians[name]) >= LIMIT_S:
            missed.append(f"{name} takes {medians[name]:.3f} s")
        if name.startswith("plan") and medians[name] > RATIO * peer:
            missed.append(f"{name} takes {medians[name] / peer:.1f} times the imports")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; heavy modules: {' '.join(loaded) or 'none'}")
    for sentence in missed:
        print(f"MISSED {sentence}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
