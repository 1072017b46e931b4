#!/bin/bash
# Inside the world, online: install Slurm and the node's uv, launch once so that the packages for the node are in uv's cache.
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
venv=$1/.cache/rigs/venv
export PATH=$venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d  # no package may start a service
chmod 755 /usr/sbin/policy-rc.d
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends slurm-wlm munge openssh-server rsync socat netcat-openbsd iproute2 curl > /dev/null
apt-get clean

mkdir -p /opt/rig/cache
cp "$venv/bin/uv" /opt/rig/uv.real
cp "$here/node/uv" /opt/rig/uv
cp "$here/node/curl" /usr/local/bin/curl
touch /opt/rig/baking

"$here/services.sh" &
until [ -e /run/rig.ready ]; do sleep 0.1; done
export SKYPILOT_DISABLE_USAGE_COLLECTION=1 SKYPILOT_POD_MEMORY_GB_LIMIT=5
# The network is the host's here, and so are its ports.
export SKYPILOT_API_SERVER_LOCAL_PORT=46599 SKYPILOT_API_SERVER_ENDPOINT=http://127.0.0.1:46599
sky launch -y -c bake --infra slurm --cpus 1+ true
sky down -y bake
sky api stop
mkdir -p /opt/rig/sky
cp -a /root/.sky/wheels /opt/rig/sky/
rm -rf /opt/rig/baking /var/spool/slurm* /var/log/slurm /var/cache/apt /var/lib/apt/lists /etc/slurm
