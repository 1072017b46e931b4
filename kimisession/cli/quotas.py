"""`quota`: the quotas that a profile needs on GCP, what is granted, and the request for the rest."""

from kimisession.cli import show
from kimisession.cloud.base import Cloud
from kimisession.cloud.compute import open_compute
from kimisession.cloud.quota import Standing, console_link, needs, offered_in, request_command, standings
from kimisession.errors import QuotaExceeded, UsageMistake
from kimisession.profile_file import load_profile

#: Regions shown unless one is named: the cheapest of those that have such machines.
SHOWN = 6


def run_quota(
    profile: str, gpus: str | None, region: str | None, project: str, json: bool, cloud: Cloud | None = None
) -> None:
    """The three quotas by region. Raises QuotaExceeded when no region has enough of them."""
    accelerators = gpus or load_profile(profile).hardware.accelerators[0]
    if accelerators.partition(":")[0] == "CPU":
        raise UsageMistake(f"{profile} runs on a CPU: it needs no GPU quota", f"kimisession plan {profile}")
    wanted = [(market, need) for market in ("spot", "on demand") for need in needs(accelerators, market == "spot")]
    regions = (region,) if region else offered_in(accelerators)[:SHOWN]
    cloud = cloud or open_compute(project)
    granted = cloud.quotas()
    by_market = {
        market: standings(granted, [need for of, need in wanted if of == market], regions)
        for market in ("spot", "on demand")
    }
    if json:
        show.as_json("quota", {"project": cloud.project, "accelerators": accelerators, "quotas": _data(by_market)})
    else:
        show.table(("MARKET", "QUOTA", "REGION", "STANDING"), _rows(by_market))
    spot = by_market["spot"]
    lacking = _lacking(spot)
    if lacking:
        first = lacking[0]
        if not json:
            for standing in lacking[1:]:
                show.say(f"and: {request_command(cloud.project, standing.need, standing.region)}")
            show.say(f"or by hand: {console_link(cloud.project)}")
        raise QuotaExceeded(
            f"project {cloud.project} has no spot quota for {accelerators}: {first.need.metric} in {first.region}: "
            f"{first.words}",
            request_command(cloud.project, first.need, first.region),
        )
    if not json:
        unknown = sorted({s.need.metric for s in spot if s.quota is None and s.need.sure})
        if unknown:
            show.say(f"not listed by the API: {', '.join(unknown)}; look at {console_link(cloud.project)}")
        show.next_step(f"kimisession start {profile}")


def _rows(by_market: dict[str, tuple[Standing, ...]]) -> list[tuple[str, ...]]:
    """A row for each market, quota and standing; regions that stand alike share it."""
    regions: dict[tuple[str, str, str], list[str]] = {}
    for market, found in by_market.items():
        for standing in found:
            regions.setdefault((market, standing.need.metric, standing.words), []).append(standing.region)
    return [(market, metric, " ".join(where), words) for (market, metric, words), where in regions.items()]


def _lacking(found: tuple[Standing, ...]) -> list[Standing]:
    """For each need that no region meets, its best region."""
    lacking = []
    for need in dict.fromkeys(standing.need for standing in found if standing.need.sure):
        here = [standing for standing in found if standing.need == need]
        if here and all(standing.enough is False for standing in here):
            lacking.append(max(here, key=lambda s: s.quota.free if s.quota else 0.0))
    return lacking


def _data(by_market: dict[str, tuple[Standing, ...]]) -> list[dict[str, object]]:
    return [
        {
            "market": market,
            "metric": standing.need.metric,
            "region": standing.region,
            "needed": standing.need.amount,
            "limit": None if standing.quota is None else int(standing.quota.limit),
            "used": None if standing.quota is None else int(standing.quota.usage),
            "enough": standing.enough,
        }
        for market, found in by_market.items()
        for standing in found
    ]
