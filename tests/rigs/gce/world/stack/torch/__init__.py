"""STAND-IN for torch on a pretended machine: just what kimisession/node/preflight_gather.py asks of it, without a GPU. A
tensor is a row for each rank, `k` times 0, 1, 2, ... or `k` throughout, and never written out."""

from torch import locked

__version__ = locked.TORCH
int64 = bfloat16 = None


class version:
    cuda = locked.CUDA


class cuda:
    class nccl:
        @staticmethod
        def version():
            return tuple(int(part) for part in locked.NCCL.split(".")[:3])

    class Event:
        def __init__(self, enable_timing):
            """It takes no time."""

        def record(self):
            """Now."""

        def elapsed_time(self, end):
            return 100.0

    @staticmethod
    def set_device(device):
        """There is none."""

    @staticmethod
    def synchronize():
        """Nothing is on its way."""


class Tensor:
    def __init__(self, rows, ramp, count):
        self.rows, self.ramp, self.count = rows, ramp, count

    def __mul__(self, factor):
        return Tensor([row * factor for row in self.rows], self.ramp, self.count)

    def view(self, world, count):
        return self

    def __getitem__(self, places):
        return self

    def float(self):
        return self

    def sum(self, dim):
        each = self.count * (self.count - 1) // 2 if self.ramp else self.count
        return Tensor([row * each for row in self.rows], self.ramp, 1)

    def mean(self, dim):
        return Tensor([float(row) for row in self.rows], self.ramp, 1)

    def tolist(self):
        return self.rows


def device(kind, index):
    return index


def arange(count, dtype, device):
    return Tensor([1], True, count)


def full(size, value, dtype, device):
    return Tensor([value], False, size[0])


def empty(count, dtype, device):
    return Tensor([], False, count)
