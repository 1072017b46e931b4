"""Would the pinned engine's own parser take these flags? Known before anything is rented. Pure: the table comes in."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kimisession.core.profile import FlagValue

_SIZE = re.compile(r"\d+(?:\.\d+)?[kmgtKMGT]?")


@dataclass(frozen=True, slots=True)
class KnownFlag:
    """One flag as the parser has it. `takes`: a switch has no value, `optional` may have one, `many` one or more.

    `choices` the parser compares; `registered` are refused a moment later, by the table that a plugin may add to.
    """

    name: str
    takes: Literal["switch", "one", "optional", "many"]
    type: str = "str"  # str, int, float, json, or size (an integer that may end in k or M)
    choices: tuple[str, ...] = ()
    registered: tuple[str, ...] = ()
    folded: bool = False  # compared in small letters with underscores
    deprecated: bool = False


@dataclass(frozen=True, slots=True)
class FlagTable:
    """Every flag of one engine version. `spellings` maps all that the parser accepts, aliases and --no-x included."""

    engine: str
    version: str
    wheel: str
    sha256: str
    requires: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, KnownFlag] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """A flag that the engine would not start with, and what to write instead (empty: leave it out)."""

    flag: str
    why: str
    replacement: str

    def __str__(self) -> str:
        instead = f"use {self.replacement}" if self.replacement else "leave it out"
        return f"{self.flag}: {self.why}; {instead}"


@dataclass(frozen=True, slots=True)
class Renamed:
    """A flag, perhaps only with one value, that people still write. `instead` is a flag's name without dashes."""

    flag: str
    instead: str
    why: str
    value: str = ""


#: Read in the wheels of 0.15.0, 0.19.1 and 0.33.0; the old spellings stand in public guides of 2025 and 2026.
RENAMED = (
    Renamed(
        "swap-space",
        "kv-offloading-size",
        "the swap space of the V0 engine is gone; its value was GiB per GPU, the new one is GiB over all ranks",
    ),
    Renamed(
        "skip-non-local-expert-weights",
        "enable-ep-weight-filter",
        "none of the releases read here has it",
    ),
    Renamed(
        "quantization-param-path",
        "",
        "a file of KV scales is not read any more: FP8 KV scales come with a calibrated checkpoint, else they are 1.0",
    ),
    Renamed(
        "load-format",
        "",
        "compressed-tensors is a quantisation, not a way to load; it is found in the checkpoint's config.json",
        "compressed-tensors",
    ),
    Renamed("enable-reasoning", "", "--reasoning-parser alone switches it on since vLLM 0.9"),
    Renamed("disable-log-requests", "no-enable-log-requests", "it is a negation now"),
)


def find(table: FlagTable, name: str) -> KnownFlag | None:
    """The flag that a spelling means, as argparse would find it: underscores are dashes, `--a.b` sets a key of `--a`,
    and a beginning that fits one flag alone stands for it."""
    wanted = "--" + name.lstrip("-").replace("_", "-").partition(".")[0]
    known = table.spellings.get(wanted)
    if known is not None:
        return known
    fitting = {flag.name: flag for spelling, flag in table.spellings.items() if spelling.startswith(wanted)}
    return next(iter(fitting.values())) if len(fitting) == 1 else None


def check_flags(table: FlagTable, flags: Mapping[str, FlagValue]) -> tuple[Refused, ...]:
    """What the parser of this version would refuse, in the order given; empty if it takes everything.

    `flags` are without dashes, as in a profile. A flag whose value is false is left out of the command line, but its
    name is checked all the same. What two flags mean together is not checked: the parser does not either.
    """
    return tuple(_refusals(table, flags))


def _refusals(table: FlagTable, flags: Mapping[str, FlagValue]) -> Iterable[Refused]:
    plugged = any("plugin" in name for name in flags)
    for name, value in flags.items():
        written = f"--{name.lstrip('-')}"
        known = find(table, name)
        renamed = _renamed(table, name, value, known)
        if renamed is not None:
            yield renamed
        elif known is None:
            near = difflib.get_close_matches(written, table.spellings, 1, 0.75)
            yield Refused(written, f"{table.engine} {table.version} has no such flag", near[0] if near else "")
        elif value is not False:
            why = _bad_value(known, value, "." in name, plugged)
            if why:
                yield Refused(written, why[0], why[1])


def _renamed(table: FlagTable, name: str, value: FlagValue, known: KnownFlag | None) -> Refused | None:
    plain = name.lstrip("-").replace("_", "-")
    for row in RENAMED:
        if row.flag == plain and (value == row.value if row.value else known is None):
            there = row.instead if row.instead and find(table, row.instead) else ""
            written = f"--{plain} {row.value}".rstrip()
            return Refused(written, row.why, f"--{there}" if there else "")
    return None


def _bad_value(known: KnownFlag, value: FlagValue, by_key: bool, plugged: bool) -> tuple[str, str] | None:
    """Why the parser would refuse this value, and what to write; None if it takes it."""
    if by_key:
        return None  # a key of a JSON flag: the engine's own config class checks it
    if known.takes == "switch":
        return None if value is True else (f"it is a switch and takes no value, not {value!r}", f"{known.name} = true")
    if value is True:
        return None if known.takes == "optional" else ("it needs a value", f"{known.name} VALUE")
    if isinstance(value, list) and known.takes == "many":
        return "a list travels as JSON, which this flag does not read", f"{known.name} with one value"
    if isinstance(value, dict | list):
        return None if known.type in ("json", "str") else ("it takes no JSON", f"{known.name} {known.type.upper()}")
    text = str(value)
    says = _bad_text(known, text)
    if says:
        return says
    names = known.choices or (() if plugged else known.registered)
    compared = text.lower().replace("-", "_") if known.folded else text
    if names and compared not in names:
        near = difflib.get_close_matches(compared, names, 1, 0.5)
        listed = ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:8])} and {len(names) - 8} more"
        return f"{text!r} is none of {listed}", f"{known.name} {near[0]}" if near else ""
    return None


def _bad_text(known: KnownFlag, text: str) -> tuple[str, str] | None:
    """Whether the text is what the flag's type reads."""
    if text in ("", "None"):
        return None
    if known.type == "json":
        try:
            json.loads(text)
        except ValueError:
            return f"{text!r} is not JSON", f"{known.name} '{{...}}'"
    if known.type == "int" and not re.fullmatch(r"-?\d+", text):
        return f"{text!r} is not a whole number", f"{known.name} NUMBER"
    if known.type == "size" and text not in ("-1", "auto") and not _SIZE.fullmatch(text):
        return f"{text!r} is not a whole number", f"{known.name} NUMBER"
    if known.type == "float":
        try:
            float(text)
        except ValueError:
            return f"{text!r} is not a number", f"{known.name} NUMBER"
    return None
