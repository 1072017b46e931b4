#!/usr/bin/env bash
# Take GCP's GIB out of the way of a session on one machine, and bring it back.
#
#   gib.sh remove [--nodes N]     the folder, the linker's entries, the variables; then proves that they are gone
#   gib.sh check [--nodes N]      only looks; 0 when there is no trace
#   gib.sh restore                everything back as it was
#   gib.sh exec COMMAND ...       run a command without the variables that this shell may have got before `remove`
#
# Why (incident 5, public write-up of February 2026): GIB is a set of NCCL plugins for several machines. ldconfig knows
# them, so NCCL inside ONE machine loads them too, and fails or hangs in its first collective, minutes after the start.
# Settings did not help there (NCCL_NET_PLUGIN= and ten others), nor renaming the files; taking the folder out and
# rebuilding the linker's cache did. With --nodes above 1 nothing is touched: GIB is what connects the machines.
#
# Repeatable. The folder is moved, not copied (no space needed), next to where it was. Lines in profile and
# environment files are commented out in place and marked, so that `restore` needs no copy of a file that somebody may
# have edited since.
set -euo pipefail
shopt -s nullglob

gib=/usr/local/gib
# Beside it, so that moving is a rename: instant, and never half done.
archive=/usr/local/.kimisession-gib
mark='#kimisession-gib# '
stand_in='#kimisession-gib+ the next line stands in for the one above'
# What GIB's own set_nccl_env.sh exports (Google's documents on A3 machines); its own file is asked too, when there.
# NCCL variables that are not in this list, such as NCCL_NVLS_ENABLE, are somebody's choice and stay.
variables='NCCL_NET NCCL_CROSS_NIC NCCL_NET_GDR_LEVEL NCCL_P2P_NET_CHUNKSIZE NCCL_NVLS_CHUNKSIZE NCCL_IB_ADAPTIVE_ROUTING
NCCL_IB_QPS_PER_CONNECTION NCCL_IB_TC NCCL_IB_FIFO_TC NCCL_TUNER_CONFIG_PATH NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN
NCCL_SHIMNET_SHIM_LAYERS NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE'

total=5 done_steps=0
step() { # one line for people, one for the keeper
    done_steps=$((done_steps + 1))
    printf 'gib: %s\n{"progress": {"done": %d, "total": %d, "unit": "steps"}}\n' "$1" "$done_steps" "$total"
}
tell_failed() { # the keeper quotes the sentence of such a line; people read it as the last
    local text=${1//$'\n'/ }
    printf '{"failed": {"exit": 5, "message": "%s"}}\ngib: %s\n' "$(sed 's/[\\"]/\\&/g; s/[[:cntrl:]]/ /g' <<<"$text")" "$text"
}
fail() { # CAUSE; FIX
    tell_failed "incident 5 (GIB breaks NCCL inside one machine): $1."
    exit 5
}

shell_files() {
    printf '%s\n' /etc/profile /etc/profile.d/*.sh /etc/bash.bashrc /etc/bashrc /etc/zsh/zshenv \
        /root/.bashrc /root/.profile /root/.bash_profile /home/*/.bashrc /home/*/.profile /home/*/.bash_profile
}
environment_files() { printf '%s\n' /etc/environment /etc/environment.d/*.conf /etc/security/pam_env.conf; }
linker_files() { printf '%s\n' /etc/ld.so.conf /etc/ld.so.conf.d/*.conf; }

names() { # the variables that are GIB's, as an alternation
    local script
    {
        tr ' ' '\n' <<<"$variables"
        for script in "$gib"/scripts/*.sh "$archive"/scripts/*.sh; do
            { grep -ohE '\bNCCL_[A-Z0-9_]+=' "$script" || true; } | tr -d '='
        done
    } | grep . | sort -u | paste -sd '|'
}

# Comment out the lines of a file that match a pattern; a search path only loses its GIB parts.
#   edit FILE PREFIX PATTERN      PREFIX keeps an `if` of a shell file from becoming empty (`: `)
edit() {
    local file=$1 prefix=$2 pattern=$3 new
    [ -f "$file" ] && grep -qE "$pattern" "$file" || return 0
    new=$(mktemp "$file.kimisession.XXXXXX")
    PATTERN=$pattern MARK=$prefix$mark STAND_IN=$stand_in awk '
        index($0, "#kimisession-gib") { print; next }
        $0 ~ ENVIRON["PATTERN"] {
            print ENVIRON["MARK"] $0
            if ($0 ~ /(^|[^A-Z_])(LD_LIBRARY_PATH|LIBRARY_PATH|PATH)=/) {
                gsub(/\/usr\/local\/gib[^:"'\'' ;]*:?/, "")
                print ENVIRON["STAND_IN"]
                print
            }
            next
        }
        { print }' "$file" >"$new"
    if [ "$prefix" = ': ' ] && ! bash -n "$new" 2>/dev/null && bash -n "$file" 2>/dev/null; then
        rm -f "$new"
        fail "$file would no longer be valid shell without its GIB lines; take them out by hand"
    fi
    replace "$file" "$new"
}

unedit() {
    local file=$1 new
    [ -f "$file" ] && grep -q '#kimisession-gib' "$file" || return 0
    new=$(mktemp "$file.kimisession.XXXXXX")
    awk '/^#kimisession-gib\+/ { getline; next } { sub(/^(: )?#kimisession-gib# /, ""); print }' "$file" >"$new"
    replace "$file" "$new"
}

replace() { # FILE NEW: whole, with the old one's owner and mode
    chown --reference="$1" "$2"
    chmod --reference="$1" "$2"
    mv -f "$2" "$1"
}

traces() { # every trace that is left, one a line
    local name value
    [ ! -e "$gib" ] || echo "$gib is there"
    ldconfig -p | awk '$NF ~ /\/gib\// { print "ldconfig -p has " $1 " from " $NF }'
    # A login shell of nobody in particular, as a new SSH session or job would get it.
    while IFS='=' read -r name value; do
        if [[ $name =~ ^($(names))$ || $value == *"$gib"* ]]; then echo "a login shell sets $name=$value"; fi
    done < <(env -i HOME="${HOME:-/root}" PATH="$PATH" TERM=dumb bash -l -c env 2>/dev/null)
    # These are read by PAM, which no shell started here goes through.
    while read -r name; do
        if [ -f "$name" ]; then
            { grep -HE "^[[:space:]]*(export +)?($(names))=|^[^#]*$gib" "$name" || true; } | sed 's/^/left in /'
        fi
    done < <(environment_files)
}

remove() {
    local file lines
    lines="^[[:space:]]*(export +|declare -x +)?($(names))=|^[[:space:]]*(source|\.) +[^#]*$gib|=[^#]*$gib"
    while read -r file; do edit "$file" ': ' "$lines"; done < <(shell_files)
    while read -r file; do edit "$file" '' "$lines"; done < <(environment_files)
    step "variables are out of profile and environment files"
    while read -r file; do edit "$file" '' "^[^#]*/gib(/|[[:space:]]*$)"; done < <(linker_files)
    step "the linker's configuration does not name it"
    if [ -e "$gib" ]; then
        # An older archive is the same folder from an earlier removal; the newest is what restore should bring back.
        rm -rf "$archive"
        mv "$gib" "$archive"
    fi
    step "the folder is kept as $archive"
    ldconfig
    step "the linker's cache is rebuilt"
    prove
}

prove() {
    local left
    left=$(traces)
    [ -z "$left" ] || fail "$(head -n 1 <<<"$left") ($(wc -l <<<"$left") traces); run gib.sh remove as root"
    step "no trace of GIB in the linker's cache or in a fresh login shell"
}

restore() {
    local file
    if [ -e "$archive" ] && [ -e "$gib" ]; then fail "$gib and $archive are both there; remove the one that is old"; fi
    if [ -e "$archive" ]; then mv "$archive" "$gib"; fi
    while read -r file; do unedit "$file"; done < <(shell_files; environment_files; linker_files)
    ldconfig
    total=1
    step "GIB is as it was"
}

without_variables() {
    local name all unset=() path=${LD_LIBRARY_PATH:-}
    all=$(names)
    # The running environment is older than the removal: this shell's parents read the profile when GIB was there.
    while IFS= read -r name; do
        case $name in
            PATH | LD_LIBRARY_PATH | LIBRARY_PATH) continue ;; # lists, of which GIB is one entry
        esac
        if [[ $name =~ ^($all)$ || ${!name} == *"$gib"* ]]; then unset+=(-u "$name"); fi
    done < <(compgen -e)
    path=$(tr ':' '\n' <<<"$path" | { grep -v "^$gib" || true; } | paste -sd ':')
    if [ -n "$path" ]; then export LD_LIBRARY_PATH=$path; else unset LD_LIBRARY_PATH; fi
    exec env "${unset[@]}" "$@"
}

verb=${1:-} nodes=1
shift || true
if [ "$verb" = exec ]; then without_variables "$@"; fi
while [ $# -gt 0 ]; do
    case $1 in
        --nodes) nodes=${2:?--nodes takes a number} && shift 2 ;;
        *) echo "gib.sh: unknown word $1; use remove, check, restore, exec, and --nodes N" && exit 2 ;;
    esac
done
if [ "$verb" != restore ] && [ "$nodes" -gt 1 ]; then
    echo "gib: $nodes machines work together in this session, so GIB stays as it is."
    exit 0
fi
case $verb in
    remove) remove ;;
    check) total=1 && prove ;;
    restore) restore ;;
    *) echo "gib.sh: say remove, check, restore or exec" && exit 2 ;;
esac
