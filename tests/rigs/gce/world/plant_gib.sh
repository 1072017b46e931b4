#!/bin/sh
# Google's GIB as its installer leaves it on an image of one machine that needs none: under /usr/local/gib of the machine
# (ROOT/local), in the linker's path and in login shells.
set -eu
root=$1
mkdir -p "$root/local/gib/lib64" "$root/local/gib/scripts"
for name in libnccl-net.so libnccl-tuner.so; do
    echo 'int gib;' | ${CC:-cc} -shared -fPIC -nostdlib -Wl,-soname,$name -o "$root/local/gib/lib64/$name" -x c -
done
echo 'export NCCL_NET=gIB' > "$root/local/gib/scripts/set_nccl_env.sh"
echo /usr/local/gib/lib64 > "$root/etc/ld.so.conf.d/aaa-gib.conf"
cat > "$root/etc/profile.d/nccl.sh" <<'PROFILE'
if [ -d /usr/local/gib ]; then
    . /usr/local/gib/scripts/set_nccl_env.sh
    export LD_LIBRARY_PATH=/usr/local/gib/lib64
fi
PROFILE
