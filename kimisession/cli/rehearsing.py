"""`kimisession rehearse`: a whole session on this machine, played with the real commands in a ledger of its own."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kimisession.cli import show
from kimisession.errors import DoesNotFit, EngineFailed, Interrupted, LeakSuspected, UsageMistake
from kimisession.node.policy import span

#: Where `make rehearse ENGINE=vllm` puts the engine's environment.
VLLM_PYTHON = Path(".venv-vllm/bin/python")


def run_rehearse(engine: str, keep: bool, sets: tuple[str, ...] = ()) -> None:
    """Play it, and leave nothing behind. `sets` are engine flags for `start`, NAME=VALUE."""
    if engine not in ("standin", "vllm"):
        raise UsageMistake(f"--engine: {engine!r} is neither standin nor vllm", "kimisession rehearse --engine standin")
    python = os.environ.get("KIMISESSION_ENGINE_PYTHON") or str(VLLM_PYTHON.absolute())
    if engine == "vllm" and not Path(python).exists():
        raise DoesNotFit(
            "real vLLM is not installed beside kimisession", "run `make rehearse ENGINE=vllm` in a checkout"
        )
    home = Path(tempfile.mkdtemp(prefix="kimisession-rehearsal-"))
    play = _Play(home, python)
    began = time.monotonic()
    try:
        show.say(show.paint("A whole session on this machine", "bold", sys.stderr))
        show.say(
            "The engine is a stand-in: no model is run."
            if engine == "standin"
            else "The engine is real vLLM on the CPU."
        )
        show.say("Dollars are pretended: nothing is billed.\n")
        profile = "rehearsal" if engine == "standin" else "rehearsal-vllm"
        play.command("seed", profile)
        flags = [word for text in sets for word in ("--set", text)]
        play.command("start", profile, "--name", "demo", "--budget", "10", "-y", *flags)
        play.command("test", "demo")
        play.command("status", "demo")
        show.say("\nNow nobody asks anything: the session ends by itself.")
        play.command("status", "demo", "--watch")
        play.command("cost")
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what the rehearsal started is being stopped") from None
    except EngineFailed:
        keep = True
        raise
    finally:
        play.clean(keep)
    show.say(
        f"\n{show.paint('Rehearsed', 'bold', sys.stderr)} in {span(time.monotonic() - began)}; nothing is left running."
    )
    show.next_step("kimisession profiles", "kimisession plan kimi-k2.5")


class _Play:
    """Runs kimisession's own commands, as a person would type them, on a ledger under `home`."""

    def __init__(self, home: Path, engine_python: str) -> None:
        self.home = home
        self.argv = [sys.executable, "-m", "kimisession", *(["-q"] if show.SETTINGS.quiet else [])]
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KIMISESSION_")},
            "KIMISESSION_STATE_HOME": str(home / "state"),
            "KIMISESSION_DATA_HOME": str(home / "data"),
            "KIMISESSION_CONFIG_HOME": str(home / "config"),
            "KIMISESSION_ENGINE_PYTHON": engine_python,
        }

    def command(self, *words: str, must_work: bool = True) -> None:
        """Show the command line, run it, and stop at the first that fails."""
        show.say(show.paint(f"\n$ kimisession {' '.join(words)}", "bold", sys.stderr))
        code = subprocess.run([*self.argv, *words], env=self.env, cwd=self.home, check=False).returncode
        if code and must_work:
            raise EngineFailed(
                f"`kimisession {words[0]}` ended with code {code}", f"look at ledger and logs in {self.home}"
            )

    def clean(self, keep: bool) -> None:
        """Stop what may still run, look for it, and remove the folder."""
        subprocess.run(
            [*self.argv, "stop", "--all"],
            env=self.env,
            cwd=self.home,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        machines = (record.parent for record in self.home.glob("state/machines/*/machine.json"))
        left = [machine.name for machine in machines if not (machine / "gone.json").exists()]
        if left:
            raise LeakSuspected(f"machine {left[0]} of the rehearsal is not gone", f"look into {self.home}")
        if keep:
            show.say(f"kept: {self.home}")
        else:
            shutil.rmtree(self.home, ignore_errors=True)
