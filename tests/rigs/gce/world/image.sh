#!/bin/bash
# The image of the pretended machines: IMAGE/root, the part of a root file system that a machine owns, with SkyPilot's
# runtime in its user's home, and IMAGE/sky, the wheel that SkyPilot's server has to have with it. Online, on the host.
#
#     image.sh IMAGE
#
# The runtime is installed by SkyPilot's own commands where it will be, /home/gcpuser, in a mount namespace of our own.
set -eu
image=$1
here=$(cd "$(dirname "$0")" && pwd -P)
standins=$here/../../../hooks/standins
venv=$here/../../../../.cache/rigs/venv/bin
root=$image/root

mkdir -p "$root"/{etc/ssh,etc/ld.so.conf.d,etc/profile.d,etc/ssl/certs,etc/systemd/system,var/log,var/tmp,root,home/gcpuser}
mkdir -p "$root"/{proc,sys,dev,run,tmp,usr,mnt,media,srv,opt,boot,local/{bin,sbin,lib,etc,share},.old}
chmod 1777 "$root/tmp" "$root/var/tmp"
for name in bin sbin lib lib32 lib64 libx32; do
    if [ -L "/$name" ]; then ln -s "$(readlink "/$name")" "$root/$name"; fi
done

# /etc: what Debian's programs cannot do without. No group tty: where it exists sshd gives terminals to it, and a user
# namespace of one id has no such group; then SkyPilot streams nothing, without a word.
cp -a /etc/alternatives "$root/etc/"
for name in ld.so.conf nsswitch.conf profile bash.bashrc services protocols debian_version; do
    if [ -e "/etc/$name" ]; then cp -L "/etc/$name" "$root/etc/$name"; fi
done
ln -s ../usr/lib/os-release "$root/etc/os-release"
cp -L /etc/ld.so.conf.d/*.conf "$root/etc/ld.so.conf.d/" 2>/dev/null || true
cat > "$root/etc/passwd" <<'PASSWD'
root:x:0:0:root:/root:/bin/bash
gcpuser:x:1001:1001::/home/gcpuser:/bin/bash
sshd:x:105:65534::/run/sshd:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
PASSWD
printf 'root:x:0:\ngcpuser:x:1001:\nnogroup:x:65534:\n' > "$root/etc/group"
echo '# nothing' > "$root/etc/fuse.conf"
cat > "$root/etc/ssh/sshd_config" <<'SSHD'
# It runs as the one user that there is, in a user namespace of one id (init.py): no PAM, no other owner.
HostKey /etc/ssh/host_key
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
AcceptEnv LANG LC_*
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
# What PAM would read from /etc/environment (init.py).
Include /etc/ssh/environment.conf
SSHD

# Stand-ins, all of them first in PATH. The driver's machine is the one that the tests of scripts/hooks plant.
cp "$here"/standins/* "$root/local/bin/"
cp "$standins/machine.sh" "$root/local/lib/machine.sh"
for name in systemctl nvidia-smi; do ln -s machine.sh "$root/local/lib/$name"; done # behind ours of that name
for name in apt-get apt-cache dpkg dpkg-query modinfo modprobe rmmod; do
    ln -s ../lib/machine.sh "$root/local/bin/$name"
done
for name in shutdown reboot halt; do ln -s poweroff "$root/local/bin/$name"; done
cp "$venv/uv" "$root/local/lib/uv"
cp -r "$here/stack" "$root/local/share/stack"
find "$root/local/share/stack" -name __pycache__ -prune -exec rm -r {} +
"$here/plant_driver.sh" "$root/var/lib/machine"
${CC:-cc} -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$root/local/lib/libcuda.so.1" "$here/libcuda.c"
"$here/plant_gib.sh" "$root"

# What the reaper's machine installs, and where from: there is no package index (kimisession/cloud/reaper_startup.sh).
library=$("$venv/python" -c 'from kimisession.cloud.guard import LIBRARY; print(LIBRARY)')
"$venv/pip" download -qq --disable-pip-version-check --only-binary :all: -d "$root/local/share/wheels" \
    --python-version "$(/usr/bin/python3 -c 'import sys; print(*sys.version_info[:2], sep=".")')" "google-cloud-compute==$library"
mkdir -p "$root/etc/default"
printf 'PIP_NO_INDEX=1\nPIP_FIND_LINKS=/usr/local/share/wheels\n' > "$root/etc/default/kimisession-reaper"

# SkyPilot's wheel, and its runtime on the machine.
HOME=$image/make "$venv/python" - "$image" <<'PYTHON'
import pathlib, shutil, sys
from sky.backends import wheel_utils
from sky.skylet import constants as c
image = pathlib.Path(sys.argv[1])
_, wheel = wheel_utils.build_sky_wheel()
shutil.copytree(pathlib.Path("~/.sky/wheels").expanduser(), image / "sky" / "wheels")
home = image / "root" / "home" / "gcpuser"
shutil.copytree(image / "sky" / "wheels", home / ".sky" / "wheels", ignore=shutil.ignore_patterns(".*"))
commands = c.UV_INSTALLATION_COMMANDS + c.SKY_USER_ENV_CREATION_COMMANDS + c.RAY_SKYPILOT_INSTALLATION_COMMANDS
commands = commands.replace("{sky_wheel_hash}", wheel).replace("{cloud}", "gcp")
(image / "make" / "install.sh").write_text(commands)
PYTHON
mkdir -p "$image/make/tmp"
cd "$root/home/gcpuser"
# shellcheck disable=SC2016  # for the shell inside
unshare --user --map-root-user --mount --pid --fork --kill-child bash -euc '
    exec 3< "$1/make/install.sh" 4< "$1/root/local/lib/uv" 5< "$1/root/local/bin/uv"
    mount --make-rprivate /
    mount -t tmpfs tmpfs /home
    mkdir /home/gcpuser
    mount --bind . /home/gcpuser
    mkdir -p .local/bin
    cat <&4 > .local/bin/uv.real
    cat <&5 > .local/bin/uv
    chmod 755 .local/bin/uv .local/bin/uv.real
    cd /home/gcpuser
    set +eu
    env -u PYTHONPATH -u VIRTUAL_ENV HOME=/home/gcpuser PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin \
        UV_REAL=/home/gcpuser/.local/bin/uv.real UV_OFFLINE=0 \
        SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt bash -c "$(cat <&3)" || exit 1
    rm -rf .local/bin/uv.real .cache
' image "$image" > "$image/install.log" 2>&1 || { tail -n 30 "$image/install.log" >&2; exit 1; }
test -x "$root/home/gcpuser/skypilot-runtime/bin/ray"
rm -rf "$image/make"

# A certificate for all of Google's names, from an authority that only this rig trusts.
"$here/certificates.sh" "$image/tls"
