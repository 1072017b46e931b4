#!/usr/bin/env bash
# STAND-IN. Plays apt-get, apt-cache, dpkg, dpkg-query, rmmod, modprobe, modinfo, systemctl and nvidia-smi of one pretended
# machine with GPUs, by the name it is called with. Its state is real files: /sys/module (planted by the test) and $MACHINE:
#   disk, libs, fabric    versions of the modules on disk, the user libraries, the fabric manager
#   packages              `NAME VERSION` lines that apt knows         active/ masked/ units/    systemd's
#   break-*               faults: break-fetch break-install break-modprobe break-rollback break-reboot
# It holds drivers to their own rules: modules in use stay, modprobe loads what is on disk, libraries refuse other modules.
set -eu
me=$(basename "$0")
echo "$me $*" >>"$MACHINE/calls"
sys=/sys/module
get() { cat "$MACHINE/$1" 2>/dev/null || true; }
holds() { # MODULE ON: the modules that it sits on
    case $1 in nvidia_drm) echo nvidia_modeset ;; nvidia_uvm | nvidia_modeset | gdrdrv) echo nvidia ;; esac
}
insert() {
    [ ! -e "$sys/$1" ] || return 0
    if [ -e "$MACHINE/break-modprobe" ] && [ "$(get disk)" = "$(get break-modprobe)" ]; then exit 1; fi
    for below in $(holds "$1"); do insert "$below"; done
    mkdir -p "$sys/$1/holders"
    get disk >"$sys/$1/version"
    echo 0 >"$sys/$1/refcnt"
    for below in $(holds "$1"); do touch "$sys/$below/holders/$1"; done
}

case $me in
    apt-cache)
        case $1 in
            search) awk -v p="$3" '$1 ~ p { print $1 " - a package" }' "$MACHINE/packages" ;;
            madison) awk -v n="$2" '$1 == n { print " " $1 " | " $2 " | http://archive.example jammy/main" }' "$MACHINE/packages" ;;
        esac ;;
    apt-get)
        case " $* " in *" update "*) exit 0 ;; esac
        [ ! -e "$MACHINE/break-fetch" ] || { echo "E: Unable to fetch some archives" >&2; exit 100; }
        case " $* " in *" --download-only "*) exit 0 ;; esac
        # What a package's own script does: it starts its service, and that loads the modules that are there right then.
        if [ ! -e "$MACHINE/masked/nvidia-persistenced" ]; then insert nvidia; touch "$MACHINE/active/nvidia-persistenced"; fi
        case " $* " in
            *" --allow-downgrades "*) [ ! -e "$MACHINE/break-rollback" ] || exit 100 ;;
            *)
                if [ -e "$MACHINE/break-install" ]; then # half of it: libraries are new, the module did not build
                    for word in "$@"; do case $word in nvidia-driver*=*) v=${word#*=} && echo "${v%%-*}" >"$MACHINE/libs" ;; esac; done
                    echo "Error! Bad return status for module build on kernel" >&2
                    exit 100
                fi ;;
        esac
        for word in "$@"; do
            v=${word#*=} v=${v%%-*}
            case $word in
                nvidia-driver*=*) echo "$v" >"$MACHINE/libs"; echo "$v" >"$MACHINE/disk" ;;
                nvidia-fabricmanager*=*) echo "$v" >"$MACHINE/fabric" ;;
            esac
        done ;;
    dpkg) exit 0 ;;
    dpkg-query) awk '{ print "ii  " $0 }' "$MACHINE/dpkg" ;;
    modinfo)
        [ -n "$(get disk)" ] || exit 1
        case $2 in version) get disk ;; license) get license ;; esac ;;
    modprobe) insert "$1" ;;
    rmmod)
        busy() { echo "rmmod: ERROR: Module $1 is in use" >&2; exit 1; }
        [ -z "$(ls "$sys/$1/holders")" ] && [ "$(cat "$sys/$1/refcnt")" = 0 ] || busy "$1"
        if [ "$1" = nvidia ]; then
            for service in "$MACHINE"/active/nvidia-*; do [ ! -e "$service" ] || busy "$1"; done
        fi
        for below in $(holds "$1"); do rm "$sys/$below/holders/$1"; done
        rm -r "${sys:?}/$1" ;;
    systemctl)
        verb=$1; shift
        words=(); for word in "$@"; do case $word in --*) ;; *) words+=("${word%.service}") ;; esac; done
        case $verb in
            is-active) [ -e "$MACHINE/active/${words[0]}" ] ;;
            is-enabled) [ -e "$MACHINE/units/${words[0]}" ] ;;
            cat) [ -e "$MACHINE/units/${words[0]}" ] ;;
            stop) rm -f "$MACHINE/active/${words[0]}" ;;
            start)
                [ ! -e "$MACHINE/masked/${words[0]}" ] || exit 1
                if [ "${words[0]}" = nvidia-fabricmanager ] && [ "$(get fabric)" != "$(cat $sys/nvidia/version)" ]; then
                    echo "fabric manager NVIDIA GPU driver interface version mismatch" >&2
                    exit 1
                fi
                touch "$MACHINE/active/${words[0]}" ;;
            daemon-reload) ;;
            enable) touch "$MACHINE/units/${words[0]}" "$MACHINE/active/${words[0]}" ;;
            disable) rm -f "$MACHINE/units/${words[0]}" "$MACHINE/active/${words[0]}" ;;
            mask) for word in "${words[@]}"; do touch "$MACHINE/masked/$word"; done ;;
            unmask) for word in "${words[@]}"; do rm -f "$MACHINE/masked/$word"; done ;;
            reboot) [ ! -e "$MACHINE/break-reboot" ] || exit 1; touch "$MACHINE/rebooted" ;;
        esac ;;
    nvidia-smi)
        [ -e $sys/nvidia/version ] || { echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."; exit 9; }
        [ "$(cat $sys/nvidia/version)" = "$(get libs)" ] || { echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18; }
        for n in 0 1 2 3 4 5 6 7; do
            case "$*" in -L) echo "GPU $n: NVIDIA H100 80GB HBM3 (UUID: GPU-$n)" ;; *) get libs ;; esac
        done ;;
esac
