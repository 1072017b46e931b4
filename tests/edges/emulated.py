"""A project on the emulated Compute Engine, in this process, as the real client library meets it over plain HTTP."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kimisession.core.launch import session_labels

if TYPE_CHECKING:
    from kimisession.cloud.compute import Compute

PROJECT = "kimi-rig"
ZONE = "us-central1-a"
ID = "kimi-1a2b3c4d"
NODE = f"{ID}-0f0f0f0f-head-ab12cd34-compute"


def needed() -> None:
    """Skip where the libraries of the `cloud` extra are not installed."""
    pytest.importorskip("google.cloud.compute_v1")
    pytest.importorskip("googleapiclient")


class Project:
    """The emulator, a client on it, and what tests do behind Google's back."""

    def __init__(self, folder: Path) -> None:
        from tests.rigs.gce.emulator.admin import Admin
        from tests.rigs.gce.emulator.driver import NullMachines
        from tests.rigs.gce.emulator.emulator import Emulator
        from tests.rigs.gce.emulator.server import serve
        from tests.rigs.gce.emulator.state import State

        self.state = State(folder / "project.json", PROJECT)
        self.machines = NullMachines()
        self.emulator = Emulator(self.state, self.machines)
        self.servers = serve(self.emulator, [("127.0.0.1", 0)])
        self.url = f"http://127.0.0.1:{self.servers.ports[0]}"
        self.token = self.emulator.token()
        self.admin = Admin(self.emulator)
        self.slept: list[float] = []
        self.compute = self.as_member("")

    def as_member(self, member: str, project: str = PROJECT) -> "Compute":
        """A client that acts as `user:...` or `serviceAccount:...`; as the project's owner with an empty text."""
        from google.oauth2 import credentials

        from kimisession.cloud.compute import Compute

        token = self.emulator.token(member) if member else self.token
        return Compute(project, credentials.Credentials(token), self.url, self.sleep)  # type: ignore[no-untyped-call]

    def sleep(self, seconds: float) -> None:
        """Nobody waits for a retry; an operation gets the moment that it needs."""
        self.slept.append(seconds)
        time.sleep(min(seconds, 0.02))

    def close(self) -> None:
        """Stop listening."""
        self.servers.close()
        self.emulator.close()

    def tell(self, what: str, **words: Any) -> Any:
        """The emulator's back door (tests/rigs/gce/emulator/admin.py)."""
        status, answer = self.admin.answer("POST", f"/admin/{what}", words)
        assert status == 200, answer
        return answer

    def call(self, verb: str, path: str, body: Mapping[str, Any] | None = None, wait: bool = True) -> dict[str, Any]:
        """Compute Engine's own API as somebody else's client uses it. Waits for the operation unless told not to."""
        target = f"/compute/v1/projects/{PROJECT}/{path}"
        raw = b"" if body is None else json.dumps(body).encode()
        reply = self.emulator.answer(verb, "compute.googleapis.com", target, f"Bearer {self.token}", raw)
        assert reply.status == 200, reply.body
        operation: dict[str, Any] = reply.body
        if wait and operation.get("kind") == "compute#operation":
            self.state.wait_until(
                lambda data: data["operations"][operation["name"]]["wire"]["status"] == "DONE", timeout_s=20
            )
        return operation

    def insert(self, name: str = NODE, labels: Mapping[str, str] | None = None, zone: str = ZONE) -> None:
        """A spot machine with eight GPUs, its boot disk named after it, as SkyPilot asks for one."""
        self.call("POST", f"zones/{zone}/instances", body_of(name, labels or {}, zone))

    def names(self) -> list[str]:
        """The machines that exist."""
        return sorted(key.rpartition("/")[2] for key in self.state.data["instances"])


def body_of(name: str, labels: Mapping[str, str], zone: str = ZONE) -> dict[str, Any]:
    """An instance as in the REST API."""
    return {
        "name": name,
        "machineType": f"zones/{zone}/machineTypes/a3-highgpu-8g",
        "labels": dict(labels),
        "disks": [
            {
                "boot": True,
                "autoDelete": True,
                "initializeParams": {
                    "sourceImage": "projects/debian-cloud/global/images/family/debian-12",
                    "diskSizeGb": "100",
                },
            }
        ],
        "networkInterfaces": [{"network": f"projects/{PROJECT}/global/networks/default"}],
        "scheduling": {
            "provisioningModel": "SPOT",
            "instanceTerminationAction": "DELETE",
            "automaticRestart": False,
            "onHostMaintenance": "TERMINATE",
        },
    }


def labels_of(deadline: datetime, session: str = ID, owner: str = "ann") -> dict[str, str]:
    """A session's labels."""
    return session_labels(session, session.rpartition("-")[0], owner, deadline)


@contextmanager
def project(folder: Path) -> Iterator[Project]:
    """One, and its sockets closed afterwards."""
    made = Project(folder)
    try:
        yield made
    finally:
        made.close()
