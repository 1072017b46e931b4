"""From the body of an insert to an instance as Compute Engine shows it, with its boot disk."""

import re
from typing import Any

from . import billing
from .auth import default_account
from .catalog import ALL_REGIONS, DEFAULT_LIMIT, GPU_METRICS, MACHINE_TYPES, ZONES
from .driver import VmSpec
from .errors import Failed, Refused, invalid
from .faults import quota_exceeded
from .state import Json, State, fingerprint, last, new_id, region_of

_LABEL_KEY, _LABEL_VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")


def check_labels(labels: Json, field: str = "resource.labels") -> None:
    """Google's form of keys and values, and at most 64 of them; 400 otherwise."""
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise invalid(field, f"{key}={value}", "Labels are lower case letters, digits, _ and -, 63 at most.")
    if len(labels) > 64:
        raise invalid(field, len(labels), "A resource can have at most 64 labels.")


def check_zone(zone: str) -> None:
    """400 for a zone that there is not."""
    if zone not in ZONES:
        raise invalid("zone", zone, "Unknown zone.")


def check_properties(state: State, zone: str, name: str, asked: Json) -> None:
    """What Google refuses at once in the properties of a new instance. The lock is held."""
    key = f"{zone}/{name}"
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise invalid("resource.name", name, "Must be a match of regex '[a-z]([-a-z0-9]{0,61}[a-z0-9])?'")
    if key in state.data["instances"]:
        path = f"projects/{state.project}/zones/{zone}/instances/{name}"
        raise Refused(409, "alreadyExists", f"The resource '{path}' already exists")
    if any(other.endswith(f"/{name}") for other in state.data["instances"]):
        raise Refused(409, "alreadyExists", f"the emulator knows machines by name, and {name} is in another zone")
    if last(asked.get("machineType", "")) not in MACHINE_TYPES:
        raise invalid("resource.machineType", asked.get("machineType", ""), f"It does not exist in zone '{zone}'.")
    if not any(disk.get("boot") for disk in asked.get("disks", [])):
        raise invalid("resource.disks", len(asked.get("disks", [])), "At least one boot disk must be given.")
    if not asked.get("networkInterfaces"):
        raise invalid("resource.networkInterfaces", "", "At least one network interface is required.")
    scheduling = asked.get("scheduling", {})
    spot = scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible")
    if spot and scheduling.get("automaticRestart"):
        why = "Scheduling must have preemptible be false when AutomaticRestart is true."
        raise invalid("resource.scheduling.preemptible", "true", why)
    if (gpus_of(asked)) and scheduling.get("onHostMaintenance", "MIGRATE") != "TERMINATE":
        raise invalid("resource.scheduling.onHostMaintenance", "MIGRATE", "Instances with GPUs must be TERMINATE.")
    if scheduling.get("instanceTerminationAction") and not (spot or scheduling.get("maxRunDuration")):
        why = "It needs a spot instance or a limited run time."
        raise invalid("resource.scheduling.instanceTerminationAction", scheduling["instanceTerminationAction"], why)
    for account in asked.get("serviceAccounts", []):
        if default_account(account.get("email", "")) not in state.data["service_accounts"]:
            raise invalid("resource.serviceAccounts[0].email", account.get("email"), "The account does not exist.")
    check_labels(asked.get("labels") or {})


def gpus_of(properties: Json) -> dict[str, int]:
    """Accelerator types and counts, those that come with the machine type included."""
    shape = MACHINE_TYPES[last(properties["machineType"])]
    asked = {
        last(one["acceleratorType"]): int(one["acceleratorCount"]) for one in properties.get("guestAccelerators") or []
    }
    return asked or ({shape.gpu: shape.gpus} if shape.gpu else {})


def over_quota(state: State, zone: str, properties: Json, count: int) -> Failed | None:
    """The error that `count` more of these end in; None when they fit. The lock is held."""
    spot = properties.get("scheduling", {}).get("provisioningModel") == "SPOT"
    for gpu, each in gpus_of(properties).items():
        metric = metric_of(gpu, spot)
        region, limits = region_of(zone), state.data["quotas"]
        for name, key in ((ALL_REGIONS, ALL_REGIONS), (metric, f"{region}/{metric}")):
            limit = float(limits.get(key, DEFAULT_LIMIT))
            if usage(state, name, region) + each * count > limit:
                return quota_exceeded(name, limit, region)
    return None


def metric_of(gpu: str, spot: bool) -> str:
    """The quota that a GPU counts against."""
    return ("PREEMPTIBLE_" if spot else "") + GPU_METRICS.get(gpu, f"{gpu.upper().replace('-', '_')}_GPUS")


def usage(state: State, metric: str, region: str) -> int:
    """How many GPUs of instances that are not stopped count against a metric. The lock is held."""
    total = 0
    for key, instance in state.data["instances"].items():
        if instance["status"] == "TERMINATED":
            continue
        spot = instance["scheduling"]["provisioningModel"] == "SPOT"
        for gpu, count in gpus_of(instance).items():
            here = metric == metric_of(gpu, spot) and region_of(key.partition("/")[0]) == region
            total += count if metric == ALL_REGIONS or here else 0
    return total


def make(state: State, zone: str, name: str, asked: Json) -> None:
    """Put a new instance, PROVISIONING, and its disks into the project. The lock is held."""
    key, number = f"{zone}/{name}", state.free_number()
    scheduling = dict(asked.get("scheduling", {}))
    spot = scheduling.get("provisioningModel") == "SPOT" or bool(scheduling.get("preemptible"))
    scheduling = {
        "onHostMaintenance": "TERMINATE" if spot else "MIGRATE",
        "automaticRestart": not spot,
        "preemptible": spot,
        "provisioningModel": "SPOT" if spot else "STANDARD",
        **scheduling,
    }
    if spot:
        scheduling.setdefault("instanceTerminationAction", "STOP")
    if "maxRunDuration" in scheduling:
        duration = scheduling["maxRunDuration"]
        scheduling["maxRunDuration"] = {**duration, "seconds": str(duration.get("seconds", 0))}
    labels = dict(asked.get("labels") or {})
    metadata = [
        {"key": one["key"], "value": one.get("value", "")} for one in asked.get("metadata", {}).get("items", [])
    ]
    tags = list(asked.get("tags", {}).get("items", []))
    nic = dict(asked["networkInterfaces"][0])
    outside = f"34.1.1.{number}" if nic.get("accessConfigs") else ""
    region = region_of(zone)
    instance: Json = {
        "kind": "compute#instance",
        "id": new_id(),
        "creationTimestamp": state.stamp(),
        "name": name,
        "zone": state.link(f"zones/{zone}"),
        "selfLink": state.link(f"zones/{zone}/instances/{name}"),
        "machineType": state.link(f"zones/{zone}/machineTypes/{last(asked['machineType'])}"),
        "status": "PROVISIONING",
        "cpuPlatform": "Unknown CPU Platform",
        "labels": labels,
        "labelFingerprint": fingerprint(labels),
        "metadata": {"kind": "compute#metadata", "fingerprint": fingerprint(metadata), "items": metadata},
        "tags": {"fingerprint": fingerprint(tags), **({"items": tags} if tags else {})},
        "networkInterfaces": [
            {
                "kind": "compute#networkInterface",
                "name": "nic0",
                "network": state.link("global/networks/default"),
                "subnetwork": state.link(f"regions/{region}/subnetworks/default"),
                "networkIP": f"10.128.0.{number}",
                "stackType": "IPV4_ONLY",
                "fingerprint": fingerprint(number),
            }
        ],
        "disks": [_disk(state, zone, name, index, disk) for index, disk in enumerate(asked["disks"])],
        "serviceAccounts": [
            {"email": default_account(one.get("email", "")), "scopes": list(one.get("scopes", []))}
            for one in asked.get("serviceAccounts") or []
        ],
        "scheduling": scheduling,
        "canIpForward": bool(asked.get("canIpForward")),
        "deletionProtection": bool(asked.get("deletionProtection")),
        "startRestricted": False,
        "fingerprint": fingerprint([key, number]),
    }
    gpus = gpus_of(asked)
    if gpus:
        instance["guestAccelerators"] = [
            {"acceleratorType": state.link(f"zones/{zone}/acceleratorTypes/{gpu}"), "acceleratorCount": count}
            for gpu, count in gpus.items()
        ]
    if asked.get("resourcePolicies"):
        instance["resourcePolicies"] = list(asked["resourcePolicies"])
    state.data["inside"][key] = {"number": number, "nat": outside, "preempted": False}
    state.data["instances"][key] = instance


def _disk(state: State, zone: str, name: str, index: int, asked: Json) -> Json:
    """A new disk in the project, or the one that is named; as it is shown on its instance."""
    wanted: Json = asked.get("initializeParams", {})
    if asked.get("source"):
        disk_name = last(asked["source"])
    else:
        disk_name = wanted.get("diskName", name if index == 0 else f"{name}-{index}")
        image, size = wanted.get("sourceImage", ""), int(wanted.get("diskSizeGb", 10))
        labels = dict(wanted.get("labels") or {})
        make_disk(state, zone, disk_name, last(wanted.get("diskType", "pd-standard")), size, image, labels)
    disk = state.data["disks"].get(f"{zone}/{disk_name}")
    if disk is None:
        raise invalid("resource.disks", disk_name, "The disk does not exist.")
    instance = state.link(f"zones/{zone}/instances/{name}")
    disk["users"] = [*disk.get("users", []), instance]
    disk["lastAttachTimestamp"] = state.stamp()
    return {
        "kind": "compute#attachedDisk",
        "type": "PERSISTENT",
        "mode": "READ_WRITE",
        "source": disk["selfLink"],
        "deviceName": asked.get("deviceName", f"persistent-disk-{index}"),
        "index": index,
        "boot": bool(asked.get("boot")),
        "autoDelete": bool(asked.get("autoDelete")),
        "interface": "SCSI",
        "diskSizeGb": disk["sizeGb"],
    }


def make_disk(state: State, zone: str, name: str, kind: str, size_gb: int, image: str, labels: Json) -> None:
    """A new persistent disk, billed from now on. The lock is held."""
    key = f"{zone}/{name}"
    if key in state.data["disks"]:
        path = f"projects/{state.project}/zones/{zone}/disks/{name}"
        raise Refused(409, "alreadyExists", f"The resource '{path}' already exists")
    disk: Json = {
        "kind": "compute#disk",
        "id": new_id(),
        "creationTimestamp": state.stamp(),
        "name": name,
        "zone": state.link(f"zones/{zone}"),
        "selfLink": state.link(f"zones/{zone}/disks/{name}"),
        "type": state.link(f"zones/{zone}/diskTypes/{kind}"),
        "sizeGb": str(size_gb),
        "status": "READY",
        "labelFingerprint": fingerprint(labels),
        "physicalBlockSizeBytes": "4096",
    }
    if image:
        disk["sourceImage"] = image
    if labels:
        disk["labels"] = dict(labels)
    state.data["disks"][key] = disk
    billing.begin(state, "disk", key, kind, units=size_gb)


def spec(state: State, key: str) -> VmSpec:
    """What a driver needs to know of an instance. The lock is held."""
    instance = state.data["instances"][key]
    zone, name = key.split("/")
    boot = next(disk for disk in instance["disks"] if disk["boot"])
    disk = state.data["disks"][f"{zone}/{last(boot['source'])}"]
    account: Any = (instance["serviceAccounts"] or [{"email": "", "scopes": []}])[0]
    return VmSpec(
        name=name,
        zone=zone,
        internal_ip=instance["networkInterfaces"][0]["networkIP"],
        external_ip=state.data["inside"][key]["nat"],
        machine_type=last(instance["machineType"]),
        labels=dict(instance["labels"]),
        metadata={item["key"]: item["value"] for item in instance["metadata"]["items"]},
        service_account=account["email"],
        scopes=tuple(account["scopes"]),
        image=disk.get("sourceImage", ""),
        disk_gb=int(disk["sizeGb"]),
    )
