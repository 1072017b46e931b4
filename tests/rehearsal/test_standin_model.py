"""The stand-in's folder: real shards that move and verify, and that say that there is no model in them."""

import json
from pathlib import Path

import pytest

from kimisession.rehearsal.shards import Tensor, write_shards
from kimisession.rehearsal.standin_model import make_standin_model


def test_the_folder_says_in_words_that_it_is_a_stand_in(tmp_path: Path) -> None:
    config = json.loads(make_standin_model(tmp_path, shard_bytes=10)[0].read_text())
    assert config["model_type"] == "kimisession-standin"
    assert "there is no model in them" in config["note"]


def test_each_shard_holds_the_bytes_that_were_asked_for(tmp_path: Path) -> None:
    files = make_standin_model(tmp_path, shards=3, shard_bytes=1001)
    assert [path.name for path in files] == [
        "config.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    for shard in files[1:-1]:
        whole = shard.read_bytes()
        assert len(whole) - 8 - int.from_bytes(whole[:8], "little") == 1001
    assert json.loads(files[-1].read_text())["metadata"] == {"total_size": 3003}


def test_the_bytes_are_the_same_every_time_and_differ_between_shards(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in make_standin_model(tmp_path / "a", shard_bytes=5000)]
    assert first == [path.read_bytes() for path in make_standin_model(tmp_path / "b", shard_bytes=5000)]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize(("shards", "shard_bytes"), [(0, 10), (1, 0)])
def test_an_empty_stand_in_is_refused(tmp_path: Path, shards: int, shard_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1 shard of 1 byte"):
        make_standin_model(tmp_path, shards, shard_bytes)


def test_a_tensor_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    twin = Tensor("twin", "U8", (1,), lambda tensor: bytes(tensor.size_bytes))
    with pytest.raises(ValueError, match="occurs twice"):
        write_shards(tmp_path, [[twin], [twin]])
