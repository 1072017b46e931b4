"""What goes wrong on demand. A fault is a dict in the state, so that it survives a restart as everything else does.

Every fault has `kind`, and may have `times` (how often it strikes; without it, until it is taken away) and matchers:
`method` (a method id, with * for a part), `zone`, `name` (of an instance, with *). By kind:

| kind | further fields | what happens |
|---|---|---|
| http_error | status=503, reason, message | the call is refused before it acts |
| lost_reply | | the call acts; then the connection is closed without an answer |
| slow_reply | seconds | the answer comes that late |
| stockout | zone | inserts there are accepted, then fail with ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS |
| quota | zone, metric, limit=0, as="operation" or "http" | inserts fail with QUOTA_EXCEEDED, or 403 quotaExceeded |
| op_error | code, message | the operation of the call is accepted, then fails, having done nothing |
| slow_operation | seconds | the operation of the call ends that much later |
| delete_ignored | seconds | the delete says DONE and the instance stays; it goes `seconds` later, if they are given |
| unreachable | zone, as="warning" or "error" | lists over all zones warn that it is missing from them, or fail (503) |
"""

import fnmatch
import time

from .catalog import ALL_REGIONS
from .errors import Failed, Refused
from .state import Json, State, new_id, region_of

KINDS = {
    "http_error": {"status", "reason", "message"},
    "lost_reply": set(),
    "slow_reply": {"seconds"},
    "stockout": set(),
    "quota": {"metric", "limit", "as"},
    "op_error": {"code", "message"},
    "slow_operation": {"seconds"},
    "delete_ignored": {"seconds"},
    "unreachable": {"as"},
}
_COMMON = {"kind", "times", "method", "zone", "name", "id"}


def add(state: State, fault: Json) -> str:
    """Arm a fault; its id. Raises ValueError for a kind or a field that is not in the table."""
    unknown = set(fault) - _COMMON - KINDS.get(str(fault.get("kind")), set())
    if fault.get("kind") not in KINDS or unknown:
        raise ValueError(f"no such fault: {fault.get('kind')} with {sorted(unknown) or 'these fields'}; see faults.py")
    with state.changing() as data:
        data["faults"].append({**fault, "id": new_id()})
        return str(data["faults"][-1]["id"])


def strike(state: State, kind: str, method: str, zone: str = "", name: str = "") -> Json | None:
    """The first fault of this kind that matches, counted down; None when all is well."""
    with state.reading() as data:
        for fault in data["faults"]:
            asked = ((fault.get("method", "*"), method), (fault.get("zone", "*"), zone), (fault.get("name", "*"), name))
            if fault["kind"] == kind and all(fnmatch.fnmatchcase(value, pattern) for pattern, value in asked):
                break
        else:
            return None
        if "times" in fault:
            with state.changing():
                fault["times"] -= 1
                if fault["times"] <= 0:
                    data["faults"].remove(fault)
        return dict(fault)


def before(state: State, method: str, zone: str, name: str) -> None:
    """Refuse or delay a call before it acts."""
    if fault := strike(state, "slow_reply", method, zone, name):
        time.sleep(float(fault["seconds"]))
    if fault := strike(state, "http_error", method, zone, name):
        status = int(fault.get("status", 503))
        message = fault.get("message", "The service is currently unavailable.")
        raise Refused(status, fault.get("reason", "backendError"), message)


def no_capacity(state: State, method: str, zone: str) -> Failed | None:
    """Why an insert in this zone fails after it was accepted; None when it does not. Refused where quota says so."""
    if strike(state, "stockout", method, zone):
        return Failed(
            "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
            f"The zone 'projects/{state.project}/zones/{zone}' does not have enough resources available to fulfill the "
            "request, '(resource type:compute)'.",
        )
    if fault := strike(state, "quota", method, zone):
        metric, limit = str(fault.get("metric", ALL_REGIONS)), float(fault.get("limit", 0))
        return quota_exceeded(metric, limit, region_of(zone), str(fault.get("as", "operation")))
    return None


def quota_exceeded(metric: str, limit: float, region: str, how: str = "operation") -> Failed:
    """Google's sentence about a quota; raised as 403 where `how` is "http", else the operation's error."""
    where = "globally." if metric == ALL_REGIONS else f"in region {region}."
    message = f"Quota '{metric}' exceeded.  Limit: {limit:.1f} {where}"
    if how == "http":
        raise Refused(403, "quotaExceeded", message, "usageLimits")
    return Failed("QUOTA_EXCEEDED", message)


def unreachable(state: State) -> list[str]:
    """Zones that lists over all zones miss. Refused (503) where the fault says that the whole list fails."""
    found = [fault for fault in state.data["faults"] if fault["kind"] == "unreachable"]
    if any(fault.get("as") == "error" for fault in found):
        raise Refused(503, "backendError", "The service is currently unavailable.")
    return [str(fault["zone"]) for fault in found]


def of_operation(state: State, method: str, zone: str, name: str) -> tuple[Failed | None, float]:
    """What befalls the operation of a call: the error that it ends in, and how many seconds later it ends."""
    slow = strike(state, "slow_operation", method, zone, name)
    failed = strike(state, "op_error", method, zone, name)
    error = None
    if failed:
        error = Failed(failed.get("code", "INTERNAL_ERROR"), failed.get("message", "Internal error. Please try again."))
    return error, float(slow["seconds"]) if slow else 0.0
