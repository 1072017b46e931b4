"""The driver hook against a stand-in of apt, the kernel's modules, systemd and nvidia-smi (standins/machine.sh).

What is asserted is the end state: which version modules, libraries and fabric manager have, and that they agree. The
stand-in is held to the real tools' rules by its own text; no real driver was swapped here.
"""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hooks.private_mounts import host_fingerprint, needs_namespaces, run_privately

STAND_IN = Path(__file__).parent / "standins" / "machine.sh"
COMMANDS = ("apt-get", "apt-cache", "dpkg", "dpkg-query", "modinfo", "modprobe", "rmmod", "systemctl", "nvidia-smi")
OLD, NEW = "570.211.01", "580.126.09"
ALL_MODULES = ["nvidia", "nvidia_drm", "nvidia_modeset", "nvidia_uvm"]

#: As on the image of the write-up: no package is named for 580, one provides it.
PACKAGES = """nvidia-driver-570-server 570.211.01-0ubuntu0.22.04.1
nvidia-driver-575-server 580.126.09-0ubuntu0.22.04.1
nvidia-driver-575-server-open 580.126.09-0ubuntu0.22.04.1
nvidia-driver-590 590.48.01-0ubuntu0.22.04.1
nvidia-fabricmanager-570 570.211.01-0ubuntu0.22.04.1
nvidia-fabricmanager-575 580.126.09-0ubuntu0.22.04.1
"""

pytestmark = needs_namespaces


@pytest.fixture(autouse=True)
def _the_host_is_untouched() -> Iterator[None]:
    before = host_fingerprint()
    yield
    assert host_fingerprint() == before


@dataclass
class End:
    """How the hook and the machine ended."""

    code: int
    lines: list[str]
    modules: list[str]
    loaded: str
    disk: str
    libs: str
    fabric: str
    active: set[str]
    masked: set[str]
    rebooted: bool
    calls: list[str]

    @property
    def last(self) -> str:
        if self.code == 5:
            assert json.loads(self.lines[-2]) == {"failed": {"exit": 5, "message": self.lines[-1][len("driver: ") :]}}
        return self.lines[-1]

    @property
    def whole(self) -> str:
        """The one version that everything has; empty when the driver is half swapped."""
        agree = {self.loaded, self.libs, self.disk}
        return self.loaded if len(agree) == 1 and self.modules == ALL_MODULES else ""


def swap(
    tmp_path: Path,
    *words: str,
    installed: str = OLD,
    packages: str = PACKAGES,
    license_: str = "NVIDIA",
    faults: tuple[str, ...] = (),
    units: tuple[str, ...] = ("nvidia-fabricmanager",),
    active: tuple[str, ...] = ("nvidia-fabricmanager", "nvidia-persistenced"),
    first: str = "",
) -> End:
    """A machine with a loaded driver, and `driver.sh` on it. `first` is shell that runs before the hook."""
    machine, commands = tmp_path / "machine", tmp_path / "commands"
    for folder in (commands, machine / "active", machine / "masked", machine / "units", machine / "sys"):
        folder.mkdir(parents=True)
    for name in COMMANDS:
        (commands / name).symlink_to(STAND_IN)
    for name in ("disk", "libs", "fabric"):
        (machine / name).write_text(installed + "\n", encoding="ascii")
    (machine / "packages").write_text(packages, encoding="ascii")
    (machine / "license").write_text(license_ + "\n", encoding="ascii")
    dpkg = "".join(
        f"nvidia-{name}={installed}-0ubuntu0.22.04.1\n" for name in ("driver-570-server", "fabricmanager-570")
    )
    (machine / "dpkg").write_text(dpkg, encoding="ascii")
    for fault in faults:
        name, _, text = fault.partition("=")
        (machine / name).write_text(text, encoding="ascii")
    for kind, names in (("units", units), ("active", active)):
        for name in names:
            (machine / kind / name).touch()
    script = f"""
    export MACHINE={machine}
    mount --bind {machine}/sys /sys/module
    mkdir -p {tmp_path}/private/upper/dev {tmp_path}/private/work/dev
    mount -t overlay -o lowerdir=/dev,upperdir={tmp_path}/private/upper/dev,workdir={tmp_path}/private/work/dev o /dev
    touch /dev/nvidia0
    for name in nvidia_drm nvidia_uvm; do modprobe $name; done
    : > $MACHINE/calls
    {first}
    "$HOOKS/driver.sh" {shlex.join(words)}
    """
    done = run_privately(tmp_path, script, path_first=commands)
    assert (machine / "calls").exists(), f"the pretended machine could not be made: {done.stderr}"
    sys = machine / "sys"
    text = {name: (machine / name).read_text(encoding="ascii").strip() for name in ("disk", "libs", "fabric")}
    version = sys / "nvidia" / "version"
    return End(
        done.returncode,
        done.stdout.splitlines() or [done.stderr],
        sorted(path.name for path in sys.iterdir()),
        version.read_text(encoding="ascii").strip() if version.exists() else "",
        **text,
        active={path.name for path in (machine / "active").iterdir()},
        masked={path.name for path in (machine / "masked").iterdir()},
        rebooted=(machine / "rebooted").exists(),
        calls=(machine / "calls").read_text(encoding="utf-8").splitlines(),
    )


def test_an_old_driver_is_swapped_without_a_reboot_in_the_right_order(tmp_path: Path) -> None:
    end = swap(tmp_path, "--min", "580")
    assert end.code == 0, end.lines
    assert end.last == f"driver: {NEW} is loaded, {OLD} was before, without a reboot"
    assert (end.whole, end.fabric, end.rebooted) == (NEW, NEW, False)
    assert end.active == {"nvidia-fabricmanager", "nvidia-persistenced"}
    assert not end.masked
    assert [c for c in end.calls if c.startswith("rmmod")] == [
        f"rmmod {module}" for module in ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")
    ]
    install = next(i for i, c in enumerate(end.calls) if " install --no-install" in c)
    assert max(i for i, c in enumerate(end.calls) if c.startswith("rmmod")) < install
    assert "nvidia-driver-575-server=580.126.09-0ubuntu0.22.04.1" in end.calls[install], "by what it provides"
    assert "nvidia-fabricmanager-575=580.126.09" in end.calls[install]


def test_a_driver_that_is_new_enough_is_left_alone(tmp_path: Path) -> None:
    end = swap(tmp_path, "--min", "570")
    assert end.code == 0
    assert "nothing to do" in end.last
    assert end.whole == OLD
    assert not [c for c in end.calls if c.startswith(("apt", "rmmod", "modprobe", "systemctl stop"))]


def test_a_busy_driver_names_its_holder_and_stays_whole(tmp_path: Path) -> None:
    end = swap(tmp_path, "--min", "580", first="sleep 77 3</dev/nvidia0 &")
    assert end.code == 5
    assert end.last.startswith("driver: a busy module: module nvidia is held by pid ")
    assert "(sleep 77)" in end.last
    assert end.whole == OLD
    assert end.active == {"nvidia-fabricmanager", "nvidia-persistenced"}
    assert not end.masked


def test_a_module_that_the_kernel_keeps_is_named_and_the_others_come_back(tmp_path: Path) -> None:
    end = swap(tmp_path, "--min", "580", first="echo 3 > /sys/module/nvidia_modeset/refcnt")
    assert end.code == 5
    assert "module nvidia_modeset is held by somebody in the kernel (3 references)" in end.last
    assert end.whole == OLD
    assert not end.rebooted


def test_no_package_that_provides_the_version_changes_nothing(tmp_path: Path) -> None:
    end = swap(tmp_path, "--min", "600")
    assert end.code == 5
    assert "incident 3" in end.last
    assert "at least 600 (the newest here is 590.48.01)" in end.last
    assert end.whole == OLD
    assert not [c for c in end.calls if c.startswith(("rmmod", "systemctl stop"))]


def test_a_driver_without_its_fabric_manager_is_not_taken(tmp_path: Path) -> None:
    end = swap(tmp_path, "--min", "585")
    assert end.code == 5
    assert any("nvidia-driver-590 provides 590.48.01, for which there is no fabric manager" in x for x in end.lines)
    assert end.whole == OLD


def test_open_modules_stay_open(tmp_path: Path) -> None:
    end = swap(tmp_path, "--min", "580", license_="Dual MIT/GPL")
    assert end.whole == NEW
    assert any("nvidia-driver-575-server-open=" in c for c in end.calls)


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        (("break-fetch",), "cannot be fetched; nothing was changed"),
        (("break-install",), f"the old driver {OLD} is back and whole"),
        ((f"break-modprobe={NEW}",), f"the old driver {OLD} is back and whole"),
    ],
)
def test_a_swap_that_fails_half_way_leaves_the_old_driver_whole(
    tmp_path: Path, faults: tuple[str, ...], why: str
) -> None:
    end = swap(tmp_path, "--min", "580", faults=faults)
    assert end.code == 5
    assert why in end.last
    assert "incident 2" in end.last
    assert (end.whole, end.fabric) == (OLD, OLD)
    assert not end.masked


def test_when_the_old_driver_cannot_come_back_none_is_loaded(tmp_path: Path) -> None:
    end = swap(tmp_path, "--min", "580", faults=("break-install", "break-rollback"))
    assert end.code == 5
    assert "none is loaded; take another machine" in end.last
    assert end.modules == []


def test_a_run_that_was_cut_off_between_installing_and_loading_goes_on(tmp_path: Path) -> None:
    cut = f"rm -r /sys/module/*; echo {NEW} > $MACHINE/disk; echo {NEW} > $MACHINE/libs; echo {NEW} > $MACHINE/fabric"
    end = swap(tmp_path, "--min", "580", active=(), first=cut)
    assert end.code == 0, end.lines
    assert end.whole == NEW
    assert "nvidia-fabricmanager" in end.active
    assert not [c for c in end.calls if c.startswith("apt-get")]


KEPT = "echo 3 > /sys/module/nvidia_modeset/refcnt"


def test_a_reboot_is_refused_while_nothing_that_survives_it_is_armed(tmp_path: Path) -> None:
    end = swap(tmp_path, "--min", "580", "--may-reboot", first=KEPT)
    assert end.code == 5
    assert "the deadline timer is not armed; run scripts/deadline/arm.sh first" in end.last
    assert (end.whole, end.rebooted) == (OLD, False)


def test_with_the_timer_armed_it_reboots_once_and_then_goes_on(tmp_path: Path) -> None:
    armed = "kimisession-deadline.timer"
    # After the reboot the kernel has loaded what is on the disk; `driver.sh` is run again by whoever launched it.
    first = f"""{KEPT}
    "$HOOKS/driver.sh" --min 580 --may-reboot && exit 9; echo "code $?"
    [ -e $MACHINE/rebooted ] || exit 8
    rm -r /sys/module/*; rm -f $MACHINE/masked/* $MACHINE/active/*; modprobe nvidia_uvm; modprobe nvidia_drm
    """
    end = swap(
        tmp_path,
        "--min",
        "580",
        "--may-reboot",
        first=first.replace("&& exit 9; echo", "|| echo"),
        units=("nvidia-fabricmanager", armed),
        active=("nvidia-fabricmanager", "nvidia-persistenced", armed),
    )
    assert "code 75" in end.lines
    assert any("reboots into 580.126.09; run the same command again" in line for line in end.lines)
    assert end.code == 0, end.lines
    assert (end.whole, end.rebooted) == (NEW, True)
    assert "nvidia-fabricmanager" in end.active


def test_it_does_not_reboot_a_second_time(tmp_path: Path) -> None:
    armed = "kimisession-deadline.timer"
    first = f"{KEPT}; mkdir -p /var/lib/kimisession; echo {NEW} > /var/lib/kimisession/driver-reboot"
    end = swap(
        tmp_path,
        "--min",
        "580",
        "--may-reboot",
        first=first,
        units=("nvidia-fabricmanager", armed),
        active=(armed,),
    )
    assert end.code == 5
    assert "after a reboot for 580.126.09 as well" in end.last
    assert not end.rebooted
