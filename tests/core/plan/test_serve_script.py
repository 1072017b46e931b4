"""A script that serves a model is read as data: nothing of it runs."""

from pathlib import Path

import pytest

from kimisession.core.plan.flags import check_flags
from kimisession.core.plan.serve_script import NoServeCommand, parse_script
from kimisession.flag_file import known_flags

SCRIPT = (Path(__file__).parents[2] / "fixtures/scripts/serve_h200.sh").read_text(encoding="utf-8")


def test_the_guides_script_is_read_with_its_variables_put_in() -> None:
    script = parse_script(SCRIPT, known_flags("vllm", "0.19.1"))
    assert script.model == "/projects/${SLURM_JOB_ACCOUNT}/models/kimi-k2.5"
    assert script.flags["speculative-config"] == {
        "model": "/projects/${SLURM_JOB_ACCOUNT}/models/kimi-k2.5-eagle3-mla",
        "method": "eagle3",
        "num_speculative_tokens": 3,
    }
    assert script.flags["eplb-config"] == {"window_size": 1000, "step_interval": 1000}
    assert script.flags["max-model-len"] == 65536
    assert script.flags["enable-eplb"] is True
    assert script.env == {"VLLM_TUNED_CONFIG_FOLDER": "/projects/${SLURM_JOB_ACCOUNT}/configs/moe"}
    assert script.sbatch["mem"] == "1800G"
    assert script.modules == ("anaconda3",)


def test_exactly_the_guides_three_flags_are_refused() -> None:
    table = known_flags("vllm", "0.19.1")
    assert table is not None
    refused = check_flags(table, parse_script(SCRIPT, table).flags)
    assert [r.flag for r in refused] == ["--swap-space", "--skip-non-local-expert-weights", "--quantization-param-path"]
    assert [r.replacement for r in refused] == ["--kv-offloading-size", "--enable-ep-weight-filter", ""]


@pytest.mark.parametrize(
    ("text", "model", "flags"),
    [
        ("vllm serve org/m -tp 8 --enforce-eager", "org/m", {"tensor-parallel-size": 8, "enforce-eager": True}),
        ("nohup srun vllm serve org/m --seed=1 > log 2>&1 &", "org/m", {"seed": 1}),
        ("exec python3 -m vllm.entrypoints.openai.api_server --model org/m --port 8000", "org/m", {}),
        ("M=org/m\nvllm serve $M --dtype ${D:-auto}", "org/m", {"dtype": "auto"}),
        ("vllm serve org/m \\ --max_num_seqs 4 \\ --seed 1", "org/m", {"max-num-seqs": 4, "seed": 1}),
        ("vllm serve org/m --eplb-config '{\n\"window_size\": 1}'", "org/m", {"eplb-config": {"window_size": 1}}),
        ("vllm serve org/m --enforce-eager # and nothing else\necho --seed 1", "org/m", {"enforce-eager": True}),
        ("python -m sglang.launch_server --model-path org/m --kt-method RAWINT4", "org/m", {"kt-method": "RAWINT4"}),
    ],
)
def test_the_forms_that_people_write_are_read(text: str, model: str, flags: dict[str, object]) -> None:
    script = parse_script(text)
    assert (script.model, dict(script.flags)) == (model, flags)


def test_a_version_that_the_script_installs_is_known() -> None:
    assert parse_script('pip install "vllm==0.19.1"\nvllm serve org/m').version == "0.19.1"


def test_a_script_that_serves_nothing_is_told() -> None:
    with pytest.raises(NoServeCommand, match="vllm serve"):
        parse_script("#!/bin/bash\necho vllm\n")


@pytest.mark.parametrize("spelled", ["--api-key", "--api-ke", "--hf-token", "--hf_token"])
def test_no_secret_of_a_script_gets_into_its_profile(spelled: str) -> None:
    text = f"export HF_TOKEN=s3cret VLLM_API_KEY=s3cret HF_HOME=/x\nvllm serve org/m {spelled} s3cret --max-num-seqs 4"
    script = parse_script(text, known_flags("vllm", "0.19.1"))
    assert "s3cret" not in f"{script.flags} {script.env} {script.model}"
    assert script.env == {"HF_HOME": "/x"}
    assert {"HF_TOKEN", "VLLM_API_KEY"} < set(script.secrets)


def test_tokens_that_are_no_secret_stay() -> None:
    script = parse_script("vllm serve org/m --max-num-batched-tokens 4096", known_flags("vllm", "0.19.1"))
    assert script.flags == {"max-num-batched-tokens": 4096}
