"""The reaper: the sweep that runs in the project itself, its machine, its heartbeat, and who believes it."""

import base64
import io
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from emulated import ID, NODE, PROJECT, ZONE, Project, labels_of, needed, project

from kimisession.cloud import guard
from kimisession.cloud.permissions import REAPER, reaper_account_commands
from kimisession.cloud.reaper import reap
from kimisession.cloud.sweep import Sweeper
from kimisession.core.guard import DELETE, LABEL_BEAT, LABEL_CODE, LABEL_DID, LABEL_GUARD, NAME, SILENT, guard_layer
from kimisession.core.inventory import Machine
from kimisession.errors import UsageMistake

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)
EMAIL = f"kimisession-reaper@{PROJECT}.iam.gserviceaccount.com"
PAST = labels_of(NOW - HOUR)


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Project]:
    """A project with the reaper's account, its role exactly as small as we say."""
    needed()
    with project(tmp_path) as made:
        made.tell("account", email=EMAIL)
        made.tell("role", role=f"projects/{PROJECT}/roles/kimisession_reaper", permissions=list(REAPER))
        made.tell("bind", member=f"serviceAccount:{EMAIL}", role=f"projects/{PROJECT}/roles/kimisession_reaper")
        yield made
        assert made.state.data["violations"] == []


def enable(there: Project) -> Machine:
    return guard.enable(there.compute, ZONE, "", "default", lambda _: None)


def run(there: Project, said: list[str] | None = None) -> bool:
    """One run, with the reaper's own account and nothing more."""
    cloud = there.as_member(f"serviceAccount:{EMAIL}")
    return reap(Sweeper(cloud, sleep=there.sleep), ZONE, NAME, time.time, (said if said is not None else []).append)


# -- one run --------------------------------------------------------------------------------------------------------------


def test_it_deletes_what_is_past_its_deadline_whoever_began_it_and_nothing_else(there: Project) -> None:
    enable(there)
    there.insert(labels=PAST)
    there.insert("bobs", labels_of(NOW - HOUR, "b-1a2b3c4d", "bob"), "europe-west4-b")
    live = f"live-1a2b3c4d{NODE.removeprefix(ID)}"
    there.insert(live, labels_of(NOW + HOUR, "live-1a2b3c4d"))
    there.insert(f"x{NODE}")
    assert run(there)
    assert there.names() == sorted([NAME, live, f"x{NODE}"])


def test_its_permissions_are_enough_and_not_one_too_many(there: Project) -> None:
    enable(there)
    # For what is left over, and for lists of one zone when that of all zones fails: not used in every run.
    used = {"compute.disks.delete", "compute.addresses.delete", "compute.zones.list", "compute.regions.list"}
    used |= {"compute.globalOperations.list", "compute.zoneOperations.list"}
    for permission in sorted(set(REAPER) - used):
        there.insert(labels=PAST)
        there.tell("deny", member=f"serviceAccount:{EMAIL}", permission=permission)
        try:
            complete = run(there)
        except Exception:
            complete = False
        there.tell("allow", member=f"serviceAccount:{EMAIL}", permission=permission)
        assert not complete, f"{permission} is not needed"
        assert run(there)
        there.compute.machine(ZONE, NAME)
        there.call("POST", f"zones/{ZONE}/instances/{NAME}/setLabels", relabelled(there))


def relabelled(there: Project) -> dict[str, object]:
    """The reaper's labels without its heartbeat."""
    machine = there.compute.machine(ZONE, NAME)
    assert machine is not None
    labels = {key: value for key, value in machine.labels.items() if key not in (LABEL_BEAT, LABEL_DID)}
    return {"labels": labels, "labelFingerprint": machine.label_fingerprint}


def test_it_never_deletes_itself(there: Project) -> None:
    machine = enable(there)
    there.compute.set_labels(machine, PAST)
    assert run(there)
    assert there.names() == [NAME]


def test_its_heartbeat_follows_a_complete_list(there: Project) -> None:
    enable(there)
    there.insert(labels=PAST)
    before = int(time.time())
    assert run(there)
    machine = there.compute.machine(ZONE, NAME)
    assert machine is not None
    assert int(machine.labels[LABEL_BEAT]) >= before
    assert machine.labels[LABEL_DID] == "1-deleted-0-left"
    assert machine.labels[LABEL_GUARD] == "reaper"


@pytest.mark.parametrize("as_", ["warning", "error"])
def test_without_every_zone_there_is_no_heartbeat_and_the_others_are_swept(there: Project, as_: str) -> None:
    enable(there)
    there.insert(labels=PAST)
    there.tell("faults", kind="unreachable", zone="us-east4-a", **{"as": as_})
    there.tell("faults", kind="http_error", status=503, method="compute.*.list", zone="us-east4-a")
    said: list[str] = []
    assert not run(there, said)
    assert there.names() == [NAME]
    assert "us-east4-a did not answer: no heartbeat" in said
    machine = there.compute.machine(ZONE, NAME)
    assert machine is not None
    assert LABEL_BEAT not in machine.labels


def test_one_that_may_not_delete_has_no_heartbeat(there: Project) -> None:
    enable(there)
    there.tell("deny", member=f"serviceAccount:{EMAIL}", permission=DELETE)
    said: list[str] = []
    assert not run(there, said)
    assert f"lacks {DELETE}" in said[-1]


def test_a_deletion_that_fails_does_not_keep_the_others_and_is_tried_again(there: Project) -> None:
    enable(there)
    there.insert(labels=PAST)
    there.insert("bobs", labels_of(NOW - HOUR, "b-1a2b3c4d", "bob"))
    there.tell("faults", kind="http_error", status=400, method="compute.instances.delete", name="bobs", times=3)
    assert run(there)
    assert there.names() == [NAME]


def test_what_says_done_and_stays_is_asked_again(there: Project) -> None:
    enable(there)
    there.insert(labels=PAST)
    there.tell("faults", kind="delete_ignored", times=2)
    assert run(there)
    assert there.names() == [NAME]


def test_a_stopped_machine_and_a_left_over_disk_go(there: Project) -> None:
    enable(there)
    there.insert(labels=labels_of(NOW + HOUR))
    there.call("POST", f"zones/{ZONE}/instances/{NODE}/stop")
    there.call("POST", f"zones/{ZONE}/disks", {"name": "data", "sizeGb": "10", "labels": PAST})
    long_ago = (NOW - HOUR).isoformat()
    there.state.data["instances"][f"{ZONE}/{NODE}"]["lastStopTimestamp"] = long_ago
    there.state.data["disks"][f"{ZONE}/data"]["creationTimestamp"] = long_ago
    assert run(there)
    assert there.names() == [NAME]
    assert {key.rpartition("/")[2] for key in there.state.data["disks"]} == {NAME}


@pytest.mark.parametrize("marked", [True, False])
def test_a_boot_disk_without_labels_goes_when_one_of_ours_deleted_its_machine_and_stays_otherwise(
    there: Project, marked: bool
) -> None:
    enable(there)
    there.insert(labels=PAST)
    there.call("POST", f"zones/{ZONE}/instances/{NODE}/setDiskAutoDelete?autoDelete=false&deviceName={device(there)}")
    if marked:
        assert run(there)
    else:
        there.call("DELETE", f"zones/{ZONE}/instances/{NODE}")
    assert there.names() == [NAME]
    decoy = f"x{NODE}"
    there.call("POST", f"zones/{ZONE}/disks", {"name": decoy, "sizeGb": "10"})
    past = {"creationTimestamp": (NOW - HOUR).isoformat()}
    for key in (NODE, decoy):
        there.state.data["disks"][f"{ZONE}/{key}"] |= past
    for entry in there.state.data["operations"].values():
        entry["wire"] |= {"endTime": (NOW - HOUR / 2).isoformat()}
    said: list[str] = []
    assert run(there, said)
    left = {key.rpartition("/")[2] for key in there.state.data["disks"]}
    assert left == {NAME, decoy, *([] if marked else [NODE])}
    assert any(f"disk {NODE}:" in line and "look before you delete it" in line for line in said) is not marked


def device(there: Project) -> str:
    """By what name the guest knows its boot disk."""
    name: str = there.state.data["instances"][f"{ZONE}/{NODE}"]["disks"][0]["deviceName"]
    return name


# -- its machine ----------------------------------------------------------------------------------------------------------


def test_enabling_twice_makes_one(there: Project) -> None:
    first, second = enable(there), guard.enable(there.compute, "us-west1-a", "", "default", lambda _: None)
    assert (first.zone, first.name) == (second.zone, second.name)
    assert there.names() == [NAME]
    made = there.state.data["instances"][f"{ZONE}/{NAME}"]
    assert made["scheduling"]["automaticRestart"] is True
    assert made["scheduling"]["provisioningModel"] == "STANDARD"
    assert made["serviceAccounts"][0]["email"] == EMAIL


def test_one_with_other_code_is_replaced(there: Project) -> None:
    machine = enable(there)
    there.compute.set_labels(machine, {LABEL_CODE: "older"})
    said: list[str] = []
    assert guard.enable(there.compute, ZONE, "", "default", said.append).labels[LABEL_CODE] == guard.code_version()
    assert any("another version" in line for line in said)
    assert there.names() == [NAME]


def test_disabling_deletes_it_and_may_be_repeated(there: Project) -> None:
    enable(there)
    assert guard.disable(there.compute, lambda _: None) == 1
    assert guard.disable(there.compute, lambda _: None) == 0
    assert there.names() == []


def test_an_account_that_does_not_exist_says_how_to_make_it(there: Project) -> None:
    with pytest.raises(UsageMistake) as caught:
        guard.enable(there.compute, ZONE, "nobody@elsewhere.iam.gserviceaccount.com", "default", lambda _: None)
    for command in reaper_account_commands(PROJECT):
        assert command in caught.value.hint
    assert there.names() == []


# -- who believes it --------------------------------------------------------------------------------------------------------


def seen(beat: timedelta | None = None, **changes: object) -> Machine:
    labels = {LABEL_GUARD: "reaper", LABEL_CODE: "c"}
    if beat is not None:
        labels[LABEL_BEAT] = str(int((NOW - beat).timestamp()))
    words: dict[str, object] = {"name": NAME, "zone": ZONE, "began": NOW - HOUR, "labels": labels, **changes}
    return Machine(**words)  # type: ignore[arg-type]


SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("machines", "armed", "words"),
    [
        ((), False, "guard enable"),
        ((seen(),), False, "has not looked yet"),
        ((seen(timedelta(seconds=30)),), True, "looked at all zones 3"),
        ((seen(SILENT - 2 * SECOND),), True, "ago"),
        ((seen(SILENT + 2 * SECOND),), False, "not alive any more"),
        ((seen(-SILENT - 2 * SECOND),), False, "not alive any more"),
        ((seen(SECOND, status="TERMINATED"),), False, "is TERMINATED"),
        ((seen(HOUR), seen(SECOND)), True, "1 s ago"),
        ((seen(SECOND, labels={LABEL_GUARD: "reaper", LABEL_BEAT: "soon"}),), False, "not looked"),
    ],
)
def test_a_reaper_is_counted_on_only_while_its_heart_beats(
    machines: tuple[Machine, ...], armed: bool, words: str
) -> None:
    layer = guard_layer(machines, PROJECT, NOW, "c")
    assert (layer.name, layer.armed) == ("reaper", armed)
    assert words in layer.evidence


def test_start_is_told_of_a_reaper_that_looked(there: Project) -> None:
    assert not guard.guard_state(there.compute, NOW).armed
    enable(there)
    assert not guard.guard_state(there.compute, datetime.now(UTC)).armed
    assert run(there)
    assert guard.guard_state(there.compute, datetime.now(UTC)).armed


# -- the code that travels ----------------------------------------------------------------------------------------------------


def test_the_code_is_a_small_zip_and_the_same_code_makes_the_same_one() -> None:
    code = guard.code_zip()
    assert guard.code_zip() == code
    assert len(base64.b64encode(code)) < guard.LARGEST_VALUE
    names = zipfile.ZipFile(io.BytesIO(code)).namelist()
    assert "kimisession/cloud/reaper.py" in names
    assert not [name for name in names if "/cli/" in name or "/engines/" in name]


def test_the_zip_runs_alone(tmp_path: Path) -> None:
    (tmp_path / "code.zip").write_bytes(guard.code_zip())
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-m", "kimisession.cloud.reaper", "--help"],
        cwd=tmp_path,
        env={"PYTHONPATH": "code.zip", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--zone" in done.stdout


@pytest.mark.slow
def test_the_startup_script_fetches_the_code_from_metadata_and_runs_it_again_and_again(
    there: Project, tmp_path: Path
) -> None:
    """The script as Compute Engine would run it, but for its folder and its pause. Its token is the rig's."""
    enable(there)
    there.insert(labels=PAST)
    port = there.servers.metadata(("127.0.0.1", 0), lambda _: f"{ZONE}/{NAME}")
    script = guard.startup_script(ZONE).replace("/var/lib/kimisession-reaper", str(tmp_path / "home"))
    script = script.replace("sleep 180", "sleep 1")
    (tmp_path / "startup").write_text(script)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    running = subprocess.Popen(
        ["bash", str(tmp_path / "startup")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "GCE_METADATA_HOST": f"127.0.0.1:{port}",
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            "KIMISESSION_COMPUTE_ENDPOINT": there.url,
            "KIMISESSION_COMPUTE_TOKEN": there.emulator.token(f"serviceAccount:{EMAIL}"),
        },
        text=True,
        start_new_session=True,
    )
    try:
        assert running.stdout
        said = []
        for line in running.stdout:
            said.append(line)
            if sum("looked at project" in one for one in said) == 2:
                break
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    assert any(f"deleting machine {NODE}" in line for line in said), said
    assert there.names() == [NAME]


def test_the_notes_say_the_commands_that_the_program_says() -> None:
    notes = (Path(__file__).parents[2] / "notes" / "permissions.md").read_text(encoding="utf-8")
    for command in reaper_account_commands("PROJECT"):
        assert command in notes


def test_the_startup_script_is_whole() -> None:
    script = guard.startup_script("us-west1-b")
    assert not re.search(r"@[A-Z_]+@", script)
    assert '--zone "us-west1-b"' in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_thousand_machines_in_all_zones_are_looked_at_in_five_seconds(there: Project) -> None:
    from tests.rigs.gce.emulator.catalog import ZONES  # benchmarks/sweep.py has forty, and the whole program

    there.insert(labels=labels_of(NOW + HOUR))
    key = f"{ZONE}/{NODE}"
    one, disk = there.state.data["instances"][key], there.state.data["disks"][key]
    for number in range(1000):
        session, zone = f"s-{number:08x}", ZONES[number % len(ZONES)]
        name, link = session + NODE.removeprefix(ID), one["zone"].replace(ZONE, zone)
        # Every fourth is a decoy: a name like ours, and no labels.
        labels = labels_of(NOW + HOUR, session) if number % 4 else {"team": "search"}
        there.state.data["instances"][f"{zone}/{name}"] = {**one, "name": name, "labels": labels, "zone": link}
        there.state.data["inside"][f"{zone}/{name}"] = there.state.data["inside"][key]
        there.state.data["disks"][f"{zone}/{name}"] = {**disk, "name": name, "zone": link}
    # Of this thread's own time: the emulator shares the process, and other tests the machine.
    began, calls = time.thread_time(), len(there.emulator.calls)
    look = Sweeper(there.compute, owner="ann").look()
    took_s = time.thread_time() - began
    machines = [f for f in look.findings if isinstance(f.resource, Machine)]
    assert (len(machines), sum(f.due for f in machines)) == (1001, 0)
    assert len({f.resource.zone for f in machines}) == len(ZONES)
    assert took_s < 5
    assert len(there.emulator.calls) - calls == 3 + 3 + 1  # pages of machines, of disks, of addresses
