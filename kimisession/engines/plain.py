"""The files in sky/: a profile as a SkyPilot task for people who launch it with plain `sky launch`. Pure.

They are printed from the profiles, so that they cannot say anything else (kimisession/cli/sky_files.py); a test compares.
"""

import shlex

from kimisession.core.catalog import parse_accelerators
from kimisession.core.durations import parse_duration
from kimisession.core.launch import flags_to_argv
from kimisession.core.node_steps import ENGINE_PYTHON, setup_steps
from kimisession.core.profile import FlagValue, Profile, choose_checkpoint

#: Profiles with a file of their own in sky/.
PROFILES = ("kimi-k2.5", "kimi-k2.5-int4", "kimi-k2-thinking", "kimi-k2.5-h200")

_HEAD = """\
# {summary}.
#
#     sky launch -c {name} sky/{name}.yaml {flags}-i 1 --down
#
# Made from the profile {name} by `make sky`: change that. Plain use lacks what `kimisession start` has: an end when
# nobody asks anything (to SkyPilot a served model is a job that never ends: only `timeout` below ends this one, and -i deletes
# the machine after it), a key, a dollar cap, a deadline that survives a dead SkyPilot, the check that nothing is left, and a
# receipt. Look with `sky status -r`, reach it with `ssh -L 8000:127.0.0.1:8000 {name}`, end it with `sky down {name}`.
"""

SEED = """\
# Put the weights of a profile into a bucket, from a spot machine without GPUs: about $0.30 an hour, half an hour for the 595 GB
# of Kimi K2.5 (public write-up, February 2026). The plain form of `kimisession seed PROFILE --bucket gs://NAME`.
#
#     sky launch -c seed sky/seed-weights.yaml --env BUCKET=gs://NAME -i 1 --down
#
# Plain use lacks a price and a cap before it begins, and the deletion of this machine when SkyPilot dies. The bucket has to
# exist; start it there with --infra gcp/REGION. No byte of the weights touches this disk: they stream from the repository into
# the bucket, are checksummed on both sides and sealed last; launched again after an interruption, it goes on where it was.
name: seed-weights
resources:
  infra: gcp
  cpus: 16+
  memory: 32+
  disk_size: 50
  use_spot: true
workdir: .
envs:
  BUCKET: ""  # like gs://NAME
  PROFILE: kimi-k2.5
secrets:
  HF_TOKEN: ""  # only for repositories that ask for one
setup: |
  set -e
  export PATH="$HOME/.local/bin:$PATH"
  scripts/hooks/stack.sh --lock seed --venv ~/seed
run: |
  case "$BUCKET" in gs://?*) ;; *) echo "say where to with --env BUCKET=gs://NAME" && exit 2 ;; esac
  PYTHONPATH=. timeout 6h ~/seed/bin/python -m kimisession seed "$PROFILE" --here --bucket "$BUCKET"
"""


def plain_yaml(profile: Profile) -> str:
    """The text of a profile's file in sky/."""
    slurm = profile.hardware.infra == "slurm"
    lines = [
        _HEAD.format(
            summary=profile.summary,
            name=profile.name,
            flags="--env MODEL=/FOLDER " if slurm else "--env BUCKET=gs://NAME ",
        ).rstrip(),
        f"name: {profile.name.replace('.', '-')}",
        "resources:",
        *(_slurm_resources(profile) if slurm else _gcp_resources(profile)),
        "workdir: .",
        "envs:",
        *(
            ['  MODEL: ""  # a folder that the job can read']
            if slurm
            else ['  BUCKET: ""  # like gs://NAME, filled by sky/seed-weights.yaml']
        ),
        *(_slurm_config(profile) if slurm else _setup(profile)),
        "run: |",
        "  set -e",
        *(f"  {line}" for line in (_slurm_run(profile) if slurm else _gcp_run(profile))),
        "",
    ]
    return "\n".join(lines)


def _gcp_resources(profile: Profile) -> list[str]:
    wanted = (text.split(":") for text in profile.hardware.accelerators)
    counts = ", ".join(f"{name}: {count}" for name, count in wanted)
    return [
        "  infra: gcp",
        f"  accelerators: {{{counts}}}",
        "  use_spot: true",
        f"  disk_size: {profile.hardware.disk_gib}",
    ]


def _slurm_resources(profile: Profile) -> list[str]:
    slurm = profile.slurm
    name, count = profile.hardware.accelerators[0].split(":")
    where = f"slurm/*/{slurm.partition}" if slurm.partition else "slurm"
    lines = [f"  infra: {where}", f"  accelerators: {{{name}: {count}}}"]
    lines += [f"  cpus: {slurm.cpus}+"] if slurm.cpus else []
    return lines + ([f"  memory: {slurm.memory_gib}+"] if slurm.memory_gib else [])


def _setup(profile: Profile) -> list[str]:
    steps = [step for step in setup_steps(profile, "gcp", 8, ENGINE_PYTHON) if step.name != "weights"]
    return ["setup: |", "  set -e", *(f"  {_words(step.argv)}" for step in steps)]


def _words(argv: tuple[str, ...]) -> str:
    """A step's words for a shell in the checkout."""
    here = {"@{machine}/scripts": "scripts", "@{machine}/engine": "~/engine", "@{python}": "python3"}
    words = []
    for arg in argv:
        text = arg
        for machine, place in here.items():
            text = text.replace(machine, place)
        words.append(text if text.startswith("~/") else shlex.quote(text))
    return " ".join(words)


def _engine(profile: Profile, python: str, model: str) -> list[str]:
    """The engine's command line, a flag a line."""
    words = [python if word == "@{engine_python}" else word for word in profile.engine.command]
    flags = {**profile.engine.flags, **_checkpoint_flags(profile)}
    own = (f"--model {model} --served-model-name {profile.model.served_name}", "--host 127.0.0.1 --port 8000")
    lines = [" ".join(words), *own]
    for name, value in flags.items():
        argv = flags_to_argv({name: value})
        if argv:
            lines.append(shlex.join(argv))
    limit = parse_duration(profile.limits.duration)
    env = [f"export {name}={shlex.quote(value)}" for name, value in profile.engine.env.items()]
    return [*env, f"timeout -k 30 {limit} " + " \\\n    ".join(lines)]


def _checkpoint_flags(profile: Profile) -> dict[str, FlagValue]:
    """Of the checkpoint that the first accelerator gets."""
    accelerator, _ = parse_accelerators(profile.hardware.accelerators[0])
    return dict(choose_checkpoint(profile, accelerator.architecture).flags)


def _gcp_run(profile: Profile) -> list[str]:
    return [
        'case "$BUCKET" in gs://?*) ;; *) echo "say where from with --env BUCKET=gs://NAME" && exit 2 ;; esac',
        'python3 -m kimisession.node.pull --from "$BUCKET" --to ~/model --spread',
        *_indented(_engine(profile, "~/engine/bin/python", "~/model")),
    ]


def _slurm_config(profile: Profile) -> list[str]:
    slurm = profile.slurm
    minutes = -(-parse_duration(profile.limits.duration) // 60) + 5
    options = {"time": minutes, "account": slurm.account, "qos": slurm.qos}
    lines = [f"      {key}: {value}" for key, value in options.items() if value]
    return ["config:", "  slurm:", "    sbatch_options:", *lines]


def _slurm_run(profile: Profile) -> list[str]:
    slurm = profile.slurm
    lines = ["module purge && " + " && ".join(f"module load {name}" for name in slurm.modules)] if slurm.modules else []
    if slurm.conda:
        lines.append(f'export PATH="{slurm.conda}/bin:$PATH"')
    lines.append(
        '[ -e "$MODEL/config.json" ] || { echo "say where the weights are with --env MODEL=/FOLDER" && exit 2; }'
    )
    return [*lines, *_indented(_engine(profile, "python3", '"$MODEL"'))]


def _indented(lines: list[str]) -> list[str]:
    return [line for block in lines for line in block.split("\n")]
