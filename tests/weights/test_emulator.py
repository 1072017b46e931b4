"""Against a server that no one here wrote: PyPI's gcp-storage-emulator, as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimisession.weights.errors import BucketTaken
from kimisession.weights.gcs import GcsBucket, create_bucket
from kimisession.weights.hub import HubSource
from kimisession.weights.seal import Deleted, delete, read_seal, verify
from kimisession.weights.seed import seed
from tests.weights.gcs_emulator import gcs_emulator
from tests.weights.gcs_server import client_for
from tests.weights.hub_server import HubServer
from tests.weights.making import HASTY, PART_BYTES, same_files, weights_folder
from tests.weights.servers import serving

pytest.importorskip("google.cloud.storage")


@pytest.fixture
def store() -> Iterator[str]:
    with gcs_emulator() as url:
        yield url


def test_the_seeder_and_the_puller_pass(store: str, tmp_path: Path) -> None:
    weights = weights_folder(tmp_path / "weights")
    hub = HubServer(weights)
    bucket = GcsBucket(client_for(store), "weights", "kimi/")
    with serving(hub):
        source = HubSource("owner/mini", endpoint=hub.url)
        manifest = seed(source, bucket, model="mini", part_bytes=PART_BYTES, patience=HASTY)
        moved = dict(hub.seen.calls)
        again = seed(HubSource("owner/mini", endpoint=hub.url), bucket, model="mini", patience=HASTY)
        assert again == manifest == read_seal(bucket)
        assert hub.seen.calls.get("hub.body") == moved["hub.body"], "a sealed bucket moves no bytes"
    verify(bucket, manifest, deep=True)
    pulled = subprocess.run(
        [sys.executable, "-m", "kimisession.node.pull", "--from", "gs://weights/kimi", "--to", str(tmp_path / "to")],
        env={**os.environ, "STORAGE_EMULATOR_HOST": store},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert json.loads(pulled.stdout.splitlines()[-1])["done"]["manifest"] == manifest.digest
    assert same_files(weights, tmp_path / "to")
    assert delete(bucket, "weights/kimi") == Deleted(9, 0)
    assert list(bucket.list()) == []


def test_a_bucket_is_created_once_and_not_used_across_regions(store: str) -> None:
    client = client_for(store)
    labels = {"kimisession": "weights"}
    assert create_bucket(client, "near-the-gpus", location="us", labels=labels)  # the emulator knows no other place
    assert not create_bucket(client, "near-the-gpus", location="us", labels=labels)
    with pytest.raises(BucketTaken, match="is in us, the GPUs will be in europe-west4"):
        create_bucket(client, "near-the-gpus", location="europe-west4", labels=labels)
