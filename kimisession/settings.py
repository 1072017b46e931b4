"""What a user may set once instead of typing it: flag > KIMISESSION_* > ./kimisession.toml > config.toml > default.

Secrets are not settings: tokens and keys come from the environment or from files.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kimisession.errors import UsageMistake
from kimisession.paths import config_home

#: Every setting and what it is for. Values are text, read by the same code that reads the flag of that name.
KNOWN: dict[str, str] = {
    "profile": "what `start` and `plan` take when no profile is named",
    "infra": "where sessions run",
    "gpus": "what they may use there, like H100:8",
    "idle": "end after this long without requests",
    "duration": "hard cap of a session",
    "budget": "dollar cap of a session",
    "price": "dollars per hour, where the profile's figure is not yours",
    "engine_python": "the Python that has the engine",
    "webhook_file": "a file with a URL that is told before a session ends",
}
DEFAULTS: dict[str, str] = {"profile": "kimi-k2.5"}


@dataclass(frozen=True)
class Setting:
    """A value and who said it; both empty when nobody did."""

    value: str | None
    origin: str


def _file(path: Path) -> Mapping[str, str]:
    """The settings in a TOML file. Raises UsageMistake that names file and key."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageMistake(f"{path} cannot be read: {error}", "mend or remove it") from None
    for key, value in raw.items():
        if key not in KNOWN:
            close = difflib.get_close_matches(key, KNOWN, 1)
            guess = f", did you mean {close[0]}?" if close else ""
            raise UsageMistake(f"{path}: {key} is not a setting{guess}", "`kimisession config show` lists them")
        if isinstance(value, bool | dict | list):
            raise UsageMistake(f"{path}: {key} is not text or a number", 'write it like idle = "20m"')
    return {key: str(value) for key, value in raw.items()}


def _refuse_misspelled(environment: Mapping[str, str]) -> None:
    """A cap that is misspelled is no cap: raises UsageMistake for a variable that is nearly a setting's."""
    names = {f"KIMISESSION_{key.upper()}" for key in KNOWN}
    for name in environment:
        if name.startswith("KIMISESSION_") and name not in names:
            close = difflib.get_close_matches(name, names, 1, cutoff=0.9)
            if close:
                raise UsageMistake(f"{name} is not a setting, did you mean {close[0]}?", f"unset {name}")


def settings(folder: Path | None = None, environment: Mapping[str, str] = os.environ) -> dict[str, Setting]:
    """Every known setting with its origin. `folder` is where the project file is looked for (default: here).
    Raises UsageMistake for what cannot be read, and for a name that is nearly a setting's."""
    _refuse_misspelled(environment)
    layers = [
        ({k: v for k in KNOWN if (v := environment.get(f"KIMISESSION_{k.upper()}"))}, "environment"),
        (_file(path := (folder or Path.cwd()) / "kimisession.toml"), str(path)),
        (_file(path := config_home() / "config.toml"), str(path)),
        (DEFAULTS, "default"),
    ]
    found = {}
    for key in KNOWN:
        value, origin = next(((layer[key], name) for layer, name in layers if key in layer), (None, ""))
        found[key] = Setting(value, f"KIMISESSION_{key.upper()}" if origin == "environment" else origin)
    return found
