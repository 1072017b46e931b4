#!/bin/sh
# The environment of all rigs with real SkyPilot: .cache/rigs/venv of this checkout. One minute the first time.
set -eu
checkout=$(cd "$(dirname "$0")/../.." && pwd -P)
rigs=$checkout/.cache/rigs
version=0.14.1
if [ ! -e "$rigs/venv/$version.done" ]; then
    "${PYTHON:-python3}" -m venv "$rigs/venv"
    "$rigs/venv/bin/pip" install -q -e "$checkout" "skypilot[gcp,kubernetes,slurm]==$version" uv pytest
    touch "$rigs/venv/$version.done"
fi
