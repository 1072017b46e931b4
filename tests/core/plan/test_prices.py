"""Prices come from SkyPilot's catalogs, are kept in a copy of our own, and their age is shown."""

import os
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from kimisession.cloud.prices import market

HEAD = "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice"
GCP = """\
a3-highgpu-8g,208.0,1872.0,,,,us-central1,us-central1-a,9.46006,2.88933
a3-highgpu-8g,208.0,1872.0,,,,europe-west4,europe-west4-b,9.93306,2.27469
a3-highgpu-1g,26.0,234.0,,,,us-central1,us-central1-a,1.18251,0.36117
,,,H100,8,H100,us-central1,us-central1-a,78.0,23.0
,,,H100,8,H100,europe-west4,europe-west4-b,80.0,21.0
,,,H100,8,H100,asia-south1,asia-south1-c,70.0,10.0
,,,H100,1,H100,us-central1,us-central1-a,9.75,3.0
,,,H200,8,H200,us-central1,us-central1-b,80.0,
"""
AWS = "p5.48xlarge,192.0,2048.0,H100,8.0,H100,us-east-1,us-east-1a,55.04,\n"
AS_OF = datetime(2026, 11, 20, 9, 0, tzinfo=UTC)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    for version, cloud, rows in (("v8", "gcp", GCP), ("v7", "gcp", ""), ("v8", "aws", AWS)):
        file = tmp_path / "catalogs" / version / cloud / "vms.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{HEAD}\n{rows}", encoding="utf-8")
        os.utime(file, (AS_OF.timestamp(), AS_OF.timestamp()))
    return tmp_path / "catalogs", tmp_path / "cache"


def test_host_and_gpus_of_a_zone_are_added(places: tuple[Path, Path]) -> None:
    found = market("gcp", "H100", 8, *places)
    assert found is not None
    assert [(o.zone, o.spot_usd, o.on_demand_usd) for o in found.offers] == [
        ("europe-west4-b", Decimal("23.27469"), Decimal("89.93306")),
        ("us-central1-a", Decimal("25.88933"), Decimal("87.46006")),
    ]


def test_a_zone_without_such_hosts_is_no_offer(places: tuple[Path, Path]) -> None:
    found = market("gcp", "H100", 8, *places)
    assert found is not None
    assert "asia-south1-c" not in {offer.zone for offer in found.offers}
    assert "asia-south1-c" in (places[0] / "v8/gcp/vms.csv").read_text(encoding="utf-8")


def test_a_cloud_that_prices_machines_whole_is_read_as_well(places: tuple[Path, Path]) -> None:
    found = market("aws", "H100", 8, *places)
    assert found is not None
    assert [(o.instance, o.usd_per_hour, o.spot_usd) for o in found.offers] == [("p5.48xlarge", Decimal("55.04"), None)]


def test_the_copy_answers_when_the_catalog_is_gone_and_says_its_age(places: tuple[Path, Path]) -> None:
    catalogs, cache = places
    first = market("gcp", "H100", 8, catalogs, cache)
    (catalogs / "v8/gcp/vms.csv").unlink()
    (catalogs / "v7/gcp/vms.csv").unlink()
    assert market("gcp", "H100", 8, catalogs, cache) == first
    assert first is not None
    assert first.age(datetime(2026, 11, 20, 12, 0, tzinfo=UTC)).total_seconds() == 3 * 3600


def test_without_a_catalog_and_without_a_copy_the_shipped_list_stands_in_and_says_so(tmp_path: Path) -> None:
    found = market("gcp", "H100", 8, tmp_path, tmp_path / "cache")
    assert found is not None
    assert found.shipped
    assert found.as_of == datetime(2026, 11, 21, tzinfo=UTC)
    central = next(offer for offer in found.offers if offer.zone == "us-central1-a")
    assert central.spot_usd == Decimal("23.9408") + Decimal("2.88933")


def test_what_the_shipped_list_does_not_have_has_no_market(tmp_path: Path) -> None:
    assert market("gcp", "B200", 8, tmp_path, tmp_path / "cache") is None
    assert market("aws", "H100", 8, tmp_path, tmp_path / "cache") is None
    assert market("../gcp", "H100", 8, tmp_path, tmp_path / "cache") is None


def test_a_damaged_copy_is_made_again(places: tuple[Path, Path]) -> None:
    catalogs, cache = places
    first = market("gcp", "H100", 8, catalogs, cache)
    (cache / "prices-gcp.json").write_text('{"as_of": 1, "rows": [["x"', encoding="utf-8")
    assert market("gcp", "H100", 8, catalogs, cache) == first
