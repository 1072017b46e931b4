#!/usr/bin/env bash
# A Python for the seeder of weights: one that is here and has what it imports, else a locked environment of its own.
#
#   seeder.sh --venv FOLDER [--try PYTHON]
#
# Afterwards FOLDER/bin/python runs it. What it imports is tried, not looked up, with kimisession where PYTHONPATH has it:
# an image that has everything needs no package index. Repeatable. Exit codes: those of stack.sh.
set -euo pipefail
hooks=$(cd "$(dirname "$0")" && pwd)
export PATH=$PATH:$HOME/.local/bin # where SkyPilot puts uv

venv='' tried=python3
while [ $# -gt 0 ]; do
    case $1 in
        --venv) venv=${2:?--venv takes a folder} && shift 2 ;;
        --try) tried=${2:?--try takes a Python} && shift 2 ;;
        *) echo "seeder.sh: unknown word $1; use --venv and --try" && exit 2 ;;
    esac
done
[ -n "$venv" ] || { echo "seeder.sh: --venv is needed" && exit 2; }

for python in "$venv/bin/python" "$tried" python3 python3.12; do
    python=$(command -v "$python" || true)
    if [ -n "$python" ] && "$python" -c 'import google.cloud.storage, kimisession.weights.seeder' 2>/dev/null; then
        if [ "$python" != "$venv/bin/python" ]; then
            # A link would not do: a Python finds its packages by the path that it is called by.
            mkdir -p "$venv/bin"
            printf '#!/bin/sh\nexec "%s" "$@"\n' "$python" >"$venv/bin/python"
            chmod 755 "$venv/bin/python"
        fi
        echo "seeder: $python has what it needs"
        exit 0
    fi
done
exec "$hooks/stack.sh" --lock seed --venv "$venv"
