"""What Google would bill, by the emulator's own clock: the truth that our receipts are compared with.

The rule, of which nothing was compared with a real bill. Read in Google's documents (instances.stop; the pages on Spot VMs
and on prices): a stopped instance is not billed, its disks and reserved addresses are until they are deleted; an instance is
billed by the second, for a minute at least; one that is preempted in its first minute costs nothing. Assumed, as the dearer
reading: an instance costs from RUNNING, which PROVISIONING and STAGING are not, until it is TERMINATED or gone, so all of
STOPPING and of the half minute after a preemption's notice too; an ephemeral external address costs as long as its instance
does; a disk costs from the insert to its end, also where its instance never ran. Seconds are exact here, not rounded up.
"""

from decimal import Decimal

from .catalog import MACHINE_TYPES
from .state import Json, State, last, utc

MINIMUM_S = Decimal(60)


def begin(state: State, kind: str, resource: str, sku: str, spot: bool = False, units: int = 1) -> None:
    """Bill from now on; nothing if this resource is billed already. The lock is held.

    A sku without a price is a violation, not a free lunch.
    """
    data = state.data
    if any(row["resource"] == resource and row["kind"] == kind and row["end"] is None for row in data["bill"]):
        return
    prices = data["prices"].get(sku)
    if prices is None:
        state.violation(f"no price for {sku}", resource=resource)
        return
    data["bill"].append(
        {
            "kind": kind,
            "resource": resource,
            "sku": sku,
            "spot": spot,
            "units": units,
            "usd_per_hour": str(Decimal(prices[1 if spot else 0]) * units),
            "start": state.clock(),
            "end": None,
            "free": False,
        }
    )


def end(state: State, resource: str, kind: str = "", preempted: bool = False) -> None:
    """Bill no further. The lock is held."""
    for row in state.data["bill"]:
        if row["resource"] == resource and row["end"] is None and kind in ("", row["kind"]):
            row["end"] = state.clock()
            row["free"] = preempted and row["kind"] != "disk" and row["end"] - row["start"] < MINIMUM_S


def instance_runs(state: State, key: str, instance: Json) -> None:
    """The instance and its external address are billed from now on."""
    spot = instance["scheduling"]["provisioningModel"] == "SPOT"
    sku = last(instance["machineType"])
    begin(state, "instance", key, sku, spot)
    if state.data["inside"][key]["nat"]:
        begin(state, "address", key, "external-ip", spot)
    gpus = sum(int(one["acceleratorCount"]) for one in instance.get("guestAccelerators", []))
    if gpus != MACHINE_TYPES[sku].gpus:
        state.violation(f"{sku} with {gpus} GPUs has no price", resource=key)


def instance_stops(state: State, key: str, preempted: bool = False) -> None:
    """The instance and its ephemeral address are billed no further; its disks are."""
    end(state, key, "instance", preempted)
    end(state, key, "address", preempted)


def bill(state: State) -> Json:
    """Every line with its seconds and dollars until now, and the sum. Dollars are decimal text, exact."""
    with state.reading() as data:
        now, lines, total = state.clock(), [], Decimal(0)
        for row in data["bill"]:
            until = now if row["end"] is None else row["end"]
            seconds = Decimal(repr(round(until - row["start"], 6)))
            billed_s = Decimal(0) if row["free"] else max(seconds, MINIMUM_S if row["kind"] == "instance" else seconds)
            usd = Decimal(row["usd_per_hour"]) * billed_s / 3600
            total += usd
            lines.append(
                {
                    **row,
                    "start": utc(row["start"]),
                    "end": None if row["end"] is None else utc(row["end"]),
                    "seconds": str(seconds),
                    "billed_s": str(billed_s),
                    "usd": str(usd),
                }
            )
        running = sorted({row["resource"] for row in data["bill"] if row["end"] is None})
        return {"lines": lines, "usd": str(total), "running": running}
