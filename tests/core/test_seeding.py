"""What a seeding is as a session: without an engine, under the caps, at a price or at none."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from good_values import NOON, PROFILE, choices, requested

from kimisession.core.cost import UNPRICED, cost_of
from kimisession.core.launch import LaunchSpec
from kimisession.core.ledger import Session, apply
from kimisession.core.lifecycle import Observation, SeenResource, news
from kimisession.core.quote import Quote, make_quote
from kimisession.core.seeding import Seeding, region_for, seed_spec, seeding_name, seeding_profile
from kimisession.node.config import from_json
from kimisession.node.policy import Limits, Reason, Seen, decide

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SEEDING = Seeding("owner/model", "owner/model", COMMIT, "gs://mine/kimi", 595_200_000_000, gated=True)


def quote(usd: str = "0.19", ground: str = "a catalog", **more: Any) -> Quote:
    profile = seeding_profile(PROFILE, SEEDING, Decimal(usd), ground, False)
    return make_quote(profile, choices(name="seed-good", count=16, bucket_url=SEEDING.bucket_url, **more), NOON)


def spec(**more: Any) -> LaunchSpec:
    return seed_spec(quote(**more), "seed-good-0123abcd", "me", SEEDING, "us-central1")


def test_a_seeding_is_a_session_without_an_engine_and_without_gpus() -> None:
    made = spec()
    assert (made.engine, made.accelerators, made.ephemeral_disk) == (None, "CPU:16", False)
    assert (made.placement.memory_gib, made.placement.zone) == (32, "us-central1")
    assert [step.name for step in made.steps] == ["stack", "weights"]
    assert made.labels["kimisession-deadline"] == "20261120t180000z"
    assert from_json(made.node_config()).engine is None


def test_its_price_and_caps_are_its_own_and_not_those_of_eight_gpus() -> None:
    agreed = quote(budget_usd=Decimal("0.38"))
    assert (agreed.usd_per_hour, agreed.deadline) == (Decimal("0.19"), NOON + timedelta(hours=6))
    assert (agreed.ends_at, agreed.worst_usd) == (NOON + timedelta(hours=2), Decimal("0.38"))


def test_what_goes_where_is_on_record_so_that_the_same_command_finds_it_again() -> None:
    assert quote().flags == {"bucket": "gs://mine/kimi", "revision": COMMIT}


def test_no_rule_about_readiness_ends_it_before_its_cap_or_the_longest_that_extend_reaches() -> None:
    limits = spec().limits
    told = Limits(
        idle_s=limits.idle_s,
        unused_s=limits.unused_s,
        hard_cap_at=24 * 3600.0,
        budget_at=None,
        ready_within_s=limits.ready_within_s,
        coldstart_stall_s=limits.coldstart_stall_s,
        stall_s=limits.stall_s,
        unknown_s=limits.unknown_s,
        warn_s=limits.warn_s,
    )
    decision = decide(Seen(started_at=0.0, progressed_at=0.0, phase="weights"), told, 20 * 3600.0)
    assert (decision.reason, decision.ends_at) == (Reason.HARD_CAP, 24 * 3600.0)


def test_the_token_is_a_file_that_the_step_names_and_nothing_else() -> None:
    weights = spec().steps[1].argv
    assert "HF_TOKEN_PATH=@{machine}/hf_token" in weights
    without = seed_spec(quote(), "seed-good-0123abcd", "me", replace(SEEDING, gated=False), "")
    assert not any("TOKEN" in word for word in without.steps[1].argv)


def test_the_step_names_a_commit_and_never_a_branch() -> None:
    words = spec().steps[1].argv
    assert words[words.index("--revision") + 1] == COMMIT


def test_595_gb_take_half_an_hour_to_two_hours_and_the_machine_its_minutes() -> None:
    assert SEEDING.minutes == (33, 129)
    assert replace(SEEDING, weights_bytes=0).minutes == (2, 5)


@pytest.mark.parametrize(
    ("location", "region"), [("us-east5", "us-east5"), ("us", "us-central1"), ("eu", "europe-west4")]
)
def test_a_bucket_is_written_from_inside_of_where_it_is(location: str, region: str) -> None:
    assert region_for(location) == region


@pytest.mark.parametrize("location", ["", "nam4", "moon"])
def test_where_no_region_is_known_none_is_guessed(location: str) -> None:
    with pytest.raises(ValueError, match="no region is known"):
        region_for(location)


@pytest.mark.parametrize("profile", ["kimi-k2.5", "a-profile-with-a-name-of-many-letters"])
def test_a_seedings_name_can_name_a_session(profile: str) -> None:
    from kimisession.core.launch import check_name

    assert check_name(seeding_name(profile)).startswith("seed-")


def test_a_machine_without_a_price_is_named_on_the_receipt_and_not_billed_with_nothing() -> None:
    session = apply(Session("s"), requested(usd_per_hour=Decimal(0), price_ground=UNPRICED))
    seen = Observation(NOON, True, "", (SeenResource("gcp/a/vm", "machine", NOON),))
    for event in news(session, seen):
        session = apply(session, event)
    assert cost_of(session, NOON + timedelta(hours=1)).unpriced == ("gcp/a/vm",)
