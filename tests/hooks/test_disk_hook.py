"""Local SSDs, formatted and mounted for real: loop devices in a private mount namespace."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hooks.private_mounts import host_fingerprint, needs_namespaces, run_privately

pytestmark = needs_namespaces


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Path]:
    """A folder with links ssd-0 to ssd-2 to empty disks."""
    folder, loops = tmp_path / "disks", []
    folder.mkdir()
    try:
        for number in range(3):
            image = folder / f"image-{number}"
            with image.open("wb") as file:
                file.truncate(32 << 20)
            done = subprocess.run(["losetup", "-f", "--show", image], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no loop devices here: {done.stderr.strip()}")
            loops.append(done.stdout.strip())
            (folder / f"ssd-{number}").symlink_to(loops[-1])
        yield folder
    finally:
        for loop in loops:
            with contextlib.suppress(OSError):
                subprocess.run(["losetup", "-d", loop], check=False)


def run(tmp_path: Path, disks: Path, script: str) -> list[str]:
    before = host_fingerprint()
    hook = f'"$HOOKS/disk.sh" --at /root/ssds --ssds "{disks}/ssd-*"'
    done = run_privately(tmp_path, f"export SUDO_UID=65534 SUDO_GID=65534\nhook() {{ {hook}; }}\n{script}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert host_fingerprint() == before
    return done.stdout.splitlines()


def test_each_empty_disk_is_mounted_for_the_jobs_user_and_again_after_a_reboot(tmp_path: Path, disks: Path) -> None:
    told = run(
        tmp_path,
        disks,
        """
        hook; touch /root/ssds/1/kept
        hook
        stat -c '%u %m' /root/ssds/*
        umount /root/ssds/*
        hook; ls /root/ssds/*/kept; umount /root/ssds/*
        """,
    )
    assert [line for line in told if line.startswith("disk:")] == ["disk: 3 local SSDs under /root/ssds"] * 3
    assert [line for line in told if line.startswith("65534")] == [f"65534 /root/ssds/{number}" for number in range(3)]
    assert told[-1] == "/root/ssds/1/kept", "a disk that was formatted here is not formatted twice"


def test_a_disk_with_something_on_it_or_in_use_is_left_alone(tmp_path: Path, disks: Path) -> None:
    told = run(
        tmp_path,
        disks,
        f"""
        mkfs.ext4 -q -L mine {disks}/ssd-0; mkfs.ext4 -q -L other {disks}/ssd-1
        mkdir /root/other; mount {disks}/ssd-1 /root/other
        hook
        blkid -p -s LABEL -o value {disks}/ssd-0
        umount /root/ssds/* /root/other
        """,
    )
    assert "has something on it and stays as it is." in told[0]
    assert "is in use at /root/other and stays so." in told[1]
    assert told[2] == "disk: 1 local SSDs under /root/ssds"
    assert told[-1] == "mine"


def test_a_machine_without_local_disks_goes_on_without(tmp_path: Path, disks: Path) -> None:
    for link in disks.glob("ssd-*"):
        link.unlink()
    assert run(tmp_path, disks, "hook")[0] == "disk: 0 local SSDs under /root/ssds"
