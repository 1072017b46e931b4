"""Kimi K2.5's text model at its full dimensions, without its weights: a folder for `--load-format dummy`.

Every tensor that the engine makes of it has its real size, type and sharding (memory, speed of kernels, start-up); what it
says is noise. Dimensions and quantisation are those of the public checkpoint's config.json (61 layers, 384 experts, MLA;
routed experts in compressed-tensors INT4, group 32). `layers` cuts it to fit fewer GPUs; the first layer is dense. `rank_of`
makes one GPU's share of a tensor-parallel group of its own: heads, widths and vocabulary divided, so one GPU holds and computes
what each of `rank_of` would, at full depth, without their all-reduces.

    python -m kimisession.rehearsal.dummy_kimi DIR [LAYERS [RANK_OF]]
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from kimisession.rehearsal.mini_kimi import DEFAULT, Shape, make_model_files

K25 = replace(
    DEFAULT,
    hidden_size=7168,
    num_hidden_layers=61,
    first_k_dense_replace=1,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=384,
    num_experts_per_tok=8,
    n_shared_experts=1,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    vocab_size=163840,
    max_position_embeddings=262144,
)

#: As in the public checkpoint: only the routed experts are INT4.
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
                "actorder": None,
            },
        }
    },
}


def make_dummy_kimi(folder: Path, layers: int = 61, rank_of: int = 1) -> tuple[Path, ...]:
    """Config, tokenizer and a file of no tensors. Returns the files.

    Raises ValueError for fewer than two layers, and for a `rank_of` that the dimensions cannot be divided by.
    """
    if not 2 <= layers <= K25.num_hidden_layers:
        raise ValueError(f"{layers} layers: the first is dense, so between 2 and {K25.num_hidden_layers} make a model")
    if rank_of not in (1, 2, 4, 8, 16):
        raise ValueError(f"a rank of {rank_of}: heads and widths divide by 1, 2, 4, 8 or 16")
    shape: Shape = replace(
        K25,
        num_hidden_layers=layers,
        num_attention_heads=K25.num_attention_heads // rank_of,
        intermediate_size=K25.intermediate_size // rank_of,
        moe_intermediate_size=K25.moe_intermediate_size // rank_of,
        vocab_size=K25.vocab_size // rank_of,
    )
    note = f"Kimi K2.5's text dimensions with {layers} layers and no weights: for --load-format dummy."
    if rank_of > 1:
        note += f" One GPU's share of {rank_of}."
    shards = folder / "model.safetensors"  # without a tensor: a folder without any such file is refused by `seed`
    files = make_model_files(folder, shape, {"quantization_config": INT4, "note": note})
    header = json.dumps({"__metadata__": {"note": note}}).encode()
    shards.write_bytes(len(header).to_bytes(8, "little") + header)
    return (*files, shards)


def main(arguments: list[str]) -> int:
    """`DIR [LAYERS [RANK_OF]]`."""
    folder = Path(arguments[0])
    for file in make_dummy_kimi(folder, *map(int, arguments[1:3])):
        print(file)
    print(json.dumps({"layers": json.loads((folder / "config.json").read_text())["num_hidden_layers"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
