"""Profiles as people write them: TOML text into `core.profile.Profile`, one sentence per mistake, with file and key."""

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kimisession.core.catalog import parse_accelerators
from kimisession.core.durations import parse_duration
from kimisession.core.launch import check_name
from kimisession.core.profile import Profile
from kimisession.errors import UsageMistake
from kimisession.paths import config_home

_DURATIONS = (
    "idle", "unused", "duration", "longest", "ready_within", "coldstart_stall", "stall", "unknown", "warn", "silent",
    "stop_grace",
)  # fmt: skip


def profile_files() -> dict[str, Path]:
    """Every profile by name: the package's, and the user's own, which win."""
    shipped = Path(str(resources.files("kimisession") / "profiles"))
    own = config_home() / "profiles"
    return {p.stem: p for folder in (shipped, own) for p in sorted(folder.glob("*.toml"))}


def load_profile(name: str) -> Profile:
    """The profile of this name, or in the file of this path. Raises UsageMistake."""
    files = profile_files()
    path = Path(name) if name.endswith(".toml") else files.get(name)
    if path is None:
        close = difflib.get_close_matches(name, files, 1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise UsageMistake(f"there is no profile {name!r}", f"{guess}`kimisession profiles` lists them")
    return read_profile(path)


def read_profile(path: Path) -> Profile:
    """The profile in a file. Raises UsageMistake that names file and key of every mistake, one sentence each."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageMistake(f"{path}: {error.strerror}", "`kimisession profiles` lists the profiles there are") from None
    except UnicodeDecodeError as error:
        raise UsageMistake(f"{path}: this is not TOML: {error}", "mend that line") from None
    return profile_from_text(text, str(path), path.stem)


def profile_from_text(text: str, path: str, stem: str | None = None) -> Profile:
    """The profile in a text; `path` is what mistakes are said of, `stem` the name that it must have. Raises UsageMistake."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageMistake(f"{path}: this is not TOML: {error}", "mend that line") from None
    mistakes = [*_unknown_keys(raw, Profile, "")]
    profile = None
    if not mistakes:
        profile, mistakes = _typed(raw)
    if profile is not None:
        mistakes = [*_meaning(profile, profile.name if stem is None else stem)]
    if mistakes or profile is None:
        raise UsageMistake("; ".join(f"{path}: {mistake}" for mistake in mistakes), "mend the profile and try again")
    return profile


def _typed(raw: dict[str, Any]) -> tuple[Profile | None, list[str]]:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Profile).validate_python(raw), []
    except ValidationError as error:
        seen: dict[str, str] = {}
        for mistake in error.errors():
            key = ".".join(str(part) for part in mistake["loc"] if not str(part)[:1].isupper())
            # A value of a union is told once, not once an alternative.
            seen.setdefault(key, f"{key}: {mistake['msg'][:1].lower()}{mistake['msg'][1:]}")
        return None, list(seen.values())


def _unknown_keys(raw: Any, schema: Any, at: str) -> Iterable[str]:
    """Misspelt keys, with the nearest one that exists."""
    hints = get_type_hints(schema)
    known = {f.name for f in fields(schema)}
    if not isinstance(raw, dict):
        return
    for key, value in raw.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            yield f"{at}{key} is not a key here" + (f", did you mean {close[0]}?" if close else "")
            continue
        for option in (hints[key], *get_args(hints[key])):
            if is_dataclass(option):
                for index, item in enumerate(value if isinstance(value, list) else [value]):
                    place = f"{at}{key}.{index}." if isinstance(value, list) else f"{at}{key}."
                    yield from _unknown_keys(item, option, place)


def _meaning(profile: Profile, stem: str) -> Iterable[str]:
    """What the types cannot say."""
    if profile.name != stem:
        yield f"name: {profile.name!r} is not the file's name"
    try:
        check_name(profile.name.replace(".", "-"))
    except ValueError as error:
        yield f"name: {error}"
    for key in _DURATIONS:
        try:
            parse_duration(getattr(profile.limits, key))
        except ValueError as error:
            yield f"limits.{key}: {error}"
    for index, text in enumerate(profile.hardware.accelerators):
        try:
            parse_accelerators(text)
        except ValueError as error:
            yield f"hardware.accelerators.{index}: {error}"
    if not profile.hardware.accelerators:
        yield "hardware.accelerators: name at least one, like H100:8"
    if not profile.checkpoints:
        yield "checkpoints: name at least one"
    if profile.price.usd_per_hour < 0:
        yield "price.usd_per_hour: a price is not negative"
