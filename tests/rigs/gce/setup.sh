#!/bin/sh
# Make what the GCE rig runs on, all of it under .cache/rigs: an environment with SkyPilot, and the image of its pretended
# machines. Nothing of the host is touched. Needs a Debian or Ubuntu host with its package sources, a Python package index
# and user namespaces (root or an ordinary user); three minutes the first time, then it looks and ends.
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
checkout=$(cd "$here/../../.." && pwd -P)
"$here/../sky_venv.sh"
image=$checkout/.cache/rigs/gce
if [ ! -e "$image/image.done" ]; then
    rm -rf "$image"
    mkdir -p "$image"
    "$here/world/packages.sh" "$image"
    "$here/world/image.sh" "$image"
    touch "$image/image.done"
fi
