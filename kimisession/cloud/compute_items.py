"""The items of Compute Engine's library as values of core/inventory.py."""

import re
from datetime import UTC, datetime
from typing import Any

from kimisession.cloud.base import Quota
from kimisession.core.inventory import Address, Disk, Firewall, Machine, Operation


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def last_part(url: str) -> str:
    """The name at the end of a link."""
    return url.rpartition("/")[2]


def firewall_of(item: Any) -> Firewall:
    """A firewall rule of the library as a Firewall."""
    return Firewall(item.name, _moment(item.creation_timestamp))


def _place(item: Any) -> str:
    return last_part(getattr(item, "zone", "") or "") or last_part(getattr(item, "region", "") or "") or "global"


def machine_of(item: Any) -> Machine:
    """An instance of the library as a Machine."""
    nic = next(iter(item.network_interfaces), None)
    access = next(iter(nic.access_configs), None) if nic is not None else None
    stopped = item.last_stop_timestamp if item.status in ("TERMINATED", "STOPPED", "STOPPING", "SUSPENDED") else ""
    return Machine(
        item.name,
        _place(item),
        _moment(item.creation_timestamp),
        dict(item.labels),
        item.label_fingerprint,
        status=item.status,
        ended=_moment(stopped) if stopped else None,
        machine_type=last_part(item.machine_type),
        spot=item.scheduling.provisioning_model == "SPOT" or bool(item.scheduling.preemptible),
        accelerators=tuple((last_part(a.accelerator_type), a.accelerator_count) for a in item.guest_accelerators),
        disks=tuple((last_part(disk.source), bool(disk.auto_delete)) for disk in item.disks if disk.source),
        internal_ip=nic.network_i_p if nic is not None else "",
        external_ip=access.nat_i_p if access is not None else "",
        account=next((one.email for one in item.service_accounts), ""),
    )


def disk_of(item: Any) -> Disk:
    """A disk of the library as a Disk."""
    return Disk(
        item.name,
        _place(item),
        _moment(item.creation_timestamp),
        dict(item.labels),
        item.label_fingerprint,
        size_gib=int(item.size_gb),
        disk_type=last_part(item.type_),
        users=tuple(last_part(user) for user in item.users),
    )


def address_of(item: Any) -> Address:
    """An address of the library as an Address."""
    return Address(
        item.name,
        _place(item),
        _moment(item.creation_timestamp),
        dict(item.labels),
        item.label_fingerprint,
        address=item.address,
        users=tuple(last_part(user) for user in item.users),
    )


def operation_of(item: Any) -> Operation:
    """An operation of the library as an Operation."""
    status = item.status if isinstance(item.status, str) else item.status.name
    kind, target = item.operation_type, item.target_link
    aimed = re.search(r"/(?:instances|disks|addresses|firewalls)/([^/]+)$", target)
    return Operation(
        item.name,
        _place(item),
        kind,
        aimed.group(1) if aimed else "",
        status,
        _moment(item.insert_time or item.start_time),
        _moment(item.end_time) if item.end_time else None,
        item.user,
        item.operation_group_id,
        tuple((error.code, error.message) for error in item.error.errors),
        item.client_operation_id,
    )


def quota_of(region: str, item: Any) -> Quota:
    """A quota of a region, or of the project ("global"), as a Quota."""
    metric = item.metric if isinstance(item.metric, str) else item.metric.name
    return Quota(region, metric, float(item.limit), float(item.usage))
