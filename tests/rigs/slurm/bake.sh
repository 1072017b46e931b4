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

useradd --no-create-home --home-dir /home/me --shell /bin/bash --password '*' me  # no password, and not locked
mkdir -p /opt/rig/cache
chown me: /opt/rig/cache
cp "$venv/bin/uv" /opt/rig/uv.real
cp "$here/node/uv" /opt/rig/uv
cp "$here/node/curl" /usr/local/bin/curl
touch /opt/rig/baking

# The network is the host's here, and so are its ports: any that are free.
read -r RIG_SSH_PORT RIG_SLURMCTLD_PORT RIG_SLURMD_PORT SKYPILOT_API_SERVER_LOCAL_PORT < <(python - <<'END'
import socket

sockets = [socket.socket() for _ in range(4)]
for one in sockets:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in sockets))
END
)
export RIG_SSH_PORT RIG_SLURMCTLD_PORT RIG_SLURMD_PORT
"$here/services.sh" &
until [ -e /run/rig.ready ]; do sleep 0.1; done
as_me() {
    setpriv --reuid me --regid me --init-groups env HOME=/home/me USER=me LOGNAME=me SKYPILOT_DISABLE_USAGE_COLLECTION=1 \
        SKYPILOT_POD_MEMORY_GB_LIMIT=5 SKYPILOT_API_SERVER_LOCAL_PORT="$SKYPILOT_API_SERVER_LOCAL_PORT" \
        SKYPILOT_API_SERVER_ENDPOINT="http://127.0.0.1:$SKYPILOT_API_SERVER_LOCAL_PORT" "$@"
}
as_me sky launch -y -c bake --infra slurm --cpus 1+ true
as_me sky down -y bake
as_me sky api stop
mkdir -p /opt/rig/sky
cp -a /home/me/.sky/wheels /opt/rig/sky/
rm -rf /opt/rig/baking /var/spool/slurm* /var/log/slurm /var/cache/apt /var/lib/apt/lists /etc/slurm
