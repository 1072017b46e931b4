"""`python -m tests.rigs.gce.emulator --state FILE --listen HOST:PORT ... --admin HOST:PORT --metadata HOST:PORT`."""

import argparse
import importlib
import signal
import sys
import threading
from pathlib import Path

from .driver import Machines, NullMachines
from .emulator import Emulator
from .server import address_of, serve
from .state import State


def main() -> int:
    """Serve until SIGTERM or SIGINT. Prints `ready PORT...` (API ports, admin, metadata) when everything listens."""
    parser = argparse.ArgumentParser(prog="emulator", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the JSON file that the project lives in")
    parser.add_argument("--project", default="kimi-rig", help="id of the project, when the file is new")
    parser.add_argument(
        "--listen", action="append", required=True, metavar="HOST:PORT", help="Google's APIs; repeatable"
    )
    parser.add_argument("--admin", metavar="HOST:PORT")
    parser.add_argument("--metadata", metavar="HOST:PORT")
    parser.add_argument("--cert", type=Path, help="PEM, with the chain")
    parser.add_argument("--key", type=Path)
    parser.add_argument("--plain", action="store_true", help="HTTP without TLS")
    parser.add_argument("--machines", metavar="MODULE:FACTORY", help="what makes a Machines (driver.py); default: none")
    parser.add_argument("--discovery", type=Path, help="folder of discovery documents")
    options = parser.parse_args()
    if options.plain == bool(options.cert):
        parser.error("give --cert and --key, or --plain")
    emulator = Emulator(State(options.state, options.project), _machines(options.machines), options.discovery)
    servers = serve(
        emulator,
        [address_of(text) for text in options.listen],
        address_of(options.admin) if options.admin else None,
        address_of(options.metadata) if options.metadata else None,
        options.cert,
        options.key,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    print("ready", *servers.ports, flush=True)
    stop.wait()
    servers.close()
    emulator.close()
    return 0


def _machines(name: str | None) -> Machines:
    if not name:
        return NullMachines()
    module, _, factory = name.partition(":")
    machines: Machines = getattr(importlib.import_module(module), factory)()
    return machines


if __name__ == "__main__":
    sys.exit(main())
