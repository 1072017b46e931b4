#!/bin/sh
# Inside the world: munge, slurmctld, slurmd with eight pretended H200, sshd, and a home for SkyPilot. Then wait.
# Process 1 of the world: when it ends, everything ends.
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
say() { echo "rig: $*"; }

echo "127.0.0.1 localhost rig" > /etc/hosts
mkdir -p /etc/slurm /run/munge /run/sshd /var/log/munge /var/log/slurm /var/lib/munge /var/spool/slurmctld /var/spool/slurmd
chown munge: /run/munge /var/log/munge /var/lib/munge /etc/munge /etc/munge/munge.key
cp "$here/slurm.conf" "$here/gres.conf" /etc/slurm/

su -s /bin/sh munge -c '/usr/sbin/munged --force' 2>/var/log/munge/start.log
slurmctld
slurmd
/usr/sbin/sshd -o Port=22 -o ListenAddress=127.0.0.1 -o StrictModes=no -o PermitRootLogin=yes -o UsePAM=no -o AcceptEnv='*' \
    -o MaxStartups=100 -o MaxSessions=100

mkdir -p /root/.ssh /root/.slurm /root/.sky/catalogs/v8/common
[ ! -e /opt/rig/sky/wheels ] || cp -a /opt/rig/sky/wheels /root/.sky/
chmod 700 /root /root/.ssh
[ -e /root/.ssh/rig ] || ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/rig
grep -qsFf /root/.ssh/rig.pub /root/.ssh/authorized_keys || cat /root/.ssh/rig.pub >> /root/.ssh/authorized_keys
cat > /root/.slurm/config <<END
Host rig
    HostName 127.0.0.1
    Port 22
    User root
    IdentityFile /root/.ssh/rig
END
printf 'AcceleratorName,Clouds\nH200,"['\''GCP'\'', '\''AWS'\'']"\n' > /root/.sky/catalogs/v8/common/accelerators.csv
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
until [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; do sleep 0.1; done
say ready
touch /run/rig.ready
while :; do sleep 3600 & wait $!; done
