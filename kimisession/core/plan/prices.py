"""What a machine costs where: rows of SkyPilot's price catalogs turned into offers. Money is Decimal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation

#: GCP prices the host and its GPUs apart: the host's name for (accelerator, count). SkyPilot 0.14.1, gcp_catalog.py.
GCP_HOSTS = {
    ("A100-80GB", 8): "a2-ultragpu-8g",
    ("H100", 8): "a3-highgpu-8g",
    ("H200", 8): "a3-ultragpu-8g",
    ("B200", 8): "a4-highgpu-8g",
    ("RTXPRO6000", 8): "g4-standard-384",
}


@dataclass(frozen=True, slots=True)
class Offer:
    """One kind of machine in one zone. Dollars per hour of the whole machine; None where the catalog has no price."""

    cloud: str
    region: str
    zone: str
    instance: str
    on_demand_usd: Decimal | None
    spot_usd: Decimal | None

    @property
    def usd_per_hour(self) -> Decimal | None:
        """The cheaper of the two."""
        stated = [usd for usd in (self.spot_usd, self.on_demand_usd) if usd is not None]
        return min(stated) if stated else None


@dataclass(frozen=True, slots=True)
class Market:
    """All offers of one cloud for one machine, the cheapest first, and of when the catalog is that they come from.
    `shipped`: out of the list that comes with kimisession, for want of a catalog on this machine."""

    offers: tuple[Offer, ...]
    cloud: str
    as_of: datetime
    source: str = "SkyPilot's catalog"
    shipped: bool = False

    def age(self, now: datetime) -> timedelta:
        """How old the prices are."""
        return max(timedelta(0), now - self.as_of)


def offers_of(rows: Iterable[Mapping[str, str]], cloud: str, accelerator: str, count: int) -> tuple[Offer, ...]:
    """Offers for `count` of an accelerator in one machine, the cheapest first.

    `rows` have the columns InstanceType, AcceleratorName, AcceleratorCount, Region, AvailabilityZone, Price and
    SpotPrice. Where a cloud prices host and GPUs in rows of their own (GCP), the two of a zone are added.
    """
    hosts: dict[str, Mapping[str, str]] = {}
    gpus: list[Mapping[str, str]] = []
    host = GCP_HOSTS.get((accelerator, count), "") if cloud == "gcp" else ""
    for row in rows:
        if host and row["InstanceType"] == host:
            hosts[row["AvailabilityZone"]] = row
        elif row["AcceleratorName"] == accelerator and _count(row["AcceleratorCount"]) == count:
            gpus.append(row)
    found = []
    for row in gpus:
        zone = row["AvailabilityZone"]
        if row["InstanceType"]:
            found.append(_offer(cloud, row, _usd(row["Price"]), _usd(row["SpotPrice"]), row["InstanceType"]))
        elif zone in hosts:
            on_demand = _sum(_usd(row["Price"]), _usd(hosts[zone]["Price"]))
            spot = _sum(_usd(row["SpotPrice"]), _usd(hosts[zone]["SpotPrice"]))
            found.append(_offer(cloud, row, on_demand, spot, host))
    priced = [offer for offer in found if offer.usd_per_hour is not None]
    return tuple(sorted(priced, key=lambda offer: (offer.usd_per_hour or Decimal(0), offer.zone, offer.region)))


def _offer(cloud: str, row: Mapping[str, str], on_demand: Decimal | None, spot: Decimal | None, instance: str) -> Offer:
    return Offer(cloud, row["Region"], row["AvailabilityZone"] or row["Region"], instance, on_demand, spot)


def _count(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _usd(text: str) -> Decimal | None:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        return None
    return amount if amount.is_finite() and amount > 0 else None


def _sum(one: Decimal | None, other: Decimal | None) -> Decimal | None:
    return None if one is None or other is None else one + other
