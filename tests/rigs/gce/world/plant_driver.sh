#!/bin/sh
# What the stand-ins of apt, modprobe and nvidia-smi (tests/hooks/standins/machine.sh) remember: an image with driver 570 and
# packages for 580, as in the public write-up of February 2026 (no package is named for 580, one provides it).
set -eu
mkdir -p "$1/active" "$1/masked" "$1/units"
for name in disk libs fabric; do echo 570.211.01 > "$1/$name"; done
echo NVIDIA > "$1/license"
cat > "$1/packages" <<'PACKAGES'
nvidia-driver-570-server 570.211.01-0ubuntu0.22.04.1
nvidia-driver-575-server 580.126.09-0ubuntu0.22.04.1
nvidia-driver-575-server-open 580.126.09-0ubuntu0.22.04.1
nvidia-fabricmanager-570 570.211.01-0ubuntu0.22.04.1
nvidia-fabricmanager-575 580.126.09-0ubuntu0.22.04.1
PACKAGES
for name in driver-570-server fabricmanager-570; do echo "nvidia-$name=570.211.01-0ubuntu0.22.04.1"; done > "$1/dpkg"
touch "$1/units/nvidia-fabricmanager" "$1/active/nvidia-fabricmanager" "$1/active/nvidia-persistenced"
