"""A model that nobody described: its headers are read by range, and damaged ones are named in a sentence."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimisession.core.plan.models import card_from_config, components
from kimisession.core.plan.tensors import counted_card
from kimisession.model_file import card_named
from kimisession.rehearsal.mini_kimi import make_mini_kimi
from kimisession.weights.errors import BadSource, TryAgain
from kimisession.weights.headers import FIRST_BYTES, kept_card, read_model
from tests.weights.full_kimi import full_kimi
from tests.weights.hub_server import COMMIT, HubServer, _HubHandler
from tests.weights.servers import serving

MORE_THAN_SOCKETS_HOLD = 16_000_000


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of a folder is kept as well: not in the cache of whoever runs this."""
    monkeypatch.setenv("KIMISESSION_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "mini"
    make_mini_kimi(path)
    return path


@pytest.fixture
def hub(folder: Path) -> Iterator[HubServer]:
    server = HubServer(folder)
    with serving(server):
        yield server


def test_the_bytes_of_a_folder_are_counted_and_agree_with_its_dimensions(folder: Path) -> None:
    read = read_model(str(folder))
    assert read.card.counted is not None
    derived = components(card_from_config(json.loads((folder / "config.json").read_text())))
    for kind in ("routed_experts", "shared_experts", "dense_mlp", "embed", "lm_head", "attention_sharded", "norms"):
        assert getattr(read.card.counted, kind) == getattr(derived, kind), kind
    assert read.file_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert read.card.checkpoint_bytes == read.file_bytes


def test_all_of_kimi_k2_5_is_counted_from_34_mb_and_is_what_the_dimensions_say(tmp_path: Path) -> None:
    folder = full_kimi(tmp_path / "k2.5")
    read = read_model(str(folder), cache=tmp_path, now=lambda: 100.0)
    assert (read.files, read.tensors) == (64, 208_550)
    assert read.bytes_read < 36_000_000
    assert read.card.counted is not None
    derived = components(card_named("moonshotai/Kimi-K2.5"))
    shape_tensors = 60 * 384 * 3 * 8  # two int32 for each packed matrix, which no arithmetic on dimensions has
    assert replace(read.card.counted, routed_experts=read.card.counted.routed_experts - shape_tensors) == derived
    assert read.file_bytes == pytest.approx(595.18e9, abs=0.01e9), "as vLLM logs the files of K2.6: 554.30 GiB"
    again = read_model(str(folder), cache=tmp_path, now=lambda: 160.0)
    assert (again.card, again.age_s) == (read.card, 60)
    (folder / "config.json").touch()
    assert read_model(str(folder), cache=tmp_path, now=lambda: 200.0).age_s == 0


def test_a_model_on_the_hub_is_known_after_kilobytes_of_it(hub: HubServer, tmp_path: Path) -> None:
    read = read_model("owner/mini", endpoint=hub.url, cache=tmp_path)
    assert read.revision == COMMIT
    assert read.card.counted == read_model(str(hub.folder)).card.counted
    assert read.bytes_read < 8 * FIRST_BYTES
    deadline = time.monotonic() + 10  # the server counts what it sent a moment after it was received
    while sum(hub.seen.body_out.values()) < read.bytes_read and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(hub.seen.body_out.values()) == read.bytes_read
    assert read.file_bytes > 50 * read.bytes_read


def test_what_was_read_once_needs_no_hub_again(hub: HubServer, tmp_path: Path) -> None:
    first = read_model("owner/mini@" + COMMIT, endpoint=hub.url, cache=tmp_path, now=lambda: 1000.0)
    calls = dict(hub.seen.calls)
    again = read_model("owner/mini@" + COMMIT, endpoint=hub.url, cache=tmp_path, now=lambda: 1e9)
    assert hub.seen.calls == calls
    assert (again.card, again.bytes_read) == (first.card, first.bytes_read)
    assert again.age_s == 1e9 - 1000


def test_a_profile_about_a_model_that_was_read_once_finds_its_card(hub: HubServer, tmp_path: Path) -> None:
    assert kept_card("owner/mini", tmp_path) is None
    read = read_model("owner/mini", endpoint=hub.url, cache=tmp_path)
    assert kept_card("owner/mini", tmp_path) == read.card


def test_a_branch_is_asked_for_again_after_a_day_and_kept_where_nobody_answers(folder: Path, tmp_path: Path) -> None:
    server = HubServer(folder)
    with serving(server):
        read_model("owner/mini", endpoint=server.url, cache=tmp_path, now=lambda: 0.0)
        asked = server.seen.calls["hub.resolve"]
        read_model("owner/mini", endpoint=server.url, cache=tmp_path, now=lambda: 80_000.0)
        assert server.seen.calls["hub.resolve"] == asked
        read_model("owner/mini", endpoint=server.url, cache=tmp_path, now=lambda: 90_000.0)
        assert server.seen.calls["hub.resolve"] == 2 * asked
    kept = read_model("owner/mini", endpoint=server.url, cache=tmp_path, now=lambda: 9_000_000.0)
    assert kept.age_s == 9_000_000 - 90_000
    with pytest.raises(TryAgain):
        read_model("owner/mini@other", endpoint=server.url, cache=tmp_path)


class Deaf(HubServer):
    """A hub that ignores ranges: it answers 200 and sends whole files."""

    def finish_request(self, request: Any, client_address: Any) -> None:
        _DeafHandler(request, client_address, self)


class _DeafHandler(_HubHandler):
    def parse_request(self) -> bool:
        found = super().parse_request()
        if found:
            del self.headers["Range"]
        return found


def test_a_server_that_ignores_ranges_cannot_make_it_download_the_files(folder: Path, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.mkdir()
    (big / "config.json").write_bytes((folder / "config.json").read_bytes())
    header = json.dumps({"lm_head.weight": {"dtype": "U8", "shape": [10**9], "data_offsets": [0, 10**9]}}).encode()
    file = big / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + 10**9)  # sparse
    server = Deaf(folder)
    server.folder = big
    server.tree = [
        {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}
        for path in sorted(big.iterdir())
    ]
    with serving(server):
        read = read_model("owner/mini", endpoint=server.url, cache=tmp_path / "cache")
    assert read.file_bytes > 10**9
    assert read.bytes_read < 2 * FIRST_BYTES
    assert sum(server.seen.body_out.values()) < MORE_THAN_SOCKETS_HOLD


GOOD = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "too few"),
        (b"\x10\0\0\0\0\0\0\0{", "too few"),
        (b"\x00\x01\0\0\0\0\0\0" + b"{" * 20, "cut off"),
        ((10**12).to_bytes(8, "little") + b"{}", "would have 1,000,000,000,000 bytes"),
        (b"<!DOCTYPE html><html>not found</html>", "no safetensors file"),
        ((4).to_bytes(8, "little") + b"\xff\xfe{}", "not JSON"),
        ((4).to_bytes(8, "little") + b"[[]]", "not a JSON object"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "has no dtype, shape and data_offsets"),
        (b"".join(((n := json.dumps(GOOD).encode()), len(n).to_bytes(8, "little"))[::-1]) + b"1234", "behind the end"),
        (
            b"".join(((n := json.dumps(GOOD).replace("[2, 2]", "[9, 9]").encode()), len(n).to_bytes(8, "little"))[::-1])
            + b"12345678",
            "not those of its shape",
        ),
    ],
)
def test_a_damaged_header_is_one_sentence_that_names_the_file(
    content: bytes, says: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadSource) as caught:
        read_model(str(tmp_path))
    assert says in caught.value.message
    assert "model.safetensors" in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_headers_that_no_model_has_are_not_downloaded(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for number in range(5):
        file = tmp_path / f"model-{number}.safetensors"
        file.write_bytes((99_000_000).to_bytes(8, "little"))
        os.truncate(file, 100_000_000)
    with pytest.raises(BadSource) as caught:
        read_model(str(tmp_path))
    assert "495,000,040 bytes in all" in caught.value.message


def test_another_architecture_is_refused_after_its_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}))
    with pytest.raises(BadSource) as caught:
        read_model(str(tmp_path))
    assert "only models with DeepSeek's MLA can be planned" in caught.value.message


@pytest.mark.parametrize(("name", "says"), [("./nothing-here", "no folder"), ("a/b/c", "no model on the hub")])
def test_a_model_that_is_nowhere_is_said_so(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadSource) as caught:
        read_model(name, cache=tmp_path)
    assert says in caught.value.message


def test_an_unknown_quantisation_is_counted_instead_of_derived(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    card = counted_card(config, (), 100, "x")
    assert card.experts_format == "other"
    assert card.counted is not None
