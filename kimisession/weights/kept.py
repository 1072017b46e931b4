"""What a bucket in Cloud Storage holds and costs a month: everything in it, not only what a seal names.

Billed as well are noncurrent generations and soft-deleted objects, which no ordinary list shows. Parts of unfinished multipart
uploads are billed too and no list of the JSON API has them: they are named, not priced (kimisession itself uploads resumably,
which is no multipart upload).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from kimisession.weights.gcs import GcsBucket
from kimisession.weights.storage_cost import usd_per_month

#: What is in nobody's list.
NOT_LISTED = "parts of unfinished multipart uploads"


@dataclass(frozen=True)
class Kept:
    """Bytes of a whole bucket. `usd_per_month` is None where no price is known for its location or its storage class."""

    bucket: str
    location: str
    live_bytes: int
    old_bytes: int  # noncurrent generations
    deleted_bytes: int  # soft-deleted, billed until their retention ends
    usd_per_month: Decimal | None
    why: str = ""  # why it has no price

    @property
    def total_bytes(self) -> int:
        """All that is billed and listed."""
        return self.live_bytes + self.old_bytes + self.deleted_bytes


def kept(url: str, client: Any = None) -> Kept:
    """Ask for all of it. `client` is a google.cloud.storage.Client, by default one with this machine's own credentials.
    Raises WeightsError."""
    name = url.removeprefix("gs://").partition("/")[0]
    bucket = GcsBucket.at(url) if client is None else GcsBucket(client, name)
    location, every, deleted = bucket.billed()
    if not location:
        return Kept(f"gs://{name}", "", 0, 0, 0, Decimal(0), "there is no such bucket any more")
    live_bytes = _bytes(blob for blob in every if blob.time_deleted is None)
    old_bytes, deleted_bytes = _bytes(every) - live_bytes, _bytes(deleted)
    usd, why = usd_per_month(live_bytes + old_bytes + deleted_bytes, location), ""
    if classes := {str(blob.storage_class or "STANDARD") for blob in (*every, *deleted)} - {"STANDARD"}:
        usd, why = None, f"no price is known here for storage class {', '.join(sorted(classes))}"
    elif usd is None:
        why = f"no storage price is known for {location}"
    return Kept(f"gs://{name}", location, live_bytes, old_bytes, deleted_bytes, usd, why)


def _bytes(blobs: Iterable[Any]) -> int:
    return sum(int(blob.size or 0) for blob in blobs)
