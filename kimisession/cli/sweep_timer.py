"""`sweep --install-timer`: a systemd timer of this user that sweeps every 15 minutes, and its removal.

Worth having beside the reaper, not instead of it: it sleeps while this machine sleeps.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from kimisession.cli import show
from kimisession.errors import KimiError

UNIT = "kimisession-sweep"
EVERY_MINUTES = 15

#: Where things are, never what they contain: a unit file is no place for a secret.
_PATHS = (
    "KIMISESSION_STATE_HOME",
    "KIMISESSION_CONFIG_HOME",
    "KIMISESSION_CACHE_HOME",
    "XDG_STATE_HOME",
    "XDG_CONFIG_HOME",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "CLOUDSDK_CONFIG",
    "GOOGLE_CLOUD_PROJECT",
    "PATH",
)


def unit_folder() -> Path:
    """Where systemd looks for a user's units."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def service_text(project: str) -> str:
    """The unit that sweeps once. Exit code 7, something is left, makes it fail, which `systemctl --user --failed` shows."""
    words = [sys.executable, "-m", "kimisession", "-q", "sweep", "--delete", "-y"]
    words += ["--project", project] if project else []
    kept = "".join(f'Environment="{key}={value}"\n' for key in _PATHS if (value := os.environ.get(key)))
    return (
        "[Unit]\nDescription=Delete kimisession machines past their deadline\n"
        "Documentation=https://github.com/kimisession/kimisession\n\n"
        f"[Service]\nType=oneshot\nTimeoutStartSec=600\n"
        f"ExecStart={shlex.join(words)}\n{kept}"
    ).replace("%", "%%")


def timer_text() -> str:
    """Every 15 minutes of the calendar; a run that was missed while the machine slept is made up for."""
    return (
        f"[Unit]\nDescription=Sweep every {EVERY_MINUTES} minutes\n\n"
        f"[Timer]\nOnCalendar=*:0/{EVERY_MINUTES}\nPersistent=true\nRandomizedDelaySec=60\n\n"
        "[Install]\nWantedBy=timers.target\n"
    )


def install(project: str) -> None:
    """Write the units and start the timer. Repeatable. Raises KimiError when systemd does not take it."""
    folder = unit_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{UNIT}.service").write_text(service_text(project), encoding="utf-8")
    (folder / f"{UNIT}.timer").write_text(timer_text(), encoding="utf-8")
    show.say(f"wrote {folder / UNIT}.service and .timer")
    _systemctl("daemon-reload")
    _systemctl("enable", "--now", f"{UNIT}.timer")
    show.out(f"sweeps every {EVERY_MINUTES} minutes while you are logged in")
    show.next_step(f"systemctl --user list-timers {UNIT}.timer", "loginctl enable-linger: also while you are not")


def remove() -> None:
    """Stop the timer and delete the units. Repeatable."""
    files = [unit_folder() / f"{UNIT}.{kind}" for kind in ("timer", "service")]
    if not any(file.exists() for file in files):
        show.out("there is no timer")
        return
    try:
        _systemctl("disable", "--now", f"{UNIT}.timer")
    finally:
        for file in files:
            file.unlink(missing_ok=True)
    _systemctl("daemon-reload")
    show.out("the timer is gone")


def _systemctl(*words: str) -> None:
    command = f"systemctl --user {' '.join(words)}"
    try:
        done = subprocess.run(["systemctl", "--user", *words], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KimiError(
            f"systemd does not answer: {error}", f"where a user session of systemd runs: {command}"
        ) from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise KimiError(f"systemd did not take it: {said}", f"where a user session of systemd runs: {command}")
