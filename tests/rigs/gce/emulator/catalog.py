"""What the emulated Google offers: zones, machine types, GPUs, and what they cost."""

from dataclasses import dataclass

ZONES = (
    "asia-southeast1-b", "asia-southeast1-c", "europe-west4-a", "europe-west4-b", "europe-west4-c",
    "us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f", "us-east4-a", "us-east4-b", "us-east4-c",
    "us-east5-a", "us-east5-b", "us-west1-a", "us-west1-b", "us-west4-a",
)  # fmt: skip
REGIONS = tuple(sorted({zone.rpartition("-")[0] for zone in ZONES}))

#: accelerator type -> its quota metric; spot machines count against PREEMPTIBLE_ that.
GPU_METRICS = {
    "nvidia-tesla-a100": "NVIDIA_A100_GPUS",
    "nvidia-a100-80gb": "NVIDIA_A100_80GB_GPUS",
    "nvidia-h100-80gb": "NVIDIA_H100_GPUS",
    "nvidia-h100-mega-80gb": "NVIDIA_H100_MEGA_GPUS",
    "nvidia-h200-141gb": "NVIDIA_H200_GPUS",
    "nvidia-b200": "NVIDIA_B200_GPUS",
    "nvidia-rtx-pro-6000": "NVIDIA_RTX_PRO_6000_GPUS",
    "nvidia-l4": "NVIDIA_L4_GPUS",
}
DEFAULT_LIMIT = 64.0
ALL_REGIONS = "GPUS_ALL_REGIONS"


@dataclass(frozen=True)
class MachineType:
    """Shape of a machine. GPUs that come with the type count without being asked for."""

    vcpus: int
    memory_mb: int
    gpu: str = ""
    gpus: int = 0


MACHINE_TYPES = {
    "a2-ultragpu-8g": MachineType(96, 1_392_640, "nvidia-a100-80gb", 8),
    "a3-highgpu-8g": MachineType(208, 1_916_928, "nvidia-h100-80gb", 8),
    "a3-megagpu-8g": MachineType(208, 1_916_928, "nvidia-h100-mega-80gb", 8),
    "a3-ultragpu-8g": MachineType(224, 3_022_848, "nvidia-h200-141gb", 8),
    "a4-highgpu-8g": MachineType(224, 4_063_232, "nvidia-b200", 8),
    "g4-standard-384": MachineType(384, 1_474_560, "nvidia-rtx-pro-6000", 8),
    "g2-standard-4": MachineType(4, 16_384, "nvidia-l4", 1),
    "e2-micro": MachineType(2, 1_024),
    "e2-small": MachineType(2, 2_048),
    "e2-medium": MachineType(2, 4_096),
    "e2-standard-2": MachineType(2, 8_192),
    "e2-standard-4": MachineType(4, 16_384),
    "n1-standard-8": MachineType(8, 30_720),
    "n2-standard-4": MachineType(4, 16_384),
    "n2-standard-8": MachineType(8, 32_768),
    "n2-standard-16": MachineType(16, 65_536),
    "c3-standard-44": MachineType(44, 180_224),
}

#: Dollars per hour of a whole machine with its GPUs, on demand and spot; of a GB of disk; of an external address.
#: Round figures near the public lists: a rig that compares receipts with the bill states its own (POST /admin/prices).
PRICES: dict[str, list[str]] = {
    "a2-ultragpu-8g": ["40.00", "16.00"],
    "a3-highgpu-8g": ["88.00", "24.00"],
    "a3-megagpu-8g": ["92.00", "26.00"],
    "a3-ultragpu-8g": ["84.00", "28.00"],
    "a4-highgpu-8g": ["128.00", "48.00"],
    "g4-standard-384": ["36.00", "14.40"],
    "g2-standard-4": ["0.72", "0.28"],
    "e2-micro": ["0.0084", "0.0028"],
    "e2-small": ["0.0168", "0.0056"],
    "e2-medium": ["0.0336", "0.0112"],
    "e2-standard-2": ["0.0672", "0.0224"],
    "e2-standard-4": ["0.1344", "0.0448"],
    "n1-standard-8": ["0.38", "0.08"],
    "n2-standard-4": ["0.1944", "0.0468"],
    "n2-standard-8": ["0.3888", "0.0936"],
    "n2-standard-16": ["0.7776", "0.1872"],
    "c3-standard-44": ["2.1648", "0.6494"],
    # Google's for us-central1, $0.04, 0.10 and 0.17 a month of 730 hours, to sixteen digits
    "pd-standard": ["0.00005479452054794521", "0.00005479452054794521"],
    "pd-balanced": ["0.0001369863013698630", "0.0001369863013698630"],
    "pd-ssd": ["0.0002328767123287671", "0.0002328767123287671"],
    "hyperdisk-balanced": ["0.00011", "0.00011"],
    "hyperdisk-ml": ["0.00011", "0.00011"],
    "external-ip": ["0.005", "0.0025"],
}
