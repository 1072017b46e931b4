"""Calls about what does not run: operations, networks, firewall rules, addresses, regions, machine types, images."""

from typing import Any

from . import billing, faults, lists
from .calls import Call, answers
from .catalog import ALL_REGIONS, DEFAULT_LIMIT, GPU_METRICS, MACHINE_TYPES, REGIONS, ZONES
from .errors import Refused, not_found
from .instances import check_zone, usage
from .state import NUMBER, Json, State, fingerprint, new_id

_MADE = "2020-01-01T00:00:00.000-08:00"
_WAIT_S = 30.0  # Google's own wait returns after two minutes at most


def _operations(call: Call) -> dict[str, Json]:
    """Operations of the place that the call is about; a call for all places gets all."""
    wires = {name: entry["wire"] for name, entry in call.state.data["operations"].items()}
    kind = call.method.id.split(".")[1]
    if call.method.id.endswith("aggregatedList"):
        return wires
    if kind == "zoneOperations":
        return {name: wire for name, wire in wires.items() if wire.get("zone", "").endswith(f"/{call.zone}")}
    return {name: wire for name, wire in wires.items() if "zone" not in wire and "region" not in wire}


@answers("compute.zoneOperations.list", "compute.globalOperations.list")
def list_operations(call: Call) -> Json:
    return lists.plain(call.method, call.query, _operations(call))


@answers("compute.globalOperations.aggregatedList")
def all_operations(call: Call) -> Json:
    far = faults.unreachable(call.state)
    return lists.aggregated(call.method, call.query, _operations(call), "operations", far)


@answers("compute.zoneOperations.get", "compute.globalOperations.get")
def get_operation(call: Call) -> Json:
    found = _operations(call).get(call.path["operation"])
    if found is None:
        raise not_found(call.resource)
    return found


@answers("compute.regionOperations.get", "compute.regionOperations.wait")
def get_region_operation(call: Call) -> Json:
    return dict(call.find("operations", call.path["operation"])["wire"])


@answers("compute.zoneOperations.wait", "compute.globalOperations.wait")
def wait_operation(call: Call) -> Json:
    """Called without the lock: it answers when the operation is done, or as it stands after a while."""
    name = call.path["operation"]
    with call.state.reading():
        get_operation(call)
    gone: Json = {"wire": {"status": "DONE"}}
    call.state.wait_until(lambda data: data["operations"].get(name, gone)["wire"]["status"] == "DONE", _WAIT_S)
    with call.state.reading():
        return dict(get_operation(call))


@answers("compute.zoneOperations.delete", "compute.globalOperations.delete")
def delete_operation(call: Call) -> Json:
    get_operation(call)
    del call.state.data["operations"][call.path["operation"]]
    return {}


@answers("compute.projects.get")
def get_project(call: Call) -> Json:
    limit = call.state.data["quotas"].get(ALL_REGIONS, DEFAULT_LIMIT)
    used = usage(call.state, ALL_REGIONS, "")
    return {
        "kind": "compute#project",
        "id": NUMBER,
        "name": call.state.project,
        "creationTimestamp": _MADE,
        "selfLink": call.state.link("").rstrip("/"),
        "defaultServiceAccount": f"{NUMBER}-compute@developer.gserviceaccount.com",
        "defaultNetworkTier": "PREMIUM",
        "xpnProjectStatus": "UNSPECIFIED_XPN_PROJECT_STATUS",
        "commonInstanceMetadata": {"kind": "compute#metadata", "fingerprint": fingerprint([])},
        "quotas": [{"metric": ALL_REGIONS, "limit": float(limit), "usage": float(used)}],
    }


def _region(call: Call, region: str) -> Json:
    """With the GPU quotas that this list has: Google's document names none for H200, B200 and on-demand H100."""
    metric_schema = call.method.document.schemas["Quota"]["properties"]["metric"]
    metrics = [prefix + metric for prefix in ("", "PREEMPTIBLE_") for metric in GPU_METRICS.values()]
    quotas = call.state.data["quotas"]
    return {
        "kind": "compute#region",
        "id": str(1000 + REGIONS.index(region)),
        "name": region,
        "description": region,
        "creationTimestamp": _MADE,
        "status": "UP",
        "selfLink": call.state.link(f"regions/{region}"),
        "zones": [call.state.link(f"zones/{zone}") for zone in ZONES if zone.startswith(f"{region}-")],
        "quotas": [
            {
                "metric": metric,
                "limit": float(quotas.get(f"{region}/{metric}", DEFAULT_LIMIT)),
                "usage": float(usage(call.state, metric, region)),
            }
            for metric in metrics
            if metric in metric_schema["enum"]
        ],
    }


def _zone(call: Call, zone: str) -> Json:
    return {
        "kind": "compute#zone",
        "id": str(2000 + ZONES.index(zone)),
        "name": zone,
        "description": zone,
        "creationTimestamp": _MADE,
        "status": "UP",
        "region": call.state.link(f"regions/{zone.rpartition('-')[0]}"),
        "selfLink": call.state.link(f"zones/{zone}"),
    }


def _machine_type(call: Call, name: str) -> Json:
    shape = MACHINE_TYPES[name]
    made: Json = {
        "kind": "compute#machineType",
        "id": str(3000 + list(MACHINE_TYPES).index(name)),
        "name": name,
        "description": f"{shape.vcpus} vCPUs",
        "creationTimestamp": _MADE,
        "guestCpus": shape.vcpus,
        "memoryMb": shape.memory_mb,
        "isSharedCpu": False,
        "zone": call.zone,
        "selfLink": call.state.link(f"zones/{call.zone}/machineTypes/{name}"),
    }
    if shape.gpu:
        made["accelerators"] = [{"guestAcceleratorType": shape.gpu, "guestAcceleratorCount": shape.gpus}]
    return made


def _accelerator_type(call: Call, name: str) -> Json:
    return {
        "kind": "compute#acceleratorType",
        "id": str(4000 + list(GPU_METRICS).index(name)),
        "name": name,
        "description": name,
        "creationTimestamp": _MADE,
        "maximumCardsPerInstance": 8,
        "zone": call.state.link(f"zones/{call.zone}"),
        "selfLink": call.state.link(f"zones/{call.zone}/acceleratorTypes/{name}"),
    }


def _network(call: Call, name: str) -> Json:
    return {
        "kind": "compute#network",
        "id": "5000",
        "name": name,
        "creationTimestamp": _MADE,
        "autoCreateSubnetworks": True,
        "routingConfig": {"routingMode": "REGIONAL"},
        "selfLink": call.state.link(f"global/networks/{name}"),
    }


def _subnetwork(call: Call, name: str) -> Json:
    region = call.path["region"]
    return {
        "kind": "compute#subnetwork",
        "id": str(6000 + REGIONS.index(region)),
        "name": name,
        "creationTimestamp": _MADE,
        "ipCidrRange": "10.128.0.0/20",
        "gatewayAddress": "10.128.0.1",
        "network": call.state.link("global/networks/default"),
        "region": call.state.link(f"regions/{region}"),
        "selfLink": call.state.link(f"regions/{region}/subnetworks/{name}"),
        "stackType": "IPV4_ONLY",
        "purpose": "PRIVATE",
    }


#: collection -> (parameter that names one, those there are, how one is written)
_FIXED: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "regions": ("region", REGIONS, _region),
    "zones": ("zone", ZONES, _zone),
    "machineTypes": ("machineType", tuple(MACHINE_TYPES), _machine_type),
    "acceleratorTypes": ("acceleratorType", tuple(GPU_METRICS), _accelerator_type),
    "networks": ("network", ("default",), _network),
    "subnetworks": ("subnetwork", ("default",), _subnetwork),
}


@answers(*(f"compute.{collection}.{verb}" for collection in _FIXED for verb in ("get", "list")))
def fixed(call: Call) -> Json:
    """What does not change: one, or all of them."""
    _, collection, verb = call.method.id.split(".")
    parameter, names, write = _FIXED[collection]
    if "zone" in call.path and collection != "zones":
        check_zone(call.zone)
    if "region" in call.path and collection != "regions" and call.path["region"] not in REGIONS:
        raise not_found(f"projects/{call.state.project}/regions/{call.path['region']}")
    if verb == "list":
        return lists.plain(call.method, call.query, {name: write(call, name) for name in names})
    if call.path[parameter] not in names:
        raise not_found(call.resource)
    return dict(write(call, call.path[parameter]))


def default_rules(state: State) -> dict[str, Json]:
    """The rules that come with the default network, as far as they matter: all inside, and SSH from anywhere."""

    def rule(name: str, protocol: Json, source: str, priority: int = 65534) -> Json:
        return {
            "kind": "compute#firewall",
            "id": new_id(),
            "name": name,
            "creationTimestamp": _MADE,
            "network": state.link("global/networks/default"),
            "priority": priority,
            "direction": "INGRESS",
            "sourceRanges": [source],
            "allowed": [protocol],
            "disabled": False,
            "selfLink": state.link(f"global/firewalls/{name}"),
        }

    return {
        "default-allow-internal": rule("default-allow-internal", {"IPProtocol": "all"}, "10.128.0.0/9"),
        "default-allow-ssh": rule("default-allow-ssh", {"IPProtocol": "tcp", "ports": ["22"]}, "0.0.0.0/0"),
    }


@answers("compute.networks.getEffectiveFirewalls")
def effective_firewalls(call: Call) -> Json:
    if call.path["network"] != "default":
        raise not_found(call.resource)
    return {"firewalls": list(call.state.data["firewalls"].values())}


@answers("compute.firewalls.list")
def list_firewalls(call: Call) -> Json:
    return lists.plain(call.method, call.query, call.state.data["firewalls"])


@answers("compute.firewalls.get")
def get_firewall(call: Call) -> Json:
    return call.find("firewalls", call.path["firewall"])


@answers("compute.firewalls.insert", "compute.firewalls.update")
def put_firewall(call: Call) -> Json:
    name, rules = call.body["name"], call.state.data["firewalls"]
    known = rules.get(name)
    if known and call.method.id.endswith("insert"):
        path = f"projects/{call.state.project}/global/firewalls/{name}"
        raise Refused(409, "alreadyExists", f"The resource '{path}' already exists")
    if not known and call.method.id.endswith("update"):
        raise not_found(call.resource)
    own = {"kind": "compute#firewall", "id": new_id(), "creationTimestamp": call.state.stamp()}
    rules[name] = {"direction": "INGRESS", "priority": 1000, "disabled": False, **call.body, **own}
    rules[name]["selfLink"] = call.state.link(f"global/firewalls/{name}")
    return call.operation(call.method.id.split(".")[2], "", {}, target=f"global/firewalls/{name}")


@answers("compute.firewalls.delete")
def delete_firewall(call: Call) -> Json:
    name = call.path["firewall"]
    call.find("firewalls", name)
    return call.operation("delete", "drop", {"kind": "firewalls", "key": name, "billed": "none"})


@answers("compute.addresses.list")
def list_addresses(call: Call) -> Json:
    prefix = f"{call.path['region']}/"
    here = {key: one for key, one in call.state.data["addresses"].items() if key.startswith(prefix)}
    return lists.plain(call.method, call.query, here)


@answers("compute.addresses.insert")
def insert_address(call: Call) -> Json:
    """A reserved external address: billed until it is deleted, used or not."""
    region, name = call.path["region"], call.body["name"]
    key = f"{region}/{name}"
    call.state.data["addresses"][key] = {
        "kind": "compute#address",
        "id": new_id(),
        "name": name,
        "creationTimestamp": call.state.stamp(),
        "address": f"34.1.2.{len(call.state.data['addresses']) + 10}",
        "addressType": "EXTERNAL",
        "networkTier": "PREMIUM",
        "status": "RESERVED",
        "region": call.state.link(f"regions/{region}"),
        "selfLink": call.state.link(f"regions/{region}/addresses/{name}"),
        "labels": dict(call.body.get("labels") or {}),
        "labelFingerprint": fingerprint(call.body.get("labels") or {}),
    }
    billing.begin(call.state, "address", key, "external-ip")
    return call.operation("insert", "", {}, target=f"regions/{region}/addresses/{name}")


@answers("compute.addresses.delete")
def delete_address(call: Call) -> Json:
    key = f"{call.path['region']}/{call.path['address']}"
    call.find("addresses", key)
    return call.operation("delete", "drop", {"kind": "addresses", "key": key, "billed": "address"})


@answers("compute.images.get", "compute.images.getFromFamily")
def get_image(call: Call) -> Json:
    """Any image is there, in any project: which images exist is not what these tests are about."""
    name = call.path.get("image") or f"{call.path['family']}-v20261101"
    return {
        "kind": "compute#image",
        "id": "7000",
        "name": name,
        "family": call.path.get("family", name),
        "creationTimestamp": _MADE,
        "diskSizeGb": "50",
        "status": "READY",
        "selfLink": f"https://www.googleapis.com/compute/v1/projects/{call.path['project']}/global/images/{name}",
    }
