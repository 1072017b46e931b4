"""A seeding as SkyPilot is asked for it, what its machine is sent, and its price."""

import os
import subprocess
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from good_values import PROFILE, choices

from kimisession.cloud.cpu_prices import cpu_offer
from kimisession.core.launch import LaunchSpec
from kimisession.core.quote import make_quote
from kimisession.core.seeding import Seeding, seed_spec, seeding_profile
from kimisession.engines.payload import lay_out
from kimisession.engines.task import run_script, task_config

NOW = datetime(2026, 11, 21, 1, 0, tzinfo=UTC)
SEEDING = Seeding("owner/model", "owner/model", "0" * 40, "gs://mine/kimi", 10**9, gated=True)


def spec() -> LaunchSpec:
    profile = seeding_profile(PROFILE, SEEDING, Decimal("0.19"), "a catalog", False)
    chosen = choices(name="seed-good", infra="gcp", count=16, bucket_url=SEEDING.bucket_url)
    return seed_spec(make_quote(profile, chosen, NOW), "seed-good-0123abcd", "me", SEEDING, "us-central1")


def test_a_small_spot_machine_without_gpus_is_asked_for_where_the_bucket_is() -> None:
    assert task_config(spec(), "gcp", "/payload", NOW)["resources"] == {
        "infra": "gcp/us-central1",
        "cpus": "16+",
        "memory": "32+",
        "disk_size": 50,
        "use_spot": True,
        "labels": dict(spec().labels),
    }


def test_the_seeding_machine_has_the_layers_of_a_machine_with_gpus() -> None:
    config = task_config(spec(), "gcp", "/payload", NOW)
    script = str(config["run"])
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.index("arm.sh") < script.index("kimisession.node.job"), "its own end comes first"
    assert f"--deadline {int(spec().deadline.timestamp()) + 120}" in script
    assert "timeout -k 30" in script
    assert "kimisession-deadline" in config["resources"]["labels"]
    assert "setup" not in config
    assert "envs" not in config


def test_the_token_is_a_file_of_its_users_alone_and_goes_with_the_session(tmp_path: Path) -> None:
    lay_out(tmp_path, spec(), {"api_key": "k", "hf_token": "hf_hidden"})
    assert (tmp_path / "hf_token").stat().st_mode & 0o777 == 0o600
    holding = [p.name for p in tmp_path.rglob("*") if p.is_file() and "hf_hidden" in p.read_text(errors="replace")]
    assert holding == ["hf_token"]
    assert "hf_hidden" not in str(task_config(spec(), "gcp", "/payload", NOW))
    assert '"$machine/hf_token"' in run_script(spec(), "gcp")


def test_the_whole_package_travels_and_runs_from_where_it_was_laid(tmp_path: Path) -> None:
    lay_out(tmp_path, spec(), {})
    assert os.access(tmp_path / "scripts" / "hooks" / "seeder.sh", os.X_OK)
    assert (tmp_path / "scripts" / "deadline" / "arm.sh").exists()
    lib = tmp_path / "lib"
    assert sum(p.stat().st_size for p in lib.rglob("*") if p.is_file()) < 5_000_000
    assert not list(lib.rglob("__pycache__"))


CATALOG = """\
InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice
n2-standard-8,8,32,,,,us-central1,us-central1-a,0.38,0.09
n2-standard-16,16,64,,,,us-central1,us-central1-a,0.77,0.18
n2-standard-16,16,64,,,,us-central1,us-central1-b,0.77,0.21
n4-highcpu-16,16,32,,,,us-central1,us-central1-a,0.61,0.24
n4-highcpu-16,16,32,,,,us-central1,us-central1-b,0.61,
n4-highcpu-16,16,32,,,,us-east5,us-east5-a,0.61,0.11
e2-standard-16,16,64,,,,us-central1,us-central1-a,0.10,0.05
,,,H100,8,,us-central1,us-central1-a,80,20
"""


@pytest.fixture
def catalogs(tmp_path: Path) -> Path:
    (tmp_path / "v8" / "gcp").mkdir(parents=True)
    (tmp_path / "v8" / "gcp" / "vms.csv").write_text(CATALOG)
    return tmp_path


def test_the_price_is_that_of_the_type_which_skypilot_takes_in_the_dearest_zone(catalogs: Path) -> None:
    offer = cpu_offer(16, 32, "us-central1", catalogs)
    assert offer is not None
    assert (offer.instance_type, offer.usd_per_hour) == ("n4-highcpu-16", Decimal("0.24"))
    assert "us-central1" in offer.ground


def test_without_a_catalog_or_a_region_in_it_there_is_no_price(catalogs: Path, tmp_path: Path) -> None:
    assert cpu_offer(16, 32, "mars-north1", catalogs) is None
    assert cpu_offer(16, 32, "us-central1", tmp_path / "nowhere") is None
