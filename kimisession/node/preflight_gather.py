"""One rank of the preflight's all-gather, run by the ENGINE's Python, one process per GPU.

    RANK=0 WORLD_SIZE=8 PREFLIGHT_STORE=/dev/shm/x ENGINE_PYTHON preflight_gather.py

Prints `stage NAME` lines (so that a hang says where) and, on rank 0, one JSON line
{"gb_per_s": ..., "world": ..., "torch": ..., "nccl": ..., "cuda": ..., "seconds": ...}. GB/s is decimal and counts what
one GPU receives from the others: (world - 1) x 256 MiB per round, over the mean of 10 rounds after one more.

It starts without torchrun: the agent imports torch once more, and its log hides which rank said what. NCCL's settings
come from the environment and are not touched: the engine will run with the same ones.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import time
from typing import Any

SMALL_BYTES = 4 << 20
LARGE_BYTES = 256 << 20
ROUNDS = 10


def stage(name: str) -> None:
    """Say where this rank is."""
    print(f"stage {name}", flush=True)


def main() -> int:
    """Entry point. 1 when a sum is wrong; torch's own exceptions otherwise."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stage("start")
    # This file's folder is where Python looks first, and its neighbours have names that a package may have as well.
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - compared with strings
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]  # noqa: PTH100
    # Torch is the engine's, never ours: nothing in this folder depends on it when it is imported.
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    stage("torch")
    began = time.monotonic()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{os.environ['PREFLIGHT_STORE']}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=float(os.environ.get("PREFLIGHT_TIMEOUT_S", "60"))),
    )
    stage("group")

    count = SMALL_BYTES // 8
    # Integers that differ by rank and by place: a lost, doubled or shifted piece changes the sum.
    own = torch.arange(count, dtype=torch.int64, device=device) * (rank + 1)
    gathered = torch.empty(count * world, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(gathered, own)
    found = gathered.view(world, count).sum(dim=1).tolist()
    wanted = [(r + 1) * count * (count - 1) // 2 for r in range(world)]
    if found != wanted:
        print(f"rank {rank} gathered the sums {found}, they should be {wanted}", flush=True)
        return 1
    stage("first collective")

    size = LARGE_BYTES // 2
    own = torch.full((size,), float(rank + 1), dtype=torch.bfloat16, device=device)
    gathered = torch.empty(size * world, dtype=torch.bfloat16, device=device)
    dist.all_gather_into_tensor(gathered, own)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(ROUNDS):
        dist.all_gather_into_tensor(gathered, own)
    end.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(end) / 1000 / ROUNDS
    if gathered.view(world, size)[:, :: size // 64].float().mean(dim=1).tolist() != [r + 1.0 for r in range(world)]:
        print(f"rank {rank} gathered wrong values in the large round", flush=True)
        return 1
    stage("done")
    if rank == 0:
        result = {
            "gb_per_s": round((world - 1) * LARGE_BYTES / seconds / 1e9, 1),
            "world": world,
            "torch": str(torch.__version__),
            "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
            "cuda": str(torch.version.cuda),
            "seconds": round(time.monotonic() - began, 2),
        }
        print(json.dumps(result), flush=True)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
