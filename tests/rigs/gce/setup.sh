#!/bin/sh
# Make what the GCE rig runs on, all of it under .cache/rigs: an environment with SkyPilot, and the image of its pretended
# machines. Nothing of the host is touched. Needs a Debian or Ubuntu host with its package sources, a Python package index
# and user namespaces (root or an ordinary user); three minutes the first time, then it looks and ends.
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
checkout=$(cd "$here/../../.." && pwd -P)
"$here/../sky_venv.sh"
image=$checkout/.cache/rigs/gce
made_from=$(cat "$here"/world/image.sh "$here"/world/p*.sh "$here/world/certificates.sh" "$here"/world/standins/* "$here"/world/libcuda.c "$here"/world/stack/*.py "$here"/world/stack/*/*.py \
    "$here"/world/stack/vllm/*/*/*.py "$here/../sky_venv.sh" | sha256sum)
if [ "$(cat "$image/image.done" 2>/dev/null)" != "$made_from" ]; then
    rm -rf "$image"
    mkdir -p "$image"
    "$here/world/packages.sh" "$image"
    "$here/world/image.sh" "$image"
    echo "$made_from" > "$image/image.done"
fi
