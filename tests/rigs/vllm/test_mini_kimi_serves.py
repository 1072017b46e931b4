"""Real vLLM loads mini-kimi's shards, says what only these weights can say, and counts its KV cache as we do.

The tests share one server and run in this order; the last one ends it.
"""

import json
import re
import signal
import subprocess
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from vllm_rig import PYTHON, Server, until

from kimisession.rehearsal.mini_kimi import ANSWER, THOUGHT

QUESTION = {"model": "mini-kimi", "messages": [{"role": "user", "content": "Who are you?"}]}

READ_BACK = """
import json, sys, torch
from safetensors import safe_open
from transformers import AutoTokenizer
folder = sys.argv[1]
names = json.load(open(f"{folder}/model.safetensors.index.json"))["weight_map"]
for name, shard in names.items():
    with safe_open(f"{folder}/{shard}", framework="pt") as file:
        tensor = file.get_tensor(name)
    assert torch.isfinite(tensor).all(), name
    wanted = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
    assert tensor.dtype == wanted, name
tokenizer = AutoTokenizer.from_pretrained(folder)
text = "Hello, this is mini-kimi. \\u00e4\\u6708 {}"
assert tokenizer.decode(tokenizer.encode(text)) == text
turn = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
print(json.dumps([len(names), turn]))
"""


def test_the_libraries_that_everyone_uses_read_the_shards_and_the_tokenizer(model: Path) -> None:
    output = subprocess.run(
        [str(PYTHON), "-c", READ_BACK, str(model)], check=True, capture_output=True, timeout=60
    ).stdout
    tensors, turn = json.loads(output.splitlines()[-1])
    assert tensors == len(json.loads((model / "model.safetensors.index.json").read_text())["weight_map"])
    assert turn == "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"


def answer(server: Server, **options: Any) -> dict[str, Any]:
    response = json.load(server.request("/v1/chat/completions", {**QUESTION, **options}, server.key))
    assert isinstance(response, dict)
    return response


def test_mini_kimi_thinks_its_thought_and_says_its_answer(server: Server) -> None:
    said = answer(server)
    message = said["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (THOUGHT, ANSWER)
    assert said["choices"][0]["finish_reason"] == "stop"


def test_a_budget_that_ends_inside_the_thought_leaves_the_content_null(server: Server) -> None:
    said = answer(server, max_tokens=8)
    message = said["choices"][0]["message"]
    assert message["content"] is None
    assert THOUGHT.startswith(message["reasoning"])
    assert said["choices"][0]["finish_reason"] == "length"


def test_without_thinking_the_answer_comes_at_once(server: Server) -> None:
    message = answer(server, chat_template_kwargs={"thinking": False})["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, ANSWER)


def test_a_stream_brings_the_same_words_in_pieces(server: Server) -> None:
    request = {**QUESTION, "stream": True, "stream_options": {"include_usage": True}}
    with server.request("/v1/chat/completions", request, server.key) as response:
        lines = [line.removeprefix(b"data: ").strip() for line in response if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    chunks = [json.loads(line) for line in lines]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == THOUGHT
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
    assert len(deltas) > 100
    assert chunks[-1]["usage"]["completion_tokens"] == answer(server)["usage"]["completion_tokens"]


def test_vllm_prints_the_kv_tokens_that_the_formula_gives(server: Server) -> None:
    printed = re.findall(r"CPU KV cache size: ([\d,]+) tokens", server.log.read_text())
    assert printed == ["77,664"]  # held to the formula in tests/rehearsal/test_mini_kimi.py


@pytest.mark.parametrize("key", [None, "wrong"])
def test_without_its_key_the_api_refuses(server: Server, key: str | None) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.request("/v1/models", key=key)
    assert refused.value.code == 401


def test_metrics_need_no_key_and_count_the_tokens(server: Server) -> None:
    page = server.request("/metrics").read().decode()
    generated = re.search(r'^vllm:generation_tokens_total\{.*model_name="mini-kimi".*\} (\S+)$', page, re.MULTILINE)
    assert generated is not None
    assert float(generated[1]) > 100


def test_after_sigterm_no_process_of_it_is_left(server: Server) -> None:
    assert len(server.processes()) >= 2, "the API server and its EngineCore"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=20) == 0
    assert until(lambda: not server.processes(), within_s=10)
