#!/bin/sh
# Make what the Slurm rig runs on: an environment with SkyPilot, and an image with Debian's Slurm and SkyPilot's packages for
# the node. Nothing of the host is touched: all of it is under .cache/rigs. Needs root, a Debian or Ubuntu host and its
# package sources, and a Python package index; three minutes the first time.
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
checkout=$(cd "$here/../../.." && pwd -P)
rigs=$checkout/.cache/rigs
"$here/../sky_venv.sh"
made_from=$(cat "$here/bake.sh" "$here"/node/* | sha256sum)
if [ "$(cat "$rigs/slurm/image.done" 2>/dev/null)" != "$made_from" ]; then
    rm -rf "$rigs/slurm/make" "$rigs/slurm/image"  # what is made new lies over nothing old
    mkdir -p "$rigs/slurm/make"
    "$here/world.sh" --online "$rigs/slurm/make" "$here/bake.sh" "$checkout"
    rm -rf "$rigs/slurm/image"  # its empty folders
    mv "$rigs/slurm/make/upper" "$rigs/slurm/image"
    rm -rf "$rigs/slurm/make"
    echo "$made_from" > "$rigs/slurm/image.done"
fi
