"""Rate, time left and monthly cost."""

from __future__ import annotations

from decimal import Decimal

from kimisession.weights.pace import Pacing
from kimisession.weights.seal import FileProgress, Progress
from kimisession.weights.storage_cost import usd_per_month


def at(done: int, *moving: FileProgress) -> Progress:
    return Progress(done, 1000, 0, 2, moving)


def test_rates_are_per_shard_and_in_all() -> None:
    pacing = Pacing()
    pacing.feed(at(0, FileProgress("a", 0, 400), FileProgress("b", 0, 600)), 10.0)
    whole, first, second = pacing.feed(at(100, FileProgress("a", 80, 400), FileProgress("b", 20, 600)), 12.0)
    assert (whole.bytes_per_s, whole.left_s) == (50.0, 18.0)
    assert (first.path, first.bytes_per_s, first.left_s) == ("a", 40.0, 8.0)
    assert (second.bytes_per_s, second.left_s) == (10.0, 58.0)


def test_a_stall_has_no_time_left() -> None:
    pacing = Pacing()
    pacing.feed(at(100), 0.0)
    for second in range(1, 60):
        paces = pacing.feed(at(100), float(second))
    assert (paces[0].bytes_per_s, paces[0].left_s) == (0.0, None)


def test_keeping_595_gb_costs_what_the_price_page_says() -> None:
    assert usd_per_month(595 * 10**9, "us-central1") == Decimal("11.08")
    assert usd_per_month(1, "mars-east1") is None


def test_what_an_earlier_run_finished_is_done_and_no_sign_of_speed() -> None:
    pacing = Pacing()
    pacing.feed(Progress(0, 1000, 0, 2), 0.0)
    whole = pacing.feed(Progress(510, 1000, 1, 2, (), kept_bytes=500), 5.0)[0]
    assert (whole.bytes_per_s, whole.left_s) == (2.0, 245.0)


def test_the_first_moment_promises_nothing() -> None:
    pacing = Pacing()
    pacing.feed(at(0), 0.0)
    assert pacing.feed(at(1), 1.0)[0].left_s is None


def test_a_shard_that_began_late_is_not_slow() -> None:
    pacing = Pacing()
    pacing.feed(at(0), 0.0)
    pacing.feed(at(0, FileProgress("a", 0, 400)), 8.0)
    assert pacing.feed(at(100, FileProgress("a", 100, 400)), 10.0)[1].bytes_per_s == 50.0
