"""`cost`: one receipt with everything that it rests on, and what all sessions took by week, by profile, for a million tokens."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import Home
from good_values import requested
from test_json import document

from kimisession.cli.ending import _kept_data, _tell_storage, groups, week_of
from kimisession.core.ledger import (
    AttemptFailed,
    EndedOnNode,
    Event,
    Fact,
    LaunchRequested,
    Ready,
    ResourceCreated,
    ResourceGone,
    TeardownConfirmed,
)
from kimisession.weights.errors import WeightsError
from kimisession.weights.kept import kept

AT = datetime(2026, 3, 5, 14, 0, tzinfo=UTC)  # a Thursday
HOUR = timedelta(hours=1)


def session(at: datetime = AT, hours: int = 1, tokens: str = "2000000", **changes: Any) -> list[Event]:
    """A rented machine that was ready after six minutes and ended by itself; its disk, and a zone that had none."""
    end = at + hours * HOUR
    good = {"infra": "gcp", "stand_in": False, "usd_per_hour": Decimal(26), "bucket": "gs://weights/kimi", **changes}
    return [
        requested(at, **good),
        LaunchRequested(at),
        AttemptFailed(at, "us-east5-a", "ZONE_RESOURCE_POOL_EXHAUSTED"),
        ResourceCreated(at, "gcp/us-central1-a/m", "machine", Decimal(24), "a3-highgpu-8g spot, a list"),
        ResourceCreated(at, "gcp/us-central1-a/m/disk", "disk", Decimal("0.10"), "100 GiB pd-balanced, a list"),
        Ready(at + HOUR / 10),
        Fact(end, "tokens", tokens),
        EndedOnNode(end, "idle", "idle 20m of 20m", 10),
        ResourceGone(end, "gcp/us-central1-a/m", "Compute Engine: deleted by vm@p, operation o"),
        ResourceGone(end, "gcp/us-central1-a/m/disk", "Compute Engine: deleted by vm@p, operation o"),
        TeardownConfirmed(end, "two empty lists"),
    ]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    store = home.store()
    store.append("a-1", session(name="a"))
    store.append("b-1", session(AT + 24 * HOUR, 2, name="b", profile="other"))
    store.append("c-1", session(AT + 4 * 24 * HOUR, name="c"))
    store.append("d-1", session(AT, 9, name="d", pretended=True))
    store.close()
    return home


def test_a_receipt_in_json_has_evidence_attempts_estimate_and_the_price_of_a_useful_hour(home: Home) -> None:
    found = document(home.type("cost", "a", "--json"), "receipt")
    assert found["usd"] == "24.10"
    assert [line["evidence"] for line in found["lines"]] == ["Compute Engine: deleted by vm@p, operation o"] * 2
    assert (found["evidence"], found["confirmed"]) == ("idle 20m of 20m", "two empty lists")
    assert found["attempts"] == [
        {"at": "2026-03-05T14:00:00Z", "place": "us-east5-a", "why": "ZONE_RESOURCE_POOL_EXHAUSTED"}
    ]
    assert found["estimate"] == {"usd": "26.00", "worst_usd": "52.00"}
    useful = found["useful"]
    assert (useful["sessions"], useful["usd"], Decimal(useful["ready_s"])) == (1, "24.10", 3240)
    assert Decimal(useful["usd_per_hour"]).quantize(Decimal("0.01")) == Decimal("26.78")
    assert (found["tokens"], found["usd_per_million_tokens"]) == (2000000, "12.05")


def test_the_same_receipt_for_people_names_the_tokens(home: Home) -> None:
    told = home.type("cost", "a").out
    assert "2,000,000 tokens generated, as last heard, $12.05 per million" in told
    assert "x $0.1000/h = $0.10" in told
    assert "estimate    $26.00 for this time at the agreed price, $52.00 at the caps" in told


def test_totals_by_week_and_profile_leave_out_what_is_pretended(home: Home) -> None:
    found = document(home.type("cost", "--json"), "costs")
    assert [(one["week"], one["sessions"], one["usd"], one["tokens"]) for one in found["weeks"]] == [
        ("2026-03-02", 2, "72.30", 4000000),
        ("2026-03-09", 1, "24.10", 2000000),
    ]
    assert [(one["profile"], one["usd"], one["usd_per_million_tokens"]) for one in found["profiles"]] == [
        ("good", "48.20", "12.05"),
        ("other", "48.20", "24.10"),
    ]
    assert (found["count"], found["usd"], found["storage"]) == (3, "96.40", None)
    told = home.type("cost").out
    assert "2026-03-02" in told
    assert "$12.05" in told
    assert "kimisession cost --storage asks what the weights cost a month" in told


def test_every_total_has_what_a_live_session_took_until_now(tmp_path: Path) -> None:
    """The ledger's own figure is of the last event, hours ago; the place cannot be asked in this test."""
    home, began = Home(tmp_path), datetime.now(UTC) - 2 * HOUR
    store = home.store()
    store.append("a-1", session(began, infra="elsewhere", name="a")[:6])
    store.close()
    found = document(home.type("cost", "--json"), "costs")
    usd = Decimal(found["sessions"][0]["usd"])
    assert usd > 48
    assert [Decimal(one["usd"]) for one in (found, found["weeks"][0], found["profiles"][0])] == [usd] * 3
    told = home.type("cost").out
    assert "so far, cannot be seen now" in told
    assert "1 session took $48.2" in told


def test_a_session_that_cannot_be_seen_has_a_receipt_all_the_same(tmp_path: Path) -> None:
    home = Home(tmp_path)
    store = home.store()
    store.append("a-1", session(datetime.now(UTC) - 2 * HOUR, infra="elsewhere", name="a")[:6])
    store.close()
    said = home.type("cost", "a")
    assert "not looked: 'elsewhere' is not a place" in said.err
    assert "everything not known to have ended is counted until now" in said.out


def test_weeks_begin_on_monday_in_utc(home: Home) -> None:
    rows = {row.session: row for row in home.store().rows()}
    assert week_of(rows["b-1"]) == "2026-03-02"
    assert [group.tokens for group in groups(rows.values(), {}, week_of)] == [None, None]


class Storage:
    """A client of Cloud Storage, as far as it is asked."""

    def __init__(
        self, location: str = "US-CENTRAL1", storage_class: str = "STANDARD", retention_s: int = 604800
    ) -> None:
        policy = SimpleNamespace(retention_duration_seconds=retention_s)
        self.found = SimpleNamespace(location=location, soft_delete_policy=policy)
        self.storage_class = storage_class

    def bucket(self, name: str) -> None:
        """Not needed."""

    def lookup_bucket(self, name: str) -> Any:
        return self.found

    def list_blobs(self, name: str, retry: Any = None, versions: bool = False, soft_deleted: bool = False) -> list[Any]:
        def blob(gib: int, gone: object = None) -> Any:
            return SimpleNamespace(size=gib << 30, time_deleted=gone, storage_class=self.storage_class)

        assert versions != soft_deleted
        return [blob(3)] if soft_deleted else [blob(90), blob(7, AT)]


def test_a_bucket_costs_what_no_seal_names_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = kept("gs://weights/kimi", Storage())
    assert (found.live_bytes >> 30, found.old_bytes >> 30, found.deleted_bytes >> 30) == (90, 7, 3)
    assert found.usd_per_month == Decimal("2.00")
    _tell_storage(["gs://weights/kimi"], [("gs://weights", found)], True)
    told = capsys.readouterr().out
    assert "gs://weights holds" in told
    assert "$2.00 a month; not in it: parts of unfinished multipart uploads" in told
    assert kept("gs://weights", Storage(retention_s=0)).deleted_bytes == 0


def test_a_bucket_without_a_known_price_says_so() -> None:
    for client, why in ((Storage("mars"), "mars"), (Storage(storage_class="NEARLINE"), "NEARLINE")):
        found = kept("gs://weights", client)
        assert found.usd_per_month is None
        assert why in found.why
    lost = Storage()
    lost.found = None
    assert "no such bucket" in kept("gs://weights", lost).why
    refused = _kept_data("gs://weights", WeightsError("nobody may read it"))
    assert (refused["usd_per_month"], refused["unpriced"]) == (None, ["gs://weights"])
