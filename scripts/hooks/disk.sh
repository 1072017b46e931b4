#!/usr/bin/env bash
# The machine's local SSDs, each formatted and mounted for the weights, of which `pull --spread` puts a part on each.
#
#   disk.sh [--at /mnt/kimisession] [--ssds '/dev/disk/by-id/google-local-nvme-ssd-*']
#
# Why: Google attaches local SSDs to its GPU machines and mounts none (a3-highgpu-8g: 16 of 375 GB), and neither does
# SkyPilot. The boot disk they would lie on otherwise is a network disk: 595 GB of weights are half an hour on one of 1.2 TB
# at pd-balanced's 0.28 MB/s per GB (Google's documents), and were 8 minutes on local NVMe (public write-up, February 2026,
# incident 12). No RAID: mdadm is not on every image, and an engine reads whole files side by side anyway.
#
# Only a disk with nothing on it is formatted, or one that this script formatted: its label says so. Repeatable. Exit codes:
# 0 done, or there is no such disk; 2 usage. A disk that does not work is left out and said, and where none works the weights
# take the boot disk: slower, and the preflight measures by how much.
set -euo pipefail
shopt -s nullglob

at=/mnt/kimisession ssds='/dev/disk/by-id/google-local-nvme-ssd-*'
while [ $# -gt 0 ]; do
    case $1 in
        --at) at=${2:?--at takes a folder} && shift 2 ;;
        --ssds) ssds=${2:?--ssds takes a pattern} && shift 2 ;;
        *) echo "disk.sh: unknown word $1; use --at and --ssds" && exit 2 ;;
    esac
done
label=kimisession

ours() { # DEVICE: 0 when it may be used: empty, or formatted here before
    local found
    found=$(blkid -p -s LABEL -s TYPE -s PTTYPE -o value "$1" 2>/dev/null | paste -sd ' ') || true
    [ -z "$found" ] || [ "$found" = "$label ext4" ]
}

use() { # DEVICE FOLDER
    if [ -z "$(blkid -p -s LABEL -o value "$1" 2>/dev/null)" ]; then
        # No journal: what is on it is a copy, and gone with the machine.
        mkfs.ext4 -q -F -L "$label" -m 0 -O ^has_journal -E nodiscard "$1" || return
    fi
    mkdir -p "$2" && mount -o noatime "$1" "$2" || return
    # For the user whose job this is: sudo says who that is.
    chown "${SUDO_UID:-0}:${SUDO_GID:-0}" "$2"
}

devices=() folders=() pids=() mounted=0
# shellcheck disable=SC2206  # a pattern
for link in $ssds; do
    case $link in *-part*) continue ;; esac
    device=$(readlink -f "$link") folder=$at/$((${#devices[@]} + mounted))
    if where=$(findmnt -n -o TARGET -S "$device"); then
        case $where in
            "$at"/*) mounted=$((mounted + 1)) ;;
            *) echo "disk: $device is in use at $where and stays so." ;;
        esac
    elif ! ours "$device"; then
        echo "disk: $device has something on it and stays as it is."
    else
        devices+=("$device") folders+=("$folder")
        use "$device" "$folder" &
        pids+=($!)
    fi
done
for number in "${!pids[@]}"; do
    if wait "${pids[$number]}"; then
        mounted=$((mounted + 1))
    else
        echo "disk: ${devices[$number]} could not be formatted and mounted; going on without it."
    fi
done
printf 'disk: %d local SSDs under %s\n{"progress": {"done": 1, "total": 1, "unit": "steps"}}\n' "$mounted" "$at"
