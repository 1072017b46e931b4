"""Model cards as TOML files: the ones that ship with the package, and a folder or config.json of the user's."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from kimisession.core.plan.models import FORMATS, ModelCard, ModelUnknown, Vision, card_from_config


def card_from_toml(text: str, where: str = "card") -> ModelCard:
    """Turn the text of a card into a ModelCard. Raises ModelUnknown, which names `where` and the field."""
    try:
        raw: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelUnknown(f"{where}: not TOML ({error})") from error
    vision = raw.pop("vision", None)
    for key in ("aliases", "evidence"):
        raw[key] = tuple(raw.get(key, ()))
    for key in ("experts_format", "shared_format", "dense_format", "attention_format"):
        if raw.get(key, "bf16") not in FORMATS:
            raise ModelUnknown(f"{where}: {key} is {raw[key]!r}; it must be one of {', '.join(FORMATS)}")
    try:
        return ModelCard(**raw, vision=Vision(**vision) if vision else None)
    except TypeError as error:
        raise ModelUnknown(f"{where}: {error}") from error


@cache
def all_cards() -> tuple[ModelCard, ...]:
    """The cards that ship with kimisession, by file name."""
    folder = resources.files("kimisession") / "models"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return tuple(card_from_toml(f.read_text(encoding="utf-8"), f.name) for f in files)


def card_named(name: str) -> ModelCard:
    """The shipped card for a repository name or one of its aliases; a remark in brackets after it is ignored.

    Raises ModelUnknown with the names that exist.
    """
    wanted = name.split("(", maxsplit=1)[0].strip().lower()
    for card in all_cards():
        if wanted in (card.name.lower(), *(alias.lower() for alias in card.aliases)):
            return card
    known = ", ".join(card.name for card in all_cards())
    raise ModelUnknown(f"no card for {name!r}; give the folder with its config.json, or one of: {known}")


def card_from_folder(folder: Path) -> ModelCard:
    """A card out of the config.json of a downloaded model. Raises ModelUnknown if there is none or it is foreign."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnknown(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise ModelUnknown(f"{path}: is not a JSON object")
    return card_from_config(config, name=folder.name)
