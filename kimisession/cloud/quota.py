"""Which quotas of Google Cloud a machine needs, what of them is granted, and how to ask for more.

Three kinds count. All GPUs together: GPUS_ALL_REGIONS, zero in a new project. GPUs of the kind in the region: of spot machines
by PREEMPTIBLE_..., of on-demand ones of the newer kinds by their family. And vCPUs in the region, which are shown and not
counted on: whether machines with GPUs inside use that quota is not verified here.

The API lists only some of these: a document of November 2026 has no metric for H200, B200 or H100 on demand
(compute.v1 discovery document, revision 20261106). What it does not list is not known here, which is never taken for zero.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kimisession.cloud.base import Quota
from kimisession.cloud.prices import market
from kimisession.core.catalog import parse_accelerators
from kimisession.errors import QuotaExceeded, UsageMistake

ALL_REGIONS = "GPUS_ALL_REGIONS"

#: Our accelerator's name as the quotas spell it, and the vCPUs of the machine with eight (Compute Engine documentation,
#: accelerator-optimized machine types).
_KINDS = {
    "A100-80GB": ("NVIDIA_A100_80GB", 96),
    "H100": ("NVIDIA_H100", 208),
    "H200": ("NVIDIA_H200", 224),
    "B200": ("NVIDIA_B200", 224),
    "RTXPRO6000": ("NVIDIA_RTX_PRO_6000", 384),
}

#: On demand, these have a quota by metric of their own; newer kinds count by family.
_BY_METRIC = frozenset({"NVIDIA_A100_80GB"})


@dataclass(frozen=True)
class Need:
    """A quota that a machine uses. `amount` of it; `family` where GPUs are counted by family; `sure` False: shown only."""

    metric: str
    quota_id: str
    amount: int
    regional: bool = True
    family: str = ""
    sure: bool = True


@dataclass(frozen=True)
class Standing:
    """A need in one region; `quota` is None where the API does not list it."""

    need: Need
    region: str
    quota: Quota | None

    @property
    def enough(self) -> bool | None:
        """Whether it is granted and free; None when that is not known."""
        return None if self.quota is None else self.quota.free >= self.need.amount

    @property
    def words(self) -> str:
        """What people read."""
        if self.quota is None:
            return "not listed by the API: see the console"
        text = f"{self.quota.usage:g} of {self.quota.limit:g} used, {self.need.amount} needed"
        return text if self.enough else f"{text}: NOT enough"


class Asked(Protocol):
    """What can tell quotas."""

    @property
    def project(self) -> str:
        """The project's id."""

    def quotas(self) -> tuple[Quota, ...]:
        """Limits and use of every region, and of the project as region "global"."""


def needs(accelerators: str, spot: bool) -> tuple[Need, ...]:
    """The quotas for `H100:8`; none for a machine without GPUs. Raises UsageMistake for a kind that GCP does not rent."""
    try:
        accelerator, count = parse_accelerators(accelerators)
    except ValueError as mistake:
        raise UsageMistake(str(mistake), "for example --gpus H100:8") from None
    if accelerator.memory_gib is None:
        return ()
    if accelerator.name not in _KINDS:
        raise UsageMistake(f"no quota of GCP is known for {accelerator.name}", f"known are {', '.join(_KINDS)}")
    kind, vcpus_of_eight = _KINDS[accelerator.name]
    if spot:
        gpus = Need(f"PREEMPTIBLE_{kind}_GPUS", _id(f"PREEMPTIBLE_{kind}_GPUS"), count)
    elif kind in _BY_METRIC:
        gpus = Need(f"{kind}_GPUS", _id(f"{kind}_GPUS"), count)
    else:
        gpus = Need(f"{kind}_GPUS", "GPUS-PER-GPU-FAMILY-per-project-region", count, family=kind)
    cpus = "PREEMPTIBLE_CPUS" if spot else "CPUS"
    return (
        Need(ALL_REGIONS, "GPUS-ALL-REGIONS-per-project", count, regional=False),
        gpus,
        Need(cpus, _id(cpus), -(-vcpus_of_eight * count // 8), sure=False),
    )


def _id(metric: str) -> str:
    return f"{metric.replace('_', '-')}-per-project-region"


def offered_in(accelerators: str) -> tuple[str, ...]:
    """The regions where the price list has such a machine, the cheapest first; empty where no list has it."""
    accelerator, count = parse_accelerators(accelerators)
    found = market("gcp", accelerator.name, count)
    return tuple(dict.fromkeys(offer.region for offer in found.offers)) if found else ()


def standings(quotas: Iterable[Quota], wanted: Iterable[Need], regions: Iterable[str]) -> tuple[Standing, ...]:
    """Every need in every region; those of the project once, as region "global"."""
    known = {(quota.region, quota.metric): quota for quota in quotas}
    places = tuple(regions)
    found = []
    for need in wanted:
        for region in places if need.regional else ("global",):
            found.append(Standing(need, region, known.get((region, need.metric))))
    return tuple(found)


def request_command(project: str, need: Need, region: str) -> str:
    """What asks Google for it (gcloud reference, beta quotas preferences create). Granting takes minutes to days."""
    dimensions = [f"region={region}"] if need.regional else []
    dimensions += [f"gpu_family={need.family}"] if need.family else []
    chosen = f" --dimensions={','.join(dimensions)}" if dimensions else ""
    return (
        f"gcloud beta quotas preferences create --service=compute.googleapis.com --project={project} "
        f"--quota-id={need.quota_id} --preferred-value={need.amount}{chosen} --email=EMAIL"
    )


def console_link(project: str) -> str:
    """Where the same is done by hand."""
    return f"https://console.cloud.google.com/iam-admin/quotas?project={project}"


def check_quota(cloud: Asked, accelerators: str, spot: bool, regions: Iterable[str] = ()) -> None:
    """Refuse, before anything exists, what cannot be granted anywhere. Raises QuotaExceeded with the command that asks for
    more. A quota that the API does not list refuses nothing."""
    wanted = [need for need in needs(accelerators, spot) if need.sure]
    places = tuple(regions) or offered_in(accelerators)
    found = standings(cloud.quotas(), wanted, places)
    for need in wanted:
        here = [standing for standing in found if standing.need is need]
        if not here or any(standing.enough is not False for standing in here):
            continue
        best = max(here, key=lambda s: s.quota.free if s.quota else 0.0)
        assert best.quota is not None
        where = f"in {best.region}" if need.regional else "in all regions together"
        others = f", nor in {len(here) - 1} other regions" if len(here) > 1 else ""
        used = f"{best.quota.limit:g}, {best.quota.usage:g} in use" if best.quota.usage else f"{best.quota.limit:g}"
        raise QuotaExceeded(
            f"project {cloud.project} may not have {accelerators}: {need.metric} {where} is {used}, and {need.amount} are "
            f"needed{others}",
            request_command(cloud.project, need, best.region),
            tuple(standing.region for standing in here),
        )
