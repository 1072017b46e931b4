"""What both weight benchmarks share: a shard set, a watch over CPU and memory, and the verdict on ratios."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
TICK_S = os.sysconf("SC_CLK_TCK")


def shard_set(folder: Path, shards: int, shard_mib: int) -> int:
    """Shards with real safetensors headers over random bytes, an index and two small files; the bytes in all."""
    folder.mkdir(parents=True)
    block = random.Random(7).randbytes(16 * 2**20)
    weight_map = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        size = shard_mib * 2**20
        header = b""
        for _ in range(2):  # the header's length is part of the offsets, so it settles in the second round
            tensor = {"dtype": "U8", "shape": [size - 8 - len(header)], "data_offsets": [0, size - 8 - len(header)]}
            header = json.dumps({f"layer.{number}": tensor}).encode()
        header = header.ljust((len(header) + 7) // 8 * 8)
        tensor = {"dtype": "U8", "shape": [size - 8 - len(header)], "data_offsets": [0, size - 8 - len(header)]}
        header = json.dumps({f"layer.{number}": tensor}).encode().ljust(len(header))
        weight_map[f"layer.{number}"] = name
        with (folder / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            turn = 0
            while (left := size - file.tell()) > 0:
                turn += 4096 + number
                file.write((block[turn % len(block) :] + block[: turn % len(block)])[:left])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "kimi_k2"}')
    (folder / "tokenizer_config.json").write_text("{}")
    return sum(path.stat().st_size for path in folder.iterdir())


@dataclass(frozen=True)
class Result:
    """One run: wall and CPU seconds of the client and its children, their peak RssAnon, everyone else's CPU, disk."""

    wall_s: float
    cpu_s: float
    rss_anon_mib: float
    others_cpu_s: float
    disk_mib: float = 0.0

    @property
    def others_share(self) -> float:
        """The share of the machine's CPU that others used meanwhile."""
        return self.others_cpu_s / self.wall_s / (os.cpu_count() or 1)


def _tree(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - thousands of times
        if entry.isdigit():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(entry))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += parents.get(pid, [])
    return found


def _rss_anon_kib(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _written_bytes(pid: int) -> int:
    """Bytes that a process and the children it has waited for caused to be written to a disk."""
    try:
        return int(Path(f"/proc/{pid}/io").read_text().split("\nwrite_bytes: ")[1].split()[0])
    except (OSError, IndexError):
        return 0


def _busy_s() -> float:
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / TICK_S


def _cpu_s(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / TICK_S
        except (OSError, IndexError):
            continue
    return total


def measure(command: list[str], environment: dict[str, str], servers: list[int], timeout_s: float = 300) -> Result:
    """Run a command and watch it. `servers` are processes whose CPU is neither the client's nor anybody else's."""
    before, serving = _busy_s(), _cpu_s(servers)
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    peak = written = 0
    over = threading.Event()

    def watch() -> None:
        nonlocal peak, written
        while not over.wait(0.05):
            tree = _tree(process.pid)
            peak = max(peak, sum(_rss_anon_kib(pid) for pid in tree))
            written = max(written, sum(_written_bytes(pid) for pid in tree))

    errors: list[bytes] = []
    assert process.stderr is not None
    stderr = process.stderr
    reader = threading.Thread(target=lambda: errors.append(stderr.read()))
    watcher = threading.Thread(target=watch)
    reader.start()
    watcher.start()
    killer = threading.Timer(timeout_s, process.kill)
    killer.start()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - began
    killer.cancel()
    over.set()
    watcher.join()
    reader.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {errors[0].decode(errors='replace')[-600:]}")
    cpu_s = usage.ru_utime + usage.ru_stime
    others_s = max(0.0, _busy_s() - before - cpu_s - (_cpu_s(servers) - serving))
    return Result(wall_s, cpu_s, peak / 1024, others_s, written / 2**20)


@dataclass(frozen=True)
class Mover:
    """A way to move the set: its name, the command for a fresh target folder, its environment."""

    name: str
    command: Callable[[Path], list[str]]
    environment: dict[str, str]
    target: Path


def interleave(
    movers: list[Mover], runs: int, servers: list[int], total_bytes: int, quiet: float | None = None
) -> dict[str, list[Result]]:
    """Every mover once per round, after one round that is not counted; a line per run on stdout.

    With `quiet`, a run during which others used more than that share of the machine is done again, up to three times;
    the best of these counts then, and every run that was done again is printed.
    """
    results: dict[str, list[Result]] = {mover.name: [] for mover in movers}
    for number in range(runs + 1):
        for mover in movers:
            if mover.name not in results:
                continue
            tries: list[Result] = []
            while not tries or (number and quiet is not None and tries[-1].others_share > quiet and len(tries) < 4):
                if tries:
                    print("        (others were busy: done again)", flush=True)
                    await_quiet(quiet or 0)
                try:
                    result = _once(mover, servers)
                except RuntimeError as error:
                    print(f"{mover.name}: left out: {error}", flush=True)
                    break
                tries.append(result)
                print(
                    f"{'warm-up' if not number else f'run {number}  '} {mover.name:28} {result.wall_s:7.2f} s "
                    f"{total_bytes / GIB / result.wall_s:6.2f} GiB/s "
                    f"{result.cpu_s / (total_bytes / GIB):6.2f} CPU-s/GiB {result.rss_anon_mib:6.0f} MiB, "
                    f"others {100 * result.others_share:.0f}% of the machine",
                    flush=True,
                )
            if not tries:
                del results[mover.name]
            elif number:
                results[mover.name].append(min(tries, key=lambda one: one.others_share))
    return results


def _once(mover: Mover, servers: list[int]) -> Result:
    shutil.rmtree(mover.target, ignore_errors=True)
    mover.target.mkdir(parents=True)
    try:
        return measure(mover.command(mover.target), {**os.environ, **mover.environment}, servers)
    finally:
        shutil.rmtree(mover.target, ignore_errors=True)


def await_quiet(share: float, deadline_s: float = 20) -> None:
    """Wait until nobody uses more than `share` of the machine for a second, or the deadline passes."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        before = _busy_s()
        time.sleep(1)
        if (_busy_s() - before) / (os.cpu_count() or 1) <= share:
            return


def table(results: dict[str, list[Result]], total_bytes: int) -> Iterator[str]:
    """A Markdown table of medians and spreads."""
    yield "| mover | n | wall s, median [min-max] | GiB/s | client CPU-s/GiB | RssAnon MiB, most | others, share of the machine |"
    yield "|---|---|---|---|---|---|---|"
    for name, runs in results.items():
        if not runs:
            continue
        wall = [run.wall_s for run in runs]
        yield (
            f"| {name} | {len(runs)} | {statistics.median(wall):.2f} [{min(wall):.2f}-{max(wall):.2f}] "
            f"| {total_bytes / GIB / statistics.median(wall):.2f} "
            f"| {statistics.median(run.cpu_s for run in runs) / (total_bytes / GIB):.2f} "
            f"| {max(run.rss_anon_mib for run in runs):.0f} "
            f"| {100 * statistics.median(run.others_share for run in runs):.0f}% |"
        )


@dataclass
class Verdict:
    """Ratios against their bounds; `missed` says whether one was not kept."""

    missed: bool = False

    def line(self, what: str, values: list[float], bound: float, *, at_least: bool) -> None:
        """One line per ratio: the median over rounds, its spread, the bound, and whether the bound lies inside."""
        middle, low, high = statistics.median(values), min(values), max(values)
        kept = middle >= bound if at_least else middle <= bound
        inside = " (the bound lies inside the spread)" if low < bound < high else ""
        sign = ">=" if at_least else "<="
        print(
            f"{'ok    ' if kept else 'MISSED'} {what}: {middle:.2f} [{low:.2f}-{high:.2f}], bound {sign} {bound}{inside}"
        )
        self.missed = self.missed or not kept


@contextmanager
def scratch(memory: Path, disk: Path) -> Iterator[tuple[Path, Path]]:
    """Two working folders, one in memory and one on a disk, gone afterwards."""
    folders = [parent / f"kimisession-bench-{os.getpid()}" for parent in (memory, disk)]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
        yield folders[0], folders[1]
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
