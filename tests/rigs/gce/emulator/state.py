"""The emulated project: resources as they are on the wire, kept in one JSON file that is written after every change."""

import hashlib
import json
import secrets
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from .catalog import PRICES

Json = dict[str, Any]

OWNER = "user:owner@example.com"
NUMBER = "123456789012"
#: Google writes Compute Engine's times in Pacific time with an offset; a client that drops the offset is wrong by hours.
PACIFIC = timezone(timedelta(hours=-8))
_COMPUTE = "https://www.googleapis.com/compute/v1/"


def fresh(project: str) -> Json:
    """A project in which nothing was made yet: one owner, and the default service account as an editor."""
    return {
        "project": project,
        "instances": {},  # "zone/name" -> Instance
        "disks": {},  # "zone/name" -> Disk
        "addresses": {},  # "region/name" -> Address
        "firewalls": {},  # "name" -> Firewall
        "operations": {},  # name -> {"wire": Operation, "do": ..., "args": ..., "delay_s": ...}
        "inside": {},  # "zone/name" -> what the wire does not show: {"preempted": bool, "nat": "34.1.1.10"}
        "later": [],  # [{"at": seconds, "do": ..., "args": ...}]: what happens by itself
        "requests": {},  # requestId -> operation
        "service_accounts": {f"{NUMBER}-compute@developer.gserviceaccount.com": "Compute Engine default"},
        "bindings": {
            "roles/owner": [OWNER],
            "roles/editor": [f"serviceAccount:{NUMBER}-compute@developer.gserviceaccount.com"],
        },
        "roles": {},  # custom or changed roles -> permissions, over auth.ROLES
        "denied": [],  # [member, permission]
        "tokens": {},  # access token -> {"member", "scopes", "expires"}
        "quotas": {},  # "region/METRIC", or "METRIC" of the project -> limit
        "prices": PRICES,
        "settings": {"boot_s": 0.0, "stopping_s": 0.0, "notice_s": 30.0},
        "faults": [],
        "bill": [],
        "violations": [],
        "etag": 1,
    }


class State:
    """What the project consists of, under one lock. `clock` gives seconds since the epoch."""

    def __init__(self, file: Path, project: str = "kimi-rig", clock: Callable[[], float] = time.time) -> None:
        self.file, self.clock = file, clock
        self.changed = threading.Condition(threading.RLock())
        self.data: Json = json.loads(file.read_text(encoding="utf-8")) if file.exists() else fresh(project)

    @property
    def project(self) -> str:
        return str(self.data["project"])

    @contextmanager
    def reading(self) -> Iterator[Json]:
        """The project, still for as long as this is held."""
        with self.changed:
            yield self.data

    @contextmanager
    def changing(self) -> Iterator[Json]:
        """The project, to be changed: on disk, and those who wait told, when this ends. Half a change is kept too."""
        with self.changed:
            try:
                yield self.data
            finally:
                temporary = self.file.with_suffix(".new")
                temporary.write_text(json.dumps(self.data), encoding="utf-8")
                temporary.replace(self.file)
                self.changed.notify_all()

    def violation(self, what: str, **where: object) -> None:
        """Note what a client, or we, did wrong by Google's own documents."""
        with self.changing() as data:
            data["violations"].append({"at": utc(self.clock()), "what": what, **where})

    def wait_until(self, true: Callable[[Json], bool], timeout_s: float) -> bool:
        """Whether it became true in time. Called with the lock held, after every change."""
        with self.changed:
            return self.changed.wait_for(lambda: true(self.data), timeout_s)

    def stamp(self) -> str:
        """Now, as Compute Engine writes it."""
        return datetime.fromtimestamp(self.clock(), PACIFIC).isoformat(timespec="milliseconds")

    def link(self, path: str) -> str:
        """The URL of something of the project: `zones/z/instances/i`."""
        return f"{_COMPUTE}projects/{self.project}/{path}"

    def free_number(self, first: int = 10) -> int:
        """The last byte of both addresses of a new instance: 10.128.0.N inside, 34.1.1.N outside."""
        taken = {int(entry["number"]) for entry in self.data["inside"].values()}
        return next(number for number in range(first, 255) if number not in taken)


def utc(seconds: float) -> str:
    """RFC 3339 in UTC, to the microsecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def new_id() -> str:
    """An id as Google gives them: a uint64 in decimal, as text."""
    return str(secrets.randbelow(2**62) + 2**62)


def fingerprint(content: object) -> str:
    """What a client must send back to prove that it has seen this content: base64 of eight bytes."""
    return b64encode(hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()[:8]).decode()


def last(link: str) -> str:
    """The bare name at the end of a URL or a partial one."""
    return link.rsplit("/", 1)[-1]


def region_of(zone: str) -> str:
    """us-central1-a is in us-central1."""
    return zone.rpartition("-")[0]
