"""What a machine, a disk or an address that was found costs an hour: machines by the price lists that `plan` uses, disks and
addresses by a dated list in this package. What the lists do not have has no price."""

import csv
import functools
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

from kimisession.cloud.prices import market
from kimisession.core.audit import Price
from kimisession.core.inventory import Address, Disk, Machine, Resource
from kimisession.core.plan.prices import GCP_HOSTS, Market

_BY_TYPE = {host: shape for shape, host in GCP_HOSTS.items()}

#: Google prices disks by the month and bills them by the second (its page "Disk and image pricing"); its list of prices counts
#: a month as 730 hours.
HOURS_A_MONTH = 730

#: An external address that a machine uses, in any region. On demand: the list beside this file. Spot: Google's page on network
#: pricing, as github.com/ChiefGyk3D/Clouds-Against-Humanity (wiki, Provider-GCP-Cost-Lesson) read it on 2026-10-16.
ADDRESS_USD_PER_HOUR = Decimal("0.005")
SPOT_ADDRESS_USD_PER_HOUR = Decimal("0.0025")
SPOT_ADDRESS_AS_OF = "2026-10-16"

UNPRICED = Price(None, "not priced")


@functools.cache
def _market(accelerator: str, count: int) -> Market | None:
    return market("gcp", accelerator, count)


@functools.cache
def _disk_list() -> tuple[str, Mapping[str, Mapping[str, str]]]:
    """The day that the list is of, and its rows by region. See the first lines of the file."""
    with (Path(__file__).parent / "gcp_disk_prices.csv").open(encoding="utf-8", newline="") as file:
        lines = file.readlines()
    told = [line for line in lines if line.startswith("#")]
    rows = [line for line in lines if not line.startswith("#")]
    as_of = next(line.partition(":")[2].strip() for line in told if line.startswith("# as_of:"))
    return as_of, {row["Region"]: row for row in csv.DictReader(rows)}


def price_of_resource(resource: Resource) -> Price:
    """Dollars per hour of a resource in its own zone or region; of a machine and its address, spot or not."""
    if isinstance(resource, Machine):
        return _of_machine(resource)
    return _of_disk(resource) if isinstance(resource, Disk) else _of_address(resource)


def _of_machine(machine: Machine) -> Price:
    shape = _BY_TYPE.get(machine.machine_type)
    found = _market(*shape) if shape else None
    if found is None:
        return UNPRICED
    offer = next((offer for offer in found.offers if offer.zone == machine.zone), None)
    usd: Decimal | None = None
    if offer is not None:
        usd = offer.spot_usd if machine.spot else offer.on_demand_usd
    word = "spot" if machine.spot else "on demand"
    return Price(usd, f"{machine.machine_type} {word} in {machine.zone}, list of {found.as_of:%Y-%m-%d}")


def _region(zone: str) -> str:
    """Of a zone, its region; a region stays what it is."""
    return zone.rpartition("-")[0] if zone[-2:-1] == "-" else zone


def _of_disk(disk: Disk) -> Price:
    as_of, rows = _disk_list()
    region = _region(disk.zone)
    listed = rows.get(region, {}).get(disk.disk_type, "")
    if not listed or not disk.size_gib or disk.disk_type == "unused-address" or region == disk.zone:
        return UNPRICED  # a hyperdisk, a disk of a whole region, or one whose size nobody told us
    per_gib = Decimal(listed)
    ground = f"{disk.size_gib} GiB {disk.disk_type} in {region} at ${per_gib} per GiB and month of {HOURS_A_MONTH} h"
    return Price(per_gib * disk.size_gib / HOURS_A_MONTH, f"{ground}, Google's list of {as_of}")


def _of_address(address: Address) -> Price:
    as_of, rows = _disk_list()
    if address.users:
        if address.spot:
            return Price(SPOT_ADDRESS_USD_PER_HOUR, f"address of a spot machine, Google's list of {SPOT_ADDRESS_AS_OF}")
        return Price(ADDRESS_USD_PER_HOUR, f"address of a machine, Google's list of {as_of}")
    region = _region(address.zone)
    listed = rows.get(region, {}).get("unused-address", "")
    if not listed:
        return UNPRICED
    return Price(Decimal(listed), f"address that nothing uses in {region}, Google's list of {as_of}")
