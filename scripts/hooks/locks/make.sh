#!/usr/bin/env bash
# Lock an engine's stack anew: make.sh VLLM_VERSION [NCCL_PIN, e.g. nvidia-nccl-cu12==2.29.3]
#
# Every package of vLLM on Linux x86-64 and Python 3.12 with the SHA-256 of its wheels, out of the Python package index,
# so that a machine installs what was looked at, or nothing. A developer's tool (uv, Python 3.11); machines only read.
set -euo pipefail
cd "$(dirname "$0")"
vllm=${1:?say a version of vLLM} nccl=${2:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "vllm==$vllm" >"$work/in"
echo "$nccl" >"$work/override"
uv pip compile "$work/in" --override "$work/override" --python-version 3.12 --python-platform x86_64-manylinux_2_35 \
    --only-binary :all: --format pylock.toml --no-header -q -o "$work/pylock.toml"
python3 - "$work/pylock.toml" "$vllm" "$nccl" >"vllm-$vllm.lock" <<'PY'
import sys, tomllib
from pathlib import Path

packages = tomllib.loads(Path(sys.argv[1]).read_text())["packages"]
print(f"# vLLM {sys.argv[2]} on Linux x86-64, Python 3.12. Made by: scripts/hooks/locks/make.sh {' '.join(sys.argv[2:])}".rstrip())
for package in packages:
    hashes = [f"    --hash=sha256:{wheel['hashes']['sha256']}" for wheel in package["wheels"]]
    print(" \\\n".join([f"{package['name']}=={package['version']}", *hashes]))
PY
grep -E '^(vllm|torch|nvidia-nccl-cu1[23]|nvidia-cuda-runtime(-cu12)?)==' "vllm-$vllm.lock"
