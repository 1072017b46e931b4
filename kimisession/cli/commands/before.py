"""Before a session: which profiles there are, whether one fits, for how much, and under which quota."""

from pathlib import Path
from typing import Annotated

import typer

from kimisession.cli import completing
from kimisession.cli.amounts import dollars as _dollars
from kimisession.cli.amounts import duration as _duration
from kimisession.cli.amounts import rate
from kimisession.cli.commands.options import JsonOpt, ProjectOpt
from kimisession.cli.usage import only_one
from kimisession.errors import UsageMistake


def profiles(
    name: Annotated[
        str | None,
        typer.Argument(help="Show one profile with its sources.", autocompletion=completing.profile_names),
    ] = None,
    json: JsonOpt = False,
) -> None:
    """List profiles, or show one with its sources.

    Example: kimisession profiles kimi-k2.5-int4
    """
    from kimisession.cli.profiles import list_profiles, show_profile

    show_profile(name, json) if name else list_profiles(json)


def plan(
    profile: Annotated[
        str | None,
        typer.Argument(
            help="A profile, or a file with one; default kimi-k2.5.", autocompletion=completing.profile_names
        ),
    ] = None,
    int4: Annotated[bool, typer.Option("--int4", help="The kimi-k2.5-int4 profile.")] = False,
    gpus: Annotated[str | None, typer.Option(metavar="TYPE:N", help="On other devices, like H200:8.")] = None,
    context: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Tokens that a request must have, like 64k: what does it take?")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Requests of that length at once: what does it take?")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME", help="Force one of the profile's checkpoints.")
    ] = None,
    infra: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Where; default: what the profile says.", autocompletion=completing.places),
    ] = None,
    duration: Annotated[str | None, typer.Option(metavar="DURATION", help="Hard cap of the session, like 2h.")] = None,
    ram: Annotated[
        int | None,
        typer.Option(min=1, metavar="GIB", help="GiB of host memory, or the quota on it, for experts in host memory."),
    ] = None,
    price: Annotated[
        str | None, typer.Option(metavar="USD", help="Dollars per hour, where the figure shown is not yours.")
    ] = None,
    preemptions: Annotated[
        str | None,
        typer.Option("--preemptions-per-hour", metavar="RATE", help="A rate that you know, to price what they cost."),
    ] = None,
    api_price: Annotated[
        str | None,
        typer.Option("--api-price", metavar="USD", help="Dollars per million output tokens, for the break-even."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An engine flag, as max-model-len=16384."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="The arithmetic, line by line, with sources.")] = False,
    compare: Annotated[tuple[str, str] | None, typer.Option(metavar="A B", help="Two profiles side by side.")] = None,
    script: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="A script with `vllm serve`: it becomes a profile.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A model without a profile: owner/name@revision on the hub, or a folder; needs --gpus.",
        ),
    ] = None,
    as_profile: Annotated[
        bool, typer.Option("--as-profile", help="With --model: print a profile of it instead, to change and start.")
    ] = False,
    engine_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="With --from or --model: the version that the script is for, or to plan with."
        ),
    ] = None,
    lock: Annotated[
        bool, typer.Option("--lock", help="Print kimisession.lock.toml: the stack, image to flags.")
    ] = False,
    manifests: Annotated[
        bool, typer.Option("--manifests", help="Print Kubernetes manifests: volume, download, serve.")
    ] = False,
    json: JsonOpt = False,
) -> None:
    """Know before you pay: fit, flags, stack, minutes, dollars.

    Nothing is rented, and nothing is asked of the network but the sizes of a --model that was never read before.
    Exit code 5: it would not start.

    Examples:

      kimisession plan kimi-k2.5 --context 64k

      kimisession plan --from serve.sh > mine.toml
    """
    from kimisession.cli.planning import PlanOptions, parse_sets, parse_tokens, run_compare, run_plan
    from kimisession.settings import settings

    if int4 and profile not in (None, "kimi-k2.5", "kimi-k2.5-int4"):
        raise UsageMistake(f"--int4 is a form of kimi-k2.5, not of {profile}", "leave one of the two out")
    if engine_version and not (model or script):
        raise UsageMistake("--engine-version belongs to --from or --model", "a profile pins its own; leave it out")
    if as_profile and not model:
        raise UsageMistake("--as-profile belongs to --model", "kimisession plan --model OWNER/NAME --gpus H200:8")
    only_one({"a profile": profile or int4, "--compare": compare, "--from": script, "--model": model})
    only_one({"--lock": lock, "--manifests": manifests, "--as-profile": as_profile, "--json": json})
    only_one({"--lock": lock, "--manifests": manifests, "--as-profile": as_profile, "--explain": explain})
    only_one({"--lock": lock, "--manifests": manifests, "--explain": explain, "--compare": compare})
    only_one({"--lock": lock, "--manifests": manifests, "--explain": explain, "--from": script})
    said = {} if model or script or compare else {key: setting.value for key, setting in settings().items()}
    options = PlanOptions(
        profile="kimi-k2.5-int4" if int4 else profile or said.get("profile") or "kimi-k2.5",
        infra=infra or said.get("infra"),
        gpus=gpus or said.get("gpus"),
        context=parse_tokens("context", context),
        concurrency=concurrency,
        checkpoint=checkpoint,
        sets=parse_sets(sets),
        duration_s=_duration("duration", duration or said.get("duration")),
        ram_gib=ram,
        price_usd=_dollars("price", price or said.get("price")),
        preemptions_per_hour=rate("preemptions-per-hour", preemptions),
        api_usd_per_million=_dollars("api-price", api_price),
        explain=explain,
        json=json,
        lock=lock,
        manifests=manifests,
        as_profile=as_profile,
    )
    if model:
        from kimisession.cli.any_model import run_model

        run_model(model, engine_version, options)
    elif script:
        from kimisession.cli.scripts import run_script

        run_script(script, engine_version, options)
    elif compare:
        run_compare(*compare, options)
    else:
        run_plan(options)


def quota(
    profile: Annotated[
        str, typer.Argument(help="For which machine.", autocompletion=completing.profile_names)
    ] = "kimi-k2.5",
    gpus: Annotated[str | None, typer.Option(metavar="TYPE:N", help="For other devices, like H200:8.")] = None,
    region: Annotated[str | None, typer.Option(metavar="REGION", help="Only there.")] = None,
    project: ProjectOpt = "",
    json: JsonOpt = False,
) -> None:
    """Show the GPU quotas that a profile needs, and how to ask.

    Exit code 3: no region has enough.

    Example: kimisession quota kimi-k2.5 --region us-central1
    """
    from kimisession.cli.quotas import run_quota

    run_quota(profile, gpus, region, project, json)
