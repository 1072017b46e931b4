"""What the emulator asks of whoever makes its machines real."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class VmSpec:
    """One instance as its machine needs to know it. Names are unique in the emulated project.

    `metadata` has the instance's own items (`ssh-keys`, `startup-script`, ...), keys to text; `image` is the
    sourceImage of the boot disk as the client wrote it; `machine_type` is the bare name (`a3-highgpu-8g`).
    `external_ip` is empty where the instance has no access config.
    """

    name: str
    zone: str
    internal_ip: str
    external_ip: str
    machine_type: str
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    service_account: str = ""
    scopes: tuple[str, ...] = ()
    image: str = ""
    disk_gb: int = 10


class Machines(Protocol):
    """Makes machines. Every method may block, may be called from any thread, and is called without the state's lock.

    All but `boot` are no-ops for a name that is not known. An exception out of `boot` becomes the operation's error
    and the instance is removed; out of the others it is noted in /admin/violations.
    """

    def boot(self, vm: VmSpec) -> None:
        """Make the machine, with a fresh disk, and return when it runs (it need not answer SSH yet)."""

    def power_off(self, name: str) -> None:
        """Stop it as a stop or a preemption does; the disk stays. Returns when nothing of it runs any more."""

    def power_on(self, name: str) -> None:
        """Start it again from the disk that `power_off`, or the guest's own shutdown, left."""

    def reboot(self, name: str) -> None:
        """A reset: everything that runs in it dies at once, and it boots from the same disk."""

    def destroy(self, name: str) -> None:
        """Kill it and drop its disk. May be repeated."""

    def alive(self, name: str) -> bool:
        """Whether the guest runs. Polled for instances that are RUNNING: False means that the guest shut itself down."""


class NullMachines:
    """Machines that are only written down. `calls` has (method, name) in order; `halt(name)` plays a guest shutdown."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.specs: dict[str, VmSpec] = {}
        self.halted: set[str] = set()

    def boot(self, vm: VmSpec) -> None:
        self.calls.append(("boot", vm.name))
        self.specs[vm.name] = vm
        self.halted.discard(vm.name)

    def power_off(self, name: str) -> None:
        self.calls.append(("power_off", name))

    def power_on(self, name: str) -> None:
        self.calls.append(("power_on", name))
        self.halted.discard(name)

    def reboot(self, name: str) -> None:
        self.calls.append(("reboot", name))

    def destroy(self, name: str) -> None:
        self.calls.append(("destroy", name))

    def alive(self, name: str) -> bool:
        return name not in self.halted

    def halt(self, name: str) -> None:
        """The guest shuts itself down; the emulator is to notice."""
        self.halted.add(name)
