#!/usr/bin/env bash
# The engine's locked Python stack in an environment of its own.
#
#   stack.sh --lock vllm-0.15.0 --venv /opt/kimisession/engine [--driver 580] [--python 3.12]
#
# --lock names a file in locks/ beside this script, or is a path: every package with its version and the hashes of its
# wheels, the NCCL pin included (incident 6), made by locks/make.sh. --driver is the branch that this session WILL have:
# driver, stack and weights are brought side by side, so what is loaded right now proves nothing. Without it the loaded
# one counts. Wheels for a newer CUDA than the driver serves fail at the first call (incident 1): refused before a byte
# is fetched. uv where there is one, else venv and pip. Repeatable: what is there is verified, not fetched again.
# Exit codes: 0 installed and verified; 2 usage; 5 not, and the last line says why.
set -euo pipefail
cd "$(dirname "$0")"
export PATH=$PATH:${SKY_RUNTIME_DIR:-${HOME:-/root}}/.local/bin # where SkyPilot puts uv; images have none, nor a Python 3.12

total=4 done_steps=0
step() { # one line for people, one for the keeper
    done_steps=$((done_steps + 1))
    printf 'stack: %s\n{"progress": {"done": %d, "total": %d, "unit": "steps"}}\n' "$1" "$done_steps" "$total"
}
tell_failed() { # the keeper quotes the sentence of such a line; people read it as the last
    local text=${1//$'\n'/ }
    printf '{"failed": {"exit": 5, "message": "%s"}}\nstack: %s\n' "$(sed 's/[\\"]/\\&/g; s/[[:cntrl:]]/ /g' <<<"$text")" "$text"
}
fail() { # INCIDENT, and CAUSE; FIX
    tell_failed "$1: $2."
    exit 5
}

# The newest CUDA that a driver branch serves natively (NVIDIA's CUDA release notes, table of driver versions).
cuda_of() {
    local branch=$1 row found=''
    for row in 550:12.4 555:12.5 560:12.6 565:12.7 570:12.8 575:12.9 580:13.0 590:13.1; do
        if [ "$branch" -ge "${row%%:*}" ]; then found=${row##*:}; fi
    done
    echo "${found:-12.0}"
}
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; } # VERSION MINIMUM

lock='' venv='' driver='' python=3.12
while [ $# -gt 0 ]; do
    case $1 in
        --lock) lock=${2:?--lock takes a name or a path} && shift 2 ;;
        --venv) venv=${2:?--venv takes a folder} && shift 2 ;;
        --driver) driver=${2:?--driver takes a branch such as 580} && shift 2 ;;
        --python) python=${2:?--python takes a version such as 3.12} && shift 2 ;;
        *) echo "stack.sh: unknown word $1; use --lock, --venv, --driver and --python" && exit 2 ;;
    esac
done
[ -n "$lock" ] && [ -n "$venv" ] || { echo "stack.sh: --lock and --venv are needed" && exit 2; }
[ -f "$lock" ] || lock=locks/$lock.lock
[ -f "$lock" ] || { echo "stack.sh: there is no $lock; make it with locks/make.sh" && exit 2; }

cuda=$(sed -nE 's/^nvidia-cuda-runtime(-cu[0-9]+)?==([0-9]+\.[0-9]+).*/\2/p' "$lock" | head -n 1)
if [ -z "$driver" ]; then driver=$(cat /sys/module/nvidia/version 2>/dev/null || true); fi
if [ -n "$cuda" ] && [ -n "$driver" ]; then
    serves=$(cuda_of "${driver%%.*}")
    at_least "$serves" "$cuda" || fail 'incident 1 (wheels for a newer CUDA than the driver serves)' \
        "$lock is built for CUDA $cuda and driver $driver serves up to $serves; take another lock or a newer driver"
fi
step "$lock is built for CUDA ${cuda:-none}, driver ${driver:-unknown} serves ${serves:-nobody knows what}"

if command -v uv >/dev/null; then tool=uv; else tool=pip; fi
if [ ! -x "$venv/bin/python" ]; then
    mkdir -p "$(dirname "$venv")"
    if [ "$tool" = uv ]; then
        uv venv -q --python "$python" "$venv"
    else
        command -v "python$python" >/dev/null ||
            fail 'missing Python' "there is neither uv nor python$python here; install one of them"
        "python$python" -m venv "$venv"
    fi || fail 'missing Python' "no environment with Python $python could be made in $venv; install python$python and its venv"
fi
step "an environment with Python $python is in $venv, filled by $tool"

if [ "$tool" = uv ]; then
    uv pip sync -q --python "$venv/bin/python" --require-hashes "$lock"
else
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-input --no-deps --require-hashes -r "$lock"
fi || fail 'the stack is not what was locked' "installing $lock failed (the lines above say which package); make the lock anew, or look at the package index"
step "$(grep -c '==' "$lock") packages are installed"

# Metadata for all of it, and torch itself: that its libraries load together needs no GPU to be seen.
verdict=$("$venv/bin/python" - "$lock" 2>&1 <<'PY'
import importlib.metadata, re, sys

locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^ \\\n]+)", open(sys.argv[1]).read(), re.M))
for name, version in locked.items():
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = "nothing"
    if found != version:
        sys.exit(f"{name} is {found} and the lock says {version}")
words = [f"{name} {locked[name]}" for name in ("vllm", "torch") if name in locked]
if "torch" in locked:
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    pinned = next((v for n, v in locked.items() if n.startswith("nvidia-nccl-")), nccl)
    if not pinned.startswith(nccl):
        sys.exit(f"torch loads NCCL {nccl} and the lock pins {pinned}")
    words += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}"]
print(", ".join(words) or "as locked")
PY
) || fail 'the stack is not what was locked' "$(tail -n 1 <<<"$verdict"); remove $venv and run this again"
step "verified: $verdict"
