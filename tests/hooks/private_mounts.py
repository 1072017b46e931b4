"""Run a real script as root where nothing it writes reaches this host: a private mount namespace whose /etc, /usr/local,
/var, /root and /home are overlays in memory, and whose /dev and /sys/module can be planted."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HOOKS = Path(__file__).parents[2] / "scripts" / "hooks"

# Processes too, so that nothing of a test outlives it.
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
_PRELUDE = """
set -eu
mount --make-rprivate /
mount -t tmpfs -o size=256m kimisession-test {world}/private
for name in etc usr/local var root home; do
    mkdir -p {world}/private/upper/$name {world}/private/work/$name
    mount -t overlay -o lowerdir=/$name,upperdir={world}/private/upper/$name,workdir={world}/private/work/$name \
        overlay /$name
done
# Whatever a script under test may come to: this host is neither powered off nor rebooted.
for name in poweroff reboot halt shutdown systemctl; do
    for real in /usr/sbin/$name /usr/bin/$name; do
        [ ! -e $real ] || mount --bind /bin/false "$(readlink -f $real)"
    done
done
"""


def _possible() -> str:
    """Why it cannot be done here; empty when it can."""
    if os.geteuid() != 0:
        return "private mount namespaces need root"
    if not shutil.which("unshare"):
        return "there is no unshare here"
    done = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"unshare fails here: {done.stderr.strip()}"


WHY_NOT = _possible()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "possible")


def run_privately(
    world: Path, script: str, path_first: Path | None = None, timeout_s: float = 60
) -> "subprocess.CompletedProcess[str]":
    """Run a bash script in a new namespace. `world` is a folder for it; `path_first` goes before everything in PATH."""
    (world / "private").mkdir(parents=True, exist_ok=True)
    clean = {
        "PATH": ":".join(filter(None, [path_first and str(path_first), "/usr/sbin:/usr/bin:/sbin:/bin"])),
        "HOME": "/root",
        "WORLD": str(world),
        "HOOKS": str(HOOKS),
        "LC_ALL": "C.UTF-8",
    }
    argv = [*_UNSHARE, "bash", "-c", _PRELUDE.format(world=world) + script]
    return subprocess.run(
        argv,
        env=clean,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


def host_fingerprint() -> dict[str, str]:
    """What a hook that escaped its namespace would change."""
    files = [
        "/etc/ld.so.cache",
        "/etc/ld.so.conf",
        "/etc/environment",
        "/etc/profile",
        "/root/.bashrc",
        "/root/.profile",
    ]
    found = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in files if Path(name).exists()}
    folders = ["/etc/ld.so.conf.d", "/etc/profile.d", "/etc/systemd/system", "/usr/local", "/var/lib", "/sys/module"]
    for name in folders:
        if Path(name).is_dir():
            found[name] = " ".join(sorted(os.listdir(name)))  # noqa: PTH208 - names are compared
    return found
