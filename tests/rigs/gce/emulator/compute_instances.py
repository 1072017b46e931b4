"""Calls about instances and their disks."""

import secrets

from . import faults, instances, lists
from .auth import may, needs_of_insert
from .calls import Call, answers
from .errors import Failed, Refused, invalid
from .state import Json, fingerprint, last


def _key(call: Call) -> str:
    return f"{call.zone}/{call.path['instance']}"


def _ready(call: Call, *statuses: str) -> Json:
    """The instance in one of these states; Google says `not ready` otherwise."""
    instance = call.find("instances", _key(call))
    if instance["status"] not in statuses:
        raise Refused(400, "resourceNotReady", f"The resource '{call.resource}' is not ready")
    return instance


def _set(call: Call, **fields: object) -> None:
    call.state.data["instances"][_key(call)] |= fields


@answers("compute.instances.list", "compute.disks.list")
def list_zone(call: Call) -> Json:
    instances.check_zone(call.zone)
    field = call.method.id.split(".")[1]
    here = {key: one for key, one in call.state.data[field].items() if key.startswith(f"{call.zone}/")}
    return lists.plain(call.method, call.query, here)


@answers("compute.instances.aggregatedList", "compute.disks.aggregatedList", "compute.addresses.aggregatedList")
def list_all(call: Call) -> Json:
    field = call.method.id.split(".")[1]
    return lists.aggregated(call.method, call.query, call.state.data[field], field, faults.unreachable(call.state))


@answers("compute.instances.get")
def get(call: Call) -> Json:
    return call.find("instances", _key(call))


@answers("compute.instances.insert")
def insert(call: Call) -> Json:
    instances.check_zone(call.zone)
    instances.check_properties(call.state, call.zone, call.body["name"], call.body)
    return _insert(call, call.body["name"], call.body, _capacity(call, call.body, 1))


@answers("compute.instances.bulkInsert")
def bulk_insert(call: Call) -> Json:
    """One operation for all, and one for each in the same group, as Compute Engine shows them."""
    instances.check_zone(call.zone)
    asked, names = call.body.get("instanceProperties") or {}, list(call.body.get("perInstanceProperties") or {})
    if int(call.body.get("count", 0)) != len(names) or not names:
        raise invalid(
            "resource.count", call.body.get("count"), "The emulator wants perInstanceProperties of that size."
        )
    if "/" in asked.get("machineType", ""):
        raise invalid("resource.instanceProperties.machineType", asked["machineType"], "A name is expected, not a URL.")
    for name in names:
        instances.check_properties(call.state, call.zone, name, asked)
    failed, group = _capacity(call, asked, len(names)), secrets.token_hex(16)
    keys = [f"{call.zone}/{name}" for name in names]
    for name in names:
        _insert(call, name, asked, failed, group)
    args = {"keys": keys, "zone": call.zone, "group": group}
    return call.operation("bulkInsert", "bulk", args, target=f"zones/{call.zone}/instances/bulkInsert", group=group)


def _capacity(call: Call, asked: Json, count: int) -> Failed | None:
    call.demand(*needs_of_insert(asked))
    failed = faults.no_capacity(call.state, call.method.id, call.zone)
    return failed or instances.over_quota(call.state, call.zone, asked, count)


def _insert(call: Call, name: str, asked: Json, failed: Failed | None, group: str = "") -> Json:
    key, target = f"{call.zone}/{name}", f"zones/{call.zone}/instances/{name}"
    if failed is None:
        instances.make(call.state, call.zone, name, asked)
    return call.operation("insert", "boot", {"key": key}, target=target, failed=failed, group=group)


@answers("compute.instances.delete")
def delete(call: Call) -> Json:
    """The instance is STOPPING from here on; its disks go with it where they have autoDelete."""
    key = _key(call)
    instance = call.find("instances", key)
    if instance["deletionProtection"]:
        why = "Resource cannot be deleted if it's protected against deletion."
        raise invalid("resource", instance["name"], why)
    ignored = faults.strike(call.state, "delete_ignored", call.method.id, call.zone, instance["name"])
    if ignored:
        if "seconds" in ignored:
            at = call.state.clock() + float(ignored["seconds"])
            call.state.data["later"].append({"at": at, "do": "delete", "args": {"key": key}})
        return call.operation("delete", "", {})
    operation = call.operation("delete", "delete", {"key": key})
    if not call.state.data["operations"][operation["name"]]["failed"]:
        _set(call, status="STOPPING")
    return operation


@answers("compute.instances.stop")
def stop(call: Call) -> Json:
    instance = _ready(call, "RUNNING", "STOPPING", "TERMINATED")
    operation = call.operation("stop", "stop", {"key": _key(call)})
    if instance["status"] == "RUNNING" and not call.state.data["operations"][operation["name"]]["failed"]:
        _set(call, status="STOPPING")
    return operation


@answers("compute.instances.start")
def start(call: Call) -> Json:
    instance = _ready(call, "RUNNING", "TERMINATED")
    if instance["status"] == "RUNNING":
        return call.operation("start", "", {})
    failed = faults.no_capacity(call.state, call.method.id, call.zone)
    operation = call.operation("start", "start", {"key": _key(call)}, failed=failed)
    if not call.state.data["operations"][operation["name"]]["failed"]:
        _set(call, status="PROVISIONING")
    return operation


@answers("compute.instances.reset")
def reset(call: Call) -> Json:
    _ready(call, "RUNNING")
    return call.operation("reset", "reset", {"key": _key(call)})


def _patch(call: Call, kind: str, **fields: object) -> Json:
    return call.operation(kind, "patch", {"kind": "instances", "key": _key(call), "patch": fields})


def _proven(seen: object, current: str, what: str) -> None:
    if seen != current:
        raise Refused(
            412, "conditionNotMet", f"{what} fingerprint either invalid or resource {what.lower()} have changed"
        )


@answers("compute.instances.setLabels")
def set_labels(call: Call) -> Json:
    instance, labels = call.find("instances", _key(call)), dict(call.body.get("labels") or {})
    _proven(call.body.get("labelFingerprint"), instance["labelFingerprint"], "Labels")
    instances.check_labels(labels)
    return _patch(call, "setLabels", labels=labels, labelFingerprint=fingerprint(labels))


@answers("compute.instances.setMetadata")
def set_metadata(call: Call) -> Json:
    instance, items = call.find("instances", _key(call)), list(call.body.get("items", []))
    _proven(call.body.get("fingerprint"), instance["metadata"]["fingerprint"], "Metadata")
    metadata = {"kind": "compute#metadata", "fingerprint": fingerprint(items), "items": items}
    return _patch(call, "setMetadata", metadata=metadata)


@answers("compute.instances.setTags")
def set_tags(call: Call) -> Json:
    instance, items = call.find("instances", _key(call)), list(call.body.get("items", []))
    _proven(call.body.get("fingerprint"), instance["tags"]["fingerprint"], "Tags")
    return _patch(call, "setTags", tags={"fingerprint": fingerprint(items), "items": items})


@answers("compute.instances.setScheduling")
def set_scheduling(call: Call) -> Json:
    """While it runs only restart and maintenance can be set: a deadline needs a stopped instance."""
    instance = call.find("instances", _key(call))
    if instance["status"] != "TERMINATED" and set(call.body) - {"automaticRestart", "onHostMaintenance"}:
        raise Refused(400, "invalid", f"Instance '{instance['name']}' must be stopped to set its scheduling.")
    return _patch(call, "setScheduling", scheduling={**instance["scheduling"], **call.body})


@answers("compute.instances.setDiskAutoDelete")
def set_disk_auto_delete(call: Call) -> Json:
    disks = [dict(disk) for disk in call.find("instances", _key(call))["disks"]]
    chosen = [disk for disk in disks if disk["deviceName"] == call.query["deviceName"]]
    if not chosen:
        raise invalid("deviceName", call.query["deviceName"], "No such device.")
    chosen[0]["autoDelete"] = call.query["autoDelete"] == "true"
    return _patch(call, "setDiskAutoDelete", disks=disks)


@answers("compute.instances.testIamPermissions")
def test_permissions(call: Call) -> Json:
    call.path["instance"] = call.path.pop("resource")
    call.find("instances", _key(call))
    held = [one for one in call.body.get("permissions", []) if may(call.state, call.member, one)]
    return {"permissions": held} if held else {}


@answers("compute.disks.get")
def get_disk(call: Call) -> Json:
    return call.find("disks", f"{call.zone}/{call.path['disk']}")


@answers("compute.disks.insert")
def insert_disk(call: Call) -> Json:
    """A disk of its own; a full `type` is a URL, a bare one is taken as well."""
    instances.check_zone(call.zone)
    body, kind = call.body, last(call.body.get("type", "pd-standard"))
    size_gb, image = int(body.get("sizeGb", 500)), body.get("sourceImage", "")
    instances.check_labels(body.get("labels") or {})
    instances.make_disk(call.state, call.zone, body["name"], kind, size_gb, image, body.get("labels") or {})
    return call.operation("insert", "", {}, target=f"zones/{call.zone}/disks/{body['name']}")


@answers("compute.disks.delete")
def delete_disk(call: Call) -> Json:
    key = f"{call.zone}/{call.path['disk']}"
    users = call.find("disks", key).get("users")
    if users:
        user = users[0].partition("/v1/")[2]
        text = f"The disk resource '{call.resource}' is already being used by '{user}'"
        raise Refused(400, "resourceInUseByAnotherResource", text)
    return call.operation("delete", "drop", {"kind": "disks", "key": key, "billed": "disk"})


@answers("compute.disks.setLabels")
def set_disk_labels(call: Call) -> Json:
    key, labels = f"{call.zone}/{call.path['resource']}", dict(call.body.get("labels") or {})
    _proven(call.body.get("labelFingerprint"), call.find("disks", key)["labelFingerprint"], "Labels")
    instances.check_labels(labels)
    patch = {"labels": labels, "labelFingerprint": fingerprint(labels)}
    return call.operation("setLabels", "patch", {"kind": "disks", "key": key, "patch": patch})


@answers("compute.disks.resize")
def resize_disk(call: Call) -> Json:
    key, size_gb = f"{call.zone}/{call.path['disk']}", int(call.body["sizeGb"])
    now_gb = int(call.find("disks", key)["sizeGb"])
    if size_gb <= now_gb:
        raise invalid("sizeGb", size_gb, f"Requested disk size cannot be smaller or equal to the current {now_gb} GB.")
    raise Refused(501, "notImplemented", "the emulator does not bill disks that grow")
