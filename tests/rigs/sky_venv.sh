#!/bin/sh
# The environment of all rigs with real SkyPilot: .cache/rigs/venv of this checkout. One minute the first time.
set -eu
checkout=$(cd "$(dirname "$0")/../.." && pwd -P)
venv=$checkout/.cache/rigs/venv
version=0.14.1
if [ ! -e "$venv/$version-cloud.done" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install -q -e "${checkout}[cloud]" "skypilot[gcp,kubernetes,slurm]==$version" uv pytest
    touch "$venv/$version-cloud.done"
fi
