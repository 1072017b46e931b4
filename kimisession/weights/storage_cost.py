"""What it costs to keep weights in Cloud Storage."""

from __future__ import annotations

from decimal import Decimal

USD_PER_GIB_MONTH = {
    "us-central1": Decimal("0.020"),
    "us-east1": Decimal("0.020"),
    "us-east4": Decimal("0.023"),
    "us-east5": Decimal("0.020"),
    "us-west1": Decimal("0.020"),
    "us-west2": Decimal("0.023"),
    "us-west3": Decimal("0.023"),
    "us-west4": Decimal("0.023"),
    "us-south1": Decimal("0.020"),
    "northamerica-northeast1": Decimal("0.023"),
    "northamerica-northeast2": Decimal("0.023"),
    "europe-west1": Decimal("0.020"),
    "europe-west2": Decimal("0.023"),
    "europe-west3": Decimal("0.023"),
    "europe-north1": Decimal("0.020"),
}
"""Standard storage, from a public copy of https://cloud.google.com/storage/pricing read on 2026-11-21; check before
relying on it. The page says GB and means GiB (2^30 bytes)."""


def usd_per_month(weights_bytes: int, location: str) -> Decimal | None:
    """Dollars a month for Standard storage in a region; None where the table has no price (then say so)."""
    price = USD_PER_GIB_MONTH.get(location.lower())
    return None if price is None else (Decimal(weights_bytes) / 2**30 * price).quantize(Decimal("0.01"))
