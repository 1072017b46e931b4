"""`kimisession plan --model owner/name@revision` or `--model ./folder`: a profile for a model that has none."""

import re
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path

from kimisession.cli import show
from kimisession.cli.planning import PlanOptions, checked, make_plan, show_plan
from kimisession.cli.scripts import toml_key, toml_value
from kimisession.core.catalog import ACCELERATORS, parse_accelerators
from kimisession.core.plan.models import ModelCard
from kimisession.core.profile import Checkpoint, Engine, FlagValue, Hardware, Model, Price, Profile, Stack
from kimisession.errors import KimiError, UsageMistake
from kimisession.weights.errors import TryAgain
from kimisession.weights.headers import ReadModel, read_model

#: The newest release that was run here, and its stack.
VERSION = "0.26.0"
STACKS = {"0.26.0": ("580", "13.0", "2.11.0")}
CONTEXT, SEQUENCES, UTILISATION = 32768, 64, 0.92
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"))


def run_model(text: str, version: str | None, options: PlanOptions) -> None:
    """One model, read from its own files, on one screen. Ends with exit code 5 when it does not start."""
    if options.gpus is None:
        raise UsageMistake("--model: say on which GPUs", f"kimisession plan --model {text} --gpus H200:8")
    accelerator, count = checked(lambda: parse_accelerators(options.gpus or ""), "--gpus")
    if accelerator.architecture == "cpu":
        raise UsageMistake("--model: only GPUs are planned for a model without a profile", "name GPUs, like H200:8")
    if options.manifests and text.startswith((".", "/", "~")):
        raise UsageMistake("--manifests: a pod cannot see that folder", "name the model on the hub, as owner/name")
    try:
        read = read_model(text)
    except TryAgain as error:
        raise KimiError(
            error.message, "again with a network, or --model FOLDER with its config.json and files"
        ) from None
    if not read.revision:
        text = str(Path(text).expanduser().resolve())
    profile = profile_of(text, read, f"{accelerator.name}:{count}", count, version or VERSION, options)
    if options.as_profile:
        show.out(profile_toml(profile, sentence(text, read)).rstrip("\n"))
        show.next_step(
            f"kimisession plan --model {text} ... --as-profile > {profile.name}.toml, and plan {profile.name}.toml"
        )
        return
    show_plan(make_plan(profile, options, read.card), options, source=(sentence(text, read),))


def profile_toml(profile: Profile, told: str) -> str:
    """The profile as a file of one's own, to change and to start."""
    (checkpoint,) = profile.checkpoints
    stack = {name: value for name, value in asdict(profile.stack).items() if value}
    lines = [
        f"# Made by `kimisession plan --model --as-profile`. {told}",
        f"name = {toml_value(profile.name)}",
        f"summary = {toml_value(profile.summary)}",
        f"status = {toml_value(profile.status)}",
        "",
        "[model]",
        f"served_name = {toml_value(profile.model.served_name)}",
        "",
        "[engine]",
        f"kind = {toml_value(profile.engine.kind)}",
        f"version = {toml_value(profile.engine.version)}",
        f"command = {toml_value(profile.engine.command)}",
        "",
        "[engine.flags]",
        *(f"{toml_key(name)} = {toml_value(value)}" for name, value in profile.engine.flags.items()),
        "",
        "[hardware]",
        f"accelerators = {toml_value(profile.hardware.accelerators)}",
        f"infra = {toml_value(profile.hardware.infra)}",
        *(["", "[stack]", *(f"{name} = {toml_value(value)}" for name, value in stack.items())] if stack else []),
        "",
        "[[checkpoints]]",
        f"name = {toml_value(checkpoint.name)}",
        f"repo = {toml_value(checkpoint.repo)}",
        f"bytes = {checkpoint.bytes}",
        f"architectures = {toml_value(checkpoint.architectures)}",
        f"context = {checkpoint.context}",
        "",
        "[price]",
        "usd_per_hour = 0",
        'ground = "not stated: write what your place bills"',
    ]
    return "\n".join(lines) + "\n"


def profile_of(
    text: str, read: ReadModel, accelerators: str, count: int, version: str, options: PlanOptions
) -> Profile:
    """A profile with the usual flags, for the plan alone: nobody has run it."""
    name = (
        re.sub(r"[^a-z0-9]+", "-", text.partition("@")[0].rpartition("/")[2].lower()).strip("-")[:31].strip("-")
        or "model"
    )
    name = name if name[0].isalpha() else f"m-{name[:29]}".rstrip("-")
    infra = options.infra or "gcp"
    driver, cuda, torch = STACKS.get(version, ("580", "", ""))
    context = options.context or min(CONTEXT, read.card.max_context)
    flags: dict[str, FlagValue] = {
        "tensor-parallel-size": count,
        "gpu-memory-utilization": UTILISATION,
        "max-num-seqs": max(SEQUENCES, options.concurrency or 0),
        "max-model-len": context,
    }
    return Profile(
        name=name,
        summary=f"{text}, as its own files describe it",
        status="rendered, never run",
        model=Model(name),
        engine=Engine("vllm", version, ("@{engine_python}", "-m", "vllm.entrypoints.openai.api_server"), flags),
        hardware=Hardware((accelerators,), infra),
        stack=Stack(driver, cuda, torch, gib="remove") if infra == "gcp" else Stack(torch=torch),
        checkpoints=(
            Checkpoint(
                "native",
                text,
                read.file_bytes,
                tuple(sorted({a.architecture for a in ACCELERATORS if a.architecture != "cpu"})),
                context,
            ),
        ),
        price=Price(Decimal(0), "no profile states one"),
    )


def sentence(text: str, read: ReadModel) -> str:
    """Where the sizes are from and what it took to learn them."""
    at = f" at {read.revision[:12]}" if read.revision else ""
    when = "" if not read.age_s else f", {_ago(read.age_s)} ago and kept since"
    return (
        f"{text}{at}: {read.tensors:,} tensors of {_size(read.file_bytes)} in {read.files} files, counted in their headers; "
        f"{_size(read.bytes_read)} read{when}. {_shape(read.card)}"
    )


def _shape(card: ModelCard) -> str:
    experts = f"{card.experts} experts in {card.experts_format}" if card.experts else "no experts"
    return f"{card.layers} layers, {experts}" + (", vision" if card.vision else "")


def _size(count: int) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"


def _ago(seconds: float) -> str:
    hours = seconds / 3600
    return (
        f"{max(1, round(seconds / 60))} minutes"
        if hours < 1
        else f"{hours:.0f} hours"
        if hours < 48
        else f"{hours / 24:.0f} days"
    )
