"""The emulator's machines as namespaces of the world that it runs in (vm.sh). Each has its folder under /run/vms:

disk/     its disk, a file system in memory      pid       of vm.sh; while it lives, so does the guest
names     lines for its /etc/hosts               init      process 1 of the machine, as the world counts it
console   what its process 1 says

Nothing is kept here: an emulator that was killed finds its machines again.
"""

import os
import shutil
import signal
import subprocess
import time
import zlib
from pathlib import Path

from tests.rigs.gce.emulator.driver import VmSpec

HERE = Path(__file__).parent
VMS = Path("/run/vms")


def _run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


class Namespaces:
    """`Machines` of the emulator. `image` is what setup.sh made."""

    def __init__(self, image: Path) -> None:
        self.image = image
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def boot(self, vm: VmSpec) -> None:
        folder = VMS / vm.name
        disk = folder / "disk"
        disk.mkdir(parents=True)
        # In memory, so never as large as it says; a test that fills it has not to write long.
        _run("mount", "-t", "tmpfs", "-o", "size=512m,mode=755", "disk", str(disk))
        shutil.copy("/run/names", folder / "names")
        outside = f"v{zlib.crc32(vm.name.encode()):08x}"
        _run("ip", "netns", "add", vm.name)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", vm.name)
        _run("ip", "link", "set", outside, "master", "rig0", "up")
        inside = ("ip", "-n", vm.name)
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "address", "add", f"{vm.internal_ip}/20", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "route", "add", "default", "via", "10.128.0.1", "src", vm.internal_ip)
        if vm.external_ip:
            _run(*inside, "address", "add", f"{vm.external_ip}/32", "dev", "eth0")
        self.power_on(vm.name)

    def power_on(self, name: str) -> None:
        folder = VMS / name
        if not folder.exists() or self.alive(name):
            return
        with (folder / "console").open("ab") as console:
            argv = [str(HERE / "vm.sh"), str(folder), name, str(self.image)]
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
            )
        self._started[name] = process
        (folder / "pid").write_text(str(process.pid), encoding="ascii")

    def power_off(self, name: str) -> None:
        folder = VMS / name
        if not folder.exists():
            return
        if self.alive(name):
            os.killpg(int((folder / "pid").read_text(encoding="ascii")), signal.SIGKILL)
        until = time.monotonic() + 20
        while self.alive(name) or _run("ip", "netns", "pids", name, check=False).strip():
            if time.monotonic() > until:
                raise RuntimeError(f"{name} does not die")
            time.sleep(0.05)

    def reboot(self, name: str) -> None:
        self.power_off(name)
        self.power_on(name)

    def destroy(self, name: str) -> None:
        self.power_off(name)
        folder = VMS / name
        if folder.exists():
            _run("umount", "-l", str(folder / "disk"))
            _run("ip", "netns", "del", name)
            shutil.rmtree(folder)
        self._started.pop(name, None)

    def alive(self, name: str) -> bool:
        process = self._started.get(name)
        if process is not None:
            return process.poll() is None
        try:
            pid = (VMS / name / "pid").read_text(encoding="ascii")
            return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False


def namespaces() -> Namespaces:
    """For the emulator's `--machines`."""
    return Namespaces(Path(os.environ["RIG_IMAGE"]))
