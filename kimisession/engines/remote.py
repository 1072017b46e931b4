"""Commands on another machine, over one ssh connection that later commands share (ssh's ControlMaster)."""

import contextlib
import json
import os
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimisession.errors import Unconfirmed

#: A dead peer is noticed after 15 seconds; the shared connection closes a minute after its last use.
OPTIONS = (
    "BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3",
    "StrictHostKeyChecking=accept-new", "LogLevel=ERROR",
)  # fmt: skip
_CONNECTION_FAILED = 255  # ssh(1), exit status


def sockets_home() -> Path:
    """A folder of this user alone for ssh's sockets: their path may have 104 bytes, so it is short. Raises Unconfirmed
    when somebody else made it."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"kimisession-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Unconfirmed(f"{folder} is not a folder of yours alone", f"remove {folder}")
    return folder


@dataclass(frozen=True)
class Remote:
    """A host as ssh knows it: `words` are what names it, like `("-F", CONFIG, HOST)`."""

    words: tuple[str, ...]

    def argv(self, *extra: str) -> list[str]:
        """The ssh command up to the host; `extra` stands before it."""
        shared = ("ControlMaster=auto", "ControlPersist=60", f"ControlPath={sockets_home()}/%C")
        options = [word for option in (*OPTIONS, *shared) for word in ("-o", option)]
        return ["ssh", *options, *extra, *self.words]

    def run(self, script: str, text: str = "", within_s: float = 30.0) -> str:
        """What a shell script printed there; `text` is its standard input. Raises Unconfirmed when the host cannot be
        reached, or the script fails."""
        argv = [*self.argv(), "sh", "-c", shlex.quote(script)]
        # The shared connection outlives this command: it must not hold a pipe that somebody reads to its end.
        with tempfile.TemporaryFile() as errors:
            try:
                done = subprocess.run(
                    argv, input=text.encode(), stdout=subprocess.PIPE, stderr=errors, timeout=within_s, check=False
                )
            except subprocess.TimeoutExpired:
                raise Unconfirmed(f"{self.words[-1]} did not answer within {within_s:.0f} s") from None
            except OSError as error:
                raise Unconfirmed(f"ssh cannot be started: {error}", "install an ssh client") from None
            errors.seek(0)
            told = errors.read().decode("utf-8", "replace").strip().splitlines()
        if done.returncode:
            how = "cannot be reached" if done.returncode == _CONNECTION_FAILED else "refused a command"
            raise Unconfirmed(f"{self.words[-1]} {how}: {told[-1] if told else f'exit code {done.returncode}'}")
        return done.stdout.decode("utf-8", "replace")

    def follow(self, script: str) -> Iterator[str]:
        """Lines that a script prints there, as they come, until it ends."""
        argv = [*self.argv(), "sh", "-c", shlex.quote(script)]
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            try:
                for line in process.stdout or ():
                    yield line.decode("utf-8", "replace").rstrip("\n")
            finally:
                process.terminate()

    def write_json(self, path: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file there, whole and renamed into place; its folder is made. `path` is the shell's: it may begin
        with `~/`. Raises Unconfirmed."""
        script = f'mkdir -p "$(dirname {path})" && cat > {path}.part && mv {path}.part {path}'
        self.run(script, json.dumps(content))
