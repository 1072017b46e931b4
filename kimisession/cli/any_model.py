"""`kimisession plan --model owner/name@revision` or `--model ./folder`: a profile for a model that has none."""

import re
from decimal import Decimal

from kimisession.cli.planning import PlanOptions, checked, make_plan, show_plan
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
    try:
        read = read_model(text)
    except TryAgain as error:
        raise KimiError(
            error.message, "again with a network, or --model FOLDER with its config.json and files"
        ) from None
    profile = profile_of(text, read, f"{accelerator.name}:{count}", count, version or VERSION, options)
    show_plan(make_plan(profile, options, read.card), options, source=(sentence(text, read),))


def profile_of(
    text: str, read: ReadModel, accelerators: str, count: int, version: str, options: PlanOptions
) -> Profile:
    """A profile with the usual flags, for the plan alone: nobody has run it."""
    name = re.sub(r"[^a-z0-9]+", "-", text.partition("@")[0].rpartition("/")[2].lower()).strip("-") or "model"
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
            Checkpoint("native", text, read.file_bytes, tuple({a.architecture for a in ACCELERATORS}), context),
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
