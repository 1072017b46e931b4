"""STAND-IN for torch.distributed: ranks that hear of each other through files. A rank that does not come is waited for."""

import time
from pathlib import Path

_group = {}


def init_process_group(backend, init_method, rank, world_size, timeout):
    _group.update(store=init_method.removeprefix("file://"), rank=rank, world=world_size, round=0, timeout=timeout)


def _exchange(text):
    _group["round"] += 1
    files = [Path(f"{_group['store']}-{_group['round']}-{rank}") for rank in range(_group["world"])]
    own = files[_group["rank"]]
    part = own.with_name(own.name + ".part")
    part.write_text(text)
    part.rename(own)
    until = time.monotonic() + _group["timeout"].total_seconds()
    while not all(file.exists() for file in files):
        if time.monotonic() > until:
            raise RuntimeError("a rank did not come to the collective")
        time.sleep(0.01)
    return [file.read_text() for file in files]


def all_gather_into_tensor(gathered, own):
    words = [text.split() for text in _exchange(f"{own.rows[0]!r} {int(own.ramp)} {own.count}")]
    gathered.rows = [float(row) if "." in row else int(row) for row, _, _ in words]
    gathered.ramp, gathered.count = words[0][1] == "1", int(words[0][2])


def barrier(device_ids):
    _exchange("here")


def destroy_process_group():
    """Nothing is open."""
