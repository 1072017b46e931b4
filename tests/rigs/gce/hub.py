"""A hub for a world: the strict stand-in of tests/weights with one gated model, `owner/mini`, on the bridge.

python -m tests.rigs.gce.hub FOLDER PORT TOKEN BYTES_PER_S
"""

import sys
from pathlib import Path

from tests.weights.hub_server import HubServer
from tests.weights.making import weights_folder


def main(folder: str, port: str, token: str, bytes_per_s: str) -> None:
    """Serve until killed; so slow that a seeding takes a while. A shard comes in one piece after its time, which must be less
    than the minute that a reader waits: many shards make it long, not a lower rate."""
    weights = weights_folder(Path(folder), shards=32)
    HubServer(
        weights, token=token, per_connection=float(bytes_per_s), address=("10.128.0.1", int(port))
    ).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
