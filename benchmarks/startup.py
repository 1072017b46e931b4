"""How long a command takes to begin: against `sky --help` in the same run, and against its own empty ledger.

    python benchmarks/startup.py

Makes `.venv-sky` (SkyPilot 0.14.1, its gcp, kubernetes and slurm extras) when it is missing. Runs are interleaved, medians
are quoted with their spread. The last lines are the ratios; exits 1 when one is missed:
- `kimisession --help` takes at most a twentieth of `sky --help`;
- it, `status` and `cost` load neither sky, google, pandas, numpy, httpx nor rich;
- `status` and `cost` with 10,000 sessions in the ledger take at most three times as long as with none.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from kimisession.core.ledger import (
    EndedOnNode,
    LaunchRequested,
    Ready,
    ResourceCreated,
    ResourceGone,
    SessionRequested,
    TeardownConfirmed,
)
from kimisession.store import open_store

ROOT = Path(__file__).parent.parent
SKY = ROOT / ".venv-sky"
OURS = [sys.executable, "-m", "kimisession"]
SESSIONS = 10_000
HEAVY = ("sky", "google", "pandas", "numpy", "httpx", "rich")


def make_sky() -> str:
    """SkyPilot's console script, installed beside the checkout's own environment."""
    script = SKY / "bin" / "sky"
    if not script.exists():
        print(f"installing SkyPilot into {SKY} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", SKY], check=True)
        pip = [str(SKY / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "skypilot[gcp,kubernetes,slurm]==0.14.1"], check=True)
    return str(script)


def timed(argv: list[str], env: dict[str, str]) -> float:
    """Seconds of one run that succeeded."""
    began = time.perf_counter()
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def interleaved(commands: dict[str, tuple[list[str], dict[str, str]]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each command, a run of each per round; the first round warms the caches and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, (argv, env) in commands.items():
            took = timed(argv, env)
            if number:
                times[name].append(took)
    for name, taken in times.items():
        print(
            f"  {name:<28} median {statistics.median(taken):6.3f} s  [{min(taken):.3f} to {max(taken):.3f}]  n {len(taken)}"
        )
    return times


def fill(home: Path) -> None:
    """A ledger with many sessions that have ended, written by the store itself."""
    store = open_store(home)
    began = time.perf_counter()
    start = datetime.now(UTC) - timedelta(days=400)
    price = Decimal("26.00")
    for number in range(SESSIONS):
        at = start + timedelta(minutes=50 * number)
        end = at + timedelta(minutes=30)
        name = f"session-{number}"
        store.append(
            name,
            [
                SessionRequested(
                    at=at,
                    name=name,
                    owner="benchmark",
                    profile="kimi-k2.5",
                    checkpoint="native",
                    infra="local",
                    accelerators="H100:8",
                    served_name="kimi-k2.5",
                    port=8000,
                    usd_per_hour=price,
                    price_ground="benchmark",
                    idle_s=1200,
                    deadline=end,
                    latest=end,
                    budget_usd=None,
                    budget_at=None,
                    engine_flags="",
                    stand_in=False,
                    pretended=False,
                ),
                LaunchRequested(at),
                ResourceCreated(at, f"local/{name}", "machine", price, "benchmark"),
                Ready(at + timedelta(minutes=15)),
                EndedOnNode(end, "idle", "idle 20m of 20m", 10),
                ResourceGone(end, f"local/{name}", "benchmark"),
                TeardownConfirmed(end, "benchmark"),
            ],
        )
    store.close()
    print(f"wrote {SESSIONS:,} sessions in {time.perf_counter() - began:.1f} s", file=sys.stderr)


def heavy_modules(env: dict[str, str], words: list[str]) -> set[str]:
    """Which heavy packages a command loads, by Python's own account."""
    argv = [sys.executable, "-X", "importtime", "-m", "kimisession", *words]
    done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True)
    loaded = {line.rsplit("|", 1)[1].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    return loaded & set(HEAVY)


def main() -> int:
    """Measure, print, judge."""
    sky = make_sky()
    print(
        f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}"
    )
    with tempfile.TemporaryDirectory(prefix="kimisession-startup-") as folder:
        homes = {name: Path(folder, name) for name in ("empty", "full", "sky")}
        base = {"PATH": os.environ["PATH"], "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        env = {name: {**base, "HOME": str(home), "KIMISESSION_STATE_HOME": str(home)} for name, home in homes.items()}
        for home in homes.values():
            home.mkdir()
        open_store(homes["empty"]).close()
        fill(homes["full"])
        print("help")
        helps = interleaved(
            {"sky --help": ([sky, "--help"], env["sky"]), "kimisession --help": ([*OURS, "--help"], env["empty"])}, 5
        )
        print(f"with an empty ledger, and with {SESSIONS:,} sessions")
        lists = interleaved(
            {f"{word} {home}": ([*OURS, word], env[home]) for word in ("status", "cost") for home in ("empty", "full")},
            9,
        )
        heavy = {word: heavy_modules(env["full"], [word]) for word in ("--help", "status", "cost")}

    def median(times: list[float]) -> float:
        return statistics.median(times)

    ok = True
    share = median(helps["kimisession --help"]) / median(helps["sky --help"])
    ok &= share <= 1 / 20
    print(f"ratio help kimisession/sky {share:.4f} (at most 0.0500)")
    for word in ("status", "cost"):
        ratio = median(lists[f"{word} full"]) / median(lists[f"{word} empty"])
        ok &= ratio <= 3
        print(f"ratio {word} {SESSIONS}/0 {ratio:.2f} (at most 3.00)")
    for word, found in heavy.items():
        ok &= not found
        print(f"heavy packages loaded by {word}: {', '.join(sorted(found)) or 'none'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
