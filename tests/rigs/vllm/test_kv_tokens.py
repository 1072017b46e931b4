"""`kimisession plan` counts the KV cache as real vLLM does: five shapes of mini-kimi, foretold before each server starts.

The shapes differ in layers, MLA ranks, block size, number format, memory and context. FP8 is not among the formats: vLLM's
MLA on a CPU takes none. Every server is ended once it has printed its count, so the five take about a minute and a half.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from vllm_rig import PYTHON, READY_WITHIN_S, living_in_session, until

from kimisession.core.plan.kv import cpu_kv_tokens
from kimisession.model_file import card_from_folder
from kimisession.rehearsal.mini_kimi import Shape, make_model_files
from kimisession.rehearsal.vllm_cpu import VLLM_CPU_ENV

AT_ONCE = 2
PRINTED = re.compile(r"KV cache size: ([\d,]+) tokens")
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Setting:
    """One shape and how it is served. `block` 0: the flag is left out; vLLM takes 16 whatever it says."""

    layers: int
    latent: int
    rope: int
    dtype: str
    block: int
    gib: int
    context: int

    def __str__(self) -> str:
        block = f"block {self.block}" if self.block else "no block size"
        return f"{self.layers} layers, {self.latent}+{self.rope}, {self.dtype}, {block}, {self.gib} GiB, {self.context}"


SETTINGS = (
    Setting(3, 512, 64, "bfloat16", 0, 1, 1024),
    Setting(5, 512, 64, "bfloat16", 32, 2, 1000),
    Setting(4, 256, 32, "bfloat16", 0, 1, 1024),
    Setting(3, 448, 128, "float32", 16, 1, 512),
    Setting(2, 128, 64, "float16", 64, 1, 777),
)


def foretold(setting: Setting, folder: Path) -> int:
    """What the plan says, out of the model's config.json."""
    card = card_from_folder(folder)
    return cpu_kv_tokens(
        layers=card.layers,
        kv_lora_rank=card.kv_lora,
        rope_dim=card.rope,
        element_bytes=ELEMENT_BYTES[setting.dtype],
        space_gib=setting.gib,
        max_model_len=setting.context,
    )


def printed(setting: Setting, folder: Path) -> int:
    """What vLLM prints for it."""
    log = folder / "vllm.log"
    argv = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", "--load-format=dummy"]
    argv += [f"--dtype={setting.dtype}", f"--max-model-len={setting.context}", "--max-num-seqs=4", "--enforce-eager"]
    argv += ["--host=127.0.0.1", "--port=0", "--attention-backend=CPU_MLA"]
    argv += [f"--block-size={setting.block}"] if setting.block else []
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    env = {**inherited, **VLLM_CPU_ENV, "VLLM_CPU_KVCACHE_SPACE": str(setting.gib), "TMPDIR": str(folder)}
    with log.open("wb") as output:
        server = subprocess.Popen(argv, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        said = until(lambda: bool(PRINTED.search(log.read_text())) or server.poll() is not None, READY_WITHIN_S)
    finally:
        for pid in living_in_session(server.pid):
            os.kill(pid, signal.SIGKILL)
        server.wait()
    found = PRINTED.search(log.read_text())
    assert said
    assert found, f"vLLM printed no count: {log.read_text()[-2000:]}"
    return int(found[1].replace(",", ""))


@pytest.fixture(scope="module")
def counts() -> Iterator[dict[Setting, Future[tuple[int, int]]]]:
    """For each setting what was foretold, and then what was printed; begun in order, a few at a time."""

    def play(setting: Setting) -> tuple[int, int]:
        with tempfile.TemporaryDirectory(prefix="kimi-kv-") as scratch:
            folder = Path(scratch)
            shape = replace(
                Shape(),
                num_hidden_layers=setting.layers,
                kv_lora_rank=setting.latent,
                qk_rope_head_dim=setting.rope,
                max_position_embeddings=4096,
            )
            make_model_files(folder, shape, {})
            before = foretold(setting, folder)
            return before, printed(setting, folder)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {setting: pool.submit(play, setting) for setting in SETTINGS}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_plan_foretells_the_tokens_that_vllm_prints(
    setting: Setting, counts: dict[Setting, Future[tuple[int, int]]]
) -> None:
    before, seen = counts[setting].result()
    assert before == seen
