"""SkyPilot's catalog of the emulated Google: its machine types at its prices, in four zones.

    python -m tests.rigs.gce.world.catalog FOLDER

A file that is there by hand is never overwritten by SkyPilot. In its tables GPUs have rows and prices of their own, without
an instance type.
"""

import csv
import sys
from decimal import Decimal
from pathlib import Path

from tests.rigs.gce.emulator.catalog import MACHINE_TYPES, PRICES

ZONES = ("us-central1-a", "us-central1-c", "us-east4-b", "us-west1-a")

#: accelerator type -> SkyPilot's name, MiB of memory of one.
GPUS = {"nvidia-h100-80gb": ("H100", 81559), "nvidia-h200-141gb": ("H200", 143771)}

#: Of a machine with GPUs, what is counted as the machine's own price.
HOST_USD = Decimal(4)

VMS = "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice"
IMAGES = "Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId"


def vms() -> list[list[object]]:
    """The rows of gcp/vms.csv."""
    rows: list[list[object]] = []
    for zone in ZONES:
        region = zone.rpartition("-")[0]
        for name, kind in MACHINE_TYPES.items():
            price, spot = map(Decimal, PRICES[name])
            if kind.gpu in GPUS:
                gpu, memory = GPUS[kind.gpu]
                info = {
                    "Gpus": [{"Name": gpu, "MemoryInfo": {"SizeInMiB": memory}}],
                    "TotalGpuMemoryInMiB": memory * kind.gpus,
                }
                rows.append(["", "", "", gpu, kind.gpus, info, region, zone, price - HOST_USD, spot - HOST_USD])
                price = spot = HOST_USD
            elif kind.gpu:
                continue
            rows.append([name, kind.vcpus, kind.memory_mb / 1024, "", "", "", region, zone, price, spot])
    return rows


def write(path: Path, header: str, rows: list[list[object]]) -> None:
    """One table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])


def main(folder: Path) -> None:
    """Write all tables."""
    write(folder / "gcp" / "vms.csv", VMS, vms())
    images: list[list[object]] = [
        [f"skypilot:{tag}", "", "ubuntu", "22.04", f"projects/rig-images/global/images/{tag}", "20261101", ""]
        for tag in ("custom-gpu-ubuntu-2204-cuda13", "custom-cpu-ubuntu-2204")
    ]
    write(folder / "gcp" / "images.csv", IMAGES, images)
    quotas: list[list[object]] = [[g, f"NVIDIA_{g}_GPUS", f"PREEMPTIBLE_NVIDIA_{g}_GPUS"] for g, _ in GPUS.values()]
    header = "Accelerator,OnDemandInstanceCode,SpotInstanceCode"
    write(folder / "gcp" / "accelerator_quota_mapping.csv", header, quotas)
    named: list[list[object]] = [[gpu, "['GCP']"] for gpu, _ in GPUS.values()]
    write(folder / "common" / "accelerators.csv", "AcceleratorName,Clouds", named)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
