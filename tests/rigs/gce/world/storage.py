"""storage.googleapis.com of the world: the strict stand-in of tests/weights with one bucket, gs://weights, behind TLS.

python -m tests.rigs.gce.world.storage FOLDER CERT KEY
"""

import ssl
import sys
from pathlib import Path

from tests.weights.gcs_server import GcsServer


def main(folder: str, cert: str, key: str) -> None:
    """Serve on an address of its own, so that it and the emulator of Compute Engine can both have port 443."""
    server = GcsServer(Path(folder), address=("10.128.0.2", 443))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.url = "https://storage.googleapis.com"
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
