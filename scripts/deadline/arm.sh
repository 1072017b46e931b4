#!/usr/bin/env bash
# Arm the machine's own end: a systemd timer that survives a reboot and needs neither the user, nor the keeper, nor the disk.
#
#   arm.sh --deadline 1764000000 [--without-keeper-s 240] [--grace-s 180] [--cloud gcp|none] [--script PATH]
#          [--because CODE]
#   arm.sh off            for a machine that is to be kept; a session's machine is not
#
# Arming counts as having seen a keeper: one follows at once, however long the machine was set up before. Not after a reboot.
# --because: the session has ended with this exit code, which the machine's deletion will tell.
# --deadline is in seconds since 1970. To extend, arm again with a later one. Repeatable; every file is renamed into
# place, so on a full disk the old deadline stays armed. As root. What it does at the end: kimisession/node/deadline.py.
# Exit codes: 0 armed, and systemd says so; 2 usage; 5 not armed, and the last line says why.
set -euo pipefail

units=/etc/systemd/system
script=/usr/local/lib/kimisession/deadline.py
name=kimisession-deadline
here=$(cd "$(dirname "$0")" && pwd)

tell_failed() { # the keeper quotes the sentence of such a line; people read it as the last
    local text=${1//$'\n'/ }
    printf '{"failed": {"exit": 5, "message": "%s"}}\ndeadline: %s\n' "$(sed 's/[\\"]/\\&/g; s/[[:cntrl:]]/ /g' <<<"$text")" "$text"
}
fail() {
    tell_failed "a machine that nothing ends: $1."
    exit 5
}

put() { # SOURCE TARGET: whole or not at all
    local part
    if ! { mkdir -p "$(dirname "$2")" && part=$(mktemp "$2.XXXXXX"); }; then
        fail "$2 could not be written; is the disk full"
    fi
    if ! { cat "$1" >"$part" && chmod 0644 "$part" && mv -f "$part" "$2"; }; then
        rm -f "$part"
        fail "$2 could not be written; is the disk full"
    fi
}

if [ "${1:-}" = off ]; then
    systemctl disable --now "$name.timer"
    rm -f "$units/$name.timer" "$units/$name.service" "$script"
    systemctl daemon-reload
    echo "deadline: disarmed: from now on nothing on this machine ends it."
    exit 0
fi

deadline='' without_keeper=240 grace=180 cloud='' source='' because=-1
while [ $# -gt 0 ]; do
    case $1 in
        --deadline) deadline=${2:?} && shift 2 ;;
        --without-keeper-s) without_keeper=${2:?} && shift 2 ;;
        --grace-s) grace=${2:?} && shift 2 ;;
        --cloud) cloud=${2:?} && shift 2 ;;
        --script) source=${2:?} && shift 2 ;;
        --because) because=${2:?} && shift 2 ;;
        *) echo "arm.sh: unknown word $1; use --deadline, --without-keeper-s, --grace-s, --cloud, --script, --because, or off" && exit 2 ;;
    esac
done
for number in "$deadline" "$without_keeper" "$grace" "${because#-}"; do
    [[ $number =~ ^[0-9]+$ ]] || { echo "arm.sh: --deadline is in whole seconds since 1970, the others in whole seconds" && exit 2; }
done
now=$(date +%s)
[ "$deadline" -gt "$now" ] || { echo "arm.sh: the deadline $deadline is in the past" && exit 2; }
if [ -z "$cloud" ]; then
    case $(cat /sys/class/dmi/id/product_name 2>/dev/null || true) in *Google*) cloud=gcp ;; esac
    if [ -n "${GCE_METADATA_HOST:-}" ]; then cloud=gcp; fi
fi
# Somebody's own machine must not be powered off by a session on it.
[ -n "$cloud" ] || fail "this is not a machine of a cloud that is known here, so say --cloud none if it may be powered off"

python=$(command -v /usr/bin/python3 || command -v python3) || fail "there is no python3"
# The bound that no wrong clock can move: the uptime at which the deadline will be.
uptime=$(cut -d . -f 1 /proc/uptime)
longest=$((uptime + deadline - now))
if [ -z "$source" ]; then # beside a checkout, in a machine's folder, or what an earlier arming installed
    for source in "$here/../../kimisession/node/deadline.py" "$here/../../lib/kimisession/node/deadline.py" "$script"; do
        [ ! -f "$source" ] || break
    done
fi
[ -f "$source" ] || fail "there is no $source to install; name kimisession/node/deadline.py with --script"
put "$source" "$script"

filled=$(mktemp -p /dev/shm 2>/dev/null || mktemp)
trap 'rm -f "$filled"' EXIT
# A metadata server of a test rig travels with the unit; on a real machine the variable is empty.
sed -e "s|@PYTHON@|$python|; s|@SCRIPT@|$script|; s|@DEADLINE_UTC@|$deadline|; s|@LONGEST_UPTIME_S@|$longest|" \
    -e "s|@WITHOUT_KEEPER_S@|$without_keeper|; s|@GRACE_S@|$grace|; s|@CLOUD@|$cloud|; s|@BECAUSE@|$because|" \
    -e "s|@ENVIRONMENT@|${GCE_METADATA_HOST:+GCE_METADATA_HOST=$GCE_METADATA_HOST}|" \
    "$here/$name.service" >"$filled"
{ printf '%s %s' "$(cat /proc/sys/kernel/random/boot_id)" "$uptime" >/run/kimisession-keeper-seen; } 2>/dev/null || true
put "$filled" "$units/$name.service"
put "$here/$name.timer" "$units/$name.timer"
systemctl daemon-reload || fail "systemd does not answer; this machine cannot end itself by a timer"
systemctl enable --now "$name.timer" || fail "systemd did not take the timer"
for word in is-enabled is-active; do
    systemctl "$word" --quiet "$name.timer" || fail "the timer is not there after arming ($word says no)"
done
printf 'deadline: armed for %s (grace %ss), %ss without a keeper, by %s; survives a reboot.\n' \
    "$(date -u -d "@$deadline" +%Y-%m-%dT%H:%M:%SZ)" "$grace" "$without_keeper" "$cloud"
