"""What SkyPilot is asked to launch, told without SkyPilot."""

import os
import re
import shlex
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kimisession.cli.app import app
from kimisession.cli.sky_files import sky_files
from kimisession.core.launch import EngineProcess, LaunchSpec, NodeLimits, Placement, Step, session_labels
from kimisession.core.profile import Slurm
from kimisession.engines.payload import lay_out
from kimisession.engines.task import task_config

NOW = datetime(2026, 11, 21, 1, 0, tzinfo=UTC)
LIMITS = NodeLimits(
    NOW.timestamp() + 7200, 7200, None, 1200, 1800, 2700, 600, 300, 300, 120, 1, 5, 20, 60, watch_terminals=True
)
SPEC = LaunchSpec(
    session_id="demo-0123abcd",
    name="demo",
    owner="me",
    profile="kimi-k2.5",
    deadline=NOW + timedelta(hours=2),
    accelerators="H200:8",
    usd_per_hour=Decimal(26),
    price_ground="stated",
    steps=(),
    engine=EngineProcess("vllm", ("@{engine_python}",), {}, 8000, "kimi-k2.5"),
    limits=LIMITS,
    ephemeral_disk=True,
    labels=session_labels("demo-0123abcd", "demo", "me", NOW + timedelta(hours=2)),
    placement=Placement(longest_s=8 * 3600, disk_gib=1200),
)
CHECKOUT = Path(__file__).parents[2]


def slurm(**fields: object) -> LaunchSpec:
    return replace(SPEC, placement=replace(SPEC.placement, slurm=Slurm(**fields)))  # type: ignore[arg-type]


def run_of(spec: LaunchSpec, infra: str) -> str:
    return str(task_config(spec, infra, "/payload", NOW)["run"])


def test_labels_with_the_absolute_deadline_are_in_the_very_first_call_of_every_place() -> None:
    assert task_config(SPEC, "gcp", "/p", NOW)["resources"]["labels"] == SPEC.labels
    options = task_config(SPEC, "slurm", "/p", NOW)["config"]["slurm"]["sbatch_options"]
    assert "kimisession-deadline=20261121t030000z" in options["comment"]


def test_slurm_itself_ends_the_job_two_minutes_after_the_deadline() -> None:
    assert task_config(SPEC, "slurm", "/p", NOW)["config"]["slurm"]["sbatch_options"]["time"] == "122"


def test_account_and_quality_of_service_reach_sbatch_and_the_partition_the_place() -> None:
    config = task_config(
        slurm(account="ehpc", qos="gpu8", partition="gpu", cpus=112, memory_gib=1800), "slurm", "/p", NOW
    )
    options = config["config"]["slurm"]["sbatch_options"]
    assert (options["account"], options["qos"]) == ("ehpc", "gpu8")
    resources = config["resources"]
    assert (resources["infra"], resources["cpus"], resources["memory"]) == ("slurm/*/gpu", "112+", "1800+")


def test_spot_is_the_default_on_gcp_and_the_full_price_is_asked_for() -> None:
    assert task_config(SPEC, "gcp", "/p", NOW)["resources"]["use_spot"] is True
    assert task_config(SPEC, "gcp", "/p", NOW, spot=False)["resources"]["use_spot"] is False


@pytest.mark.parametrize("infra", ["gcp", "slurm", "kubernetes"])
def test_nothing_runs_in_skypilots_own_setup_and_no_secret_is_in_the_task(infra: str) -> None:
    config = task_config(SPEC, infra, "/payload", NOW)
    assert "setup" not in config
    assert "envs" not in config
    assert config["file_mounts"] == {"~/.kimisession/demo-0123abcd": "/payload"}


@pytest.mark.parametrize("infra", ["gcp", "slurm", "kubernetes"])
def test_the_script_is_bash_and_the_keeper_holds_none_of_the_jobs_descriptors(infra: str) -> None:
    script = run_of(slurm(modules=("anaconda3",), conda="/p/$SLURM_JOB_ACCOUNT/env", scratch="/scratch"), infra)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    keeper = next(line for line in script.replace("\\\n", "").splitlines() if "kimisession.node.job" in line)
    assert re.search(r'< /dev/null\s+> "\$machine/run/job.log" 2>&1$', keeper)
    assert "timeout -k 30 28920" in keeper, "no layer lets it live longer than the profile allows"


def test_modules_and_conda_are_made_ready_inside_the_job_and_a_missing_one_ends_the_session() -> None:
    script = run_of(slurm(modules=("anaconda3", "nvidia/cuda/12"), conda="/p/$SLURM_JOB_ACCOUNT/env"), "slurm")
    assert 'module load nvidia/cuda/12 || fail "' in script
    assert 'PATH="/p/$SLURM_JOB_ACCOUNT/env"/bin:$PATH' in script
    assert "scancel --signal=TERM" in script


@pytest.mark.parametrize("bad", ["/p/$(id)", "/p; rm -rf /", '/p"', "/p`id`", "/p/a b"])
def test_a_setting_that_is_not_a_path_never_reaches_a_shell(bad: str) -> None:
    for key in ("conda", "scratch"):
        with pytest.raises(ValueError, match="cannot be a path"):
            run_of(slurm(**{key: bad}), "slurm")


def test_a_machine_of_a_cloud_arms_its_own_end_before_anything_else() -> None:
    script = run_of(SPEC, "gcp")
    assert script.index("arm.sh") < script.index("kimisession.node.job")
    assert f"--deadline {int(SPEC.deadline.timestamp()) + 120}" in script


def test_the_key_travels_as_a_file_of_its_users_alone(tmp_path: Path) -> None:
    lay_out(tmp_path, SPEC, {"api_key": "hidden"})
    assert (tmp_path / "api_key").stat().st_mode & 0o777 == 0o600
    assert not any(
        "hidden" in p.read_text(errors="replace") for p in tmp_path.rglob("*") if p.is_file() and p.name != "api_key"
    )


def test_hooks_travel_when_a_step_calls_them_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    lay_out(tmp_path / "without", SPEC, {})
    lay_out(tmp_path / "with", replace(SPEC, steps=(Step("gib", ("@{machine}/scripts/hooks/gib.sh", "remove")),)), {})
    assert not (tmp_path / "without" / "scripts").exists()
    assert os.access(tmp_path / "with" / "scripts" / "hooks" / "gib.sh", os.X_OK)


@pytest.mark.parametrize("name", sorted(sky_files()))
def test_the_files_in_sky_say_what_the_profiles_say(name: str) -> None:
    assert (CHECKOUT / "sky" / name).read_text(encoding="utf-8") == sky_files()[name], "run `make sky`"
    assert not (CHECKOUT / "sky" / "__init__.py").exists()


def test_the_seeding_file_calls_a_command_that_there_is() -> None:
    line = next(line for line in sky_files()["seed-weights.yaml"].splitlines() if "-m kimisession" in line)
    _, _, words = line.partition("-m kimisession ")
    command, *arguments = shlex.split(words.replace("$PROFILE", "kimi-k2.5").replace("$BUCKET", "gs://somewhere"))
    group: Any = get_command(app)
    asked = group.commands[command].make_context(command, arguments).params
    assert (asked["profile"], asked["here"], asked["bucket"]) == ("kimi-k2.5", True, "gs://somewhere")


@pytest.mark.parametrize("name", sorted(sky_files()))
def test_what_a_file_in_sky_runs_is_bash(name: str) -> None:
    text = sky_files()[name]
    for block in ("setup", "run"):
        found = re.search(rf"^{block}: \|\n((?:  .*\n|\n)+)", text, re.MULTILINE)
        assert found or block == "setup", name
        if found:
            subprocess.run(["bash", "-n"], input=found[1], text=True, check=True)
