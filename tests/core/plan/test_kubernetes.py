"""Manifests for a cluster: they end by themselves, and they carry no secret. (Validated once against the schemas of
Kubernetes 1.31 and 1.37 with kubernetes-validate, strictly, on 2026-11-21.)"""

import json
from dataclasses import replace
from typing import Any

import pytest

from kimisession.core.plan.kubernetes import manifests, to_yaml
from kimisession.profile_file import load_profile

KT = load_profile("kimi-k2.5-kt")


@pytest.fixture
def made() -> dict[str, dict[str, Any]]:
    documents = manifests(KT, KT.checkpoints[0], KT.engine.flags, 2)
    return {document["metadata"]["name"]: document for document in documents}


def test_the_serving_job_ends_at_its_cap_and_is_not_started_again(made: dict[str, dict[str, Any]]) -> None:
    spec = made["kimi-k2-5-kt-serve"]["spec"]
    assert spec["activeDeadlineSeconds"] == 8 * 3600
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_the_volume_holds_the_weights_with_room(made: dict[str, dict[str, Any]]) -> None:
    size = made["kimi-k2-5-kt-weights"]["spec"]["resources"]["requests"]["storage"]
    assert 595_147_639_776 / 2**30 < int(size.removesuffix("Gi")) < 700


def test_the_pod_asks_for_what_the_profile_says(made: dict[str, dict[str, Any]]) -> None:
    (container,) = made["kimi-k2-5-kt-serve"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "120", "memory": "830Gi", "nvidia.com/gpu": "2"}
    argv = container["args"]
    assert argv[argv.index("--kt-method") + 1] == "RAWINT4"
    assert argv[argv.index("--host") + 1] == "127.0.0.1"
    assert "--api-key" not in argv


def test_a_revision_is_downloaded_and_cannot_end_the_shells_word() -> None:
    checkpoint = replace(KT.checkpoints[0], repo="owner/Name@v1; rm -rf x")
    _, download, _ = manifests(KT, checkpoint, {}, 2)
    (container,) = download["spec"]["template"]["spec"]["containers"]
    script = container["command"][-1]
    assert "hf download owner/Name --revision 'v1; rm -rf x' --local-dir /models/name" in script


def test_shared_memory_is_not_taken_from_the_experts(made: dict[str, dict[str, Any]]) -> None:
    shm = made["kimi-k2-5-kt-serve"]["spec"]["template"]["spec"]["volumes"][1]
    assert int(shm["emptyDir"]["sizeLimit"].removesuffix("Gi")) <= 16


def test_yaml_nests_lists_and_tables_and_quotes_every_string() -> None:
    text = to_yaml([{"a": [{"b": "1", "c": [2, {}]}], "d": {}}, {"e": 'x: "y"'}])
    assert text == 'a:\n  - b: "1"\n    c:\n      - 2\n      - {}\nd: {}\n---\ne: "x: \\"y\\""\n'
    assert json.loads(text.splitlines()[-1].partition(": ")[2]) == 'x: "y"'


def test_no_gpu_is_held_until_somebody_says_that_the_download_is_complete(made: dict[str, dict[str, Any]]) -> None:
    assert made["kimi-k2-5-kt-serve"]["spec"]["suspend"] is True
    assert "suspend" not in made["kimi-k2-5-kt-download"]["spec"]
