"""A session that is not proven gone is said by every command that meets it."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from command_line import Home
from good_values import requested

from kimisession.cli.looking import warn_of_layers
from kimisession.core.ledger import (
    LaunchRequested,
    Ready,
    TeardownConfirmed,
    TeardownRequested,
    Unconfirmed,
    apply,
    fold,
)
from kimisession.core.lifecycle import Layer, Observation

ID = "demo-0123abcd"


@pytest.mark.parametrize(
    "words", [("status",), ("status", "other"), ("cost",), ("start", "rehearsal", "--dry-run", "--name", "x")], ids=str
)
def test_what_is_not_proven_gone_ends_every_command_with_seven_and_a_way_out(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    home, now = Home(tmp_path), datetime.now(UTC)
    other = [requested(now, name="other", infra="local"), TeardownConfirmed(now, "not listed")]
    store = home.store()
    store.append("other-0123abcd", other)
    # On a place where nobody can look any more: SkyPilot is not asked for it in this test.
    loud = [LaunchRequested(now), TeardownRequested(now, "user", "me"), Unconfirmed(now, "the cloud does not answer")]
    store.append(ID, [requested(now, name="demo", infra="elsewhere"), *loud])
    store.close()
    said = home.type(*words)
    assert said.code == 7
    assert "not proven gone" in said.err
    assert "kimisession stop demo" in said.err


@pytest.mark.parametrize("words", [("status",), ("stop", "--all"), ("stop", "demo"), ("cost",)], ids=str)
def test_an_empty_ledger_is_not_taken_for_an_empty_cloud(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert "`kimisession sweep` asks the cloud" in Home(tmp_path).type(*words).err


def test_a_layer_that_died_since_the_start_is_said_beside_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    now = datetime.now(UTC)
    layers = (Layer("keeper", True, "last heard 2 s ago"), Layer("reaper", False, "it is not alive any more"))
    seen = Observation(now, True, layers=layers)
    starting = fold(ID, [requested(now, name="demo"), LaunchRequested(now)])
    warn_of_layers(starting, seen)
    assert capsys.readouterr().err == "", "they are still being read back"
    warn_of_layers(apply(starting, Ready(now)), seen)
    assert capsys.readouterr().err == "not armed: demo: reaper: it is not alive any more\n"
