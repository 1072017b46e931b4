#!/bin/sh
# A world of its own for the Slurm rig: mount, pid, net, uts and ipc namespaces that vanish with the process that made them.
#
#     world.sh FOLDER COMMAND...            loopback only
#     world.sh --online FOLDER COMMAND...   with the host's network, to make the image
#
# /usr /etc /var /opt are overlays over the host's; /root /home /run /tmp /dev are new; this checkout is there, read-only.
# What is written to /usr /etc /var /opt goes to FOLDER, the rest is memory: SkyPilot makes and removes thousands of files for
# each session, and on a disk that others use that took 32 s instead of 2. The ordinary user whose sessions are tested is `me`. Needs root: mounts, a munge user, an sshd. (An ordinary user can be root in a namespace of
# his own where the kernel allows it and /etc/subuid gives him ids: `unshare -Ur --map-auto make test-slurm`; not tried.)
set -eu
net=--net
if [ "$1" = --online ]; then net=; shift; fi
if [ "$1" != --inside ]; then
    # shellcheck disable=SC2086  # empty or one word
    exec unshare --mount --pid $net --uts --ipc --fork --kill-child --mount-proc "$0" --inside "$@"
fi
shift
folder=$1; shift
checkout=$(cd "$(dirname "$0")/../../.." && pwd -P)
image=$checkout/.cache/rigs/slurm/image
root=$folder/root
mkdir -p "$folder/upper" "$folder/work" "$root"
chmod 755 "$folder"
mount --make-rprivate /
mount -t tmpfs -o mode=755 world "$root"
cd "$root"
mkdir -p proc sys dev run tmp root usr etc var opt mnt home/me
for name in usr etc var opt; do
    mkdir -p "$folder/upper/$name" "$folder/work/$name" "$image/$name"
    mount -t overlay -o "lowerdir=$image/$name:/$name,upperdir=$folder/upper/$name,workdir=$folder/work/$name" "$name" "$name"
done
for name in bin sbin lib lib32 lib64 libx32; do
    if [ -L "/$name" ]; then ln -s "$(readlink "/$name")" "$name"; fi
done
mount -t tmpfs -o size=4g,mode=755 home home/me
mount -t tmpfs -o size=4g,mode=1777 tmp tmp
mount -t tmpfs run run
mkdir -p run/lock
mount --rbind /sys sys
mount -t proc proc proc
mount -t tmpfs -o mode=755 dev dev
mkdir -p dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd; ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr
for name in null zero full random urandom tty; do touch "dev/$name"; mount --bind "/dev/$name" "dev/$name"; done
# GPUs that are only claimed: a device file for each, for Slurm to count.
for number in 0 1 2 3 4 5 6 7; do touch "dev/fakegpu$number"; mount --bind /dev/null "dev/fakegpu$number"; done
# The checkout, and the Python that its environments were made from.
python=$(sed -n 's/^home = //p' "$checkout/.cache/rigs/venv/pyvenv.cfg")
for place in "$checkout" "$(dirname "$python")"; do
    [ "$place" != /usr ] || continue
    mkdir -p ".$place"
    mount --rbind "$place" ".$place"
    mount -o remount,bind,ro ".$place"
done
mkdir -p .old
pivot_root . .old
cd /
umount -l /.old
rmdir /.old
hostname rig
export HOME=/root TMPDIR=/tmp USER=root LOGNAME=root
if [ -e /opt/rig ]; then
    ip link set lo up
    # Slurm looks names up with AI_ADDRCONFIG, for which 127.0.0.1 is no address.
    ip address add 10.99.0.1/32 dev lo
fi
exec "$@"
