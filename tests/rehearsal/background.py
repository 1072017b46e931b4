"""A program that runs beside the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path


class Background:
    """A program that began with the first test and is asked for by a later one."""

    def __init__(self, argv: list[str], env: dict[str, str], owner: int | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kimi-play-"))
        if owner is not None:
            os.chown(self.folder, owner, owner)
        home = {"HOME": str(self.folder), "TMPDIR": str(self.folder)}
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                argv, env={**env, **home}, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def result(self, within_s: float) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        code = self.process.wait(timeout=within_s)
        return code, (self.folder / "out").read_text(), (self.folder / "err").read_text()

    def close(self) -> None:
        """End it, if need be, as a person would; then remove its folder."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
