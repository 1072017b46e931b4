"""The engine over SkyPilot with a place and an SDK that are told what to say."""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_skypilot_task import SPEC

from kimisession.core.lifecycle import SeenResource
from kimisession.engines.place import Sight
from kimisession.engines.sky_sdk import SkyOutput, translated
from kimisession.engines.skypilot import SkyPilotEngine
from kimisession.errors import BudgetRefused, EngineFailed, NoCapacity, NotYetGone, QuotaExceeded, Unconfirmed
from kimisession.node import job

ID = "demo-0123abcd"
BEGAN = datetime.now(UTC) - timedelta(seconds=30)
THERE = Sight(True, "job 7 is RUNNING", (SeenResource("slurm/a/7", "machine", BEGAN),), (), BEGAN, ("", ""))
GONE = Sight(False, "squeue lists no job of it")


class Desk:
    """Keeps what would be written on the machine."""

    def __init__(self) -> None:
        self.written: dict[str, Any] = {}

    def write_json(self, path: str, content: Mapping[str, Any]) -> None:
        self.written[path.rpartition("/")[2]] = content

    def follow(self, script: str) -> "list[str]":
        return []  # it cannot be reached


class Somewhere:
    """A place that says what it is told; a `Sight`, or an error."""

    def __init__(self, *sights: "Sight | Exception") -> None:
        self.sights = list(sights)
        self.ended: list[bool] = []
        self.there = Desk()

    def look(self, session_id: str, commands: tuple[str, ...] = ()) -> Sight:
        sight = self.sights.pop(0) if len(self.sights) > 1 else self.sights[0]
        if isinstance(sight, Exception):
            raise sight
        return sight

    def desk(self, session_id: str) -> Desk:
        return self.there

    def check(self, spec: object) -> None:
        pass

    def launching(self, session_id: str) -> None:
        pass

    def after_launch(self, session_id: str) -> None:
        pass

    def end(self, session_id: str, force: bool) -> None:
        self.ended.append(force)

    def tidy(self, session_id: str) -> None:
        pass


class Sdk:
    """SkyPilot's SDK, as far as ending needs it."""

    StatusRefreshMode = SimpleNamespace(FORCE="force")

    def __init__(self, status: str = "RUNNING", records: "list[Any] | None" = None) -> None:
        self.status_of_request, self.records = status, records or []
        self.calls: list[str] = []

    def __call__(self) -> "Sdk":
        return self

    def get(self, answer: Any) -> Any:
        return answer

    def api_status(self, requests: list[str]) -> list[Any]:
        return [SimpleNamespace(status=self.status_of_request)]

    def api_cancel(self, requests: list[str], silent: bool) -> None:
        self.calls.append("cancel")

    def status(self, names: list[str], refresh: str) -> list[Any]:
        self.calls.append("status")
        return self.records

    def down(self, name: str) -> None:
        self.calls.append("down")


def engine(home: Path, *sights: "Sight | Exception", sdk: "Sdk | None" = None, settle_s: float = 0.0) -> SkyPilotEngine:
    return SkyPilotEngine("slurm", home, Somewhere(*sights), sdk or Sdk(), settle_s)  # type: ignore[arg-type]


def journal(*lines: dict[str, object]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def beat(age_s: float) -> dict[str, object]:
    return {"at": (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat(), "kind": "beat", "by": "keeper"}


def remember(home: Path, **launch: object) -> Path:
    folder = home / ID
    folder.mkdir()
    (folder / "session.json").write_text(json.dumps({"name": "demo", "stop_grace_s": 1}))
    if launch:
        (folder / "launch.json").write_text(json.dumps(launch))
    return folder


def test_a_place_that_cannot_be_asked_proves_nothing(tmp_path: Path) -> None:
    seen = engine(tmp_path, Unconfirmed("a cannot be reached")).observe(ID)
    assert (seen.present, seen.why) == (None, "a cannot be reached")


def test_an_empty_list_is_not_the_end_while_a_command_launches(tmp_path: Path) -> None:
    folder = remember(tmp_path)
    lock = job.hold_lock(folder / "launch.lock")
    try:
        assert engine(tmp_path, GONE).observe(ID).present is True
    finally:
        os.close(lock)
    assert engine(tmp_path, GONE).observe(ID).present is False


def test_an_empty_list_is_not_the_end_while_skypilot_goes_on_with_a_dead_commands_launch(tmp_path: Path) -> None:
    remember(tmp_path, request="r1", over=False)
    assert engine(tmp_path, GONE, sdk=Sdk("RequestStatus.RUNNING")).observe(ID).present is True
    assert engine(tmp_path, GONE, sdk=Sdk("RequestStatus.FAILED")).observe(ID).present is False


def test_a_journal_is_read_on_from_where_it_was_and_a_torn_line_is_read_again(tmp_path: Path) -> None:
    first, second = beat(3), beat(2)
    text = journal(first, second)
    cut = len(text) - 5
    here = engine(tmp_path, replace(THERE, files=("", text[:cut])), replace(THERE, files=("", journal(second))))
    assert len(here.observe(ID).journal) == 1
    here._seen.clear()
    assert len(here.observe(ID).journal) == 2
    assert here._journals[ID][0] == len(text.encode())


def test_the_autodown_is_armed_only_when_the_machine_itself_says_so(tmp_path: Path) -> None:
    said = {"down": True, "idle_minutes": 1, "wait_for": "jobs", "same_boot": True, "skylet": True, "at": 0}
    changes: list[tuple[dict[str, object], bool]] = [
        ({}, True),
        ({"down": False}, False),
        ({"idle_minutes": -1}, False),
        ({"wait_for": "jobs_and_ssh"}, False),
        ({"same_boot": False}, False),
        ({"skylet": False}, False),
    ]
    for change, armed in changes:
        seen = engine(tmp_path, replace(THERE, files=(json.dumps(said | change), ""))).observe(ID)
        assert [layer.armed for layer in seen.layers if layer.name == "SkyPilot autodown"] == [armed], change
    seen = engine(tmp_path, THERE).observe(ID)
    assert not any(layer.armed for layer in seen.layers)


def test_a_machine_that_is_long_up_without_a_keeper_is_unguarded(tmp_path: Path) -> None:
    young, old = BEGAN, datetime.now(UTC) - timedelta(minutes=16)
    assert not engine(tmp_path, replace(THERE, since=young)).observe(ID).unguarded
    assert engine(tmp_path, replace(THERE, since=old)).observe(ID).unguarded
    heard = replace(THERE, since=old, files=("", journal(beat(5))))
    assert not engine(tmp_path, heard).observe(ID).unguarded
    silent = replace(THERE, since=old, files=("", journal(beat(400))))
    assert engine(tmp_path, silent).observe(ID).unguarded


def test_stop_asks_the_keeper_first_and_ends_the_job_when_there_is_none(tmp_path: Path) -> None:
    remember(tmp_path, request="r1", over=True)
    here = engine(tmp_path, replace(THERE, files=("", journal(beat(1)))))
    with pytest.raises(NotYetGone):
        here.down(ID, "me", "user")
    place: Any = here.place
    assert place.there.written["stop.json"] == {"by": "me", "reason": "user"}
    assert place.ended == []
    there = tmp_path / "other"
    there.mkdir()
    remember(there, request="r1", over=True)
    dead = engine(there, THERE)
    with pytest.raises(NotYetGone):
        dead.down(ID, "me", "user")
    assert dead.place.ended == [False]  # type: ignore[attr-defined]


def test_a_launch_that_was_broken_off_is_cancelled_and_looked_for_twice(tmp_path: Path) -> None:
    remember(tmp_path, request="r1", over=False)
    sdk = Sdk("RequestStatus.CANCELLED")
    here = engine(tmp_path, GONE, sdk=sdk)
    with pytest.raises(NotYetGone, match="once more"):
        here.down(ID, "me", "launch-failed")
    here.down(ID, "me", "launch-failed")
    assert sdk.calls == ["cancel", "status"]
    assert here.place.there.written["stop.json"]["reason"] == "launch-failed"  # type: ignore[attr-defined]


def test_a_dead_server_is_started_to_cancel_and_does_not_keep_the_job_from_being_ended(tmp_path: Path) -> None:
    class Dead(Sdk):
        def api_cancel(self, requests: list[str], silent: bool) -> None:
            raise ConnectionError("refused")

        def api_start(self) -> None:
            self.calls.append("start")

    remember(tmp_path, request="r1", over=False)
    sdk = Dead("RequestStatus.FAILED")
    here = engine(tmp_path, THERE, GONE, sdk=sdk)
    with pytest.raises(NotYetGone, match="ending"):
        here.down(ID, "me", "launch-failed")
    assert here.place.ended == [False]  # type: ignore[attr-defined]
    with pytest.raises(NotYetGone, match="once more"):
        here.down(ID, "me", "launch-failed")
    here.down(ID, "me", "launch-failed")
    assert sdk.calls == ["start", "status"]


def test_a_stop_that_cannot_ask_the_place_is_not_confirmed(tmp_path: Path) -> None:
    with pytest.raises(Unconfirmed, match="cannot be reached"):
        engine(tmp_path, Unconfirmed("a cannot be reached")).down(ID, "me", "user")


def test_a_record_that_skypilot_keeps_of_what_is_gone_is_ended_too(tmp_path: Path) -> None:
    remember(tmp_path, request="r1", over=True)
    sdk = Sdk(records=["UP"])
    assert engine(tmp_path, GONE, sdk=sdk).observe(ID).present is False
    assert sdk.calls == ["status", "down"]


def test_a_session_that_another_machine_started_needs_nothing_of_ours_to_be_stopped(tmp_path: Path) -> None:
    sdk = Sdk()
    engine(tmp_path, GONE, sdk=sdk).down(ID, "me", "user")
    assert sdk.calls == []


class ResourcesUnavailableError(Exception):
    """SkyPilot's name for it."""

    def __init__(self, message: str, *history: str) -> None:
        super().__init__(message)
        self.failover_history = [Exception(one) for one in history]


def test_stockout_and_quota_are_told_apart_with_the_places_that_were_tried() -> None:
    error = translated(ResourcesUnavailableError("failed", "zone a: ZONE_RESOURCE_POOL_EXHAUSTED", "zone b"), "gcp")
    assert isinstance(error, NoCapacity)
    assert not isinstance(error, QuotaExceeded)
    assert error.tried == ("zone a: ZONE_RESOURCE_POOL_EXHAUSTED", "zone b")
    assert isinstance(
        translated(ResourcesUnavailableError("failed", "Quota 'GPUS_ALL_REGIONS' exceeded"), "gcp"), QuotaExceeded
    )
    assert isinstance(translated(RuntimeError("\x1b[31mboom\x1b[0m\nmore"), "slurm"), EngineFailed)
    assert translated(RuntimeError("\x1b[31mboom\x1b[0m"), "slurm").message == "SkyPilot could not launch: boom"


def test_what_skypilot_prints_is_progress_and_never_data(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.redirect_stdout(SkyOutput()):
        print("\x1b[32mRunning on cluster\x1b[0m")
    assert capsys.readouterr().out == ""


class Launching(Sdk):
    """An SDK that launches: spot machines are sold out, one on demand costs what it is told."""

    skylet = SimpleNamespace(autostop_lib=SimpleNamespace(AutostopWaitFor=SimpleNamespace(JOBS="jobs")))
    Task = SimpleNamespace(from_yaml_config=lambda config: config)

    def __init__(self, usd_per_hour: float) -> None:
        super().__init__()
        self.usd_per_hour = usd_per_hour
        self.launched: list[dict[str, Any]] = []

    def launch(self, task: dict[str, Any], **options: object) -> str:
        self.launched.append({**task, **options})
        return "r1"

    def stream_and_get(self, request: str, output_stream: object) -> tuple[int, Any]:
        if self.launched[-1]["resources"].get("use_spot"):
            raise ResourcesUnavailableError("no spot machine", "zone a: ZONE_RESOURCE_POOL_EXHAUSTED")
        return 1, SimpleNamespace(launched_resources=SimpleNamespace(get_cost=lambda seconds: self.usd_per_hour))


def test_the_autodown_is_in_the_launch_call_and_waits_for_jobs_alone(tmp_path: Path) -> None:
    sdk = Launching(0.0)
    engine(tmp_path, GONE, sdk=sdk).launch(SPEC, {"api_key": "hidden"})
    (call,) = sdk.launched
    assert (call["down"], call["idle_minutes_to_autostop"], call["wait_for"]) == (True, 1, "jobs")
    assert call["cluster_name"] == SPEC.session_id
    assert not (tmp_path / SPEC.session_id / "payload").exists(), "the key does not stay on this disk"


def test_a_launch_of_what_exists_leaves_it_as_it_is(tmp_path: Path) -> None:
    sdk = Launching(0.0)
    engine(tmp_path, THERE, sdk=sdk).launch(SPEC, {})
    assert sdk.launched == []


def test_on_demand_is_tried_only_when_asked_for_and_never_above_the_agreed_price(tmp_path: Path) -> None:
    def gcp(folder: str, sdk: Launching, fallback: bool) -> None:
        spec = replace(SPEC, placement=replace(SPEC.placement, on_demand_fallback=fallback))
        here = SkyPilotEngine("gcp", tmp_path / folder, Somewhere(GONE), sdk)  # type: ignore[arg-type]
        here.launch(spec, {})

    plain, cheap, dear = Launching(20), Launching(26), Launching(98.32)
    with pytest.raises(NoCapacity) as caught:
        gcp("plain", plain, fallback=False)
    assert caught.value.tried == ("zone a: ZONE_RESOURCE_POOL_EXHAUSTED",)
    assert len(plain.launched) == 1
    gcp("cheap", cheap, fallback=True)
    assert [call["resources"]["use_spot"] for call in cheap.launched] == [True, False]
    with pytest.raises(BudgetRefused, match=r"\$98.32 an hour"):
        gcp("dear", dear, fallback=True)


def test_the_last_words_of_a_machine_that_is_gone_are_kept(tmp_path: Path) -> None:
    remember(tmp_path)
    files = ("", journal(beat(1)), "gib failed: no such device\n")
    here = engine(tmp_path, replace(THERE, files=files), GONE)
    here.observe(ID)
    assert list(engine(tmp_path, GONE).logs(ID, follow=False)) == ["gib failed: no such device"]
    assert list(engine(tmp_path, GONE).logs("other-0123abcd", follow=True)) == []


def test_a_line_that_is_down_is_no_reason_to_end_what_was_heard_once(tmp_path: Path) -> None:
    old = datetime.now(UTC) - timedelta(hours=1)
    deaf = replace(THERE, since=old, files=())
    assert not engine(tmp_path, deaf).observe(ID).unguarded, (
        "it was not launched from here, so there may be no key to it"
    )
    (tmp_path / ID).mkdir(exist_ok=True)
    (tmp_path / ID / "session.json").write_text("{}")
    assert engine(tmp_path, deaf).observe(ID).unguarded, "never heard: SkyPilot may have died before the keeper began"
    heard = replace(THERE, since=old, files=("", journal(beat(5))))
    here = engine(tmp_path, heard, deaf)
    assert not here.observe(ID).unguarded
    here._seen.clear()
    assert not here.observe(ID).unguarded
    seen = engine(tmp_path, deaf).observe(ID)  # another command, which has heard nothing itself
    assert not seen.unguarded
    assert seen.layers[0].evidence == "the machine cannot be reached from here now"
