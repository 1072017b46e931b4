"""What other tests may rely on when they speak to the emulated Google: rows against the wire, with pretended machines."""

import base64
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("googleapiclient", reason="the emulator reads Google's discovery documents from it")

from tests.rigs.gce.emulator import filters
from tests.rigs.gce.emulator.admin import Admin
from tests.rigs.gce.emulator.driver import NullMachines, VmSpec
from tests.rigs.gce.emulator.emulator import Emulator
from tests.rigs.gce.emulator.errors import Refused
from tests.rigs.gce.emulator.metadata import etag_of
from tests.rigs.gce.emulator.server import Servers, serve
from tests.rigs.gce.emulator.state import State

PROJECT, ZONE = "kimi-rig", "us-central1-a"
BASE = f"/compute/v1/projects/{PROJECT}"
VMS = f"{BASE}/zones/{ZONE}/instances"
SOON_S = 20.0


class Clock:
    """Real time, and as much more as a test says."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class Rig:
    """An emulator on loopback and a bare HTTP client with the owner's token."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.machines = Clock(), NullMachines()
        self.emulator = Emulator(State(folder / "project.json", clock=self.clock), self.machines)
        self.servers: Servers = serve(self.emulator, [("127.0.0.1", 0)])
        self.vm_key = f"{ZONE}/kimi-a"
        self.servers.metadata(("127.0.0.1", 0), lambda address: self.vm_key)
        self.token = self.emulator.token()
        self.admin = Admin(self.emulator)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.servers.ports[0]}"

    def ask(self, verb: str, path: str, body: object = None, token: str = "") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.servers.ports[0], timeout=SOON_S)
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        connection.request(verb, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def exchange(self, form: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.servers.ports[0], timeout=SOON_S)
        connection.request("POST", "/token", form)
        return json.loads(connection.getresponse().read())

    def good(self, verb: str, path: str, body: object = None) -> Any:
        status, answer = self.ask(verb, path, body)
        assert status == 200, answer
        return answer

    def done(self, operation: dict[str, Any]) -> dict[str, Any]:
        return dict(self.good("POST", f"{BASE}/zones/{ZONE}/operations/{operation['name']}/wait"))

    def metadata(self, path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.servers.ports[1], timeout=SOON_S)
        connection.request("GET", f"/computeMetadata/v1/{path}", headers=headers or {"Metadata-Flavor": "Google"})
        response = connection.getresponse()
        return response.status, response.read().decode()

    def do(self, act: str, **fields: object) -> Any:
        status, answer = self.admin.answer("POST", f"/admin/{act}", fields)
        assert status == 200, answer
        return answer

    def operations(self) -> list[str]:
        return [one["operationType"] for one in self.good("GET", f"{BASE}/zones/{ZONE}/operations").get("items", [])]

    def running_bill(self) -> list[str]:
        return sorted(row["kind"] for row in self.emulator.bill()["lines"] if row["end"] is None)

    def eventually(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + SOON_S
        while not true():
            assert time.monotonic() < end, "it did not come true in time"
            time.sleep(0.02)

    def status(self, name: str = "kimi-a") -> str:
        return str(self.ask("GET", f"{VMS}/{name}")[1].get("status", "gone"))

    def close(self) -> None:
        self.servers.close()
        self.emulator.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def vm(name: str = "kimi-a", spot: bool = False, **more: object) -> dict[str, object]:
    """The body of an insert."""
    scheduling = {"onHostMaintenance": "TERMINATE", "automaticRestart": not spot}
    if spot:
        scheduling |= {"provisioningModel": "SPOT", "preemptible": True, "instanceTerminationAction": "DELETE"}
    return {
        "name": name,
        "machineType": f"zones/{ZONE}/machineTypes/a3-highgpu-8g",
        "labels": {"kimisession-id": "s1"},
        "disks": [
            {"boot": True, "autoDelete": True, "initializeParams": {"diskSizeGb": 100, "sourceImage": "projects/d/i"}}
        ],
        "networkInterfaces": [{"network": "global/networks/default", "accessConfigs": [{"name": "External NAT"}]}],
        "serviceAccounts": [{"email": "default", "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}],
        "metadata": {"items": [{"key": "ssh-keys", "value": "me:ssh-ed25519 AAAA"}]},
        "scheduling": scheduling,
        **more,
    }


def inserted(rig: Rig, **more: object) -> dict[str, Any]:
    operation = rig.done(rig.good("POST", VMS, vm(**more)))  # type: ignore[arg-type]
    assert "error" not in operation, operation
    return operation


def test_an_instance_comes_up_is_relabelled_and_goes_with_its_disk_and_its_bill(rig: Rig) -> None:
    inserted(rig)
    assert rig.running_bill() == ["address", "disk", "instance"]
    shown = rig.good("GET", f"{VMS}/kimi-a")
    assert (shown["status"], shown["networkInterfaces"][0]["accessConfigs"][0]["natIP"]) == ("RUNNING", "34.1.1.10")
    labels = {"labels": {"k": "v"}, "labelFingerprint": shown["labelFingerprint"]}
    rig.done(rig.good("POST", f"{VMS}/kimi-a/setLabels", labels))
    assert rig.ask("POST", f"{VMS}/kimi-a/setLabels", labels)[0] == 412
    assert rig.good("GET", f"{VMS}/kimi-a")["labels"] == {"k": "v"}
    rig.done(rig.good("DELETE", f"{VMS}/kimi-a"))
    status, answer = rig.ask("GET", f"{VMS}/kimi-a")
    sentence = f"The resource 'projects/{PROJECT}/zones/{ZONE}/instances/kimi-a' was not found"
    assert (status, answer["error"]["message"]) == (404, sentence)
    assert rig.running_bill() == []
    assert "items" not in rig.good("GET", f"{BASE}/zones/{ZONE}/disks")
    assert [call for call, _ in rig.machines.calls] == ["boot", "destroy"]
    assert rig.emulator.state.data["violations"] == []


def test_the_clients_library_finds_its_instances_by_label_in_all_zones(rig: Rig) -> None:
    compute = pytest.importorskip("google.cloud.compute_v1")
    credentials = pytest.importorskip("google.oauth2.credentials").Credentials(token=rig.token)
    inserted(rig)
    client = compute.InstancesClient(credentials=credentials, client_options={"api_endpoint": rig.url})
    request = compute.AggregatedListInstancesRequest(project=PROJECT, filter="labels.kimisession-id = s1")
    found = [(zone, one.name) for zone, scoped in client.aggregated_list(request) for one in scoped.instances]
    assert found == [(f"zones/{ZONE}", "kimi-a")]
    client.delete(project=PROJECT, zone=ZONE, instance="kimi-a")
    rig.eventually(lambda: rig.status() == "gone")
    assert rig.emulator.state.data["violations"] == []


def bulk(*names: str, spot: bool = True) -> dict[str, object]:
    """The body that SkyPilot 0.14.1 sends: names as keys, numbers for text, a null template."""
    properties = {**vm(spot=spot), "machineType": "a3-highgpu-8g"}
    del properties["name"]
    gpu = f"projects/{PROJECT}/zones/{ZONE}/acceleratorTypes/nvidia-h100-80gb"
    properties["guestAccelerators"] = [{"acceleratorType": gpu.rpartition("/")[2], "acceleratorCount": 8}]
    return {
        "count": len(names),
        "instanceProperties": properties,
        "sourceInstanceTemplate": None,
        "perInstanceProperties": {name: {} for name in names},
    }


def test_skypilots_bulk_insert_makes_one_operation_for_all_and_one_for_each(rig: Rig) -> None:
    discovery = pytest.importorskip("googleapiclient.discovery")
    credentials = pytest.importorskip("google.oauth2.credentials").Credentials(token=rig.token)
    endpoint = {"api_endpoint": f"{rig.url}/compute/v1/"}
    compute = discovery.build("compute", "v1", credentials=credentials, client_options=endpoint)
    operation = compute.instances().bulkInsert(project=PROJECT, zone=ZONE, body=bulk("kimi-a", "kimi-b")).execute()
    done = compute.zoneOperations().wait(project=PROJECT, zone=ZONE, operation=operation["name"]).execute()
    assert (done["status"], done["operationType"]) == ("DONE", "bulkInsert")
    assert sorted(rig.operations()) == ["bulkInsert", "insert", "insert"]
    states = "((labels.kimisession-id = s1)) AND ((status = RUNNING) OR (status = STAGING))"
    listed = compute.instances().list(project=PROJECT, zone=ZONE, filter=states).execute()
    assert [one["name"] for one in listed["items"]] == ["kimi-a", "kimi-b"]
    assert "items" not in compute.instances().list(project=PROJECT, zone=ZONE, filter="status = STOPPING").execute()
    assert rig.emulator.state.data["violations"] == []


@pytest.mark.parametrize(
    ("verb", "path", "body", "status"),
    [
        ("POST", VMS, vm(colour="red"), 400),
        ("POST", VMS, vm(labels={"Upper": "x"}), 400),
        ("POST", VMS, vm(canIpForward="yes"), 400),
        ("POST", VMS, vm(scheduling={"provisioningModel": "CHEAP"}), 400),
        ("POST", VMS, vm(machineType="z80"), 400),
        ("POST", f"{BASE}/zones/mars-a/instances", vm(), 400),
        ("GET", f"{VMS}?labels=x", None, 400),
        ("GET", f"{VMS}?filter=" + quote("labels.k ~ v"), None, 400),
        ("GET", f"{BASE}/zones/{ZONE}/machines", None, 404),
        ("GET", "/compute/v1/projects/another/zones/us-central1-a/instances", None, 404),
        ("GET", f"{BASE}/zones/{ZONE}/reservations", None, 403),
    ],
)
def test_what_google_would_refuse_is_refused(rig: Rig, verb: str, path: str, body: object, status: int) -> None:
    rig.do("deny", member="user:owner@example.com", permission="compute.reservations.list")
    answer_status, answer = rig.ask(verb, path, body)
    assert (answer_status, answer["error"]["code"]) == (status, status)
    assert rig.running_bill() == []


def test_a_field_that_googles_documents_do_not_know_is_noted(rig: Rig) -> None:
    rig.ask("POST", VMS, vm(colour="red"))
    rig.ask("GET", f"{BASE}/nonsense")
    assert [one["what"] for one in rig.emulator.state.data["violations"]] == ["bad request", "no such method"]


def test_a_permission_that_was_taken_away_is_missed_in_googles_words(rig: Rig) -> None:
    inserted(rig)
    rig.do("deny", member="user:owner@example.com", permission="compute.instances.delete")
    status, answer = rig.ask("DELETE", f"{VMS}/kimi-a")
    resource = f"projects/{PROJECT}/zones/{ZONE}/instances/kimi-a"
    assert (status, answer["error"]["message"]) == (
        403,
        f"Required 'compute.instances.delete' permission for '{resource}'",
    )
    rig.do("allow", member="user:owner@example.com", permission="compute.instances.delete")
    assert rig.ask("DELETE", f"{VMS}/kimi-a")[0] == 200


def test_an_insert_needs_the_permissions_of_what_it_sets(rig: Rig) -> None:
    rig.do("deny", member="user:owner@example.com", permission="iam.serviceAccounts.actAs")
    assert "actAs" in rig.ask("POST", VMS, vm())[1]["error"]["message"]
    assert rig.ask("POST", VMS, vm(serviceAccounts=[]))[0] == 200


def test_a_token_needs_a_scope_and_somebody_behind_it(rig: Rig) -> None:
    read_only = rig.emulator.token(scopes=("https://www.googleapis.com/auth/compute.readonly",))
    assert rig.ask("GET", VMS, token=read_only)[0] == 200
    assert rig.ask("POST", VMS, vm(), token=read_only)[0] == 403
    assert rig.ask("GET", VMS, token="made-up")[0] == 401
    assert rig.ask("GET", VMS, token=rig.emulator.token("user:stranger@example.com"))[0] == 403
    rig.clock.ahead_s = 3601
    assert rig.ask("GET", VMS)[0] == 401


def test_a_vm_asks_the_metadata_server_who_it_is_and_deletes_itself(rig: Rig) -> None:
    inserted(rig)
    assert rig.metadata("instance/name", Other="header")[0] == 403
    assert rig.metadata("instance/name") == (200, "kimi-a")
    assert rig.metadata("instance/zone")[1].endswith(f"/zones/{ZONE}")
    assert rig.metadata("project/project-id") == (200, PROJECT)
    assert rig.metadata("instance/attributes/ssh-keys")[1].startswith("me:")
    token = json.loads(rig.metadata("instance/service-accounts/default/token")[1])["access_token"]
    assert rig.ask("DELETE", f"{VMS}/kimi-a", token=token)[0] == 200
    rig.eventually(lambda: rig.status() == "gone")


def test_a_service_account_gets_a_token_for_its_signed_claims(rig: Rig) -> None:
    email = f"laptop@{PROJECT}.iam.gserviceaccount.com"
    rig.do("account", email=email)
    rig.do("bind", member=f"serviceAccount:{email}", role="roles/compute.viewer")
    claims = {"iss": email, "scope": "https://www.googleapis.com/auth/cloud-platform"}
    assertion = f"x.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.x"
    form = f"grant_type={quote('urn:ietf:params:oauth:grant-type:jwt-bearer')}&assertion={assertion}"
    token = rig.exchange(form)["access_token"]
    assert rig.ask("GET", VMS, token=token)[0] == 200
    assert rig.ask("POST", VMS, vm(), token=token)[0] == 403


def test_a_users_refresh_token_is_the_users_address_and_a_strangers_is_expired(rig: Rig) -> None:
    token = rig.exchange("grant_type=refresh_token&refresh_token=owner@example.com")["access_token"]
    assert rig.ask("GET", VMS, token=token)[0] == 200
    assert "access_token" not in rig.exchange("grant_type=refresh_token&refresh_token=stranger@example.com")


def test_a_stockout_ends_every_operation_in_an_error_and_leaves_nothing(rig: Rig) -> None:
    rig.do("faults", kind="stockout", zone=ZONE, times=1)
    done = rig.done(rig.good("POST", f"{VMS}/bulkInsert", bulk("kimi-a")))
    assert done["error"]["errors"][0]["code"] == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    assert "items" not in rig.good("GET", VMS)
    assert rig.emulator.bill()["lines"] == []
    assert "error" not in rig.done(rig.good("POST", f"{VMS}/bulkInsert", bulk("kimi-a")))


def test_more_gpus_than_the_quota_are_not_to_be_had(rig: Rig) -> None:
    rig.do("quota", metric="PREEMPTIBLE_NVIDIA_H100_GPUS", region="us-central1", limit=8)
    region = rig.good("GET", f"{BASE}/regions/us-central1")
    assert {"metric": "PREEMPTIBLE_NVIDIA_H100_GPUS", "limit": 8.0, "usage": 0.0} in region["quotas"]
    inserted(rig, spot=True)
    second = rig.done(rig.good("POST", VMS, vm("kimi-b", spot=True)))
    assert second["error"]["errors"][0]["code"] == "QUOTA_EXCEEDED"
    assert second["error"]["errors"][0]["message"].endswith("Limit: 8.0 in region us-central1.")
    rig.do("faults", kind="quota", **{"as": "http"})
    status, answer = rig.ask("POST", VMS, vm("kimi-c"))
    assert (status, answer["error"]["errors"][0]["reason"]) == (403, "quotaExceeded")
    assert "GPUS_ALL_REGIONS" in answer["error"]["message"]


class Broken(NullMachines):
    """No machine of these ever starts."""

    def boot(self, vm: VmSpec) -> None:
        raise RuntimeError("no memory left")


def test_a_machine_that_does_not_boot_fails_its_operation_and_leaves_nothing(rig: Rig) -> None:
    rig.emulator.cloud.machines = Broken()
    done = rig.done(rig.good("POST", VMS, vm()))
    assert done["error"]["errors"] == [{"code": "INTERNAL_ERROR", "message": "Internal error. no memory left"}]
    assert (rig.status(), rig.running_bill()) == ("gone", [])
    assert "no memory left" in rig.emulator.state.data["violations"][0]["what"]


def test_after_a_lost_reply_the_act_has_happened(rig: Rig) -> None:
    rig.do("faults", kind="lost_reply", method="compute.instances.insert", times=1)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        rig.ask("POST", VMS, vm())
    rig.eventually(lambda: rig.status() == "RUNNING")


def test_the_same_request_id_acts_once(rig: Rig) -> None:
    path = f"{VMS}?requestId=5b1d8a3e-6a0f-4a53-9d4a-5ad0a6b3c001"
    assert rig.good("POST", path, vm())["name"] == rig.good("POST", path, vm())["name"]
    assert rig.operations() == ["insert"]


def test_a_burst_of_errors_ends(rig: Rig) -> None:
    rig.do("faults", kind="http_error", method="compute.instances.*", status=503, times=2)
    assert [rig.ask("GET", VMS)[0] for _ in range(3)] == [503, 503, 200]


def test_a_delete_that_fails_leaves_the_instance_running(rig: Rig) -> None:
    inserted(rig)
    rig.do("faults", kind="op_error", method="compute.instances.delete", times=1)
    assert "error" in rig.done(rig.good("DELETE", f"{VMS}/kimi-a"))
    assert rig.status() == "RUNNING"
    assert "error" not in rig.done(rig.good("DELETE", f"{VMS}/kimi-a"))
    assert rig.status() == "gone"


def test_a_delete_may_say_done_while_the_instance_stays_for_a_while(rig: Rig) -> None:
    inserted(rig)
    rig.do("faults", kind="delete_ignored", times=1, seconds=60)
    done = rig.done(rig.good("DELETE", f"{VMS}/kimi-a"))
    assert (done["status"], rig.status()) == ("DONE", "RUNNING")
    rig.clock.ahead_s = 61
    rig.token = rig.emulator.token()
    rig.eventually(lambda: rig.status() == "gone")


def test_a_slow_operation_shows_the_instance_stopping_until_it_is_done(rig: Rig) -> None:
    inserted(rig)
    rig.do("faults", kind="slow_operation", method="compute.instances.delete", seconds=0.3)
    operation = rig.good("DELETE", f"{VMS}/kimi-a")
    assert (operation["status"], rig.status()) == ("RUNNING", "STOPPING")
    assert rig.done(operation)["status"] == "DONE"
    assert rig.status() == "gone"


def test_preemption_gives_notice_then_deletes_and_is_in_the_list_of_operations(rig: Rig) -> None:
    inserted(rig, spot=True)
    heard: list[tuple[int, str]] = []
    question = f"instance/preempted?wait_for_change=true&timeout_sec=10&last_etag={etag_of('FALSE')}"
    waiter = threading.Thread(target=lambda: heard.append(rig.metadata(question)))
    waiter.start()
    rig.do("preempt", name="kimi-a", notice_s=30)
    waiter.join(SOON_S)
    assert heard == [(200, "TRUE")]
    assert rig.status() == "STOPPING"
    rig.clock.ahead_s = 31
    rig.eventually(lambda: rig.status() == "gone")
    assert "compute.instances.preempted" in rig.operations()
    assert rig.running_bill() == []
    free = {line["kind"]: float(line["usd"]) == 0 for line in rig.emulator.bill()["lines"] if line["kind"] != "disk"}
    assert free == {"instance": True, "address": True}, "it was preempted in its first minute"


def test_a_preempted_instance_that_only_stops_still_bills_its_disk(rig: Rig) -> None:
    scheduling = {"provisioningModel": "SPOT", "onHostMaintenance": "TERMINATE", "automaticRestart": False}
    inserted(rig, scheduling={**scheduling, "instanceTerminationAction": "STOP"})
    rig.do("preempt", name="kimi-a", notice_s=0)
    rig.eventually(lambda: rig.status() == "TERMINATED")
    assert rig.running_bill() == ["disk"]


def test_a_guest_that_shuts_itself_down_is_terminated_and_its_disk_billed(rig: Rig) -> None:
    inserted(rig)
    rig.machines.halt("kimi-a")
    rig.eventually(lambda: rig.status() == "TERMINATED")
    assert rig.running_bill() == ["disk"]
    assert rig.operations().count("compute.instances.guestTerminate") == 1
    rig.done(rig.good("POST", f"{VMS}/kimi-a/start"))
    assert (rig.status(), rig.running_bill()) == ("RUNNING", ["address", "disk", "instance"])


@pytest.mark.parametrize(("spot", "after"), [(False, "RUNNING"), (True, "TERMINATED")])
def test_after_a_host_error_only_an_on_demand_instance_comes_back(rig: Rig, spot: bool, after: str) -> None:
    inserted(rig, spot=spot)
    rig.do("host_error", name="kimi-a")
    assert rig.status() == after
    assert ("compute.instances.automaticRestart" in rig.operations()) is not spot


def test_what_vanishes_leaves_no_operation(rig: Rig) -> None:
    inserted(rig)
    rig.do("vanish", name="kimi-a")
    assert (rig.status(), rig.operations(), rig.running_bill()) == ("gone", ["insert"], [])


def test_an_instance_ends_itself_at_its_maximum_run_duration(rig: Rig) -> None:
    limit = {
        "onHostMaintenance": "TERMINATE",
        "maxRunDuration": {"seconds": "60"},
        "instanceTerminationAction": "DELETE",
    }
    inserted(rig, scheduling=limit)
    rig.clock.ahead_s = 61
    rig.token = rig.emulator.token()
    rig.eventually(lambda: rig.status() == "gone")


def test_a_disk_without_auto_delete_outlives_its_instance_and_is_billed(rig: Rig) -> None:
    disk = {"boot": True, "autoDelete": False, "initializeParams": {"diskSizeGb": "100"}}
    inserted(rig, disks=[disk])
    assert rig.ask("DELETE", f"{BASE}/zones/{ZONE}/disks/kimi-a")[0] == 400
    rig.done(rig.good("DELETE", f"{VMS}/kimi-a"))
    assert rig.running_bill() == ["disk"]
    found = rig.good("GET", f"{BASE}/aggregated/disks")["items"][f"zones/{ZONE}"]["disks"]
    assert [one["name"] for one in found] == ["kimi-a"]
    rig.done(rig.good("DELETE", f"{BASE}/zones/{ZONE}/disks/kimi-a"))
    assert rig.running_bill() == []


def test_the_bill_is_price_times_seconds_and_a_minute_at_least(rig: Rig) -> None:
    rig.do("prices", **{"a3-highgpu-8g": ["36.00", "18.00"], "external-ip": ["0", "0"], "pd-standard": ["0", "0"]})
    inserted(rig)
    assert 0.6 <= float(rig.emulator.bill()["usd"]) < 0.61
    rig.clock.ahead_s = 1000
    assert 10 <= float(rig.emulator.bill()["usd"]) < 10.1


def test_lists_come_in_pages_and_an_unreachable_zone_is_said_to_be_one(rig: Rig) -> None:
    for name in ("kimi-a", "kimi-b", "kimi-c"):
        inserted(rig, name=name)
    names: list[str] = []
    token = ""
    while True:
        page = rig.good("GET", f"{BASE}/aggregated/instances?maxResults=2&pageToken={token}")
        names += [one["name"] for one in page["items"][f"zones/{ZONE}"]["instances"]]
        token = page.get("nextPageToken", "")
        if not token:
            break
    assert names == ["kimi-a", "kimi-b", "kimi-c"]
    assert page["items"]["zones/us-east4-a"]["warning"]["code"] == "NO_RESULTS_ON_PAGE"
    rig.do("faults", kind="unreachable", zone=ZONE)
    partial = rig.good("GET", f"{BASE}/aggregated/instances")
    assert partial["items"][f"zones/{ZONE}"]["warning"]["code"] == "UNREACHABLE"
    assert partial["unreachables"] == [f"zones/{ZONE}"]
    rig.do("faults", kind="unreachable", zone=ZONE, **{"as": "error"})
    assert rig.ask("GET", f"{BASE}/aggregated/instances")[0] == 503


def test_the_project_survives_a_restart_and_operations_go_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    inserted(rig)
    rig.do("faults", kind="slow_operation", method="compute.instances.delete", seconds=0.3)
    rig.good("DELETE", f"{VMS}/kimi-a")
    rig.close()
    again = Rig(tmp_path)
    again.eventually(lambda: again.status() == "gone")
    assert sorted(again.operations()) == ["delete", "insert"]
    assert again.running_bill() == []
    again.close()


def test_every_other_call_of_skypilots_start_is_answered(rig: Rig) -> None:
    rig.good("GET", BASE)
    rig.good("GET", f"{BASE}/regions/us-central1/subnetworks")
    rules = rig.good("GET", f"{BASE}/global/networks/default/getEffectiveFirewalls")["firewalls"]
    assert {"10.128.0.0/9", "0.0.0.0/0"} == {rule["sourceRanges"][0] for rule in rules}
    assert rig.good("GET", f"/v1/projects/{PROJECT}")["lifecycleState"] == "ACTIVE"
    asked = {"permissions": ["compute.instances.create", "storage.buckets.get"]}
    assert rig.good("POST", f"/v1/projects/{PROJECT}:testIamPermissions", asked) == asked
    account = f"skypilot-v1@{PROJECT}.iam.gserviceaccount.com"
    assert rig.ask("GET", f"/v1/projects/{PROJECT}/serviceAccounts/{account}")[0] == 404
    new = {"accountId": "skypilot-v1", "serviceAccount": {"displayName": "SkyPilot"}}
    assert rig.good("POST", f"/v1/projects/{PROJECT}/serviceAccounts", new)["email"] == account
    policy = rig.good("POST", f"/v1/projects/{PROJECT}:getIamPolicy", {})
    policy["bindings"].append({"role": "roles/compute.admin", "members": [f"serviceAccount:{account}"]})
    rig.good("POST", f"/v1/projects/{PROJECT}:setIamPolicy", {"policy": policy})
    assert rig.ask("POST", f"/v1/projects/{PROJECT}:setIamPolicy", {"policy": policy})[0] == 409
    services = rig.good("GET", f"/v1/projects/{PROJECT}/services?filter=state:ENABLED")["services"]
    assert {"compute.googleapis.com", "iam.googleapis.com"} <= {one["config"]["name"] for one in services}
    status, answer = rig.ask("GET", f"{BASE}/global/firewalls/kimi-ports")
    assert (status, answer["error"]["message"]) == (
        404,
        f"The resource 'projects/{PROJECT}/global/firewalls/kimi-ports' was not found",
    )
    assert rig.good("GET", f"{BASE}/zones/{ZONE}/machineTypes/a3-highgpu-8g")["guestCpus"] == 208
    assert rig.emulator.state.data["violations"] == []


def test_every_call_that_is_emulated_fits_googles_documents(rig: Rig) -> None:
    inserted(rig)
    for path in ("", f"/zones/{ZONE}", "/regions/us-east4", "/global/networks/default"):
        rig.good("GET", BASE + path)
    for path in ("/zones", "/regions", "/global/networks", "/global/firewalls", "/global/operations"):
        rig.good("GET", BASE + path)
    for path in ("machineTypes", "acceleratorTypes", "acceleratorTypes/nvidia-h100-80gb", "disks", "disks/kimi-a"):
        rig.good("GET", f"{BASE}/zones/{ZONE}/{path}")
    for kind in ("instances", "disks", "addresses", "operations"):
        assert rig.good("GET", f"{BASE}/aggregated/{kind}?orderBy=creationTimestamp%20desc")["items"]
    rig.good("GET", "/compute/v1/projects/debian-cloud/global/images/family/debian-12")
    rig.good("GET", "/v1/roles/compute.admin")
    shown = rig.good("GET", f"{VMS}/kimi-a")
    tags = {"items": ["web"], "fingerprint": shown["tags"]["fingerprint"]}
    rig.done(rig.good("POST", f"{VMS}/kimi-a/setTags", tags))
    metadata = {"items": [{"key": "k", "value": "v"}], "fingerprint": shown["metadata"]["fingerprint"]}
    rig.done(rig.good("POST", f"{VMS}/kimi-a/setMetadata", metadata))
    assert rig.metadata("instance/attributes/k") == (200, "v")
    assert rig.metadata("instance/attributes/") == (200, "k\n")
    held = {"permissions": ["compute.instances.delete"]}
    assert rig.good("POST", f"{VMS}/kimi-a/testIamPermissions", held) == held
    assert rig.ask("POST", f"{VMS}/kimi-a/setScheduling", {"maxRunDuration": {"seconds": "60"}})[0] == 400
    rig.done(rig.good("POST", f"{VMS}/kimi-a/reset"))
    rig.done(rig.good("POST", f"{VMS}/kimi-a/stop"))
    rig.done(rig.good("POST", f"{VMS}/kimi-a/setScheduling", {"automaticRestart": False}))
    rig.done(rig.good("POST", f"{VMS}/kimi-a/start"))
    rig.done(rig.good("POST", f"{VMS}/kimi-a/setDiskAutoDelete?deviceName=persistent-disk-0&autoDelete=false"))
    disk = {"name": "data", "sizeGb": "10", "type": f"zones/{ZONE}/diskTypes/pd-ssd"}
    rig.done(rig.good("POST", f"{BASE}/zones/{ZONE}/disks", disk))
    made = rig.good("GET", f"{BASE}/zones/{ZONE}/disks/data")
    labels = {"labels": {"k": "v"}, "labelFingerprint": made["labelFingerprint"]}
    rig.done(rig.good("POST", f"{BASE}/zones/{ZONE}/disks/data/setLabels", labels))
    rig.good("POST", f"{BASE}/regions/us-central1/addresses", {"name": "fixed"})
    assert rig.good("GET", f"{BASE}/regions/us-central1/addresses")["items"][0]["status"] == "RESERVED"
    rig.good("DELETE", f"{BASE}/regions/us-central1/addresses/fixed")
    rule = {
        "name": "ports",
        "network": f"projects/{PROJECT}/global/networks/default",
        "allowed": [{"IPProtocol": "tcp"}],
    }
    operation = rig.good("POST", f"{BASE}/global/firewalls", rule)
    rig.good("POST", f"{BASE}/global/operations/{operation['name']}/wait")
    rig.good("PUT", f"{BASE}/global/firewalls/ports", rig.good("GET", f"{BASE}/global/firewalls/ports"))
    rig.good("DELETE", f"{BASE}/global/firewalls/ports")
    rig.eventually(lambda: rig.ask("GET", f"{BASE}/global/firewalls/ports")[0] == 404)
    rig.eventually(lambda: rig.running_bill() == ["address", "disk", "disk", "instance"])
    assert rig.emulator.state.data["violations"] == []


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("", True),
        ("labels.k = v", True),
        ("labels.k=w", False),
        ("labels.k:*", True),
        ("labels.other:*", False),
        ("NOT labels.other:*", True),
        ("((labels.k = v)) AND ((status = A) OR (status = RUNNING))", True),
        ("(labels.k = v) (status = A)", False),
        ('name = "vm-1"', True),
        ("name eq vm-.*", True),
        ("name ne vm-.*", False),
        ("status != RUNNING", False),
        ("scheduling.preemptible = true", True),
        ("count > 7", True),
        ("labels.other = ''", False),
    ],
)
def test_filters_take_what_googles_documents_say(text: str, taken: bool) -> None:
    resource = {
        "name": "vm-1",
        "labels": {"k": "v"},
        "status": "RUNNING",
        "scheduling": {"preemptible": True},
        "count": 8,
    }
    assert filters.parse(text)(resource) is taken


@pytest.mark.parametrize(
    "text", ["labels.k", "(labels.k = v", "labels.k = v)", "= v", "labels.k ~ v", "a = b OR", "a ( b"]
)
def test_a_filter_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        filters.parse(text)


def test_as_a_process_it_says_when_it_is_ready_and_ends_when_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.rigs.gce.emulator", "--state", str(tmp_path / "p.json"), "--plain"]
    sockets = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--metadata", "127.0.0.1:0"]
    root = Path(__file__).parents[3]
    with subprocess.Popen([*command, *sockets], stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        _, _, admin, _ = process.stdout.readline().split()
        connection = http.client.HTTPConnection("127.0.0.1", int(admin), timeout=SOON_S)
        connection.request("GET", "/admin/bill")
        assert json.loads(connection.getresponse().read())["usd"] == "0"
        process.terminate()
        assert process.wait(SOON_S) == 0
