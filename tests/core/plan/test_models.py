"""Bytes of a checkpoint by kind of tensor, from dimensions alone."""

from __future__ import annotations

import pytest

from kimisession.core.plan.models import ModelUnknown, card_from_config, components, draft_named, stage_layers
from kimisession.model_file import all_cards, card_from_toml, card_named

GIB = 2**30


def test_k2_5_adds_up_to_its_published_595_gb() -> None:
    parts = components(card_named("moonshotai/Kimi-K2.5"))
    assert parts.total == 595_147_639_776
    assert parts.routed_experts == 570_760_888_320
    assert parts.shared_experts == 5_284_823_040
    assert parts.attention_replicated == 1_846_935_552
    assert parts.attention_sharded == 10_489_954_304
    assert parts.vision_blocks == 822_933_216
    assert parts.vision_other == 10_798_848
    assert parts.projector == 108_555_776


@pytest.mark.parametrize(
    ("name", "gb"),
    [
        ("moonshotai/Kimi-K2-Thinking", 594.205),
        ("moonshotai/Kimi-K2-Instruct", 1029.173),
        ("nvidia/Kimi-K2.5-NVFP4", 590.78),
        ("moonshotai/Kimi-K2.6", 595.148),
        ("moonshotai/Kimi-K2.7-Code", 595.148),
    ],
)
def test_each_card_adds_up_to_its_known_size(name: str, gb: float) -> None:
    assert components(card_named(name)).total / 1e9 == pytest.approx(gb, abs=0.001)


def test_every_shipped_card_says_where_it_comes_from() -> None:
    assert len(all_cards()) >= 9
    assert all(card.evidence for card in all_cards())


def test_a_remark_after_the_name_does_not_hide_the_card() -> None:
    assert card_named("moonshotai/Kimi-K2.5 (text dimensions, dummy weights)").name == "moonshotai/Kimi-K2.5"


def test_an_unknown_name_lists_the_ones_that_exist() -> None:
    with pytest.raises(ModelUnknown, match=r"moonshotai/Kimi-K2\.5"):
        card_named("nobody/nothing")


K2_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}


def test_a_config_json_gives_the_same_bytes_as_the_card() -> None:
    text = card_from_config({**K2_CONFIG, "quantization_config": INT4})
    assert components(text) == components(card_named("Kimi-K2-Thinking"))
    vision = {"vt_num_hidden_layers": 27, "vt_hidden_size": 1152, "vt_intermediate_size": 4304}
    wrapped = card_from_config({"text_config": {**K2_CONFIG, "quantization_config": INT4}, "vision_config": vision})
    assert components(wrapped) == components(card_named("Kimi-K2.5"))


def test_fp8_and_nvfp4_configs_are_read() -> None:
    fp8 = card_from_config({**K2_CONFIG, "quantization_config": {"quant_method": "fp8"}})
    assert components(fp8) == components(card_named("Kimi-K2-Instruct"))
    nvfp4 = card_from_config(
        {
            **K2_CONFIG,
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", "model.layers.0.self_attn*"],
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
        }
    )
    assert (nvfp4.shared_format, nvfp4.attention_format, nvfp4.kv_dtype) == ("nvfp4", "bf16", "fp8")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"num_hidden_layers": "61"}, "num_hidden_layers"),
        ({"hidden_size": 0}, "hidden"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_a_foreign_config_is_refused_by_the_name_of_the_field(change: dict[str, object], says: str) -> None:
    with pytest.raises(ModelUnknown, match=says):
        card_from_config({**K2_CONFIG, **change})


def test_a_card_with_a_typing_mistake_is_refused_with_its_file() -> None:
    with pytest.raises(ModelUnknown, match=r"x\.toml"):
        card_from_toml('name = "a"\nlayer = 3\n', "x.toml")
    with pytest.raises(ModelUnknown, match="not TOML"):
        card_from_toml("name = ", "x.toml")


def test_the_eagle3_draft_takes_what_the_logs_show() -> None:
    draft = draft_named("eagle3 lightseekorg/kimi-k2.6-eagle3-mla k=3", card_named("Kimi-K2.6"))
    assert draft is not None
    assert (draft.replicated_bytes + draft.sharded_bytes / 8) / GIB == pytest.approx(0.76, abs=0.05)
    assert draft_named("none", card_named("Kimi-K2.6")) is None


def test_pipeline_stages_hold_every_layer_once() -> None:
    for layers in (1, 2, 30, 61, 78):
        for pp in range(1, min(layers, 9) + 1):
            assert sum(stage_layers(layers, pp)) == layers
    assert stage_layers(61, 4) == (15, 15, 16, 15)
