"""What a machine without GPUs costs on GCP, by the catalog that SkyPilot keeps on this machine, without importing it.

SkyPilot takes the type that is cheapest on demand, among a few families, of those that are large enough (`gcp_catalog.py` of
0.14.1). Its spot price differs by zone, and nobody knows yet which zone it will be: the dearest of the region counts.
"""

import csv
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path

from kimisession.cloud.prices import sky_catalogs

#: The families that SkyPilot 0.14.1 chooses from when nobody names a type.
FAMILIES = ("n2-standard-", "n2-highmem-", "n2-highcpu-", "n4-standard-", "n4-highmem-", "n4-highcpu-")


@dataclass(frozen=True)
class CpuOffer:
    """One type of machine in one region, as a spot machine."""

    instance_type: str
    usd_per_hour: Decimal
    ground: str


def cpu_offer(vcpus: int, memory_gib: int, region: str, catalogs: Path | None = None) -> CpuOffer | None:
    """The machine that SkyPilot would take there, and its dearest spot price; None where there is no catalog, or no price."""
    known = (path for path in (catalogs or sky_catalogs()).glob("v*/gcp/vms.csv") if path.parts[-3][1:].isdigit())
    found = sorted(known, key=lambda path: int(path.parts[-3][1:]))
    if not found:
        return None
    rows = []
    with found[-1].open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                large = float(row["vCPUs"]) >= vcpus and float(row["MemoryGiB"]) >= memory_gib
                if large and row["Region"] == region and row["InstanceType"].startswith(FAMILIES):
                    rows.append((Decimal(row["Price"]), row["InstanceType"], Decimal(row["SpotPrice"] or "NaN")))
            except (KeyError, ValueError, InvalidOperation):
                continue  # a row about something else, or without a price
    if not rows:
        return None
    _, chosen = min((usd, name) for usd, name, _ in rows)
    spot = [usd for _, name, usd in rows if name == chosen and usd.is_finite()]
    if not spot:
        return None
    read = datetime.fromtimestamp(found[-1].stat().st_mtime, UTC)
    ground = f"{chosen} spot in {region}, dearest zone; SkyPilot's catalog of {read:%Y-%m-%d}"
    return CpuOffer(chosen, max(spot), ground)
