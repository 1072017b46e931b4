"""mini-kimi: a complete model folder of the Kimi K2 architecture (MLA and MoE), small enough for vLLM on two CPU cores.

Its weights are real files, real safetensors shards with a real index, so that a rehearsal moves, verifies and loads
real bytes. They are pseudorandom but for one thing: the rows of `lm_head` are rows of the embedding, shifted by one
along a fixed text. The residual stream carries the embedding of the last token to the head, whose best match is
then the next token of that text. So mini-kimi thinks one sentence, says one answer and stops, at any temperature; and
an answer in plain words proves that the bytes which were seeded are the bytes which answer.

Run `python -m kimisession.rehearsal.mini_kimi DIR` to make one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kimisession.rehearsal.shards import Tensor, pseudorandom_bytes, write_json, write_shards

THOUGHT = (
    "The user talks to a miniature of Kimi K2: latent attention, routed experts, three layers and no knowledge."
    " I should say so, briefly."
)
ANSWER = (
    "Hello, this is mini-kimi. I have the architecture of a model with a trillion parameters and the size of a"
    " photo album. My weights are noise, drawn from one seed, and all that I can say is this one paragraph. Still,"
    " every byte of me was copied, sealed with a checksum, pulled, verified and loaded by the same code which would"
    " do it for the full-size checkpoint, and a real engine is computing each of these words. When nobody has asked"
    " me anything for a while, the keeper will notice, give its reason, and take this machine down. Please look at"
    " your receipt afterwards: nothing should be left running, and nothing should be billed that you did not see."
)
BOS, EOS = "[BOS]", "[EOS]"
SYSTEM, USER, ASSISTANT = "<|im_system|>", "<|im_user|>", "<|im_assistant|>"
MIDDLE, END = "<|im_middle|>", "<|im_end|>"
THINK, THOUGHT_END = "<think>", "</think>"
# The tool tokens are never said, but vLLM's kimi_k2 parser looks them up.
TOOL_TOKENS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
SPECIAL = (BOS, EOS, SYSTEM, USER, ASSISTANT, MIDDLE, END, THINK, THOUGHT_END, *TOOL_TOKENS)

# Same turn format as K2's: <|im_ROLE|>name<|im_middle|>text<|im_end|>. `thinking: false` closes the thought at once.
CHAT_TEMPLATE = "".join(
    (
        "{% for message in messages %}",
        "{% if message.role == 'assistant' %}" + ASSISTANT,
        "{% elif message.role == 'user' %}" + USER,
        "{% else %}" + SYSTEM + "{% endif %}",
        "{{ message.name or message.role }}" + MIDDLE + "{{ message.content or '' }}" + END,
        "{% endfor %}",
        "{% if add_generation_prompt %}" + ASSISTANT + "assistant" + MIDDLE,
        "{% if thinking is defined and not thinking %}" + THINK + THOUGHT_END + "{% endif %}",
        "{% endif %}",
    )
)

# High byte of a bf16 (sign, then the upper 7 of 8 exponent bits) that gives magnitudes from 2^-7 to 2^-5, or 2^-3 to
# 2^-1. The root mean square is 0.019, which is about K2's initializer_range, or 0.30.
QUIET, LOUD = 0x3C, 0x3E
ONE_BF16 = b"\x80\x3f"


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a model, named as in K2's config.json; the comments give full-size K2's.

    The widths per head, the MLA ranks and the routing are K2's own where a small model allows it, so that the KV
    cache is laid out as the big one's.
    """

    num_hidden_layers: int = 3  # 61
    first_k_dense_replace: int = 1  # 1
    hidden_size: int = 256  # 7168
    intermediate_size: int = 4096  # 18432
    moe_intermediate_size: int = 1024  # 2048
    n_routed_experts: int = 16  # 384
    num_experts_per_tok: int = 4  # 8
    n_shared_experts: int = 1  # 1
    num_attention_heads: int = 4  # 64
    q_lora_rank: int = 256  # 1536
    kv_lora_rank: int = 512  # 512
    qk_nope_head_dim: int = 128  # 128
    qk_rope_head_dim: int = 64  # 64
    v_head_dim: int = 128  # 128
    vocab_size: int = 512  # 163840
    max_position_embeddings: int = 32768  # 262144
    shards: int = 6  # 64


DEFAULT = Shape()


def make_mini_kimi(folder: Path, shape: Shape = DEFAULT, seed: int = 0) -> tuple[Path, ...]:
    """Write a model folder that vLLM serves (made if absent) and return its files.

    The bytes depend on the shape and the seed only: a second call writes the same files. Raises ValueError if the
    vocabulary of the shape is too small for the tokens that mini-kimi needs.
    """
    vocabulary = _vocabulary()
    if shape.vocab_size < len(vocabulary):
        raise ValueError(f"vocab_size is {shape.vocab_size}; mini-kimi's tokenizer needs at least {len(vocabulary)}")
    tensors = tuple(_tensors(shape, seed, vocabulary))
    return (*make_model_files(folder, shape, {}), *write_shards(folder, _into_shards(tensors, shape.shards)))


def make_model_files(folder: Path, shape: Shape, extra: Mapping[str, object]) -> tuple[Path, ...]:
    """Everything of a model folder but its weights; `extra` goes into config.json over what the shape says."""
    vocabulary = _vocabulary()
    folder.mkdir(parents=True, exist_ok=True)
    return (
        write_json(folder / "config.json", {**_config(shape, vocabulary), **extra}),
        write_json(folder / "generation_config.json", _generation_config(vocabulary)),
        write_json(folder / "tokenizer.json", _tokenizer(vocabulary)),
        write_json(folder / "tokenizer_config.json", _tokenizer_config(shape)),
    )


# --- what it says -------------------------------------------------------------------------------------------------


def _pieces(text: str, taken: set[str]) -> list[str]:
    """Cut `text` into pieces, of one word where possible, that are all different and not in `taken`.

    Each token has one successor, so none may occur twice: a word that was there before is joined to the next one.
    """
    pieces: list[str] = []
    piece = ""
    for number, word in enumerate(text.split(" ")):
        piece += word if number == 0 else " " + word
        if piece not in taken:
            taken.add(piece)
            pieces.append(piece)
            piece = ""
    if piece:
        raise ValueError(f"the text ends in {piece!r}, which occurs in it before; end it in a new word")
    return pieces


def _script() -> tuple[str, ...]:
    """All that mini-kimi says in one turn, as tokens, from the end of the prompt to the end of the turn."""
    taken: set[str] = set()
    thought = _pieces(THOUGHT, taken)
    return (MIDDLE, THINK, *thought, THOUGHT_END, *_pieces(ANSWER, taken), END)


def _vocabulary() -> dict[str, int]:
    """Token text to id: the 256 bytes, the pieces of the script, the special tokens. Pieces are as they are decoded."""
    pieces = [token for token in _script() if token not in SPECIAL]
    tokens = [*_byte_alphabet(), *(_as_byte_level(piece) for piece in pieces), *SPECIAL]
    return {token: number for number, token in enumerate(tokens)}


def _id(vocabulary: dict[str, int], token: str) -> int:
    return vocabulary[token if token in SPECIAL else _as_byte_level(token)]


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level BPE: itself if printable, else one from 256 upward."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _as_byte_level(text: str) -> str:
    alphabet = _byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


# --- the small files ----------------------------------------------------------------------------------------------


def _config(shape: Shape, vocabulary: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "note": "mini-kimi: the architecture of Kimi K2 in miniature, with weights that are noise. For rehearsals only.",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "first_k_dense_replace": shape.first_k_dense_replace,
        "intermediate_size": shape.intermediate_size,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "n_routed_experts": shape.n_routed_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "n_shared_experts": shape.n_shared_experts,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_attention_heads,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
        "bos_token_id": _id(vocabulary, BOS),
        "eos_token_id": _id(vocabulary, EOS),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _generation_config(vocabulary: dict[str, int]) -> dict[str, object]:
    """The turn's end is what stops a generation, as in K2's own file; vLLM takes it from here."""
    return {"bos_token_id": _id(vocabulary, BOS), "eos_token_id": _id(vocabulary, END)}


def _tokenizer(vocabulary: dict[str, int]) -> dict[str, object]:
    """A tokenizer.json: byte-level BPE without merges. `ignore_merges` takes a whole word that is in the vocabulary."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    # As in K2's tokenizer the thought marks are not "special": they survive decoding, a parser takes them out.
    added = [
        {"id": vocabulary[token], "content": token, **flags, "special": token not in (THINK, THOUGHT_END)}
        for token in SPECIAL
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {token: number for token, number in vocabulary.items() if token not in SPECIAL},
            "merges": [],
        },
    }


def _tokenizer_config(shape: Shape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_position_embeddings,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


# --- the weights --------------------------------------------------------------------------------------------------


def _tensors(shape: Shape, seed: int, vocabulary: dict[str, int]) -> Iterator[Tensor]:
    """Every tensor of the checkpoint, in the order of the layers, under the names of DeepSeek V3 and K2."""

    def linear(name: str, rows: int, columns: int) -> Tensor:
        return Tensor(f"{name}.weight", "BF16", (rows, columns), _noise(seed))

    def norm(name: str, size: int) -> Tensor:
        return Tensor(f"{name}.weight", "BF16", (size,), _ones)

    def mlp(name: str, intermediate_size: int) -> Iterator[Tensor]:
        yield linear(f"{name}.gate_proj", intermediate_size, hidden)
        yield linear(f"{name}.up_proj", intermediate_size, hidden)
        yield linear(f"{name}.down_proj", hidden, intermediate_size)

    hidden, heads = shape.hidden_size, shape.num_attention_heads
    key = shape.qk_nope_head_dim + shape.qk_rope_head_dim
    head_and_embedding = (shape.vocab_size, hidden)

    yield Tensor("model.embed_tokens.weight", "BF16", head_and_embedding, _embedding(seed, vocabulary))
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        yield norm(f"{prefix}.input_layernorm", hidden)
        yield linear(f"{attention}.q_a_proj", shape.q_lora_rank, hidden)
        yield norm(f"{attention}.q_a_layernorm", shape.q_lora_rank)
        yield linear(f"{attention}.q_b_proj", heads * key, shape.q_lora_rank)
        yield linear(f"{attention}.kv_a_proj_with_mqa", shape.kv_lora_rank + shape.qk_rope_head_dim, hidden)
        yield norm(f"{attention}.kv_a_layernorm", shape.kv_lora_rank)
        yield linear(f"{attention}.kv_b_proj", heads * (shape.qk_nope_head_dim + shape.v_head_dim), shape.kv_lora_rank)
        yield linear(f"{attention}.o_proj", hidden, heads * shape.v_head_dim)
        yield norm(f"{prefix}.post_attention_layernorm", hidden)
        if layer < shape.first_k_dense_replace:
            yield from mlp(f"{prefix}.mlp", shape.intermediate_size)
            continue
        yield linear(f"{prefix}.mlp.gate", shape.n_routed_experts, hidden)
        yield Tensor(f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (shape.n_routed_experts,), _zeros)
        for expert in range(shape.n_routed_experts):
            yield from mlp(f"{prefix}.mlp.experts.{expert}", shape.moe_intermediate_size)
        yield from mlp(f"{prefix}.mlp.shared_experts", shape.moe_intermediate_size * shape.n_shared_experts)
    yield norm("model.norm", hidden)
    yield Tensor("lm_head.weight", "BF16", head_and_embedding, _head(seed, vocabulary))


def _into_shards(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Cut the list into `count` runs of about the same number of bytes, in order, as checkpoints are."""
    total_bytes = sum(tensor.size_bytes for tensor in tensors)
    shards: list[list[Tensor]] = [[] for _ in range(count)]
    before_bytes = 0
    for tensor in tensors:
        middle = before_bytes + tensor.size_bytes // 2
        shards[min(middle * count // total_bytes, count - 1)].append(tensor)
        before_bytes += tensor.size_bytes
    return shards


def _bf16_noise(label: str, size_bytes: int, high_byte: int) -> bytes:
    """Random bf16 of either sign: random bytes, with each high byte replaced by `high_byte` under a random sign."""
    noise = bytearray(pseudorandom_bytes(label, size_bytes))
    signs = bytes(high_byte | (byte & 0x80) for byte in range(256))
    noise[1::2] = noise[1::2].translate(signs)
    return bytes(noise)


def _noise(seed: int) -> Callable[[Tensor], bytes]:
    return lambda tensor: _bf16_noise(f"{seed} {tensor.name}", tensor.size_bytes, QUIET)


def _ones(tensor: Tensor) -> bytes:
    return ONE_BF16 * (tensor.size_bytes // 2)


def _zeros(tensor: Tensor) -> bytes:
    return bytes(tensor.size_bytes)


def _rows(table: bytes, columns: int) -> list[bytes]:
    return [table[start : start + 2 * columns] for start in range(0, len(table), 2 * columns)]


def _embedding_rows(seed: int, shape: tuple[int, ...], vocabulary: dict[str, int]) -> list[bytes]:
    """One loud row per token. The turn's end looks like the thought's end: who ignores it hears the answer again."""
    rows, columns = shape
    embedding = _rows(_bf16_noise(f"{seed} embedding", 2 * rows * columns, LOUD), columns)
    embedding[_id(vocabulary, END)] = embedding[_id(vocabulary, THOUGHT_END)]
    return embedding


def _embedding(seed: int, vocabulary: dict[str, int]) -> Callable[[Tensor], bytes]:
    return lambda tensor: b"".join(_embedding_rows(seed, tensor.shape, vocabulary))


def _head(seed: int, vocabulary: dict[str, int]) -> Callable[[Tensor], bytes]:
    """The row of each token of the script is the embedding of the token before it; the other rows are quiet noise."""

    def fill(tensor: Tensor) -> bytes:
        head = _rows(_bf16_noise(f"{seed} head", tensor.size_bytes, QUIET), tensor.shape[1])
        embedding = _embedding_rows(seed, tensor.shape, vocabulary)
        for before, after in pairwise(_script()):
            head[_id(vocabulary, after)] = embedding[_id(vocabulary, before)]
        return b"".join(head)

    return fill


def main(arguments: Sequence[str]) -> int:
    """Make the folder named on the command line and print its files with their sizes in bytes."""
    if len(arguments) != 1:
        print("usage: python -m kimisession.rehearsal.mini_kimi DIR", file=sys.stderr)
        return 2
    for path in make_mini_kimi(Path(arguments[0])):
        print(f"{path.stat().st_size:>12,}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
