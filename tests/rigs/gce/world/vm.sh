#!/bin/bash
# One pretended machine: FOLDER/disk is its disk, a file system in memory that dies with the world. Called in the world by
# machines.py; what is left of it is its exit: off, by the guest or by a kill.
#
#     vm.sh FOLDER NAME IMAGE
#
# Its own network, mounts, processes, ipc, host name, clock since the boot; the user ids are the world's.
set -eu
if [ "$1" != --inside ]; then
    code=39
    while [ "$code" = 39 ]; do # a reboot by the guest
        code=0
        # The uptime and the boot time of a machine start with it.
        up=$(cut -d . -f 1 /proc/uptime)
        nsenter --net="/run/netns/$2" unshare --mount --pid --fork --ipc --uts --time --boottime "-$up" --kill-child \
            "$0" --inside "$@" || code=$?
    done
    exit "$code"
fi
shift
disk=$1/disk name=$2 image=$3
root=$1/root
read -r pid _ < /proc/self/stat # of the world, whose /proc this still is
echo "$pid" > "$1/init"
mkdir -p "$root" "$disk/upper" "$disk/work"
mount --make-rprivate /
mount -t overlay -o "userxattr,lowerdir=$image/root,upperdir=$disk/upper,workdir=$disk/work" machine "$root"
cd "$root"
mount --rbind /usr usr
mount --bind local usr/local
mount -t proc proc proc
# /sys: this host's, but for the modules (the stand-in of the driver plants them), what says who made the machine, and cgroups.
mount -t tmpfs -o mode=755 sys sys
mkdir -p sys/module sys/class/dmi/id
for place in /sys/*; do
    case $place in */module | */class | */fs) continue ;; esac
    mkdir "sys/${place##*/}" && mount --rbind "$place" "sys/${place##*/}"
done
for place in /sys/class/*; do
    case $place in */dmi) continue ;; esac
    mkdir "sys/class/${place##*/}" && mount --rbind "$place" "sys/class/${place##*/}"
done
echo "Google Compute Engine" > sys/class/dmi/id/product_name
cat /proc/sys/kernel/random/uuid > sys/boot_id
mount --bind sys/boot_id proc/sys/kernel/random/boot_id
mount -t tmpfs -o mode=755 run run
mkdir -p run/lock run/sshd run/timers
mount -t tmpfs -o mode=755 dev dev
mkdir -p dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd; ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr
for node in null zero full random urandom tty; do touch "dev/$node"; mount --bind "/dev/$node" "dev/$node"; done
hostname "$name"
echo "$name" > etc/hostname
printf '127.0.0.1 localhost\n169.254.169.254 metadata.google.internal metadata\n' > etc/hosts
cat "$1/names" >> etc/hosts
cp "$image/tls/ca.pem" etc/ssl/certs/ca-certificates.crt
cp "${0%/*}/init.py" local/lib/init.py
pivot_root . .old
cd /
umount -l /.old
ulimit -n 1048576 2>/dev/null || true
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    /usr/bin/python3 -I -S -B /usr/local/lib/init.py
