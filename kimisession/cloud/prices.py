"""Prices from the catalogs that SkyPilot keeps on this machine, without importing it, and offline after the first time.

SkyPilot writes `~/.sky/catalogs/vN/CLOUD/vms.csv` and fetches it anew every few hours while it is used. The rows that
matter here are copied into our own cache, so that `plan` answers in milliseconds and without SkyPilot; the age that it
shows is the catalog's. Where there never was a catalog, a small list that is shipped with its source and date stands in.
"""

import csv
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from kimisession.core.catalog import ACCELERATORS
from kimisession.core.plan.prices import GCP_HOSTS, Market, offers_of
from kimisession.paths import cache_home

COLUMNS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Region", "AvailabilityZone", "Price", "SpotPrice")
_NAMES = frozenset(a.name for a in ACCELERATORS)
_HOSTS = frozenset(GCP_HOSTS.values())


def sky_catalogs() -> Path:
    """Where SkyPilot keeps its catalogs."""
    return Path.home() / ".sky" / "catalogs"


def market(
    cloud: str, accelerator: str, count: int, catalogs: Path | None = None, cache: Path | None = None
) -> Market | None:
    """Offers of one cloud for one machine; None where neither a catalog, nor a copy of one, nor the shipped list has any.

    A catalog that is newer than the copy is copied first. A copy that cannot be written is no error: the next call
    reads the catalog again.
    """
    source = _newest(catalogs or sky_catalogs(), cloud)
    copy = (cache or cache_home()) / f"prices-{cloud}.json"
    if source is not None and (not copy.exists() or copy.stat().st_mtime < source.stat().st_mtime):
        as_of, rows = source.stat().st_mtime, list(_rows(source))
        _write(copy, {"as_of": as_of, "catalog": str(source), "rows": rows})
    elif copy.exists():
        try:
            kept = json.loads(copy.read_text(encoding="utf-8"))
            as_of, rows = float(kept["as_of"]), kept["rows"]
        except (ValueError, KeyError, TypeError, OSError):
            copy.unlink(missing_ok=True)  # half written by somebody: made again from the catalog
            return market(cloud, accelerator, count, catalogs, cache) if source else None
    else:
        return shipped(cloud, accelerator, count)
    dicts = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return Market(offers_of(dicts, cloud, accelerator, count), cloud, datetime.fromtimestamp(as_of, UTC))


def shipped(cloud: str, accelerator: str, count: int) -> Market | None:
    """Offers out of the list in this package; None where it has none. Its first lines say where it is from and of when."""
    file = Path(__file__).parent / f"{cloud}_prices.csv"
    if not cloud.isidentifier() or not file.is_file():
        return None
    with file.open(encoding="utf-8", newline="") as lines:
        told: dict[str, str] = {}
        for line in lines:
            if not line.startswith("#"):
                break
            name, _, value = line.lstrip("# ").partition(":")
            told[name] = value.strip()
        rows = list(csv.DictReader(lines, COLUMNS))
    offers = offers_of(rows, cloud, accelerator, count)
    when = datetime.strptime(told["read"], "%Y-%m-%d").replace(tzinfo=UTC)
    return Market(offers, cloud, when, told["source"], shipped=True) if offers else None


def _newest(catalogs: Path, cloud: str) -> Path | None:
    """The catalog of the highest schema version that has this cloud."""
    found = [p for p in catalogs.glob(f"v*/{cloud}/vms.csv") if p.parts[-3][1:].isdigit()]
    return max(found, key=lambda p: int(p.parts[-3][1:]), default=None)


def _rows(source: Path) -> Iterator[tuple[str, ...]]:
    """The rows about accelerators that we know and about their hosts."""
    with source.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row.get("AcceleratorName") in _NAMES or row.get("InstanceType") in _HOSTS:
                yield tuple(row.get(column) or "" for column in COLUMNS)


def _write(copy: Path, content: Mapping[str, object]) -> None:
    temporary = copy.with_suffix(f".{os.getpid()}")
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(copy)
    except OSError:
        temporary.unlink(missing_ok=True)
