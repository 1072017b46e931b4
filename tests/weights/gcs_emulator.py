"""PyPI's gcp-storage-emulator, as it is, on a port of loopback."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

emulator = pytest.importorskip("gcp_storage_emulator.server")


@contextlib.contextmanager
def gcs_emulator() -> Iterator[str]:
    """Serve an empty project with one bucket, `weights`; gives the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="weights")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()
