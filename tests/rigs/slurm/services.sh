#!/bin/sh
# Inside the world: munge, slurmctld, slurmd with eight pretended H200, sshd, and a home for SkyPilot. Then wait.
# Process 1 of the world: when it ends, everything ends. The world is entered as `me`, an ordinary user, as on any cluster.
#
# RIG_SSH_PORT, RIG_SLURMCTLD_PORT and RIG_SLURMD_PORT matter where the network is the host's: while the image is made.
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
say() { echo "rig: $*"; }

echo "127.0.0.1 localhost rig" > /etc/hosts
mkdir -p /etc/slurm /run/munge /run/sshd /var/log/munge /var/log/slurm /var/lib/munge /var/spool/slurmctld /var/spool/slurmd
chown munge: /run/munge /var/log/munge /var/lib/munge /etc/munge /etc/munge/munge.key
cp "$here/slurm.conf" "$here/gres.conf" /etc/slurm/
printf 'SlurmctldPort=%s\nSlurmdPort=%s\n' "${RIG_SLURMCTLD_PORT:-6817}" "${RIG_SLURMD_PORT:-6818}" >> /etc/slurm/slurm.conf
ssh_port=${RIG_SSH_PORT:-22}

su -s /bin/sh munge -c '/usr/sbin/munged --force' 2>/var/log/munge/start.log
slurmctld
slurmd
/usr/sbin/sshd -o Port="$ssh_port" -o ListenAddress=127.0.0.1 -o StrictModes=no -o UsePAM=no -o AcceptEnv='*' \
    -o MaxStartups=100 -o MaxSessions=100 -o PidFile=/run/rig-sshd.pid

home=/home/me
chown me: "$home"
as_me() { setpriv --reuid me --regid me --init-groups env HOME="$home" USER=me LOGNAME=me "$@"; }
as_me mkdir -p -m 700 "$home/.ssh"
as_me mkdir -p "$home/.slurm" "$home/.sky/catalogs/v8/common"
[ ! -e /opt/rig/sky/wheels ] || as_me cp -a /opt/rig/sky/wheels "$home/.sky/"
[ -e "$home/.ssh/rig" ] || as_me ssh-keygen -q -t ed25519 -N '' -f "$home/.ssh/rig"
as_me cp "$home/.ssh/rig.pub" "$home/.ssh/authorized_keys"
as_me tee "$home/.slurm/config" > /dev/null <<END
Host rig
    HostName 127.0.0.1
    Port $ssh_port
    User me
    IdentityFile $home/.ssh/rig
END
printf 'AcceleratorName,Clouds\nH200,"['\''GCP'\'', '\''AWS'\'']"\n' |
    as_me tee "$home/.sky/catalogs/v8/common/accelerators.csv" > /dev/null
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
until [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; do sleep 0.1; done
say ready
touch /run/rig.ready
while :; do sleep 3600 & wait $!; done
