"""What holds for every test: the network ends at loopback, and properties are searched alike on every machine."""

import os
import sys

import hypothesis
import pytest

#: The same examples everywhere, so that a red build is red for everybody; HYPOTHESIS_PROFILE=wide looks further.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True, max_examples=60, database=None)
hypothesis.settings.register_profile("wide", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that of those who share the tests none is left with a long file at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


_LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")


def _loopback_only(event: str, args: tuple[object, ...]) -> None:
    """An audit hook cannot be taken away again, by no library and no test."""
    if event == "socket.connect" and isinstance(address := args[1], tuple):
        host = str(address[0])
    elif event == "socket.getaddrinfo" and args[0]:
        host = args[0].decode() if isinstance(args[0], bytes) else str(args[0])
    else:
        return
    if not host.startswith(_LOOPBACK):
        raise RuntimeError(f"a test reached for {host}: sockets stay on loopback")


sys.addaudithook(_loopback_only)
