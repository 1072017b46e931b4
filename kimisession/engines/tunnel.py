"""A tunnel that stays: a local port on loopback that leads to a session's endpoint, over ssh, through any interruption.

    python -m kimisession.engines.tunnel FOLDER

FOLDER/tunnel.json holds {"argv", "local"}: the ssh command and the port it listens on. The process starts ssh again whenever
it ends, with pauses that grow to ten seconds, and ends when tunnel.json is gone.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kimisession.engines.local_machine import lock_is_held
from kimisession.engines.remote import OPTIONS
from kimisession.errors import KimiError
from kimisession.node import job, leash

#: How long the first connection may take. On Slurm a job step is started for it.
OPEN_WITHIN_S = 40.0
_LONGEST_PAUSE_S = 10.0
_POLL_S = 0.3


def open_tunnel(folder: Path, words: tuple[str, ...], port: int) -> int:
    """The local port that leads to `port` of the host that ssh's `words` name. Repeatable: a tunnel that is there is
    used. Raises KimiError when nothing answers in time."""
    order = _order(folder)
    lock = folder / "tunnel.lock"
    if order is None:
        local = _free_port(port)
        _write(folder, {"argv": _argv(words, local, port), "local": local})
    else:
        local = int(order["local"])
    until = time.monotonic() + OPEN_WITHIN_S
    while time.monotonic() < until:
        if not lock_is_held(lock):
            _start(folder)
        if _listens(local):
            return local
        time.sleep(0.1)
    log = folder / "tunnel.log"
    told = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] if log.exists() else []
    raise KimiError(f"no tunnel to the session within {OPEN_WITHIN_S:.0f} s: {told[0] if told else 'ssh said nothing'}")


def open_endpoint(folder: Path) -> str:
    """The base URL at the tunnel's near end; empty when none was opened."""
    order = _order(folder)
    return f"http://127.0.0.1:{order['local']}" if order else ""


def close_tunnel(folder: Path) -> None:
    """Tell the tunnel to end. Repeatable."""
    (folder / "tunnel.json").unlink(missing_ok=True)


def _argv(words: tuple[str, ...], local: int, port: int) -> list[str]:
    own = ("ControlMaster=no", "ControlPath=none", "ExitOnForwardFailure=yes")
    options = [word for option in (*OPTIONS, *own) for word in ("-o", option)]
    return ["ssh", *options, "-N", "-L", f"127.0.0.1:{local}:127.0.0.1:{port}", *words]


def _order(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "tunnel.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(folder: Path, order: dict[str, Any]) -> None:
    part = folder / f".tunnel.json.{os.getpid()}"
    part.write_text(json.dumps(order), encoding="utf-8")
    part.replace(folder / "tunnel.json")


def _free_port(wanted: int) -> int:
    """The session's own port where it is free here, else any."""
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise KimiError("no port of 127.0.0.1 is free")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _start(folder: Path) -> None:
    with (folder / "tunnel.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "kimisession.engines.tunnel", str(folder)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    # Until it holds its lock a second one might be started, which would wait for the first and end with it.
    until = time.monotonic() + 5
    while time.monotonic() < until and not lock_is_held(folder / "tunnel.lock"):
        time.sleep(0.05)


def keep_open(folder: Path) -> int:
    """Keep the tunnel of `folder` until its order is gone. Returns 0."""
    with contextlib.suppress(OSError):
        lock = job.hold_lock(folder / "tunnel.lock")
        pause_s = 0.5
        while (order := _order(folder)) is not None:
            argv = [str(word) for word in order["argv"]]
            began = time.monotonic()
            # ssh must not outlive us: where the kernel can see to that, it does.
            with subprocess.Popen(leash.leashed(argv) if sys.platform == "linux" else argv) as process:
                while process.poll() is None and _order(folder) == order:
                    time.sleep(_POLL_S)
                process.terminate()
            pause_s = 0.5 if time.monotonic() - began > 30 else min(pause_s * 2, _LONGEST_PAUSE_S)
            wake = time.monotonic() + pause_s
            while time.monotonic() < wake and _order(folder) is not None:
                time.sleep(_POLL_S)
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(keep_open(Path(sys.argv[1])))
