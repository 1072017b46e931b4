#!/usr/bin/env bash
# Bring NVIDIA's driver to at least a version, without a reboot, and never leave half of one behind.
#
#   driver.sh --min 580 [--may-reboot]
#
# Nothing happens when the loaded driver is new enough. Else: find the apt package that PROVIDES such a version (its name
# carries a branch, not the version: nvidia-driver-575-server installs 580.126.09; incident 3), fetch everything, stop
# what holds the GPUs, take the modules out (uvm, drm, modeset, then nvidia), install, put the new ones in, start fabric
# manager of the same version. A reboot inside a setup step kills the launch (incident 4), so it is only done with
# --may-reboot, only when a module cannot be taken out, and only with the deadline timer armed, which survives it;
# the same command after the reboot goes on.
#
# Whatever fails, the end is one whole driver, the new or the old, or none at all: never new libraries over old modules.
# Exit codes: 0 the driver is new enough; 2 usage; 5 it is not, and the last line says why; 75 rebooting, run me again.
# Repeatable. As root.
set -euo pipefail
shopt -s nullglob

modules=(nvidia_uvm nvidia_drm nvidia_modeset gdrdrv nvidia_peermem nvidia) # in the order in which they come out
# Services that hold GPUs on common images. Only those that run are stopped, and started again.
services=(nvidia-fabricmanager nvidia-persistenced nvidia-dcgm dcgm dcgm-exporter google-cloud-ops-agent
    google-cloud-ops-agent-opentelemetry-collector nvidia-mps display-manager)
state=/var/lib/kimisession/driver-reboot # the version for which we rebooted: once is enough
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
apt=(apt-get -y -q -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0)

total=8 done_steps=0
step() { # one line for people, one for the keeper
    done_steps=$((done_steps + 1))
    printf 'driver: %s\n{"progress": {"done": %d, "total": %d, "unit": "steps"}}\n' "$1" "$done_steps" "$total"
}
say() { printf 'driver: %s\n' "$1"; }
tell_failed() { # the keeper quotes the sentence of such a line; people read it as the last
    local text=${1//$'\n'/ }
    printf '{"failed": {"exit": 5, "message": "%s"}}\ndriver: %s\n' "$(sed 's/[\\"]/\\&/g; s/[[:cntrl:]]/ /g' <<<"$text")" "$text"
}
fail() { # INCIDENT, and CAUSE; FIX
    tell_failed "$1: $2."
    exit 5
}
old='incident 2 (the driver is too old for the engine)'

loaded() { cat /sys/module/nvidia/version 2>/dev/null || true; }
on_disk() { modinfo -F version nvidia 2>/dev/null || true; }
# The libraries answer for themselves: they and the modules have to be of one version, else nvidia-smi says so.
answers() { [ "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sort -u)" = "$1" ]; }
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; } # VERSION MINIMUM
active() { systemctl is-active --quiet "$1" 2>/dev/null; }

# -- finding -----------------------------------------------------------------------------------------------------------

# `UPSTREAM NAME APTVERSION` of every version of every package whose name matches.
provided() {
    local name
    for name in $(apt-cache search --names-only "$1" | awk '{ print $1 }' | sort -u); do
        # nvidia-driver-575-server | 580.126.09-0ubuntu0.22.04.1 | http://...
        apt-cache madison "$name" 2>/dev/null | awk -v name="$name" '{
            upstream = $3; sub(/^[0-9]+:/, "", upstream); sub(/[-+~].*/, "", upstream); print upstream, name, $3 }'
    done
}

# Sets package, package_version, version and, where the machine has one, fabric and fabric_version.
choose() {
    local flavour='' candidates fabrics line
    # Open modules stay open and closed ones closed: the other flavour may not know these GPUs.
    case $(modinfo -F license nvidia 2>/dev/null) in *GPL*) flavour='-open' ;; esac
    candidates=$(provided "^nvidia-driver-[0-9]+(-server)?$flavour\$" | sort -u)
    fabrics=''
    if has_fabric; then fabrics=$(provided '^nvidia-fabricmanager(-[0-9]+)?$' | sort -u); fi
    package=''
    # The lowest branch that will do, the newest version of it, a -server package before another: the smallest step.
    while read -r line; do
        read -r version package package_version <<<"$line"
        fabric='' fabric_version=''
        if [ -n "$fabrics" ]; then
            read -r _ fabric fabric_version < <(awk -v v="$version" '$1 == v' <<<"$fabrics") || true
        fi
        if ! has_fabric || [ -n "$fabric" ]; then return 0; fi
        say "$package provides $version, for which there is no fabric manager"
        package=''
    done < <(while read -r version name apt_version; do
        if [ -n "$version" ] && at_least "$version" "$min"; then
            case $name in *-server*) rank=0 ;; *) rank=1 ;; esac
            printf '%s %s %s %s %s\n' "${version%%.*}" "$version" "$rank" "$name" "$apt_version"
        fi
    done <<<"$candidates" | sort -k1,1n -k2,2Vr -k3,3n | awk '{ print $2, $4, $5 }')
    best=$(awk '{ print $1 }' <<<"$candidates" | sort -V | tail -n 1)
    fail 'incident 3 (packages are named for a branch, not for what they install)' \
        "no apt package provides a driver of at least $min (the newest here is ${best:-none}); add NVIDIA's apt repository, or take a newer image"
}

has_fabric() { [ -e /dev/nvidia-nvswitchctl ] || systemctl cat nvidia-fabricmanager.service >/dev/null 2>&1; }

# -- the GPUs' users ---------------------------------------------------------------------------------------------------

stopped=()
stop_services() {
    local service
    for service in "${services[@]}"; do
        if active "$service"; then
            systemctl stop "$service" || fail 'a service will not stop' "$service holds the GPUs; systemctl stop $service"
            stopped+=("$service")
        fi
        # Else installing starts it, and it loads whichever module is there at that moment.
        systemctl mask --runtime "$service" >/dev/null 2>&1 || true
    done
}

start_services() {
    local service
    systemctl unmask --runtime "${services[@]}" >/dev/null 2>&1 || true
    for service in ${stopped[@]+"${stopped[@]}"}; do
        systemctl start "$service" || say "$service did not start again"
    done
    stopped=()
}

holders() { # `pid 123 (python3 train.py)` of everybody who has a GPU open
    local pid
    { find /proc/[0-9]*/fd -lname '/dev/nvidia*' 2>/dev/null || true; } | cut -d / -f 3 | sort -nu | while read -r pid; do
        printf 'pid %s (%s)\n' "$pid" "$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-80 | sed 's/ *$//')"
    done
}

who_holds() { # MODULE: other modules, else processes, else nobody known
    local other=("/sys/module/$1/holders/"*) found
    if [ ${#other[@]} -gt 0 ]; then
        printf 'module %s' "${other[0]##*/}"
    else
        found=$(holders | paste -sd ',')
        printf '%s' "${found:-somebody in the kernel ($(cat "/sys/module/$1/refcnt" 2>/dev/null) references)}"
    fi
}

# Take the modules out. On failure those that were out are put back, and `busy` says what held which.
busy=''
unload() {
    local module removed=()
    for module in "${modules[@]}"; do
        [ -e "/sys/module/$module" ] || continue
        if ! rmmod "$module" 2>/dev/null; then
            busy="module $module is held by $(who_holds "$module")"
            # They are still of the version that is on the disk: this is the old driver, whole.
            load || say "the modules did not all come back"
            return 1
        fi
        removed+=("$module")
    done
    say "out: ${removed[*]:-nothing was in}"
}

load() {
    modprobe nvidia && modprobe nvidia_uvm && modprobe nvidia_modeset && modprobe nvidia_drm
}

# -- installing --------------------------------------------------------------------------------------------------------

wanted() { echo "$package=$package_version" ${fabric:+"$fabric=$fabric_version"}; }

install_packages() {
    # shellcheck disable=SC2046 # words are wanted
    "${apt[@]}" install --no-install-recommends $(wanted) && [ "$(on_disk)" = "$version" ]
}

# What dpkg has of the driver now, as NAME=VERSION, to go back to.
installed_packages() {
    dpkg-query -W -f '${db:Status-Abbrev} ${Package}=${Version}\n' 'nvidia-*' 'libnvidia-*' 'linux-modules-nvidia-*' \
        2>/dev/null | awk '$1 == "ii" { print $2 }' || true
}

# Back to the old driver, whole; without it, no driver.
back() {
    local why=$1
    if [ -n "$package" ]; then # modules and libraries are packages of their own: either may be new by now
        say "going back to ${before_disk:-what was there}"
        dpkg --configure -a >/dev/null 2>&1 || true
        # shellcheck disable=SC2086 # words are wanted
        "${apt[@]}" install --allow-downgrades --no-install-recommends $before_packages >/dev/null 2>&1 || true
    fi
    if [ -n "$before_disk" ] && [ "$(on_disk)" = "$before_disk" ] && load && answers "$before_disk"; then
        start_services
        fail "$old" "$why; the old driver $before_disk is back and whole, so try again or take a newer image"
    fi
    # Old modules under new libraries would fail later, and elsewhere: better none.
    local module
    for module in "${modules[@]}"; do [ ! -e "/sys/module/$module" ] || rmmod "$module" 2>/dev/null || true; done
    systemctl unmask --runtime "${services[@]}" >/dev/null 2>&1 || true
    fail "$old" "$why, and the old driver did not come back, so none is loaded; take another machine"
}

# -- the reboot --------------------------------------------------------------------------------------------------------

reboot_path() {
    local hint="end it, or take a newer image"
    if [ "$may_reboot" != yes ]; then
        start_services
        fail 'a busy module' "$busy; $hint, or run with --may-reboot"
    fi
    if [ -e "$state" ]; then
        start_services
        fail 'a busy module' "$busy, after a reboot for $(cat "$state") as well; take a newer image"
    fi
    if ! systemctl is-enabled --quiet kimisession-deadline.timer 2>/dev/null || ! active kimisession-deadline.timer; then
        start_services
        fail 'incident 4 (a reboot disarms what ends the session)' \
            "$busy, and the deadline timer is not armed; run scripts/deadline/arm.sh first, or $hint"
    fi
    step "$busy: installing for a reboot"
    install_packages || back "installing $package $package_version failed"
    mkdir -p "${state%/*}"
    echo "$version" >"$state"
    say "incident 4 (a reboot ends this connection): $busy, so this machine reboots into $version; run the same command again."
    systemctl reboot || { rm -f "$state" && back "the reboot was refused"; }
    exit 75
}

# ----------------------------------------------------------------------------------------------------------------------

# A new enough driver: the fabric manager of its version runs where there is one. Then it is done.
finish() {
    if has_fabric && ! active nvidia-fabricmanager; then
        systemctl start nvidia-fabricmanager ||
            fail 'no fabric manager' "GPUs on NVSwitch do not start without it; journalctl -u nvidia-fabricmanager tells why"
    fi
    rm -f "$state"
    say "$1"
    exit 0
}

min='' may_reboot=no
while [ $# -gt 0 ]; do
    case $1 in
        --min) min=${2:?--min takes a version} && shift 2 ;;
        --may-reboot) may_reboot=yes && shift ;;
        *) echo "driver.sh: unknown word $1; use --min VERSION and --may-reboot" && exit 2 ;;
    esac
done
[[ $min =~ ^[0-9]+(\.[0-9]+)*$ ]] || { echo "driver.sh: --min takes a version such as 580" && exit 2; }

before=$(loaded) before_disk=$(on_disk)
if [ -n "$before" ] && at_least "$before" "$min" && answers "$before"; then
    finish "$before is loaded and at least $min: nothing to do"
fi
gpus=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c . || true)
step "${before:-no driver} is loaded, at least $min is wanted"

version='' package='' fabric=''
before_packages=$(installed_packages)
if [ -n "$before_disk" ] && at_least "$before_disk" "$min" && [ "$before" != "$before_disk" ]; then
    # Somebody installed it and did not swap, or the last run ended between the two.
    version=$before_disk
    step "$version is installed and not loaded"
else
    "${apt[@]}" update >/dev/null || say "apt-get update failed; going on with the lists that are here"
    choose
    step "$package provides $version${fabric:+, $fabric the fabric manager}"
    # shellcheck disable=SC2046 # words are wanted
    "${apt[@]}" install --download-only --no-install-recommends $(wanted) >/dev/null ||
        fail "$old" "$package $package_version cannot be fetched; nothing was changed, so check the apt sources"
fi
step "everything is here"

stop_services
step "stopped: ${stopped[*]:-nothing ran}"
held=$(holders | paste -sd ',')
if [ -n "$held" ]; then
    # Before anything is taken out: the driver stays as it is.
    busy="module nvidia is held by $held"
    reboot_path
fi
unload || reboot_path
step "the old modules are out"

if [ -n "$package" ]; then
    install_packages || back "installing $package $package_version failed or built no module for $(uname -r)"
fi
step "$version is installed"

load || back "the modules of $version do not load"
if [ "$(loaded)" != "$version" ] || ! answers "$version"; then back "modules or libraries are not all of $version"; fi
start_services
step "the modules of $version are in"
now=$(nvidia-smi -L | grep -c . || true)
if [ "$gpus" -gt 0 ] && [ "$now" -lt "$gpus" ]; then
    fail 'missing GPUs' "$now of $gpus GPUs came back with $version; take another machine"
fi
finish "$version is loaded${before:+, $before was before}, without a reboot"
