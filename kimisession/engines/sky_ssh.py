"""A rented machine by the entry that SkyPilot writes for ssh, without importing SkyPilot."""

from pathlib import Path

from kimisession.engines.remote import Remote
from kimisession.errors import EngineFailed


def entry(session_id: str) -> Path:
    """Where SkyPilot 0.14 writes the entry of a cluster."""
    return Path(f"~/.sky/generated/ssh/{session_id}").expanduser()


def sky_desk(session_id: str) -> Remote | None:
    """The machine; None while SkyPilot has written no entry, or on another laptop than the one that began it."""
    config = entry(session_id)
    return Remote(("-F", str(config), session_id)) if config.exists() else None


def sky_ssh_config(session_id: str, names: tuple[str, ...]) -> str:
    """SkyPilot's entry under our names. Raises EngineFailed."""
    try:
        text = entry(session_id).read_text(encoding="utf-8")
    except OSError:
        raise EngineFailed(f"SkyPilot has no ssh entry for {session_id}", f"sky status {session_id}") from None
    lines = [line for line in text.splitlines() if "KnownHostsFile" not in line]
    return "\n".join(f"Host {' '.join(names)}" if line == f"Host {session_id}" else line for line in lines) + "\n"


def ask(there: Remote, commands: tuple[str, ...]) -> tuple[str, ...]:
    """What each of these shell commands prints there, in one round trip. Raises Unconfirmed."""
    mark = "@@kimisession@@"
    told = there.run("".join(f"echo {mark}; {command}\n" for command in commands) + "exit 0")
    return tuple(told.split(f"{mark}\n")[1:])
