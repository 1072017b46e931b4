"""Kimi K2.5's 64 safetensors files as far as a plan reads them: whole headers of 208,550 tensors, and no data (sparse).

Names and shapes are those of the public checkpoint's architecture: INT4 experts in compressed-tensors (packed, scale, shape),
everything else bf16, MoonViT and its projector.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from kimisession.rehearsal.dummy_kimi import INT4, K25

ENTRY_BYTES = {"BF16": 2, "I32": 4, "F32": 4}
Shapes = dict[str, tuple[str, tuple[int, ...]]]
TEXT, VIT, VIT_MLP, MERGED = "language_model.model.", 1152, 4304, 4608


def _packed(name: str, rows: int, columns: int) -> Shapes:
    return {
        f"{name}.weight_packed": ("I32", (rows, columns // 8)),
        f"{name}.weight_scale": ("BF16", (rows, columns // 32)),
        f"{name}.weight_shape": ("I32", (2,)),
    }


def _plain(rows: dict[str, tuple[int, ...]]) -> Shapes:
    return {name: ("BF16", shape) for name, shape in rows.items()}


def _layer(number: int) -> Shapes:
    at, hidden, heads, width = f"{TEXT}layers.{number}.", K25.hidden_size, K25.num_attention_heads, 2048
    query, value = K25.qk_nope_head_dim + K25.qk_rope_head_dim, K25.v_head_dim
    found = _plain(
        {
            f"{at}self_attn.q_a_proj.weight": (K25.q_lora_rank, hidden),
            f"{at}self_attn.q_a_layernorm.weight": (K25.q_lora_rank,),
            f"{at}self_attn.q_b_proj.weight": (heads * query, K25.q_lora_rank),
            f"{at}self_attn.kv_a_proj_with_mqa.weight": (K25.kv_lora_rank + K25.qk_rope_head_dim, hidden),
            f"{at}self_attn.kv_a_layernorm.weight": (K25.kv_lora_rank,),
            f"{at}self_attn.kv_b_proj.weight": (heads * (K25.qk_nope_head_dim + value), K25.kv_lora_rank),
            f"{at}self_attn.o_proj.weight": (hidden, heads * value),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
    )
    mlp = f"{at}mlp." if number == 0 else f"{at}mlp.shared_experts."
    inner = K25.intermediate_size if number == 0 else width
    found |= _plain({f"{mlp}{name}_proj.weight": (inner, hidden) for name in ("gate", "up")})
    found |= _plain({f"{mlp}down_proj.weight": (hidden, inner)})
    if number:
        found |= _plain({f"{at}mlp.gate.weight": (K25.n_routed_experts, hidden)})
        found[f"{at}mlp.gate.e_score_correction_bias"] = ("F32", (K25.n_routed_experts,))
        for expert in range(K25.n_routed_experts):
            one = f"{at}mlp.experts.{expert}."
            found |= _packed(f"{one}gate_proj", width, hidden) | _packed(f"{one}up_proj", width, hidden)
            found |= _packed(f"{one}down_proj", hidden, width)
    return found


def _vision() -> Shapes:
    found: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (VIT, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (VIT,),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, VIT),
        "mm_projector.proj.0.weight": (MERGED, MERGED),
        "mm_projector.proj.0.bias": (MERGED,),
        "mm_projector.proj.2.weight": (K25.hidden_size, MERGED),
        "mm_projector.proj.2.bias": (K25.hidden_size,),
    }
    for name in ("vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"):
        found |= {f"{name}.weight": (VIT,), f"{name}.bias": (VIT,)}
    for number in range(27):
        at = f"vision_tower.encoder.blocks.{number}."
        sizes = {"wqkv": (3 * VIT, VIT), "wo": (VIT, VIT), "mlp.fc0": (VIT_MLP, VIT), "mlp.fc1": (VIT, VIT_MLP)}
        for name, shape in sizes.items():
            found |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[:1]}
        for name in ("norm0", "norm1"):
            found |= {f"{at}{name}.weight": (VIT,), f"{at}{name}.bias": (VIT,)}
    return _plain(found)


def full_kimi(folder: Path) -> Path:
    """Write config.json and the 64 files, which have 595 GB by `ls` and 34 MB on disk. Returns the folder."""
    folder.mkdir(parents=True)
    shape, hidden = K25, K25.hidden_size
    tables = {f"{TEXT}embed_tokens.weight": (shape.vocab_size, hidden), f"{TEXT}norm.weight": (hidden,)}
    shards = [_layer(number) for number in range(shape.num_hidden_layers)]
    shards += [_plain(tables), _plain({"language_model.lm_head.weight": (shape.vocab_size, hidden)}), _vision()]
    for number, tensors in enumerate(shards, 1):
        end, header = 0, {}
        for name, (dtype, sizes) in tensors.items():
            size = ENTRY_BYTES[dtype]
            for length in sizes:
                size *= length
            header[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [end, end + size]}
            end += size
        raw = json.dumps(header, separators=(",", ":")).encode()
        file = folder / f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        file.write_bytes(len(raw).to_bytes(8, "little") + raw)
        os.truncate(file, 8 + len(raw) + end)
    text = {
        **{name: getattr(shape, name) for name in shape.__dataclass_fields__ if name != "shards"},
        "quantization_config": INT4,
    }
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": {"vt_num_hidden_layers": 27}}))
    return folder
