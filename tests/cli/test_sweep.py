"""`sweep`, `guard`, `quota`: what a person sees of a project, with and without a ledger.

In this process against a Compute Engine in memory; the real wire is in tests/edges/test_compute.py and test_reaper.py. The
last tests type the commands against the emulator.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from command_line import Home
from json_schema import mistakes

sys.path.append(str(Path(__file__).parents[1] / "edges"))
from emulated import PROJECT, ZONE, Project, labels_of, needed, project
from memory_compute import MemoryCompute, node_of

from kimisession.cli import show, sweep_timer
from kimisession.cli.guarding import run_disable, run_enable, run_permissions, run_status
from kimisession.cli.quotas import run_quota
from kimisession.cli.schemas import folder
from kimisession.cli.sweeping import SweepOptions, run_sweep
from kimisession.cloud.base import Quota
from kimisession.cloud.quota import check_quota, needs
from kimisession.controller import owner_here
from kimisession.core.audit import WITHOUT_DEADLINE
from kimisession.core.cost import UNPRICED, cost_of
from kimisession.core.guard import LABEL_BEAT, LABEL_GUARD, NAME
from kimisession.core.inventory import Machine
from kimisession.core.launch import LABEL_DEADLINE
from kimisession.core.ledger import State
from kimisession.errors import KimiError, LeakSuspected, QuotaExceeded, UsageMistake
from kimisession.store import Store, open_store

HOUR = timedelta(hours=1)
MINE, OLD, THEIRS = "mine-1a2b3c4d", "old-1a2b3c4d", "theirs-1a2b3c4d"


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryCompute]:
    monkeypatch.setenv("KIMISESSION_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("KIMISESSION_CACHE_HOME", str(tmp_path / "cache"))
    made = MemoryCompute(now)
    made.insert(MINE, labels_of(now() + HOUR, MINE, owner_here()))
    made.insert(OLD, labels_of(now() - HOUR, OLD, owner_here()))
    made.insert(THEIRS, labels_of(now() + HOUR, THEIRS, "bob-laptop"))
    yield made
    show.SETTINGS.json = False


@pytest.fixture
def store(cloud: MemoryCompute, tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


def sweep(cloud: MemoryCompute, **changes: Any) -> None:
    words: dict[str, Any] = {
        "project": "",
        "owner": None,
        "delete": False,
        "adopt": False,
        "yes": True,
        "json": False,
        **changes,
    }
    run_sweep(SweepOptions(**words), cloud)


def document(capsys: pytest.CaptureFixture[str], command: str) -> Any:
    """The one document on standard output, as its schema has it."""
    said = json.loads(capsys.readouterr().out)
    schema = json.loads((folder() / f"{command}.json").read_text(encoding="utf-8"))
    assert mistakes(said, schema, schema) == []
    return said["data"]


# -- sweep ----------------------------------------------------------------------------------------------------------------


def test_what_is_left_over_is_shown_with_its_cost_and_ends_with_seven(
    cloud: MemoryCompute, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LeakSuspected, match="1 is left over") as caught:
        sweep(cloud)
    assert caught.value.exit_code == 7
    assert caught.value.hint == "kimisession sweep --delete"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["past its deadline", "live", "another owner's"]
    assert cloud.deleted == []


def test_deleting_takes_what_is_past_and_never_anothers_live_session(
    cloud: MemoryCompute, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(cloud, delete=True)
    assert sorted(machine.session for machine in cloud.machines.values()) == [MINE, THEIRS]
    assert "deleted 1" in capsys.readouterr().out
    sweep(cloud, delete=True)


def test_nobody_to_ask_leaves_a_leak_and_names_the_flag(cloud: MemoryCompute) -> None:
    with pytest.raises(LeakSuspected, match="1 left over") as caught:
        sweep(cloud, delete=True, yes=False, project="p")
    assert caught.value.hint == "kimisession sweep --delete --project p -y"
    assert cloud.deleted == []


def test_the_command_that_is_named_deletes_no_more_than_was_looked_at(cloud: MemoryCompute) -> None:
    cloud.insert("bold-1a2b3c4d", labels_of(now() - HOUR, "bold-1a2b3c4d", "bob-laptop"))
    with pytest.raises(LeakSuspected) as caught:
        sweep(cloud, owner="bob-laptop")
    assert caught.value.hint == "kimisession sweep --delete --owner bob-laptop"


def test_what_a_silent_zone_had_is_not_called_deleted(cloud: MemoryCompute, capsys: pytest.CaptureFixture[str]) -> None:
    class GoesSilent(MemoryCompute):
        def delete(self, resource: Any) -> Any:
            self.machines.clear()  # its zone is in no list any more; nobody knows whether it still runs
            self.silent = (ZONE,)

    goes = GoesSilent(now)
    goes.insert(OLD, labels_of(now() - HOUR, OLD, owner_here()))
    with pytest.raises(LeakSuspected, match=f"{ZONE} did not answer"):
        sweep(goes, delete=True, json=True)
    assert document(capsys, "sweep")["deleted"] == []


def test_a_deadline_that_moved_while_it_was_asked_counts(cloud: MemoryCompute) -> None:
    class Moved(MemoryCompute):
        looks = 0

        def everything(self) -> Any:
            self.looks += 1
            if self.looks == 2:
                name = next(m.name for m in self.machines.values() if m.session == OLD)
                self.set_labels(self.machines[name], labels_of(now() + HOUR, OLD, owner_here()))
            return super().everything()

    moved = Moved(now)
    moved.insert(OLD, labels_of(now() - HOUR, OLD, owner_here()))
    sweep(moved, delete=True)
    assert moved.deleted == []


def test_one_owner_alone_is_looked_at_when_asked_for(cloud: MemoryCompute, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(cloud, owner="bob-laptop")
    assert len(capsys.readouterr().out.splitlines()) == 3  # head, bob's, and that nothing is left over


def test_a_silent_zone_is_a_suspicion(cloud: MemoryCompute) -> None:
    cloud.silent = ("us-east4-a",)
    sweep_again = pytest.raises(LeakSuspected, match="us-east4-a did not answer")
    with sweep_again:
        sweep(cloud, delete=True)


def test_a_name_like_ours_without_labels_is_told_and_left_alone(cloud: MemoryCompute) -> None:
    cloud.insert("a-ffffffff", {})
    with pytest.raises(LeakSuspected, match="nobody here knows whose") as caught:
        sweep(cloud, delete=True)
    assert "gcloud compute instances delete a-ffffffff" in caught.value.hint
    assert any(name.startswith("a-ffffffff") for name in cloud.machines)


def test_a_deletion_that_does_not_come_about_is_told(cloud: MemoryCompute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimisession.cli.sweeping.PATIENCE_S", 0.0)
    cloud.lies = True
    with pytest.raises(LeakSuspected, match="1 is left over") as caught:
        sweep(cloud, delete=True)
    assert caught.value.hint == "the same command again"


def test_sweep_prints_one_document(cloud: MemoryCompute, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LeakSuspected):
        sweep(cloud, json=True)
    data = document(capsys, "sweep")
    assert {f["session"]: f["verdict"] for f in data["findings"]} == {
        MINE: "live",
        OLD: "past-deadline",
        THEIRS: "foreign",
    }
    assert data["left"] == 1


# -- adopt ----------------------------------------------------------------------------------------------------------------


def test_a_lost_ledger_is_made_again_from_labels(cloud: MemoryCompute, store: Store) -> None:
    sweep(cloud, adopt=True, delete=True)
    rows = {row.session: row for row in store.rows()}
    assert set(rows) == {MINE, OLD}, "another owner's is not taken over"
    session = store.session(MINE)
    assert (session.name, session.state, session.request and session.request.infra) == ("mine", State.STARTING, "gcp")
    assert session.deadline == cloud.machines[node_of(MINE)].deadline
    sweep(cloud, adopt=True, delete=True)
    assert len(store.rows()) == 2, "adopting twice adds nothing"


def test_what_is_adopted_takes_money_from_the_moment_that_its_machine_began(cloud: MemoryCompute, store: Store) -> None:
    sweep(cloud, adopt=True, delete=True)
    (machine,) = store.session(MINE).resources
    assert (machine.id, machine.kind) == (f"gcp/{ZONE}/{node_of(MINE)}", "machine")
    assert machine.usd_per_hour is not None
    assert cost_of(store.session(MINE), machine.began + HOUR).usd == machine.usd_per_hour


def test_an_adopted_machine_without_a_price_is_not_priced_and_not_free(cloud: MemoryCompute, store: Store) -> None:
    name = node_of(MINE)
    cloud.machines[name] = replace(cloud.machines[name], zone="mars-north1-a")
    sweep(cloud, adopt=True, delete=True)
    session = store.session(MINE)
    assert session.request is not None
    assert session.request.price_ground == UNPRICED
    assert cost_of(session, now()).unpriced == (f"gcp/mars-north1-a/{name}",)


def test_anothers_session_past_its_deadline_is_not_adopted_unasked(cloud: MemoryCompute, store: Store) -> None:
    cloud.insert("bold-1a2b3c4d", labels_of(now() - HOUR, "bold-1a2b3c4d", "bob-laptop"))
    sweep(cloud, adopt=True, delete=True)
    assert {row.session for row in store.rows()} == {MINE, OLD}


def test_anothers_session_is_adopted_only_by_name(cloud: MemoryCompute, store: Store) -> None:
    sweep(cloud, adopt=True, owner="bob-laptop")
    assert [row.session for row in store.rows()] == [THEIRS]


# -- the timer ------------------------------------------------------------------------------------------------------------


def test_the_timers_units_are_written_and_hold_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PATH", str(tmp_path))  # no systemctl here
    with pytest.raises(KimiError, match="systemd does not answer"):
        sweep_timer.install("my-project")
    service = (tmp_path / "systemd/user/kimisession-sweep.service").read_text(encoding="utf-8")
    assert f"ExecStart={sys.executable} -m kimisession -q sweep --delete -y --project my-project" in service
    assert "hf_secret" not in service
    assert "OnCalendar=*:0/15" in (tmp_path / "systemd/user/kimisession-sweep.timer").read_text(encoding="utf-8")
    with pytest.raises(KimiError):
        sweep_timer.remove()
    assert list((tmp_path / "systemd/user").iterdir()) == []


def test_the_timer_sweeps_the_project_of_the_shell_that_installed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "the-shells")
    assert 'Environment="GOOGLE_CLOUD_PROJECT=the-shells"' in sweep_timer.service_text("")


@pytest.mark.parametrize("ahead", [3 * HOUR, -3 * HOUR], ids=["ahead", "behind"])
@pytest.mark.parametrize("delete", [True, False], ids=["delete", "look"])
def test_nothing_is_judged_by_a_clock_that_is_hours_off_the_clouds(
    cloud: MemoryCompute, ahead: timedelta, delete: bool
) -> None:
    cloud.now = lambda: now() - ahead
    with pytest.raises(LeakSuspected, match=r"the clock of this machine is 3 h 00 min .* the cloud's") as caught:
        sweep(cloud, delete=delete)
    assert caught.value.exit_code == 7
    assert cloud.deleted == []


def test_a_clock_that_is_a_minute_off_sweeps_and_takes_nothing_before_its_deadline(cloud: MemoryCompute) -> None:
    cloud.now = lambda: now() - timedelta(minutes=4)
    near = "near-1a2b3c4d"
    cloud.insert(near, labels_of(now() - timedelta(minutes=4), near, owner_here()))
    sweep(cloud, delete=True)
    assert cloud.deleted == [node_of(OLD, 1)]


def test_a_machine_without_a_deadline_that_was_adopted_is_not_ended_by_the_next_look(
    cloud: MemoryCompute, store: Store
) -> None:
    without = "without-1a2b3c4d"
    labels = {k: v for k, v in labels_of(now(), without, owner_here()).items() if k != LABEL_DEADLINE}
    cloud.insert(without, labels)
    with pytest.raises(LeakSuspected):
        sweep(cloud, adopt=True)
    assert store.session(without).deadline == cloud.machines[node_of(without, 3)].began + WITHOUT_DEADLINE


# -- guard ----------------------------------------------------------------------------------------------------------------


def test_a_project_without_a_reaper_says_so(cloud: MemoryCompute, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KimiError) as caught:
        run_status("", False, cloud)
    assert (caught.value.exit_code, caught.value.hint) == (1, "kimisession guard enable")
    assert "NOT armed" in capsys.readouterr().out


def test_a_reaper_that_beats_is_armed_and_verified(cloud: MemoryCompute, capsys: pytest.CaptureFixture[str]) -> None:
    labels = {LABEL_GUARD: "reaper", LABEL_BEAT: str(int(now().timestamp()))}
    cloud.machines[NAME] = Machine(NAME, ZONE, now() - HOUR, labels)
    run_status("", True, cloud)
    data = document(capsys, "guard-status")
    assert data["armed"] is True
    assert data["machines"][0]["zone"] == ZONE


def test_a_dry_run_makes_and_deletes_nothing(cloud: MemoryCompute, capsys: pytest.CaptureFixture[str]) -> None:
    run_enable("", ZONE, "", "default", True, cloud)
    run_disable("", True, cloud)
    said = capsys.readouterr().out
    assert "would create kimisession-reaper (e2-micro)" in said
    assert "would delete nothing" in said


def test_the_reaper_of_running_sessions_is_deleted_only_after_a_yes(
    cloud: MemoryCompute, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.machines[NAME] = Machine(NAME, ZONE, now() - HOUR, {LABEL_GUARD: "reaper"})
    with pytest.raises(UsageMistake, match=f"only their own layers would end {MINE}, {OLD}, {THEIRS}") as caught:
        run_disable("", False, cloud)
    assert "--yes" in caught.value.hint
    assert NAME in cloud.machines
    run_disable("", False, cloud, yes=True)
    assert NAME not in cloud.machines
    assert f"only their own layers would end {MINE}" in capsys.readouterr().err


def test_where_nothing_runs_the_reaper_goes_without_a_question(cloud: MemoryCompute) -> None:
    cloud.machines.clear()
    cloud.machines[NAME] = Machine(NAME, ZONE, now() - HOUR, {LABEL_GUARD: "reaper"})
    run_disable("", False, cloud)
    assert cloud.machines == {}


def test_the_first_permission_that_is_missing_is_named_with_what_grants_it(
    cloud: MemoryCompute, capsys: pytest.CaptureFixture[str]
) -> None:
    run_permissions("", True, cloud)
    assert document(capsys, "guard-permissions")["missing"] == []
    cloud.lacking = frozenset({"compute.instances.delete", "compute.disks.list"})
    with pytest.raises(KimiError, match=r"lacks compute\.disks\.list and 1 more") as caught:
        run_permissions("", False, cloud)
    assert "--permissions=compute.disks.list,compute.instances.delete" in caught.value.hint


# -- quota ----------------------------------------------------------------------------------------------------------------


def granted(everywhere: float = 64, h100: float = 8, used: float = 0) -> tuple[Quota, ...]:
    return (
        Quota("global", "GPUS_ALL_REGIONS", everywhere, used),
        Quota("us-central1", "PREEMPTIBLE_NVIDIA_H100_GPUS", h100, used),
    )


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (granted(everywhere=0), "GPUS_ALL_REGIONS in all regions together is 0, and 8 are needed"),
        (granted(h100=0), "PREEMPTIBLE_NVIDIA_H100_GPUS in us-central1 is 0"),
        (granted(used=8), "PREEMPTIBLE_NVIDIA_H100_GPUS in us-central1 is 8, 8 in use"),
    ],
)
def test_what_cannot_be_granted_is_refused_before_anything_exists(
    cloud: MemoryCompute, limits: tuple[Quota, ...], words: str
) -> None:
    cloud.limits = limits
    with pytest.raises(QuotaExceeded, match=words) as caught:
        check_quota(cloud, "H100:8", True, ["us-central1"])
    assert "gcloud beta quotas preferences create" in caught.value.hint


@pytest.mark.parametrize("accelerators", ["H100:8", "H200:8", "CPU:4"])
def test_what_is_granted_or_not_listed_refuses_nothing(cloud: MemoryCompute, accelerators: str) -> None:
    cloud.limits = granted()
    check_quota(cloud, accelerators, True, ["us-central1"])
    cloud.limits = ()
    check_quota(cloud, accelerators, False, ["us-central1"])


def test_one_region_with_quota_is_enough(cloud: MemoryCompute) -> None:
    cloud.limits = (*granted(h100=0), Quota("us-east4", "PREEMPTIBLE_NVIDIA_H100_GPUS", 8, 0))
    check_quota(cloud, "H100:8", True, ["us-central1", "us-east4"])


def test_the_three_quotas_of_a_machine_are_named() -> None:
    assert [need.metric for need in needs("H100:8", spot=True)] == [
        "GPUS_ALL_REGIONS",
        "PREEMPTIBLE_NVIDIA_H100_GPUS",
        "PREEMPTIBLE_CPUS",
    ]
    family = needs("H100:8", spot=False)[1]
    assert (family.quota_id, family.family) == ("GPUS-PER-GPU-FAMILY-per-project-region", "NVIDIA_H100")


def test_quota_shows_what_is_granted_and_ends_with_three_where_nothing_is(
    cloud: MemoryCompute, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.limits = granted()
    run_quota("kimi-k2.5", "H100:8", "us-central1", "", True, cloud)
    rows = {(row["market"], row["metric"]): row["enough"] for row in document(capsys, "quota")["quotas"]}
    assert rows["spot", "PREEMPTIBLE_NVIDIA_H100_GPUS"] is True
    assert rows["on demand", "NVIDIA_H100_GPUS"] is None
    cloud.limits = granted(everywhere=0)
    with pytest.raises(QuotaExceeded) as caught:
        run_quota("kimi-k2.5", "H100:8", "us-central1", "", False, cloud)
    assert (caught.value.exit_code, "--quota-id=GPUS-ALL-REGIONS-per-project" in caught.value.hint) == (3, True)
    assert "NOT enough" in capsys.readouterr().out


# -- as they are typed ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Project]:
    needed()
    with project(tmp_path) as made:
        yield made


def test_the_commands_work_as_they_are_typed(there: Project, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.folder.mkdir()
    env = {
        "KIMISESSION_COMPUTE_ENDPOINT": there.url,
        "KIMISESSION_COMPUTE_TOKEN": there.token,
        "GOOGLE_CLOUD_PROJECT": PROJECT,
    }
    there.insert(node_of(OLD), labels_of(now() - HOUR, OLD))
    said = home.type("sweep", **env)
    assert said.code == 7, said.err
    assert "past its deadline" in said.out
    said = home.type("sweep", "--delete", "-y", **env)
    assert said.code == 0, said.err
    assert there.names() == []
    there.state.data["tokens"].clear()
    said = home.type("sweep", **env)
    assert (said.code, said.hint) == (1, "gcloud auth application-default login")
