"""What disks and addresses cost an hour, by the dated list in the package."""

from dataclasses import replace
from decimal import Decimal

import pytest
from good_values import NOON

from kimisession.cloud.resource_prices import price_of_resource
from kimisession.core.inventory import Address, Disk

DISK = Disk("d", "us-central1-a", NOON, size_gib=100, disk_type="pd-balanced")


@pytest.mark.parametrize(
    ("kind", "zone", "usd_per_month"),
    [
        ("pd-balanced", "us-central1-a", "10"),
        ("pd-standard", "us-central1-a", "4"),
        ("pd-ssd", "europe-west4-b", "18.7"),
        ("pd-balanced", "asia-southeast1-c", "11"),
    ],
)
def test_a_disk_costs_its_gibibytes_times_the_listed_price_of_its_region(
    kind: str, zone: str, usd_per_month: str
) -> None:
    found = price_of_resource(replace(DISK, disk_type=kind, zone=zone))
    assert found.usd_per_hour is not None
    assert (found.usd_per_hour * 730).quantize(Decimal("0.0001")) == Decimal(usd_per_month)
    assert "Google's list of 2026-08-20" in found.ground


@pytest.mark.parametrize(
    "changes",
    [
        {"disk_type": "hyperdisk-balanced"},
        {"disk_type": ""},
        {"disk_type": "unused-address"},
        {"zone": "mars-north1-a"},
        {"zone": "us-central1"},
        {"size_gib": 0},
    ],
    ids=str,
)
def test_what_the_list_does_not_have_has_no_price(changes: dict[str, object]) -> None:
    assert price_of_resource(replace(DISK, **changes)).usd_per_hour is None  # type: ignore[arg-type]


def test_an_address_costs_less_on_a_spot_machine_and_more_when_nothing_uses_it() -> None:
    used = Address("a", "us-central1-a", NOON, users=("m",))
    left_over = Address("a", "us-central1", NOON)
    prices = [price_of_resource(one).usd_per_hour for one in (replace(used, spot=True), used, left_over)]
    assert prices == [Decimal("0.0025"), Decimal("0.005"), Decimal("0.01")]
    assert price_of_resource(replace(left_over, zone="europe-north2")).usd_per_hour is None
