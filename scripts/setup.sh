#!/bin/sh
# Make the virtual environment of this checkout: setup.sh VENV PYTHON. Repeatable; says what it does in one line.
set -eu
venv=$1 python=$2
cd "$(dirname "$0")/.."

# The first Python that is new enough: the one asked for, else those that a system may have beside it.
for candidate in "$python" python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        found=$candidate
        break
    fi
done
if [ -z "${found:-}" ]; then
    echo "kimisession needs Python 3.11 or newer; install it, then: make PYTHON=/path/to/python3.11 rehearse" >&2
    exit 1
fi

echo "Setting up $venv (once) ..." >&2
if command -v uv >/dev/null 2>&1; then
    uv venv -q --allow-existing --python "$found" "$venv"
    uv pip install -q --python "$venv/bin/python" --require-hashes -r requirements/dev.lock
    uv pip install -q --python "$venv/bin/python" --no-deps --editable .
else
    "$found" -m venv "$venv"
    "$venv/bin/pip" install -q --disable-pip-version-check --require-hashes -r requirements/dev.lock
    "$venv/bin/pip" install -q --disable-pip-version-check --no-deps --editable .
fi
