"""The entry in ssh's configuration that makes `ssh NAME` reach a session: one file a session, one line in the user's own."""

import os
from pathlib import Path


def write_entry(folder: Path, block: str) -> None:
    """Write FOLDER/ssh_config, which only this user can read, from a Host block; the host's key is kept beside it. FOLDER's
    parent is where the entries of all sessions are. Repeatable. Raises OSError."""
    config = folder / "ssh_config"
    config.touch(mode=0o600)
    config.write_text(f"{block}    UserKnownHostsFile {folder}/known_hosts\n", encoding="utf-8")
    _include(folder.parent)


def _include(home: Path) -> None:
    line = f"Include {home}/*/ssh_config"
    config = Path.home() / ".ssh" / "config"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    if line not in text.splitlines():
        config.parent.mkdir(mode=0o700, exist_ok=True)
        part = config.with_name(f".config.{os.getpid()}")
        part.touch(mode=0o600)
        part.write_text(f"# kimisession: `ssh NAME` reaches a session\n{line}\n{text}", encoding="utf-8")
        part.replace(config.resolve())
