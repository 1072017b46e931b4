"""What a rented machine does before the engine: set-up of its software, a check of seconds, the weights. Pure.

Whatever nothing orders runs side by side: the driver, the engine's stack and the weights take minutes each. A preflight that
fails ends the session while the weights are still coming (notes/hooks.md).
"""

from kimisession.core.launch import Step
from kimisession.core.profile import Profile

#: Where the set-up puts the engine's Python, in the machine's folder.
ENGINE_PYTHON = "@{machine}/engine/bin/python"

_HOOKS = "@{machine}/scripts/hooks"


def engine_python(infra: str) -> str:
    """The Python that has the engine on a rented machine, unless the user names one: the set-up's own on a bare VM, else
    the first on the path, which is the site's or the image's."""
    return ENGINE_PYTHON if infra == "gcp" else "python3"


def setup_steps(profile: Profile, infra: str, gpus: int, python: str) -> tuple[Step, ...]:
    """The set-up of a machine, without the weights. Only a VM is ours to set up: on Slurm and Kubernetes the site and the
    image bring the software. `python` is the engine's."""
    stack = profile.stack
    if infra != "gcp":
        return ()
    branch = stack.driver.partition(".")[0]
    steps: list[Step] = []
    if stack.driver:
        steps.append(Step("driver", ("sudo", f"{_HOOKS}/driver.sh", "--min", stack.driver)))
    if stack.gib == "remove":
        steps.append(Step("gib", ("sudo", f"{_HOOKS}/gib.sh", "remove")))
    if stack.torch and python == ENGINE_PYTHON:
        lock = f"{profile.engine.kind}-{profile.engine.version}"
        argv = [f"{_HOOKS}/stack.sh", "--lock", lock, "--venv", "@{machine}/engine"]
        steps.append(Step("stack", (*argv, "--driver", branch) if branch else tuple(argv)))
    if steps:
        check = ["@{python}", "-m", "kimisession.node.preflight", "--gpus", str(gpus), "--engine-python", python]
        argv = [*check, "--min-driver", stack.driver] if stack.driver else check
        steps.append(Step("preflight", tuple(argv), tuple(step.name for step in steps)))
    # First in the list and of seconds: the weights wait for nothing else.
    return (Step("disk", ("sudo", f"{_HOOKS}/disk.sh")), *steps) if profile.load == "copy" else tuple(steps)


def disk_check(weights_bytes: int, within_s: float, setup: tuple[Step, ...]) -> Step:
    """Seconds, before the weights take minutes: a disk from which they could not be read within `within_s` ends the session.
    Room is told by the pull itself, exactly and before its first byte."""
    mounted = any(step.name == "disk" for step in setup)
    slowest = f"{weights_bytes / 1e6 / within_s:.1f}"
    argv = ("@{python}", "-m", "kimisession.node.preflight", "--gpus", "1", "--only", "disk", "--disk", "@{disk}")
    argv = (*argv, "--min-disk-mb-per-s", slowest, *(("--spread",) if mounted else ()))
    return Step("disk-speed", argv, ("disk",) if mounted else ())


def weights_step(pull: tuple[str, ...], setup: tuple[Step, ...]) -> Step:
    """The weights, by the command `pull`: over the local SSDs where the set-up mounts them, once the disk was looked at."""
    after = tuple(step.name for step in setup if step.name == "disk-speed")
    if any(step.name == "disk" for step in setup):
        return Step("weights", (*pull, "--spread"), after or ("disk",))
    return Step("weights", pull, after)
