"""What SkyPilot is asked to launch: a LaunchSpec as a task, the dictionary form of SkyPilot's YAML. Pure.

The task's `run` is the keeper under its wrapper under coreutils' `timeout`. Nothing runs in SkyPilot's own `setup`: a set-up
that hangs is never idle and would hold the machine for ever, a step of the keeper has limits. The session's key travels in
the machine's folder, never in envs, which SkyPilot writes into argv.
"""

import re
from datetime import datetime
from typing import Any

from kimisession.core.launch import LaunchSpec
from kimisession.core.profile import Slurm
from kimisession.engines.slurm import FOLDER, IN_ORDER, comment_of

#: SkyPilot's own autodown, once nothing is left in the job queue. It looks every minute and counts whole minutes from its last
#: look at a running job (0.14.1), so with 1 it acts within 0 to 60 s of the job's end. On GCP it stands behind the machine's own
#: timer, which says why it deletes, and autodown does not: with 1 it came first after 23 and 51 s (own run, 2026-11-21).
AUTODOWN_MINUTES = 1
AUTODOWN_MINUTES_GCP = 3

#: After the last cap of ours the kernel of the node gets this long before anything outside of us acts.
GRACE_S = 120

#: So long after the keeper's end a cloud machine deletes itself, and says why in the request, at the latest by the next look of
#: its timer, a minute after that end. The second is for a start that failed: somebody follows it and wants to read the step and
#: its words, which 30 s of a busy laptop were too short for (own run, 2026-11-21). Both before SkyPilot's autodown.
AFTER_S = 30
AFTER_FAILED_S = 100

_PATH = re.compile(r"(?:[A-Za-z0-9._~+@%=/-]|\$\{?[A-Za-z_][A-Za-z0-9_]*\}?)*")
_MODULE = re.compile(r"[A-Za-z0-9._+/-]+")

#: Asks SkyPilot's own state on the machine what it will do: what its server believes proves nothing.
_READ_BACK = """\
import json, os, time
from sky.skylet import autostop_lib, constants
import psutil
config = autostop_lib.get_autostop_config()
home = os.environ.get('SKY_RUNTIME_DIR') or os.path.expanduser('~')
try:
    skylet = psutil.pid_exists(int(open(os.path.join(home, '.sky', 'skylet_pid')).read()))
except (OSError, ValueError):
    skylet = any('sky.skylet.skylet' in (p.info['cmdline'] or ()) for p in psutil.process_iter(['cmdline']))
print(json.dumps({'at': time.time(), 'idle_minutes': config.autostop_idle_minutes, 'down': config.down,
    'wait_for': config.wait_for.value, 'same_boot': config.boot_time == psutil.boot_time(), 'skylet': skylet}))
"""

_HEAD = """\
# The keeper is this job: when it ends, the session ends. See https://github.com/kimisession/kimisession
machine={machine}
node_python=$(command -v python3)
end() {{
{first}
  rm -rf "$machine/lib" "$machine/api_key" "$machine/webhook" "$machine/hf_token"{release}
{end}
  exit "$1"
}}
fail() {{
  printf '{{"at":"%s","kind":"ended","by":"run","reason":"setup-failed","evidence":"%s","exit_code":20}}\\n' \\
    "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$(printf '%s' "$1" | tr -d '\\\\"' | tr '[:cntrl:]' ' ')" >> "$machine/run/journal.jsonl"
  end 20
}}
"""

# The machine's own end first, before anything takes time, with a limit of its own: what hangs here would hang unguarded.
# This is as early as SkyPilot allows: nothing of a task is on a machine before its files are, and without a `setup` (which would
# not be idle while it hangs) `run` is what follows them. Before that only what is outside of the machine knows its label.
_ARM_GCP = """\
arm() {{
  [ ! -e "$machine/scripts" ] || sudo -n timeout -k 10 90 "$machine/scripts/deadline/arm.sh" "$@" \\
    --script "$machine/lib/kimisession/node/deadline.py" >> "$machine/run/deadline.log" 2>&1 < /dev/null
}}
arm --deadline {deadline} || fail "the machine's own deadline could not be armed: $(tail -n 1 "$machine/run/deadline.log")"
"""

# Whatever else is in SkyPilot's queue, or wrong with it, the machine goes by itself, soon and not with the session's deadline.
_SHORTEN_GCP = """\
  soon={after_s}
  case $1 in 20 | 21 | 22) soon={after_failed_s} ;; esac
  arm --deadline $(( $(date +%s) + soon )) --grace-s 0 --without-keeper-s "$soon" --because "$1" || true"""

# No process that goes on in the background may hold the job's output: SkyPilot reads it to its end.
_TAIL = """\
python=$(cat "${{SKY_RUNTIME_DIR:-$HOME}}/.sky/python_path" 2>/dev/null || echo python3)
( timeout -k 10 600 "$python" -c "$read_back" > "$machine/run/.layers" 2> "$machine/run/layers.log" &&
  mv "$machine/run/.layers" "$machine/run/layers.json" ) < /dev/null > /dev/null 2>&1 &
PYTHONPATH="$machine/lib" {without}timeout -k 30 {longest_s} "$node_python" -m kimisession.node.job "$machine" \\
  < /dev/null > "$machine/run/job.log" 2>&1
end $?
"""

# Slurm forgets a job minutes after its end: what it was is left in the user's home, beside the journal.
_BEGIN_SLURM = """\
job() {{
  printf '{{"id":"%s","began":%s,"ended":%s}}\\n' "$SLURM_JOB_ID" "$began" "$1" > "$machine/run/.job" &&
    mv "$machine/run/.job" "$machine/run/job.json"
}}
began=$(SLURM_TIME_FORMAT=%s squeue -h -j "$SLURM_JOB_ID" -o %S)
case $began in '' | *[!0-9]*) began=$(date +%s) ;; esac  # slurmctld does not answer: it is not much later
job null
# The job may have waited in the queue for longer than its limit knows of: the limit is brought back to the deadline.
minutes=$(( ({latest} - began + 59) / 60 ))
[ "$minutes" -gt 0 ] || fail "its deadline passed while it waited in the queue"
scontrol update JobId="$SLURM_JOB_ID" TimeLimit="$minutes"
"""

# A user may shorten a job: from here on slurmctld ends it, whatever happens to the processes on the node, and to the file
# system that the next lines write to.
_SHORTEN_SLURM = """\
  scontrol update JobId="$SLURM_JOB_ID" TimeLimit=$(( ($(date +%s) - began) / 60 + 2 ))"""

# In order, and `stop` tells nobody a second time once the folder `ending` is there.
_END_SLURM = f"""\
  job "$(date +%s)"
  mkdir "$machine/run/ending" 2> /dev/null
  trap '' TERM
  {IN_ORDER.format(job='"$SLURM_JOB_ID"')} ||
    for _ in 1 2 3 4 5 6; do scancel --signal=TERM --full "$SLURM_JOB_ID" && break; sleep 10; done"""


def task_config(spec: LaunchSpec, infra: str, payload: str, now: datetime, spot: bool = True) -> dict[str, Any]:
    """The task. `payload` is the local folder that becomes the machine's. Raises ValueError, one sentence, for a Slurm
    setting that could not be put into a script."""
    return {
        "name": spec.name,
        "num_nodes": 1,
        "resources": _resources(spec, infra, spot),
        "file_mounts": {f"{FOLDER}/{spec.session_id}": payload},
        "run": run_script(spec, infra),
        **({"config": {"slurm": {"sbatch_options": sbatch_options(spec, now)}}} if infra == "slurm" else {}),
    }


def _resources(spec: LaunchSpec, infra: str, spot: bool) -> dict[str, Any]:
    slurm = spec.placement.slurm
    accelerator, _, count = spec.accelerators.partition(":")
    where = "/".join(part for part in (infra, slurm.cluster, slurm.partition) if part) if infra == "slurm" else infra
    if infra == "slurm" and slurm.partition and not slurm.cluster:
        where = f"slurm/*/{slurm.partition}"
    resources: dict[str, Any] = {"infra": where}
    if accelerator != "CPU":
        resources["accelerators"] = {accelerator: int(count or 1)}
    else:
        resources["cpus"] = f"{count or 1}+"
    if infra == "slurm":
        if slurm.cpus:
            resources["cpus"] = f"{slurm.cpus}+"
        if slurm.memory_gib:
            resources["memory"] = f"{slurm.memory_gib}+"
        return resources
    resources["labels"] = dict(spec.labels)
    if infra == "gcp":
        resources["use_spot"] = spot
        if spec.placement.zone:
            resources["infra"] = f"gcp/{spec.placement.zone}"
        if spec.placement.zones:
            resources["ordered"] = [{"infra": f"gcp/{zone}"} for zone in spec.placement.zones]
    if spec.placement.memory_gib:
        resources["memory"] = f"{spec.placement.memory_gib}+"
    if spec.placement.disk_gib:
        resources["disk_size"] = spec.placement.disk_gib
    return resources


def sbatch_options(spec: LaunchSpec, now: datetime) -> dict[str, str]:
    """What Slurm itself is told: labels as the comment, and the deadline as the job's time limit, in whole minutes."""
    slurm = spec.placement.slurm
    minutes = -(-int((spec.deadline - now).total_seconds() + GRACE_S) // 60)
    options = {"comment": comment_of(spec.labels), "time": str(max(1, minutes))}
    return options | {key: value for key, value in (("account", slurm.account), ("qos", slurm.qos)) if value}


def run_script(spec: LaunchSpec, infra: str) -> str:
    """The task's `run`: bash, on the machine. Raises ValueError as `task_config` does."""
    longest_s = int(spec.placement.longest_s or spec.limits.duration_s) + GRACE_S
    gib = any(step.name == "gib" for step in spec.steps)
    without = '"$machine/scripts/hooks/gib.sh" exec ' if gib else ""
    tail = f"read_back=$(cat <<'END'\n{_READ_BACK}END\n)\n" + _TAIL.format(longest_s=longest_s, without=without)
    if infra != "slurm":
        machine = f'"$HOME"/.kimisession/{spec.session_id}'
        gcp = infra == "gcp"
        first = _SHORTEN_GCP.format(after_s=AFTER_S, after_failed_s=AFTER_FAILED_S) if gcp else "  true"
        head = _HEAD.format(machine=machine, release="", first=first, end="  true")
        deadline = int(spec.deadline.timestamp()) + GRACE_S
        return head + (_ARM_GCP.format(deadline=deadline) if gcp else "") + tail
    machine = f'"$(getent passwd "$(id -u)" | cut -d: -f6)"/.kimisession/{spec.session_id}'
    slurm = spec.placement.slurm
    release = f' "{_checked(slurm.scratch)}/kimisession-{spec.session_id}"' if slurm.scratch else ""
    head = _HEAD.format(machine=machine, release=f' "$machine/disk"{release}', first=_SHORTEN_SLURM, end=_END_SLURM)
    return head + _slurm_site(spec, slurm) + tail


def _slurm_site(spec: LaunchSpec, slurm: Slurm) -> str:
    """Move in, and make the site's software ready, inside the job."""
    session_id = spec.session_id
    lines = [
        # The folder first: whatever fails from here on is told in its journal.
        'mkdir -p -m 700 "${machine%/*}" && mkdir -p "$machine/run" "$machine/control"',
        # control/ may hold a request to stop from before the job began: it is kept.
        f'cp -R ~/.kimisession/{session_id}/. "$machine/" && rm -rf ~/.kimisession/{session_id}',
        _BEGIN_SLURM.format(latest=int(spec.deadline.timestamp()) + GRACE_S).rstrip(),
        '[ -e "$machine/spec.json" ] || fail "the files of the session did not arrive"',
    ]
    if slurm.scratch:
        place = f'"{_checked(slurm.scratch)}/kimisession-{session_id}"'
        lines.append(f'mkdir -p -m 700 {place} && rm -rf "$machine/disk" && ln -s {place} "$machine/disk" \\')
        lines.append('  || fail "no scratch space"')
    if slurm.modules:
        bad = [name for name in slurm.modules if not _MODULE.fullmatch(name)]
        if bad:
            raise ValueError(f"slurm.modules: {bad[0]!r} cannot be the name of a module")
        lines.append('module purge || fail "module purge failed"')
        lines += [f'module load {name} || fail "module load {name} failed"' for name in slurm.modules]
    if slurm.conda:
        prefix = f'"{_checked(slurm.conda)}"'
        lines.append(f'[ -x {prefix}/bin/python ] || fail "there is no conda environment in slurm.conda"')
        lines.append(f"export VIRTUAL_ENV={prefix} PATH={prefix}/bin:$PATH")
    return "\n".join(lines) + "\n"


def _checked(path: str) -> str:
    if not _PATH.fullmatch(path):
        raise ValueError(f"slurm: {path!r} cannot be a path; letters, digits, ._~+@%=/- and $NAME may be in it")
    return path
