#!/bin/sh
# Debian's sshd and rsync with what they need and this host lacks, unpacked into IMAGE/usr; without root, installing nothing.
#
#     packages.sh IMAGE
set -eu
image=$1
lists=$image/apt
mkdir -p "$lists/lists/partial" "$lists/cache/archives/partial" "$image/unpacked/usr"
# Lists and archives of our own, so that no lock and no folder of the host is needed.
apt() {
    apt-get -qq -o Dir::State::Lists="$lists/lists" -o Dir::Cache="$lists/cache" -o Debug::NoLocking=1 \
        -o APT::Sandbox::User= -o Dir::Log="$lists" "$@"
}
apt update
(
    cd "$lists"
    # shellcheck disable=SC2046  # words
    apt download $(apt -s --no-install-recommends install openssh-server openssh-client rsync iproute2 |
        awk '$1 == "Inst" { print $2 }') openssh-server openssh-client rsync
)
for deb in "$lists"/*.deb; do dpkg-deb -x "$deb" "$image/unpacked"; done
# Where /lib is a link into /usr, so is what a package has in it.
for name in bin sbin lib lib64; do
    if [ -d "$image/unpacked/$name" ]; then cp -a "$image/unpacked/$name" "$image/unpacked/usr/"; fi
done
mv "$image/unpacked/usr" "$image/usr"
rm -rf "$image/unpacked" "$lists"
