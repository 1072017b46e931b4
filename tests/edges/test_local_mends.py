"""The local engine when its own records are lost, torn, or were never finished."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from good_values import PROFILE, an_id, choices

from kimisession.core.launch import LaunchSpec
from kimisession.core.quote import launch_spec, make_quote
from kimisession.engines.local import LocalEngine
from kimisession.engines.local_machine import Machine
from kimisession.engines.payload import lay_out
from kimisession.errors import NotYetGone, Unconfirmed, UsageMistake
from kimisession.rehearsal.standin_model import make_standin_model


def a_spec(tmp_path: Path) -> LaunchSpec:
    """A session that gets ready and stays."""
    make_standin_model(tmp_path / "model", shards=1, shard_bytes=1000)
    profile = replace(PROFILE, load="in-place", limits=replace(PROFILE.limits, tick=0.05, stop_grace="1s"))
    chosen = choices(infra="local", bucket_url=f"file://{tmp_path / 'model'}", port=0)
    return launch_spec(make_quote(profile, chosen, datetime.now(UTC)), an_id("demo"), "me")


def test_a_machine_whose_record_was_lost_is_not_gone_while_it_runs_and_can_be_ended(tmp_path: Path) -> None:
    spec, engine = a_spec(tmp_path), LocalEngine(tmp_path / "machines")
    engine.launch(spec, {"api_key": "hidden"})
    machine = Machine(tmp_path / "machines" / spec.session_id)
    try:
        (machine.folder / "machine.json").unlink()
        seen = engine.observe(spec.session_id)
        assert (seen.present, seen.unguarded) == (True, True)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with suppress(NotYetGone, Unconfirmed):
                engine.down(spec.session_id, "a test", "user")
                break
        assert engine.observe(spec.session_id).present is False
        assert machine.leftovers() == set()
        assert not (machine.folder / "api_key").exists()
    finally:
        machine.close("test")


def test_a_start_that_died_while_it_laid_out_leaves_no_secret(tmp_path: Path) -> None:
    spec, engine = a_spec(tmp_path), LocalEngine(tmp_path / "machines")
    folder = tmp_path / "machines" / spec.session_id
    folder.mkdir(parents=True)
    lay_out(folder, spec, {"api_key": "hidden", "webhook": "https://hidden.example"})
    assert engine.observe(spec.session_id).present is False
    engine.down(spec.session_id, "a test", "launch-failed")
    assert not any("hidden" in path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    engine.launch(spec, {"api_key": "hidden"})  # the command that was given up comes late
    assert engine.observe(spec.session_id).present is False
    assert not (folder / "api_key").exists()


def test_extending_what_is_not_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path)
    with pytest.raises(UsageMistake, match="has no machine to extend"):
        engine.extend("demo-0123abcd", datetime.now(UTC) + timedelta(hours=1), 3600)


def test_a_stop_that_cannot_be_written_down_kills_instead_of_asking(tmp_path: Path) -> None:
    spec, engine = a_spec(tmp_path), LocalEngine(tmp_path / "machines")
    engine.launch(spec, {"api_key": "hidden"})
    machine = Machine(tmp_path / "machines" / spec.session_id)
    control = machine.folder / "control"
    for path in control.iterdir():
        path.unlink()
    control.rmdir()
    control.write_text("a file in the way")  # like a full disk: nothing can be left there
    try:
        with suppress(NotYetGone):
            engine.down(spec.session_id, "a test", "user")
        assert machine.leftovers() == set()
        assert engine.observe(spec.session_id).present is False
    finally:
        machine.close("test")


def test_a_layer_whose_process_was_stopped_is_not_called_armed(tmp_path: Path) -> None:
    spec, engine = a_spec(tmp_path), LocalEngine(tmp_path / "machines")
    engine.launch(spec, {"api_key": "hidden"})
    machine = engine.machine(spec.session_id)
    try:
        supervisor = int(machine.identity("supervisor").partition(":")[0])
        os.kill(supervisor, signal.SIGSTOP)
        until = time.monotonic() + 10
        while (layer := engine.observe(spec.session_id).layers[2]).armed and time.monotonic() < until:
            time.sleep(0.02)
        assert (layer.name, layer.armed) == ("supervisor", False)
        assert f"kill -CONT {supervisor}" in layer.evidence
        os.kill(supervisor, signal.SIGCONT)
        while not (layer := engine.observe(spec.session_id).layers[2]).armed and time.monotonic() < until:
            time.sleep(0.02)
        assert layer.armed
    finally:
        machine.close("test")
