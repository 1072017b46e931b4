"""A model that no card describes: its config.json and the headers of its safetensors files, read by range.

From the hub or from a local folder; kilobytes of files that have hundreds of gigabytes. What was read is kept in the
cache, so that the next plan for it asks nobody: for good where the revision is a commit, for a day where it is a branch.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kimisession.core.plan.models import Components, ModelCard, ModelUnknown, Vision
from kimisession.core.plan.tensors import (
    LENGTH_BYTES,
    BadHeader,
    Tensor,
    counted_card,
    header_length,
    tensors_of,
)
from kimisession.paths import cache_home
from kimisession.weights.errors import BadSource, TryAgain
from kimisession.weights.manifest import is_commit
from kimisession.weights.source import SourceFile

FIRST_BYTES = 64 * 1024
"""Asked for at first: holds the headers of small files; a longer one is asked for once its length is known."""
MOST_CONFIG_BYTES = 4_000_000
MOST_BYTES = 400_000_000
"""Of all headers together: Kimi K2.5's 64 files with 208,000 tensors have about 31 MB."""
AT_ONCE = 8
FRESH_S = 24 * 3600.0

Beginning = Callable[[SourceFile, int], bytes]


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model as its files describe it. `bytes_read` is what was downloaded (or read) for it; `age_s` how long ago, 0 if
    just now. `revision` is a commit, or empty for a folder."""

    card: ModelCard
    revision: str
    files: int
    file_bytes: int
    tensors: int
    bytes_read: int
    age_s: float = 0.0


def read_model(
    text: str, *, endpoint: str | None = None, cache: Path | None = None, now: Callable[[], float] = time.time
) -> ReadModel:
    """The model in a folder, or `owner/name` or `owner/name@revision` on the hub.

    Raises BadSource (no such model, a damaged header), SourceDenied, SourceChanged, TryAgain (the hub does not answer and
    nothing is kept of it), ModelUnknown (an architecture that cannot be planned).
    """
    folder = Path(text).expanduser()
    if text.startswith((".", "/", "~")) or folder.is_dir():
        return read_folder(folder, cache=cache, now=now)
    name, _, asked = text.partition("@")
    kept_at = _place(text, cache)
    kept = _kept(kept_at, now())
    if kept is not None and (is_commit(asked) or kept.age_s < FRESH_S):
        return kept
    from kimisession.weights.hub import HubSource  # brings an HTTP client along: not for what is kept

    source = HubSource(name, asked or "main", endpoint=endpoint)
    try:
        read = _read(name, source.files(), source.beginning, source.revision())
    except TryAgain:
        if kept is not None:
            return kept
        raise
    _keep(kept_at, read, now())
    return read


def kept_card(text: str, cache: Path | None = None) -> ModelCard | None:
    """The card that an earlier reading of this model left, whatever its age, or that of a folder on this machine; None
    where there is neither. Asks nobody."""
    try:
        if Path(text).is_dir():
            return read_folder(Path(text), cache=cache).card
        kept = _kept(_place(text, cache), 0.0)
    except (BadSource, OSError):
        return None
    return kept.card if kept else None


def _place(text: str, cache: Path | None) -> Path:
    return (cache or cache_home()) / "models" / f"{re.sub(r'[^A-Za-z0-9._-]', '--', text)}.json"


def read_folder(folder: Path, *, cache: Path | None = None, now: Callable[[], float] = time.time) -> ReadModel:
    """The model in a local folder. Kept until a file there has another size or time."""
    if not folder.is_dir():
        raise BadSource(f"there is no folder {folder}", "name a folder with a model, or owner/name for one on the hub")
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    listed = [SourceFile(path.name, path.stat().st_size, None) for path in paths]
    state = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    kept_at = _place(str(folder.resolve()), cache)
    kept = _kept(kept_at, now(), state)
    if kept is not None:
        return kept

    def beginning(file: SourceFile, length: int) -> bytes:
        with (folder / file.path).open("rb") as opened:
            return opened.read(length)

    read = _read(str(folder), listed, beginning, "")
    _keep(kept_at, read, now(), state)
    return read


def _read(name: str, listed: Sequence[SourceFile], beginning: Beginning, revision: str) -> ReadModel:
    config_file = next((file for file in listed if file.path == "config.json"), None)
    if config_file is None:
        raise BadSource(f"{name} has no config.json", "name a model in the Hugging Face format")
    if config_file.size > MOST_CONFIG_BYTES:
        raise BadSource(f"{name}: config.json has {config_file.size:,} bytes, which is none", "name another model")
    raw = beginning(config_file, config_file.size)
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise BadSource(f"{name}: config.json is not a JSON object", "name a model in the Hugging Face format")
    _refuse_foreign(config, name)
    shards = _shards(listed)
    if not shards:
        raise BadSource(
            f"{name} has no safetensors files", "name a model with safetensors (GGUF and .bin files are not read)"
        )
    tensors, header_bytes = _headers(name, shards, beginning)
    file_bytes = sum(file.size for file in shards)
    return ReadModel(
        card=counted_card(config, tensors, file_bytes, name),
        revision=revision,
        files=len(shards),
        file_bytes=file_bytes,
        tensors=len(tensors),
        bytes_read=len(raw) + header_bytes,
    )


def _headers(name: str, shards: Sequence[SourceFile], beginning: Beginning) -> tuple[list[Tensor], int]:
    """The tensors of all files, and the bytes that it took to learn of them."""
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            heads = list(pool.map(lambda file: beginning(file, min(FIRST_BYTES, file.size)), shards))
            count = sum(len(head) for head in heads)
            whole = [
                LENGTH_BYTES + header_length(file.path, head, file.size)
                for file, head in zip(shards, heads, strict=True)
            ]
            if sum(whole) > MOST_BYTES:
                raise BadHeader(
                    f"the headers of {name} would have {sum(whole):,} bytes in all, more than any model has"
                )
            longer = [index for index, head in enumerate(heads) if whole[index] > len(head)]
            for index, head in zip(longer, pool.map(lambda i: beginning(shards[i], whole[i]), longer), strict=True):
                heads[index] = head
                count += len(head)
        found = [tensors_of(file.path, head, file.size) for file, head in zip(shards, heads, strict=True)]
    except BadHeader as error:
        raise BadSource(str(error), "download that file again, or name another revision") from None
    return [tensor for tensors in found for tensor in tensors], count


def _refuse_foreign(config: dict[str, Any], name: str) -> None:
    """Say no after config.json alone where the architecture cannot be planned: no header needs to be read for that."""
    try:
        counted_card(config, (), 0, name)
    except ModelUnknown as error:
        raise BadSource(str(error), "kimisession profiles lists what can be planned without reading files") from None


def _shards(listed: Sequence[SourceFile]) -> list[SourceFile]:
    """The safetensors files that an engine loads: those beside config.json, and not a second copy in one file."""
    found = [file for file in listed if file.path.endswith(".safetensors") and "/" not in file.path]
    numbered = [file for file in found if not file.path.startswith("consolidated")]
    return numbered or found


def _keep(path: Path, read: ReadModel, now: float, state: Any = None) -> None:
    """Write what was read, and of which state of a folder; a cache that cannot be written is no error."""
    card = {field.name: getattr(read.card, field.name) for field in fields(read.card)}
    card["vision"] = asdict(read.card.vision) if read.card.vision else None
    card["counted"] = asdict(read.card.counted) if read.card.counted else None
    content = {**{f.name: getattr(read, f.name) for f in fields(read)}, "card": card, "read_at": now, "state": state}
    temporary = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


def _kept(path: Path, now: float, state: Any = None) -> ReadModel | None:
    """What an earlier reading left; None where there is none, it is of another state, or of another version of this."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        read_at, of = raw.pop("read_at"), raw.pop("state")
        if of != state:
            return None
        return ReadModel(**{**raw, "card": _card(raw["card"]), "age_s": max(0.0, now - read_at)})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _card(raw: dict[str, Any]) -> ModelCard:
    raw = dict(raw)
    raw["vision"] = Vision(**raw["vision"]) if raw.get("vision") else None
    raw["counted"] = Components(**raw["counted"]) if raw.get("counted") else None
    for key in ("aliases", "evidence"):
        raw[key] = tuple(raw.get(key, ()))
    return ModelCard(**raw)
