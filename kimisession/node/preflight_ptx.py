"""Which PTX the driver takes, asked with ctypes on libcuda alone: half a second, no torch.

    python3 preflight_ptx.py

Prints one JSON line {"cuda": 13000, "highest": "9.0", "refused": {"9.1": 222}, "device": "NVIDIA H200"} or
{"error": "..."}. It runs as a process of its own because a context takes GPU memory and a broken driver can hang.

A driver compiles only PTX that is no newer than itself. Own run on two H200s with driver 580.159.04: versions 8.0 to
9.0 load, 9.1 and later return 222 (CUDA_ERROR_UNSUPPORTED_PTX_VERSION); 0.46 s in all, context included.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

#: PTX ISA versions in their order (NVIDIA's PTX ISA document, release history). New ones go to the end.
VERSIONS = ("7.0", "7.4", "7.8", "8.0", "8.1", "8.2", "8.3", "8.4", "8.5", "8.6", "8.7", "8.8", "9.0", "9.1", "9.2")

#: The newest PTX that a driver branch takes: its own CUDA's (CUDA release notes, PTX ISA release history).
OF_DRIVER = (
    (525, "8.0"),
    (535, "8.2"),
    (545, "8.3"),
    (550, "8.4"),
    (555, "8.5"),
    (560, "8.5"),
    (565, "8.6"),
    (570, "8.7"),
    (575, "8.8"),
    (580, "9.0"),
    (590, "9.1"),
)

# One empty kernel, so that the compiler inside the driver really has to run.
MODULE = ".version {version}\n.target sm_{target}\n.address_size 64\n.visible .entry probe()\n{{\n\tret;\n}}\n"


def of_driver(branch: int) -> str:
    """The newest PTX version that a driver of this branch takes."""
    return max((b, isa) for b, isa in OF_DRIVER if b <= max(branch, OF_DRIVER[0][0]))[1]


def order(version: str) -> tuple[int, int]:
    """`8.10` comes after `8.9`."""
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)


class CudaError(Exception):
    """A call that the driver refused, with its number."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} returned {code}")
        self.code = code


def probe() -> dict[str, object]:
    """Load a tiny module in every PTX version, the lowest first. Raises OSError without libcuda, CudaError."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *args: object) -> None:
        code = getattr(cuda, name)(*args)
        if code:
            raise CudaError(name, code)

    call("cuInit", ctypes.c_uint(0))
    version, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    call("cuDriverGetVersion", ctypes.byref(version))
    call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
    name = ctypes.create_string_buffer(128)
    call("cuDeviceGetName", name, ctypes.c_int(128), device)
    major = ctypes.c_int()
    call("cuDeviceGetAttribute", ctypes.byref(major), ctypes.c_int(75), device)  # compute capability, major part
    call("cuCtxCreate_v2", ctypes.byref(context), ctypes.c_uint(0), device)
    target = 80 if major.value >= 8 else 10 * major.value
    highest, refused = "", {}
    for isa in VERSIONS:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            source = MODULE.format(version=isa, target=target).encode()
            call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(source))
            call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"probe"))
            highest = isa
        except CudaError as error:
            refused[isa] = error.code
    call("cuCtxDestroy_v2", context)
    return {"cuda": version.value, "highest": highest, "refused": refused, "device": name.value.decode()}


def main() -> int:
    """Entry point. 0 when the driver could be asked at all."""
    # Else a module may be compiled at its first use only, and a refusal come later.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    try:
        found = probe()
    except (OSError, CudaError, AttributeError) as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
