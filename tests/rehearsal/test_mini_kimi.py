"""mini-kimi's folder, read back with the standard library: what a loader of real checkpoints relies on."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kimisession.core.plan.kv import cpu_kv_tokens
from kimisession.rehearsal import mini_kimi
from kimisession.rehearsal.mini_kimi import DEFAULT, Shape, make_mini_kimi
from kimisession.rehearsal.vllm_cpu import KV_CACHE_BYTES, VLLM_CPU_ENV, vllm_cpu_argv

SMALL = Shape(
    num_hidden_layers=2, intermediate_size=64, moe_intermediate_size=32, n_routed_experts=4, hidden_size=64, shards=4
)
DTYPE_BYTES = {"BF16": 2, "F32": 4}
MB = 1_000_000


def header(shard: Path) -> tuple[int, dict[str, Any]]:
    """Where the bytes of a safetensors file begin, and its header."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


def read(folder: Path, name: str) -> bytes:
    """The bytes of one tensor, found as a loader finds them: index, header, range."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    start, entries = header(folder / index["weight_map"][name])
    begin, end = entries[name]["data_offsets"]
    shard = folder / str(index["weight_map"][name])
    return shard.read_bytes()[start + begin : start + end]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mini-kimi")
    make_mini_kimi(made)
    return made


def test_every_tensor_lies_where_the_index_and_the_header_say(folder: Path) -> None:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, str] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        start, entries = header(shard)
        assert entries.pop("__metadata__") == {"format": "pt"}
        assert start % 8 == 0
        end_before = 0
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            assert begin == end_before, f"{name} leaves a gap"
            assert end - begin == math.prod(entry["shape"]) * DTYPE_BYTES[entry["dtype"]]
            end_before = end
            found[name] = shard.name
        assert shard.stat().st_size == start + end_before
    assert found == weight_map


def test_the_bytes_add_up_to_the_formula_of_the_architecture(folder: Path) -> None:
    s, bf16, f32 = DEFAULT, 2, 4
    attention = (
        s.hidden_size * (s.q_lora_rank + s.kv_lora_rank + s.qk_rope_head_dim)
        + s.q_lora_rank * s.num_attention_heads * (s.qk_nope_head_dim + s.qk_rope_head_dim)
        + s.kv_lora_rank * s.num_attention_heads * (s.qk_nope_head_dim + s.v_head_dim)
        + s.num_attention_heads * s.v_head_dim * s.hidden_size
        + (s.q_lora_rank + s.kv_lora_rank + 2 * s.hidden_size)  # norms
    )
    dense = 3 * s.hidden_size * s.intermediate_size
    experts = 3 * s.hidden_size * s.moe_intermediate_size * (s.n_routed_experts + s.n_shared_experts)
    router = s.hidden_size * s.n_routed_experts
    moe_layers = s.num_hidden_layers - s.first_k_dense_replace
    elements = (
        2 * s.vocab_size * s.hidden_size
        + s.hidden_size
        + s.num_hidden_layers * attention
        + s.first_k_dense_replace * dense
        + moe_layers * (experts + router)
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == bf16 * elements + f32 * moe_layers * s.n_routed_experts
    assert 50 * MB < index["metadata"]["total_size"] < 150 * MB


def test_there_are_several_shards_of_about_the_same_size(folder: Path) -> None:
    sizes = [shard.stat().st_size for shard in folder.glob("*.safetensors")]
    assert len(sizes) == DEFAULT.shards >= 4
    assert max(sizes) < 1.2 * min(sizes)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_gives_others(tmp_path: Path) -> None:
    def digest(name: str, seed: int) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in make_mini_kimi(tmp_path / name, SMALL, seed)}

    first, again, other = digest("first", 7), digest("again", 7), digest("other", 8)
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {n for n in first if n.endswith(".safetensors")}


def test_making_it_twice_in_one_folder_changes_nothing(tmp_path: Path) -> None:
    files = make_mini_kimi(tmp_path, SMALL)
    before = {path: path.read_bytes() for path in files}
    assert make_mini_kimi(tmp_path, SMALL) == files
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_no_weight_is_infinite_or_large(tmp_path: Path) -> None:
    make_mini_kimi(tmp_path, SMALL)
    for name in json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]:
        weights = read(tmp_path, name)
        exponents = {(high & 0x7F) << 1 | low >> 7 for low, high in zip(weights[::2], weights[1::2], strict=True)}
        assert max(exponents) <= 127, f"{name} holds a weight of 2 or more"


def test_the_head_answers_each_word_of_the_script_with_the_next_one(folder: Path) -> None:
    row_bytes = 2 * DEFAULT.hidden_size
    embedding, head = read(folder, "model.embed_tokens.weight"), read(folder, "lm_head.weight")

    def row(table: bytes, token: int) -> bytes:
        return table[token * row_bytes : (token + 1) * row_bytes]

    vocabulary = mini_kimi._vocabulary()
    script = [mini_kimi._id(vocabulary, token) for token in mini_kimi._script()]
    assert len(set(script)) == len(script)
    for before, after in pairwise(script):
        assert row(head, after) == row(embedding, before)


def test_the_tokens_of_the_script_spell_the_thought_and_the_answer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    byte_of = {char: byte for byte, char in enumerate(mini_kimi._byte_alphabet())}
    assert len(byte_of) == 256
    pieces = [token for token in tokenizer["model"]["vocab"] if len(token) > 1]
    text = bytes(byte_of[char] for char in "".join(pieces)).decode()
    assert text == mini_kimi.THOUGHT + mini_kimi.ANSWER
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    assert sorted(ids) == list(range(len(ids)))


def test_the_config_stops_at_the_turns_end_and_is_read_as_kimi_k2(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    stop = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert (config["architectures"], config["model_type"]) == (["DeepseekV3ForCausalLM"], "kimi_k2")
    assert [token["content"] for token in added if token["id"] == stop] == ["<|im_end|>"]


def test_its_kv_cache_holds_the_tokens_that_vllm_printed() -> None:
    layers, latent, rope = DEFAULT.num_hidden_layers, DEFAULT.kv_lora_rank, DEFAULT.qk_rope_head_dim
    gib = KV_CACHE_BYTES / 2**30
    assert cpu_kv_tokens(layers=layers, kv_lora_rank=latent, rope_dim=rope, space_gib=gib) == 77_664


def test_a_vocabulary_too_small_for_the_script_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size is 300; mini-kimi's tokenizer needs at least"):
        make_mini_kimi(tmp_path / "new", Shape(vocab_size=300))
    assert not (tmp_path / "new").exists()


def test_the_server_listens_on_loopback_and_its_key_is_in_no_argument() -> None:
    argv = vllm_cpu_argv(Path("/venv/bin/python"), Path("/models/mini"), 8000, "mini-kimi", 4096)
    assert argv[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert {"--model=/models/mini", "--host=127.0.0.1", "--port=8000", "--max-model-len=4096"} <= set(argv)
    assert not any("key" in part for part in argv)
    assert VLLM_CPU_ENV["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in VLLM_CPU_ENV
