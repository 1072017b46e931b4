"""`kimisession plan`: one screen, no network, no cloud library, and an exit code that scripts can use."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kimisession.cli.planning import price_elsewhere
from kimisession.profile_file import load_profile, profile_files
from kimisession.rehearsal.mini_kimi import make_mini_kimi
from tests.weights.hub_server import COMMIT, HubServer
from tests.weights.servers import serving

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/fixtures/scripts/serve_h200.sh"

#: Runs a command with every way out shut, and prints what it imported.
SEALED = """\
import sys
def shut(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError("plan asked the network")
sys.addaudithook(shut)
from kimisession.cli.app import main
try:
    main()
finally:
    heavy = {"sky", "google", "torch", "httpx", "pandas"} & {name.partition(".")[0] for name in sys.modules}
    assert not heavy, heavy
"""


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HOME": str(home), "NO_COLOR": "1"}
    for name in ("STATE", "CONFIG", "DATA", "CACHE"):
        env[f"KIMISESSION_{name}_HOME"] = str(home / name)
    return subprocess.run(
        [sys.executable, "-c", SEALED, *arguments],
        check=False,
        env=env,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
    )


def data(home: Path, *arguments: str) -> dict[str, Any]:
    done = run(home, "plan", *arguments, "--json")
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["data"]
    return found


def test_the_screen_says_fit_flags_stack_minutes_and_dollars(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "kimi-k2.5")
    assert done.returncode == 0, done.stderr
    for said in (
        "72.03 (71.88 to 72.18)",
        "--max-model-len 8192",
        "driver 580",
        "17 minutes",
        "$52.00 at worst",
        "calibrated",
    ):
        assert said in done.stdout, said
    assert "next: kimisession start kimi-k2.5" in done.stderr
    assert len(done.stdout.splitlines()) <= 40


@pytest.mark.parametrize("name", profile_files())
def test_every_shipped_profile_plans_and_none_is_refused(name: str, tmp_path: Path) -> None:
    found = data(tmp_path, name)
    assert found["verdict"] in ("starts", "borderline", "not known")
    assert found["refused_flags"] == []
    assert found["stack"]["contradictions"] == []


def test_a_plan_takes_less_than_half_a_second_once_its_cache_is_warm(tmp_path: Path) -> None:
    """In time of its own, best of five: what else this machine does is not ours to answer for."""
    run(tmp_path, "plan", "kimi-k2.5")
    took = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(tmp_path, "plan", "kimi-k2.5", "--context", "64k")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.5


def test_a_wish_is_met_with_the_cheapest_changes_and_the_command_for_it(tmp_path: Path) -> None:
    found = data(tmp_path, "kimi-k2.5", "--context", "64k")
    assert found["verdict"] == "starts"
    assert found["changes"]["decode-context-parallel-size"] == 8
    assert found["flags"]["max-model-len"] == 65536
    assert all(step["costs"] and step["evidence"] for step in found["advice"]["steps"])
    said = run(tmp_path, "plan", "kimi-k2.5", "--context", "64k").stderr
    assert "kimisession start kimi-k2.5 --set decode-context-parallel-size=8 --set max-model-len=65536" in said


def test_a_larger_gpu_is_named_as_start_knows_it(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "kimi-k2.5", "--context", "256k", "--concurrency", "4")
    assert done.stdout.startswith("kimi-k2.5 on H100-NVL x 8")
    assert "--gpus H100-NVL:8" in done.stderr
    assert "price     not known" in done.stdout
    assert "that is not for H100-NVL:8: kimisession plan kimi-k2.5 --gpus H100-NVL:8" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--set", "gpu-memory-utilization=0.90"), "--gpu-memory-utilization"),
        (("--set", "max-model-len=262144"), "--max-model-len"),
        (("--set", "max-modle-len=8192"), "--max-model-len"),
        (("--gpus", "H100:4"), "--tensor-parallel-size"),
    ],
)
def test_what_does_not_start_ends_with_5_and_names_the_flag(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    done = run(tmp_path, "plan", "kimi-k2.5", *arguments)
    assert done.returncode == 5
    assert says in done.stderr


def test_the_quota_of_the_dead_deployment_is_refused_with_one_that_is_enough(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "kimi-k2.5-kt", "--ram", "480")
    assert done.returncode == 5
    assert "loading dies between layer 36 and 52" in done.stderr
    assert "raise the quota to 830 GiB" in done.stderr
    assert run(tmp_path, "plan", "kimi-k2.5-kt", "--ram", "500").returncode == 5
    assert run(tmp_path, "plan", "kimi-k2.5-kt", "--ram", "830").returncode == 0


def test_a_price_list_on_this_machine_is_used_and_its_age_shown(tmp_path: Path) -> None:
    catalog = tmp_path / ".sky/catalogs/v8/gcp/vms.csv"
    catalog.parent.mkdir(parents=True)
    catalog.write_text(
        "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice\n"
        "a3-highgpu-8g,208.0,1872.0,,,,us-central1,us-central1-a,9.46006,2.88933\n"
        ",,,H100,8,H100,us-central1,us-central1-a,78.0,23.0\n",
        encoding="utf-8",
    )
    then = time.time() - 3 * 3600
    os.utime(catalog, (then, then))
    found = data(tmp_path, "kimi-k2.5")
    assert found["price"] == {
        "usd_per_hour": "25.88933",
        "ground": "us-central1-a, spot, a3-highgpu-8g; SkyPilot's catalog of 3 hours ago",
    }
    catalog.unlink()
    assert data(tmp_path, "kimi-k2.5")["price"] == found["price"]


def test_without_a_catalog_the_shipped_list_names_its_source_and_day(tmp_path: Path) -> None:
    found = data(tmp_path, "kimi-k2.5", "--gpus", "H200:8")["price"]
    assert found["usd_per_hour"] == "32.05394"
    assert found["ground"].startswith("us-east4-b, spot, a3-ultragpu-8g; list shipped with kimisession")
    assert "read 2026-11-21" in found["ground"]


def test_no_price_is_made_up_where_none_is_known(tmp_path: Path) -> None:
    found = data(tmp_path, "kimi-k2.5", "--gpus", "H100-NVL:8")
    assert found["price"]["usd_per_hour"] is None
    assert found["cost"]["worst_usd"] is None
    said = " ".join(run(tmp_path, "plan", "kimi-k2.5", "--gpus", "H100-NVL:8").stdout.split())
    assert "not known: no price of H100-NVL:8 on gcp is known here; --price says what you pay" in said
    assert "at worst" not in said
    stated = data(tmp_path, "kimi-k2.5", "--gpus", "H100-NVL:8", "--price", "20")
    assert stated["cost"]["worst_usd"] == "40.00"


def test_a_price_for_one_place_is_not_shown_for_another(tmp_path: Path) -> None:
    at_home = data(tmp_path, "kimi-k2.5", "--infra", "slurm")["price"]
    assert (at_home["usd_per_hour"], "GCP" in at_home["ground"]) == ("0.00", False)
    rented = data(tmp_path, "kimi-k2.5-h200", "--infra", "gcp")["price"]
    assert float(rented["usd_per_hour"]) > 20


def test_what_start_quotes_elsewhere_is_what_plan_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "KIMISESSION_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert price_elsewhere(load_profile("kimi-k2.5"), "H100:8", "gcp") is None
    assert price_elsewhere(load_profile("kimi-k2.5-h200"), "H200:8", "slurm") is None
    rented = price_elsewhere(load_profile("kimi-k2.5-h200"), "H200:8", "gcp")
    assert rented is not None
    assert rented[0] > 20
    at_home = price_elsewhere(load_profile("kimi-k2.5"), "H100:8", "local")
    assert at_home is not None
    assert at_home[0] == 0


def test_the_next_command_starts_what_was_planned(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "--set", "kv-cache-dtype=fp8", "--duration", "3h", "--price", "26", "--gpus", "H100:8")
    wanted = "kimisession start kimi-k2.5 --gpus H100:8 --duration 10800s --price 26 --set kv-cache-dtype=fp8"
    assert f"next: {wanted}\n" in done.stderr


def test_what_to_type_after_a_refusal_asks_the_same_question_again(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "--gpus", "H100:4", "--context", "16k", "--set", "max-num-seqs=8")
    assert done.returncode == 5
    again = "kimisession plan kimi-k2.5 --context 16384 --gpus H100:4 --set max-num-seqs=8 --explain"
    assert f"next:  {again}\n" in done.stderr


def test_another_version_brings_its_own_torch_along(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "kimi-k2.5", "--context", "256k")
    assert done.returncode == 0, done.stderr
    assert "torch 2.10.0" in done.stdout
    assert 'engine.version = "0.19.1", stack.torch = "2.10.0"' in done.stderr


@pytest.mark.parametrize(
    "flag",
    ["cpu-offload-gb=20", "kv-cache-memory-bytes=5G", 'hf-overrides={"num_hidden_layers":6}',
     'eplb-config={"num_redundant_experts":32}'],
)  # fmt: skip
def test_a_flag_that_moves_memory_in_ways_not_modelled_gets_no_figure(flag: str, tmp_path: Path) -> None:
    found = data(tmp_path, "kimi-k2.5", "--set", flag)
    assert (found["verdict"], found["figures"]) == ("not known", {})
    assert flag.partition("=")[0] in found["reason"]


def test_a_context_that_the_engine_fits_itself_is_not_refused(tmp_path: Path) -> None:
    found = data(tmp_path, "kimi-k2.5", "--set", "max-model-len=auto")
    assert (found["verdict"], found["reason"]) == ("starts", "the engine chooses 5,504 to 19,264 tokens of context.")


def test_explain_multiplies_with_the_digits_it_shows_and_names_your_own_figures(tmp_path: Path) -> None:
    stated = ("--api-price", "3", "--preemptions-per-hour", "0.2", "--price", "26.005")
    said = " ".join(run(tmp_path, "plan", "kimi-k2.5", "--explain", *stated).stdout.split())
    assert "at worst: 2h x $26.0050/h = $52.01" in said
    assert "[stated by you with --api-price]" in said
    assert "preemption: 0.2 an hour x 2h x a cold start of $7.2092 = $2.88" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--infra", "moon"), "'moon' is not a place"),
        (("--api-price", "0"), "above 0"),
        (("--set", "max-model-len=1e999k"), "--max-model-len 1e999k: that is not a whole number"),
        (("--set", 'speculative-config={"num_speculative_tokens":[1]}'), "num_speculative_tokens"),
        (("kimi-k2-amx", "--context", "300k"), "holds 131,072 tokens at most"),
        (("kimi-k2.5-kt", "--concurrency", "9"), "--concurrency is not foretold"),
        (("kimi-k2.5-kt", "--set", "tensor-parallel-size=0"), "--tensor-parallel-size 1 or more"),
        (("kimi-k2.5-kt", "--set", "kt-num-gpu-experts=x"), "--kt-num-gpu-experts x: that is not a whole number"),
        (("rehearsal", "--manifests"), "no model on the hub"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = run(tmp_path, "plan", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 2)
    assert says in done.stderr


def test_a_wish_changes_the_context_of_an_engine_on_the_cpu_too(tmp_path: Path) -> None:
    assert data(tmp_path, "kimi-k2-amx", "--context", "64k")["changes"] == {"context-length": 65536}


def test_a_script_with_secrets_says_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text(
        "export HF_TOKEN=s3cret\nvllm serve moonshotai/Kimi-K2.5 -tp 8 --api-key s3cret\n"
    )
    done = run(tmp_path, "plan", "--from", "serve.sh", "--engine-version", "0.19.1")
    assert "s3cret" not in done.stdout + done.stderr
    assert "left out: --api-key, HF_TOKEN" in done.stderr
    assert 'gib = "remove"' in done.stdout  # else its own profile could not start on GCP


def test_two_hours_of_the_seeds_spot_machine_cost_52_dollars(tmp_path: Path) -> None:
    assert data(tmp_path, "kimi-k2.5", "--price", "26")["cost"]["worst_usd"] == "52.00"
    assert data(tmp_path, "kimi-k2.5")["cost"]["worst_usd"] == "52.00"


def test_explain_lists_the_zones_with_their_prices(tmp_path: Path) -> None:
    said = run(tmp_path, "plan", "kimi-k2.5", "--explain").stdout
    assert "offer: us-east4-a a3-highgpu-8g: $20.04/h spot, $87.83/h on demand" in said


def test_a_folder_without_a_profile_is_planned_from_its_own_files(tmp_path: Path) -> None:
    make_mini_kimi(tmp_path / "mini")
    found = data(tmp_path, "--model", "./mini", "--gpus", "H100:1")
    assert found["verdict"] == "starts"
    assert "tensors of 66.7 MB in 6 files, counted in their headers" in found["model"]
    assert found["figures"]["disk_gib"]["value"] == pytest.approx(66.7e6 / 2**30, rel=0.01)
    said = run(tmp_path, "plan", "--model", "./mini", "--gpus", "H100:1", "--context", "8k").stdout
    assert "--max-model-len 8192" in said


def test_a_model_becomes_a_profile_that_plans_the_same(tmp_path: Path) -> None:
    make_mini_kimi(tmp_path / "mini")
    arguments = ("--model", str(tmp_path / "mini"), "--gpus", "H100:1", "--infra", "local")
    made = run(tmp_path, "plan", *arguments, "--as-profile")
    (tmp_path / "mini.toml").write_text(made.stdout, encoding="utf-8")
    assert data(tmp_path, "mini.toml")["figures"] == data(tmp_path, *arguments)["figures"]


def test_a_model_on_the_hub_is_planned_once_with_the_network_and_then_without(tmp_path: Path) -> None:
    make_mini_kimi(tmp_path / "mini")
    server = HubServer(tmp_path / "mini")
    arguments = ("plan", "--model", f"owner/mini@{COMMIT}", "--gpus", "H100:1", "--json")
    with serving(server):
        env = {**os.environ, "HF_ENDPOINT": server.url, "KIMISESSION_CACHE_HOME": str(tmp_path / "CACHE")}
        argv = [sys.executable, "-m", "kimisession", *arguments]
        first = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert first.returncode == 0, first.stderr
    again = run(tmp_path, *arguments)  # every way out is shut, and the server has gone
    assert again.returncode == 0, again.stderr
    one, other = (json.loads(done.stdout)["data"] for done in (first, again))
    assert one["figures"] == other["figures"]
    assert "minutes ago and kept since" in other["model"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "./nowhere", "--gpus", "H100:8"), "there is no folder nowhere"),
        (("--model", "./mini"), "say on which GPUs"),
        (("--model", "./mini", "--gpus", "CPU:1"), "only GPUs are planned"),
        (("--model", "./mini", "--gpus", "H100:8"), "--tensor-parallel-size 8 must divide the 4 attention heads"),
    ],
)
def test_a_model_that_cannot_be_planned_is_one_sentence(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    make_mini_kimi(tmp_path / "mini")
    done = run(tmp_path, "plan", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_manifests_are_printed_for_kubernetes(tmp_path: Path) -> None:
    said = run(tmp_path, "plan", "kimi-k2.5-kt", "--manifests").stdout
    assert [line for line in said.splitlines() if line.startswith("kind:")] == [
        'kind: "PersistentVolumeClaim"',
        'kind: "Job"',
        'kind: "Job"',
    ]


def test_explain_shows_the_arithmetic_with_sources(tmp_path: Path) -> None:
    said = run(tmp_path, "plan", "kimi-k2.5", "--explain").stdout
    assert "budget: 79.18 GiB x 0.95 = 75.22 GiB" in said
    assert "path: machine > weights > boot" in said
    assert "bucket: 554.3 GiB x $0.020" in said


def test_two_profiles_stand_side_by_side(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "--compare", "kimi-k2.5", "kimi-k2.5-int4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["kimi-k2.5", "kimi-k2.5-int4"]
    assert "vllm 0.15.0" in done.stdout
    assert "vllm 0.26.0" in done.stdout


def test_a_lock_is_printed_as_toml(tmp_path: Path) -> None:
    import tomllib

    read = tomllib.loads(run(tmp_path, "plan", "kimi-k2.5", "--lock").stdout)
    assert read["machine"]["accelerators"] == "H100:8"


def test_the_guides_script_becomes_a_profile_without_its_refused_flags(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "--from", str(SCRIPT), "--engine-version", "0.19.1", "--gpus", "H200:8")
    assert done.returncode == 0, done.stderr
    for refused, instead in (
        ("--swap-space", "--kv-offloading-size"),
        ("--skip-non-local-expert-weights", "--enable-ep-weight-filter"),
        ("--quantization-param-path", "leave it out"),
    ):
        assert any(refused in line and instead in line for line in done.stderr.splitlines())
    file = tmp_path / "serve-h200.toml"
    file.write_text(done.stdout, encoding="utf-8")
    profile = load_profile(str(file))
    assert profile.checkpoints[0].repo == "moonshotai/Kimi-K2.5"
    assert profile.slurm.cpus == 112
    assert profile.engine.flags["max-model-len"] == 65536
    assert "swap-space" not in profile.engine.flags


def test_what_stops_the_rest_of_the_script_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "--from", str(SCRIPT), "--engine-version", "0.19.1", "--gpus", "H200:8")
    assert "drop --enable-eplb" in done.stderr


def test_start_refuses_a_flag_that_the_pinned_parser_does_not_know(tmp_path: Path) -> None:
    done = run(tmp_path, "start", "kimi-k2.5", "--infra", "local", "--gpus", "H100:8", "--set", "max-modle-len=9", "-y")
    assert done.returncode == 2
    assert "use --max-model-len" in done.stderr


def test_start_refuses_what_surely_does_not_fit(tmp_path: Path) -> None:
    at = ("start", "kimi-k2.5", "--infra", "local", "--gpus", "H100:8", "--set", "gpu-memory-utilization=0.90", "-y")
    done = run(tmp_path, *at)
    assert done.returncode == 5
    assert "--force-fit" in done.stderr
    forced = run(tmp_path, *at, "--force-fit")
    assert "no GPU that is known here" in forced.stderr


def test_a_plan_goes_by_the_same_settings_as_a_start(tmp_path: Path) -> None:
    (tmp_path / "kimisession.toml").write_text('infra = "slurm"\ngpus = "H200:8"\nprice = 31\n', encoding="utf-8")
    done = run(tmp_path, "plan")
    assert done.stdout.startswith("kimi-k2.5 on H200 x 8 (slurm)"), done.stderr
    assert "$31.00/h" in done.stdout
    assert run(tmp_path, "plan", "--infra", "gcp").stdout.startswith("kimi-k2.5 on H200 x 8 (gcp)")
