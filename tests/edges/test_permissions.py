"""The documented permissions against an emulated project that checks each call: with exactly these everything passes, and without
any one of them the failure names it. What real SkyPilot calls with them is in the rig (tests/rigs/gce/test_gce.py)."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from emulated import ID, NODE, PROJECT, ZONE, Project, body_of, labels_of, needed, project
from test_skypilot_task import SPEC

from kimisession.cli.guarding import run_permissions
from kimisession.cloud import guard
from kimisession.cloud.compute import Compute
from kimisession.cloud.google_errors import Denied
from kimisession.cloud.permissions import MACHINE, REAPER, USER
from kimisession.cloud.reaper import reap
from kimisession.cloud.sweep import Sweeper
from kimisession.core.guard import NAME
from kimisession.core.launch import LABEL_DEADLINE, deadline_label
from kimisession.core.lifecycle import Layer
from kimisession.engines.gcp import GcpPlace
from kimisession.errors import KimiError
from kimisession.node import deadline
from kimisession.node.wire import HttpWire, WireError

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)
ANN = "user:ann@example.com"
EMAIL = f"kimisession-reaper@{PROJECT}.iam.gserviceaccount.com"
BOX = f"kimisession-box@{PROJECT}.iam.gserviceaccount.com"
APART = timedelta(seconds=0.1)

Step = Callable[[Project, Compute], object]


def member(email: str) -> str:
    return f"serviceAccount:{email}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project in which everybody has exactly what the notes say."""
    needed()
    with project(tmp_path_factory.mktemp("project")) as made:
        for who, permissions in ((ANN, USER), (member(EMAIL), REAPER), (member(BOX), MACHINE)):
            role = f"projects/{PROJECT}/roles/{who.partition(':')[2].partition('@')[0].replace('-', '_')}"
            if who != ANN:
                made.tell("account", email=who.partition(":")[2])
            made.tell("role", role=role, permissions=list(permissions))
            made.tell("bind", member=who, role=role)
        yield made


@pytest.fixture
def there(shared: Project) -> Iterator[Project]:
    """The same, with nothing in it."""
    for kind in ("instances", "inside", "disks", "addresses", "operations", "faults", "denied", "requests", "bill"):
        shared.state.data[kind].clear()
    shared.emulator.calls.clear()
    yield shared
    assert shared.state.data["violations"] == []


# -- the user -------------------------------------------------------------------------------------------------------------


def place(cloud: Compute, folder: Path) -> GcpPlace:
    return GcpPlace(
        folder,
        lambda: cloud,
        guard=lambda cloud, now: Layer("reaper", True, "it looks"),
        desk=lambda session_id: None,
        apart=APART,
    )


def insert(there: Project, cloud: Compute, on_demand: bool = False) -> None:
    """As SkyPilot asks, with ann's login: labels, its key as metadata, the machine's account, an address."""
    body = body_of(NODE, labels_of(NOW + HOUR), ZONE)
    body |= {"metadata": {"items": [{"key": "ssh-keys", "value": "ann:ssh-ed25519 AAAA"}]}}
    body |= {"serviceAccounts": [{"email": BOX, "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}]}
    body["networkInterfaces"][0]["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    if on_demand:
        body["scheduling"] = {"onHostMaintenance": "TERMINATE"}
    cloud.create_machine(ZONE, body)


def gone(cloud: Compute) -> None:
    until = time.monotonic() + 10
    while cloud.everything().of(ID).everything:
        assert time.monotonic() < until
        time.sleep(0.02)


def checked(there: Project, cloud: Compute, folder: Path) -> None:
    placement = replace(SPEC.placement, on_demand_fallback=True, unguarded=True)
    place(cloud, folder).check(replace(SPEC, accelerators="H100:8", placement=placement))


def a_session(there: Project, cloud: Compute, folder: Path) -> None:
    """Look, forbid restarts, extend, end, prove; what `quota` asks."""
    here = place(cloud, folder)
    assert cloud.quotas()
    insert(there, cloud, on_demand=True)
    assert here.look(ID).present
    here.after_launch(ID)
    (machine,) = cloud.ours(ID).machines
    cloud.set_labels(machine, {LABEL_DEADLINE: deadline_label(NOW + 2 * HOUR)})
    here.end(ID, force=False)
    gone(cloud)
    until = time.monotonic() + 10
    while here.look(ID).present is not False:
        assert time.monotonic() < until
        time.sleep(0.05)


def a_sweep(there: Project, cloud: Compute, folder: Path) -> None:
    """What is left over: a disk, an address; and lists of one zone when that of all zones fails."""
    left_over(there)
    sweeper = Sweeper(cloud, sleep=there.sleep)
    _, failed = sweeper.delete_until_gone(5)
    for failure in failed:
        raise failure.error
    there.tell("faults", kind="unreachable", zone="europe-west4-b", **{"as": "error"})
    there.slept.clear()
    assert not sweeper.look().findings
    cloud.operations(ID, NOW - HOUR)


def a_reaper(there: Project, cloud: Compute, folder: Path) -> None:
    guard.enable(cloud, ZONE, EMAIL, "default", lambda _: None)
    guard.disable(cloud, lambda _: None)


WALKS = {"start": checked, "session": a_session, "sweep": a_sweep, "guard": a_reaper}


def left_over(there: Project) -> None:
    labels = labels_of(NOW - HOUR)
    there.call("POST", f"zones/{ZONE}/disks", {"name": "data", "sizeGb": "10", "labels": labels})
    address = {"name": "front", "labels": labels}
    there.call("POST", f"regions/{ZONE.rpartition('-')[0]}/addresses", address)
    long_ago = {"creationTimestamp": (NOW - HOUR).isoformat()}
    for things in (there.state.data["disks"], there.state.data["addresses"]):
        for thing in things.values():
            thing.update(long_ago)


def refused(there: Project) -> list[str]:
    return [name for name, _, status in there.emulator.calls if status in (401, 403)]


@pytest.mark.parametrize("name", WALKS)
def test_a_user_with_exactly_the_documented_permissions_is_refused_nothing(
    there: Project, tmp_path: Path, name: str
) -> None:
    WALKS[name](there, there.as_member(ANN), tmp_path)
    assert refused(there) == []


@pytest.mark.parametrize("permission", USER)
def test_start_and_guard_permissions_name_the_one_that_a_user_lacks_and_what_grants_it(
    there: Project, tmp_path: Path, permission: str
) -> None:
    there.tell("deny", member=ANN, permission=permission)
    for ask in (lambda cloud: checked(there, cloud, tmp_path), lambda cloud: run_permissions("", False, cloud)):
        if ask is not None:
            with pytest.raises(KimiError, match=rf"this account lacks {permission} in project {PROJECT}") as caught:
                ask(there.as_member(ANN))
            assert caught.value.exit_code == 1
            assert f"--add-permissions={permission})" in caught.value.hint
    assert there.names() == []


#: What each walk's own calls need, by the calls alone: a permission may be taken away after `start` has looked.
CALLS = {
    "session": (
        "compute.projects.get",
        "compute.regions.list",
        "compute.instances.create",
        "compute.instances.get",
        "compute.instances.list",
        "compute.instances.setLabels",
        "compute.instances.setMetadata",
        "compute.instances.setServiceAccount",
        "compute.instances.setScheduling",
        "compute.instances.delete",
        "compute.disks.create",
        "compute.subnetworks.use",
        "compute.subnetworks.useExternalIp",
        "compute.zoneOperations.get",
        "compute.globalOperations.list",
        "iam.serviceAccounts.actAs",
    ),
    "sweep": (
        "compute.instances.list",
        "compute.disks.list",
        "compute.disks.delete",
        "compute.addresses.list",
        "compute.addresses.delete",
        "compute.zones.list",
        "compute.regions.list",
        "compute.zoneOperations.list",
    ),
    "guard": (
        "compute.instances.create",
        "compute.instances.delete",
        "compute.instances.setMetadata",
        "compute.instances.setServiceAccount",
        "compute.disks.create",
        "compute.subnetworks.use",
        "compute.subnetworks.useExternalIp",
        "iam.serviceAccounts.actAs",
    ),
}


@pytest.mark.parametrize(("name", "permission"), [(name, one) for name, ones in CALLS.items() for one in ones])
def test_a_call_that_is_refused_names_the_permission_and_what_grants_it(
    there: Project, tmp_path: Path, name: str, permission: str
) -> None:
    there.tell("deny", member=ANN, permission=permission)
    with pytest.raises(KimiError) as caught:
        WALKS[name](there, there.as_member(ANN), tmp_path)
    assert permission in caught.value.message
    assert permission in caught.value.hint
    if isinstance(caught.value, Denied):
        assert caught.value.exit_code == 1


# -- the reaper -----------------------------------------------------------------------------------------------------------


def a_run(there: Project, one_by_one: bool) -> tuple[bool, list[str]]:
    """A run over what a reaper may meet, as its machine does it; what it said. `one_by_one`: then another, in which no list
    of all zones is answered."""
    guard.enable(there.compute, ZONE, EMAIL, "default", lambda _: None)
    there.insert(labels=labels_of(NOW - HOUR))
    left_over(there)
    unlabelled = f"gone-1a2b3c4d{NODE.removeprefix(ID)}"
    there.call("POST", f"zones/{ZONE}/disks", {"name": unlabelled, "sizeGb": "10"})
    said: list[str] = []
    sweeper = Sweeper(there.as_member(member(EMAIL)), sleep=there.sleep)
    complete = False
    for fault in ({}, {"kind": "unreachable", "zone": "europe-west4-b", "as": "error"})[: 2 if one_by_one else 1]:
        if fault:
            there.tell("faults", **fault)
        try:
            complete = reap(sweeper, ZONE, NAME, time.time, said.append)
        except KimiError as error:
            said.append(error.message)
            complete = False
        if not complete:
            break
    return complete, said


def test_the_reaper_with_exactly_the_documented_permissions_is_refused_nothing(there: Project) -> None:
    complete, said = a_run(there, one_by_one=True)
    assert complete, said
    assert refused(there) == []
    assert set(there.names()) == {NAME}


#: Used where a list of all zones fails.
ONE_BY_ONE = ("compute.zones.list", "compute.regions.list", "compute.zoneOperations.list")


@pytest.mark.parametrize("permission", REAPER)
def test_a_reaper_that_lacks_one_says_which(there: Project, permission: str) -> None:
    there.tell("deny", member=member(EMAIL), permission=permission)
    _, said = a_run(there, one_by_one=permission in ONE_BY_ONE)
    assert any(permission in line for line in said), said


# -- a session's machine --------------------------------------------------------------------------------------------------


def an_end(there: Project, tmp_path: Path) -> str:
    """The machine deletes itself with its own account; what its timer said."""
    (tmp_path / "poweroff").write_text("#!/bin/sh\n", encoding="ascii")
    (tmp_path / "poweroff").chmod(0o755)
    insert(there, there.as_member(ANN))
    port = there.servers.metadata(("127.0.0.1", 0), lambda address: next(iter(there.state.data["instances"]), None))
    words = [sys.executable, "-I", "-S", "-B", deadline.__file__, "--compute", there.url, "--grace-s", "0"]
    words += ["--deadline-utc", "1", "--longest-uptime-s", "1e9", "--try-s", "0.5", "--pause-s", "0.05", "--off-s", "0"]
    env = {"GCE_METADATA_HOST": f"127.0.0.1:{port}", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words += ["--seen", str(tmp_path / "seen"), "--because", "10"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout


def test_a_machine_with_exactly_the_documented_permissions_deletes_itself(there: Project, tmp_path: Path) -> None:
    an_end(there, tmp_path)
    gone(there.compute)
    listed = there.as_member(member(BOX))
    assert listed.ours(ID).machines == (), "as SkyPilot's autodown looks for its cluster"
    assert refused(there) == []


@pytest.mark.parametrize("permission", ["compute.instances.delete", "compute.zoneOperations.get"])
def test_a_machine_that_lacks_one_says_which(there: Project, tmp_path: Path, permission: str) -> None:
    there.tell("settings", stopping_s=0.3)
    there.tell("deny", member=member(BOX), permission=permission)
    said = an_end(there, tmp_path)
    there.tell("settings", stopping_s=0)
    assert f"Required '{permission}' permission" in said


class _Refusing(BaseHTTPRequestHandler):
    """A bucket that this machine's account may not read."""

    def do_GET(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_a_machine_that_may_not_read_the_weights_says_which_and_what_grants_it() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        with pytest.raises(WireError, match=r"storage\.objects\.get") as caught:
            HttpWire(f"http://127.0.0.1:{server.server_port}", "", "weights").read("manifest.json")
    finally:
        server.shutdown()
        server.server_close()
    assert "roles/storage.objectViewer" in caught.value.message
