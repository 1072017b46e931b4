"""`kimisession config show`."""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from kimisession.cli import show
from kimisession.cli.amounts import dollars, duration
from kimisession.cli.completing import PLACES
from kimisession.core.catalog import parse_accelerators
from kimisession.errors import UsageMistake
from kimisession.paths import buckets_home, config_home, state_home
from kimisession.profile_file import load_profile
from kimisession.settings import KNOWN, settings


def show_config(origin: bool, json: bool) -> None:
    """Every setting, its value, and with `origin` who said so. A value that no command could use is named. Raises
    UsageMistake for the first of them, after showing all."""
    found = settings()
    wrong = {key: why for key, setting in found.items() if setting.value and (why := mistake(key, setting.value))}
    places = {"state": state_home(), "config": config_home(), "buckets": buckets_home()}
    if json:
        rows = {key: {**asdict(setting), "mistake": wrong.get(key)} for key, setting in found.items()}
        show.as_json("config", {"settings": rows, "places": {name: str(path) for name, path in places.items()}})
    else:
        head = ("SETTING", "VALUE", "FROM", "WHAT FOR") if origin else ("SETTING", "VALUE", "WHAT FOR")
        lines = []
        for key, what in KNOWN.items():
            value, about = found[key].value or "-", f"WRONG: {wrong[key]}" if key in wrong else what
            lines.append((key, value, found[key].origin or "-", about) if origin else (key, value, about))
        show.table(head, lines)
        show.out()
        show.pairs([(name, str(path)) for name, path in places.items()])
    for key, why in wrong.items():
        raise UsageMistake(f"{key}, from {found[key].origin}: {why}", f"mend or remove {key} there")
    if not json:
        show.next_step(f"edit {config_home() / 'config.toml'}, or ./kimisession.toml, or set KIMISESSION_<SETTING>")


def mistake(key: str, value: str) -> str:
    """Why no command could use this value; empty when nothing is known against it. Reads what the flags read."""
    try:
        _CHECKS[key](value)
    except UsageMistake as wrong:
        return wrong.message.removeprefix(f"--{key}: ")
    except ValueError as wrong:
        return str(wrong)
    return ""


def _place(text: str) -> None:
    if text not in PLACES:
        raise ValueError(f"{text!r} is not a place; there are {', '.join(PLACES)}")


def _program(text: str) -> None:
    if not shutil.which(Path(text).expanduser()):
        raise ValueError(f"{text!r} is no program on this machine")


def _file(text: str) -> None:
    if not Path(text).expanduser().is_file():
        raise ValueError(f"{text!r} is no file")


_CHECKS: dict[str, Callable[[str], object]] = {
    "profile": load_profile,
    "infra": _place,
    "gpus": parse_accelerators,
    "idle": lambda text: duration("idle", text),
    "duration": lambda text: duration("duration", text),
    "budget": lambda text: dollars("budget", text),
    "price": lambda text: dollars("price", text),
    "engine_python": _program,
    "webhook_file": _file,
}
