"""kimisession as a person types it: the real program in a process of its own, with homes of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kimisession.store import Row, Store

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Said:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str
    words: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The error, without its mark."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        return line.removeprefix("error: ")

    @property
    def hint(self) -> str:
        """What to type next."""
        return next(line for line in self.err.splitlines() if line.startswith("next: ")).removeprefix("next:").strip()


class Home:
    """Somebody's state, data and configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.data = folder / "data"
        self.config = folder / "config"

    def env(self, **more: str) -> dict[str, str]:
        """The environment of a command; none of the user's own settings get in."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KIMISESSION_")}
        return {
            **clean,
            "KIMISESSION_STATE_HOME": str(self.state),
            "KIMISESSION_DATA_HOME": str(self.data),
            "KIMISESSION_CONFIG_HOME": str(self.config),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "80",
            "TERM": "dumb",
            "TZ": "UTC",
            **more,
        }

    def type(self, *words: str, **env: str) -> Said:
        """Run `kimisession WORDS` off a terminal."""
        done = subprocess.run(
            [sys.executable, "-m", "kimisession", *words],
            cwd=self.folder,
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        return Said(done.returncode, done.stdout, done.stderr, words)

    def store(self) -> Store:
        """The ledger."""
        return Store(self.state / "ledger.db")

    def live(self) -> list[Row]:
        """Sessions that may cost money."""
        if not (self.state / "ledger.db").exists():
            return []
        store = self.store()
        try:
            return store.rows(live_only=True)
        finally:
            store.close()

    def machines(self) -> list[Path]:
        """Machines that were ever made."""
        return sorted(self.state.glob("machines/*/machine.json"))
