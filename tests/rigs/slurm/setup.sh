#!/bin/sh
# Make what the Slurm rig runs on: an environment with SkyPilot, and an image with Debian's Slurm and SkyPilot's packages for
# the node. Nothing of the host is touched: all of it is under .cache/rigs. Needs root, a Debian or Ubuntu host and its
# package sources, and a Python package index; three minutes the first time.
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
checkout=$(cd "$here/../../.." && pwd -P)
rigs=$checkout/.cache/rigs
version=0.14.1
if [ ! -e "$rigs/venv/$version.done" ]; then
    "${PYTHON:-python3}" -m venv "$rigs/venv"
    "$rigs/venv/bin/pip" install -q -e "$checkout" "skypilot[gcp,kubernetes,slurm]==$version" uv pytest
    touch "$rigs/venv/$version.done"
fi
if [ ! -e "$rigs/slurm/image.done" ]; then
    rm -rf "$rigs/slurm"
    mkdir -p "$rigs/slurm/make"
    "$here/world.sh" --online "$rigs/slurm/make" "$here/bake.sh" "$checkout"
    rm -rf "$rigs/slurm/image"
    mv "$rigs/slurm/make/upper" "$rigs/slurm/image"
    rm -rf "$rigs/slurm/make"
    touch "$rigs/slurm/image.done"
fi
