"""What a machine that was found costs an hour, by the price lists that `plan` uses. What they do not have has no price."""

import functools
from decimal import Decimal

from kimisession.cloud.prices import market
from kimisession.core.audit import Price
from kimisession.core.inventory import Machine, Resource
from kimisession.core.plan.prices import GCP_HOSTS, Market

_BY_TYPE = {host: shape for shape, host in GCP_HOSTS.items()}


@functools.cache
def _market(accelerator: str, count: int) -> Market | None:
    return market("gcp", accelerator, count)


def price_of_resource(resource: Resource) -> Price:
    """Dollars per hour of a machine in its own zone, spot or not. Disks, addresses and other machines have no price here."""
    shape = _BY_TYPE.get(resource.machine_type) if isinstance(resource, Machine) else None
    found = _market(*shape) if shape else None
    if found is None or not isinstance(resource, Machine):
        return Price(None, "not priced")
    offer = next((offer for offer in found.offers if offer.zone == resource.zone), None)
    usd: Decimal | None = None
    if offer is not None:
        usd = offer.spot_usd if resource.spot else offer.on_demand_usd
    word = "spot" if resource.spot else "on demand"
    return Price(usd, f"{resource.machine_type} {word} in {resource.zone}, list of {found.as_of:%Y-%m-%d}")
