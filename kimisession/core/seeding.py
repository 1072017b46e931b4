"""A seeding: a session without an engine, on a rented machine without GPUs, that is done when the bucket is sealed. Pure.

Every layer that ends a session ends it too. No byte of the weights touches the machine's disk, and what was seeded stays in
the bucket: so the machine is a spot machine, and after a preemption the same command goes on where it was.
"""

from dataclasses import dataclass, replace
from decimal import Decimal

from kimisession.core.launch import LaunchSpec, Step
from kimisession.core.profile import Limits, Price, Profile
from kimisession.core.quote import Quote, launch_spec

#: As many as the machine of the write-up below; less memory than that, for streams hold a megabyte each.
VCPUS = 16
MEMORY_GIB_PER_VCPU = 2
DISK_GIB = 50

#: Bytes per second from the hub into a bucket: 595 GB in about half an hour on a machine with 16 vCPUs (public write-up,
#: February 2026), and a quarter of that, as a bound that nobody measured.
FAST, SLOW = 330_000_000, 80_000_000

#: Minutes that a machine takes to come up and to make the seeder ready (SkyPilot takes one to three).
UP_MINUTES = (2, 5)

_HOOK = "@{machine}/scripts/hooks/seeder.sh"
_SEEDER = "@{machine}/seeder"

#: Where a bucket in several regions is written from: one region inside of each of Cloud Storage's multi-regions.
_INSIDE = {"us": "us-central1", "eu": "europe-west4", "asia": "asia-southeast1"}


@dataclass(frozen=True)
class Seeding:
    """What goes where: `repo` on the hub at `commit`, sealed as `model`, of so many decimal bytes. `hub` is the hub's address
    where it is not the usual one; `gated` says that a token travels as the secret `hf_token`."""

    model: str
    repo: str
    commit: str
    bucket_url: str
    weights_bytes: int
    hub: str = ""
    gated: bool = False

    @property
    def minutes(self) -> tuple[int, int]:
        """From the launch to the seal, if the rate is between FAST and SLOW."""
        low, high = (-(-self.weights_bytes // (rate * 60)) for rate in (FAST, SLOW))
        return low + UP_MINUTES[0], high + UP_MINUTES[1]


def seeding_name(profile: str) -> str:
    """The name of a profile's seeding: there is one at a time."""
    return f"seed-{profile.replace('.', '-')}"[:31].rstrip("-")


def region_for(location: str) -> str:
    """The region from which a bucket in `location`, in lower case, is written without crossing regions. Raises ValueError where
    that is not known: bytes between regions are billed."""
    if location.count("-"):
        return location
    if location not in _INSIDE:
        raise ValueError(f"no region is known for a bucket in {location or 'an unknown place'}")
    return _INSIDE[location]


def seeding_profile(profile: Profile, seeding: Seeding, usd_per_hour: Decimal, ground: str, pretended: bool) -> Profile:
    """The profile as its seeding is quoted: the price of another machine, caps of its own, and what goes where in the
    place of an engine's flags."""
    return replace(
        profile,
        engine=replace(profile.engine, flags={"bucket": seeding.bucket_url, "revision": seeding.commit}),
        price=Price(usd_per_hour, ground, pretended),
        limits=Limits(duration="6h", longest="24h"),
        stack=replace(profile.stack, driver="", torch="", gib=""),
        load="copy",
        coldstart=None,
    )


def seed_spec(quote: Quote, session_id: str, owner: str, seeding: Seeding, region: str) -> LaunchSpec:
    """The launch of a quote for `seeding_profile`. Nothing of it gets ready, so no rule about readiness may end it: hard cap,
    budget and a seeder that gives up do."""
    spec = launch_spec(quote, session_id, owner)
    never_s = 2 * spec.placement.longest_s
    return replace(
        spec,
        steps=seed_steps(seeding),
        engine=None,
        limits=replace(spec.limits, ready_within_s=never_s, coldstart_stall_s=never_s),
        ephemeral_disk=False,
        placement=replace(
            spec.placement,
            disk_gib=DISK_GIB,
            memory_gib=MEMORY_GIB_PER_VCPU * quote.choices.count,
            zone=region,
        ),
    )


def seed_steps(seeding: Seeding) -> tuple[Step, ...]:
    """The seeder's Python, then the weights. The token's file is named, its content is nowhere here."""
    env = [f"HF_ENDPOINT={seeding.hub}"] if seeding.hub else []
    env += ["HF_TOKEN_PATH=@{machine}/hf_token"] if seeding.gated else []
    seeder = [f"{_SEEDER}/bin/python", "-m", "kimisession.weights.seeder", "--model", seeding.model]
    seeder += ["--from", seeding.repo, "--revision", seeding.commit, "--bucket", seeding.bucket_url]
    return (
        Step("stack", (_HOOK, "--venv", _SEEDER, "--try", "@{python}")),
        Step("weights", ("env", *env, *seeder), ("stack",)),
    )
