"""How long `kimisession sweep` takes over 1,000 machines in 40 zones, how often it asks, and what it leaves alone.

    .venv/bin/python benchmarks/sweep.py [--machines 1000] [--zones 40] [--old 20] [--repeat 3]

The real program in a process of its own, over HTTP, against the emulated Compute Engine (tests/rigs/gce/emulator) in this one,
which holds every answer against Google's documents: its seconds are in the wall seconds. Beside Ann's machines there are Bob's,
decoys whose names have the shape of ours and that have no labels of ours, and `--old` of Ann's past their deadline. First a
look, then `--delete`; prints wall seconds and requests of each, and ends with 1 when a look took five seconds or more, asked
for more than one list of all zones a page and kind, or when anything is gone that should have stayed. Exit code 7 of the sweep
is meant: the decoys are told, and stay.
"""

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "edges")]

WITHIN_S = 5.0
PAGE = 500
NODE = "-0f0f0f0f-head-ab12cd34-compute"


def zones(count: int) -> tuple[str, ...]:
    """The emulator's own and as many more as are wanted. Before anything else of it is imported."""
    from tests.rigs.gce.emulator import catalog

    found = list(catalog.ZONES)
    found += [f"bench{number // 3}-north1-{'abc'[number % 3]}" for number in range(count - len(found))]
    catalog.ZONES = tuple(found[:count])  # type: ignore[assignment]
    catalog.REGIONS = tuple(sorted({zone.rpartition("-")[0] for zone in catalog.ZONES}))
    return catalog.ZONES


def fill(there: object, places: tuple[str, ...], machines: int, old: int) -> set[str]:
    """The project; the names of what may be deleted."""
    from emulated import ID, PROJECT, ZONE, Project, labels_of

    assert isinstance(there, Project)
    now = datetime.now(UTC)
    there.insert(ID + NODE, labels_of(now + timedelta(hours=1)))
    state, key = there.state, f"{ZONE}/{ID}{NODE}"
    with state.changing() as data:
        one, inside, disk = data["instances"].pop(key), data["inside"].pop(key), data["disks"].pop(key)
        due = set()
        for number in range(machines):
            session, place = f"s-{number:08x}", places[number % len(places)]
            name, owner, ends = session + NODE, "ann" if number % 3 else "bob", now + timedelta(hours=1)
            labels = labels_of(ends, session, owner)
            if number % 50 == 7:  # similar, and not ours
                name, labels = f"x-{session}{NODE}", {"team": "search", "kimisession": "no"}
            elif number % (machines // old) == 1:
                labels = labels_of(now - timedelta(hours=1), session, "ann")
                due.add(name)
            spot = f"{place}/{name}"
            zone = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{place}"
            link = f"{zone}/instances/{name}"
            attached = [{**one["disks"][0], "source": f"{zone}/disks/{name}"}]
            data["instances"][spot] = {
                **one, "name": name, "labels": labels, "zone": zone, "selfLink": link, "disks": attached
            }  # fmt: skip
            data["inside"][spot] = inside
            disk_link = f"{zone}/disks/{name}"
            data["disks"][spot] = {**disk, "name": name, "zone": zone, "selfLink": disk_link, "users": [link]}
    return due


def sweep(there: object, home: Path, *words: str) -> tuple[float, Counter[str], int]:
    """Wall seconds, requests by method, exit code."""
    from emulated import PROJECT, Project

    assert isinstance(there, Project)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "KIMISESSION_STATE_HOME": str(home),
        "KIMISESSION_COMPUTE_ENDPOINT": there.url,
        "KIMISESSION_COMPUTE_TOKEN": there.emulator.token(),
        "GOOGLE_CLOUD_PROJECT": PROJECT,
        "USER": "ann",
        "LOGNAME": "ann",
    }
    before = len(there.emulator.calls)
    began, spent = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "kimisession", "sweep", *words], env=env, capture_output=True, text=True, check=False
    )
    took_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"  {after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime:.2f} s of processor in the program:",
        end=" ",
    )
    if done.returncode not in (0, 7):
        raise SystemExit(f"sweep ended with {done.returncode}: {done.stderr[-500:]}")
    return took_s, Counter(name for name, _, _ in there.emulator.calls[before:]), done.returncode


def clocked(there: object) -> dict[str, float]:
    """Where the emulator's own processor seconds are summed from now on, as `s`."""
    spent: dict[str, float] = {}
    answer = there.emulator.answer  # type: ignore[attr-defined]

    def timed(*words: object) -> object:
        began = time.thread_time()
        try:
            return answer(*words)
        finally:
            spent["s"] = spent.get("s", 0.0) + time.thread_time() - began

    there.emulator.answer = timed  # type: ignore[attr-defined]
    return spent


def told(calls: Counter[str]) -> str:
    return ", ".join(f"{count} {name.removeprefix('compute.')}" for name, count in sorted(calls.items()))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Wall seconds and requests of `kimisession sweep`.")
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--zones", type=int, default=40)
    parser.add_argument("--old", type=int, default=20, help="of them past their deadline")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    places = zones(args.zones)
    from emulated import project

    wrong = []
    with tempfile.TemporaryDirectory() as folder, project(Path(folder)) as there:
        due = fill(there, places, args.machines, args.old)
        before = {key.rpartition("/")[2] for key in there.state.data["instances"]}
        print(f"{args.machines} machines and as many disks in {len(places)} zones; {len(due)} past their deadline")
        own_s = clocked(there)
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; the emulator runs beside it"
        )
        pages = -(-args.machines // PAGE)
        wanted = {"compute.instances.aggregatedList": pages, "compute.disks.aggregatedList": pages}
        wanted["compute.addresses.aggregatedList"] = 1
        for number in range(args.repeat):
            took_s, calls, code = sweep(there, Path(folder) / "home", "--json")
            print(
                f"look {number + 1}: {took_s:.2f} s, {calls.total()} requests ({told(calls)}), exit code {code};",
                end=" ",
            )
            print(f"{own_s.pop('s', 0.0):.2f} s of processor in the emulator")
            wrong += [f"{took_s:.2f} s"] if took_s >= WITHIN_S else []
            wrong += [f"asked {dict(calls)}"] if dict(calls) != wanted else []
        took_s, calls, code = sweep(there, Path(folder) / "home", "--delete", "-y")
        print(f"--delete: {took_s:.2f} s, {calls.total()} requests ({told(calls)}), exit code {code}")
        after = {key.rpartition("/")[2] for key in there.state.data["instances"]}
        gone, left = before - after, due & after
        print(
            f"deleted {len(gone)}, of them {len(gone - due)} that should have stayed; {len(left)} of {len(due)} left over"
        )
        wrong += [f"gone and not due: {sorted(gone - due)[:3]}"] if gone - due else []
        wrong += [f"left over: {sorted(left)[:3]}"] if left else []
        wrong += [str(one) for one in there.state.data["violations"][:3]]
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
