"""What is launched: labels that every cloud takes, flags as the engine spells them, one JSON for the keeper."""

import contextlib
import json
import re
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from good_values import NOON, PROFILE, choices
from hypothesis import example, given
from hypothesis import strategies as st

from kimisession.core.durations import parse_duration
from kimisession.core.launch import (
    LABEL_DEADLINE,
    LABEL_OWNER,
    LABEL_SESSION,
    check_name,
    deadline_label,
    edit_argv,
    flags_to_argv,
    label_value,
    parse_deadline_label,
    session_labels,
)
from kimisession.core.quote import launch_spec, make_quote
from kimisession.node import config

#: Google: "keys and values can contain only lowercase letters, numeric characters, underscores, and dashes", 63 at most,
#: keys begin with a letter (cloud.google.com/compute/docs/labeling-resources, read November 2026).
LABEL_KEY, LABEL_VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")
#: RFC 1035, which Compute Engine holds names of resources to.
RFC1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,29}[a-z0-9])?", fullmatch=True)
MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@given(NAMES, st.text(max_size=100), MOMENTS)
@example("demo", "Müller-İstanbul@HOST.example", NOON)
@example("demo", "", NOON)
def test_labels_are_such_as_every_cloud_takes(name: str, owner: str, deadline: datetime) -> None:
    labels = session_labels(f"{name}-0123abcd", name, owner, deadline)
    assert {LABEL_SESSION, LABEL_OWNER, LABEL_DEADLINE} <= set(labels)
    for key, value in labels.items():
        assert LABEL_KEY.fullmatch(key)
        assert LABEL_VALUE.fullmatch(value)


@given(st.text())
def test_any_text_becomes_a_label_and_stays_it(text: str) -> None:
    value = label_value(text)
    assert LABEL_VALUE.fullmatch(value)
    assert label_value(value) == value


def test_a_session_id_that_no_cloud_takes_is_refused_before_anything_exists() -> None:
    with pytest.raises(ValueError, match="kimisession-session"):
        session_labels("Demo 1", "demo", "me", NOON)


@given(MOMENTS)
def test_a_deadline_goes_into_a_label_and_comes_back_to_the_second(deadline: datetime) -> None:
    back = parse_deadline_label(deadline_label(deadline))
    assert back == deadline.replace(microsecond=0)
    assert back <= deadline  # a label never gives a machine more time


def test_a_deadline_of_any_zone_is_labelled_in_utc() -> None:
    assert deadline_label(datetime(2026, 11, 20, 21, 0, tzinfo=timezone(timedelta(hours=9)))) == "20261120t120000z"


@pytest.mark.parametrize("text", ["", "20261120", "20261320t120000z", "20261120t120000", "forever"])
def test_a_label_that_is_no_deadline_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_deadline_label(text)


@given(st.text(max_size=40))
@example("demo")
@example("demo-")
@example("a" * 31)
def test_a_name_that_is_accepted_names_a_host(text: str) -> None:
    with contextlib.suppress(ValueError):  # refused
        name = check_name(text)
        assert RFC1035.fullmatch(name)
        assert len(name) <= 31


@pytest.mark.parametrize("name", ["", "Demo", "1st", "-x", "x-", "a" * 32, "a b", "kimi-k2.5", "demo\n", "../x", "ä"])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a session"):
        check_name(name)


@pytest.mark.parametrize(
    ("flags", "argv"),
    [
        ({}, ()),
        ({"trust-remote-code": True}, ("--trust-remote-code",)),
        ({"enforce-eager": False}, ()),
        ({"max-model-len": 32768}, ("--max-model-len", "32768")),
        ({"gpu-memory-utilization": 0.95}, ("--gpu-memory-utilization", "0.95")),
        ({"kv-cache-dtype": "fp8"}, ("--kv-cache-dtype", "fp8")),
        ({"limit-mm-per-prompt": {"image": 0}}, ("--limit-mm-per-prompt", '{"image": 0}')),
        ({"sizes": [1, 2]}, ("--sizes", "[1, 2]")),
        ({"zero": 0, "empty": ""}, ("--zero", "0", "--empty", "")),
    ],
)
def test_flags_become_arguments(flags: dict[str, object], argv: tuple[str, ...]) -> None:
    assert flags_to_argv(flags) == argv  # type: ignore[arg-type]


def test_an_edited_argument_list_holds_the_new_form_of_a_flag_and_nothing_of_the_old() -> None:
    argv = ("vllm", "serve", "--max_model_len", "8192", "--kv-cache-dtype=auto", "--enforce-eager", "--port", "8000")
    edited = edit_argv(argv, {"max-model-len": 16384, "kv-cache-dtype": "fp8", "enforce-eager": False})
    assert edited == ("vllm", "serve", "--port", "8000", "--max-model-len", "16384", "--kv-cache-dtype", "fp8")


def test_a_flag_may_be_set_twice_and_the_second_holds() -> None:
    argv = flags_to_argv({"max-model-len": 1, "trust-remote-code": True})
    once = edit_argv(argv, {"max-model-len": 2})
    assert edit_argv(once, {"max-model-len": 3}) == ("--trust-remote-code", "--max-model-len", "3")


def test_the_keeper_reads_back_exactly_what_was_launched() -> None:
    quote = make_quote(PROFILE, choices(budget_usd=Decimal(10)), NOON)
    spec = launch_spec(quote, "demo-0123abcd", "someone")
    read = config.from_json(spec.node_config())
    assert read.session == "demo-0123abcd"
    assert read.hard_cap_utc == quote.deadline.timestamp()
    assert quote.budget_at is not None
    assert read.budget_utc == quote.budget_at.timestamp()
    assert [step.name for step in read.steps] == ["disk-speed", "weights"]
    assert read.engine.argv == spec.engine.argv
    assert set(json.loads(spec.node_config())) == set(config.Config.__dataclass_fields__)


def test_no_secret_is_in_a_launch() -> None:
    spec = launch_spec(make_quote(PROFILE, choices(), NOON), "demo-0123abcd", "someone")
    assert not re.search(r"key|token|secret", spec.node_config().replace("tokens-per-second", ""), re.IGNORECASE)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("1h30m", 5400), (" 2H ", 7200), ("168h", 604800)]
)
def test_durations_are_read_as_people_write_them(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5x", "-5m", "1.5h", "m", "0s", "0h0m", "169h", "5m5h", "5 m", "1e3s", "\n"])
def test_nonsense_for_a_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 90s, 15m or 2h"):
        parse_duration(text)
