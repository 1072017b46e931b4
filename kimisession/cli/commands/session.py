"""A session from its start to its receipt."""

from typing import Annotated, Literal

import typer

from kimisession.cli import completing
from kimisession.cli.amounts import dollars as _dollars
from kimisession.cli.amounts import duration as _duration
from kimisession.cli.commands.options import AnyNameArg, DryOpt, JsonOpt, NameArg, YesOpt
from kimisession.errors import UsageMistake


def start(
    profile: Annotated[
        str | None, typer.Argument(help="What to run; default kimi-k2.5.", autocompletion=completing.profile_names)
    ] = None,
    int4: Annotated[
        bool, typer.Option("--int4", help="The kimi-k2.5-int4 profile: 4-bit weights, 32K context.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The session's name; default: the profile's.")
    ] = None,
    infra: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where: gcp, slurm, kubernetes or local. Default: what the profile says.",
            autocompletion=completing.places,
        ),
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="TYPE:N", help="What it may use there, like H100:8.")] = None,
    idle: Annotated[
        str | None, typer.Option(metavar="DURATION", help="End after this long without requests, like 20m.")
    ] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Hard cap of the whole session, like 2h.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="USD", help="Dollar cap: becomes a moment at the agreed price.")
    ] = None,
    price: Annotated[
        str | None, typer.Option(metavar="USD", help="Dollars per hour, where the profile's figure is not yours.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME", help="Force one of the profile's checkpoints.")
    ] = None,
    bucket: Annotated[str | None, typer.Option(metavar="URL", help="Where the seeded weights are.")] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="PORT", help="Port on loopback; default: the first free from 8000."),
    ] = None,
    on_demand_fallback: Annotated[
        bool,
        typer.Option(
            "--on-demand-fallback", help="Where no spot machine is to be had, take one at full price, at most --price."
        ),
    ] = False,
    recover: Annotated[
        bool,
        typer.Option("--recover", help="Go on after a machine was taken back: in the next zone, under the same caps."),
    ] = False,
    unguarded: Annotated[
        bool, typer.Option("--unguarded", help="Although no reaper would end it from outside (kimisession guard).")
    ] = False,
    engine_python: Annotated[
        str | None, typer.Option(metavar="PROGRAM", help="The Python that has the engine; default: this one.")
    ] = None,
    webhook_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="A file with a URL that is told before the end.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An engine flag, as max-model-len=16384."),
    ] = None,
    force_fit: Annotated[
        bool, typer.Option("--force-fit", help="Start although `plan` says that it will not fit.")
    ] = False,
    yes: YesOpt = False,
    dry_run: DryOpt = False,
    json: JsonOpt = False,
) -> None:
    """Start a session: quote, question, then until ready.

    A live session of that name is resumed. Ready means that one completion came back.

    Examples:

      kimisession start rehearsal -y

      kimisession start --int4 --infra local --gpus H100:8 --idle 20m --budget 60
    """
    from kimisession.cli.starting import StartOptions, run_start
    from kimisession.settings import settings

    said = {key: setting.value for key, setting in settings().items()}
    if int4 and profile not in (None, "kimi-k2.5", "kimi-k2.5-int4"):
        raise UsageMistake(f"--int4 is a form of kimi-k2.5, not of {profile}", "leave one of the two out")
    run_start(
        StartOptions(
            profile="kimi-k2.5-int4" if int4 else profile or said["profile"] or "kimi-k2.5",
            name=name,
            infra=infra or said["infra"],
            gpus=gpus or said["gpus"],
            idle_s=_duration("idle", idle or said["idle"]),
            duration_s=_duration("duration", duration or said["duration"]),
            budget_usd=_dollars("budget", budget or said["budget"]),
            price_usd=_dollars("price", price or said["price"]),
            checkpoint=checkpoint,
            bucket=bucket,
            port=port,
            engine_python=engine_python or said["engine_python"] or "",
            on_demand_fallback=on_demand_fallback,
            unguarded=unguarded,
            recover=recover,
            webhook_file=webhook_file or said["webhook_file"],
            sets=tuple(sets or ()),
            typed=tuple(
                flag
                for flag, value in (
                    ("--duration", duration),
                    ("--budget", budget),
                    ("--price", price),
                    ("--idle", idle),
                    ("--gpus", gpus),
                    ("--set", sets or None),
                    ("--infra", infra),
                    ("--checkpoint", checkpoint),
                    ("--port", port),
                )
                if value is not None
            ),
            yes=yes,
            dry_run=dry_run,
            json=json,
            force_fit=force_fit,
        )
    )


def status(
    name: AnyNameArg = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow until the session is gone.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Those that are gone as well.")] = False,
    json: JsonOpt = False,
) -> None:
    """Show what runs, its cost and what ends it next.

    With a name: also which layers are armed.

    Example: kimisession status --watch
    """
    from kimisession.cli.looking import run_status

    run_status(name, watch, everything, json)


def connect(
    name: NameArg = None,
    export: Annotated[
        bool, typer.Option("--export", help='Print exports: eval "$(kimisession connect --export)".')
    ] = False,
    thinking: Annotated[
        str, typer.Option(metavar="on|off", help="on, or off: show how a request switches reasoning off.")
    ] = "on",
    json: JsonOpt = False,
) -> None:
    """Show base URL and key, with lines for curl and the OpenAI SDK.

    Example: eval "$(kimisession connect --export)"
    """
    from kimisession.cli.looking import run_connect

    if thinking not in ("on", "off"):
        raise UsageMistake(f"--thinking: {thinking!r} is neither on nor off", "kimisession connect --thinking off")
    run_connect(name, export, thinking == "on", json)


def logs(
    name: AnyNameArg = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the session ends.")] = False,
    run: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of which start of the engine; default: the last.")
    ] = None,
    folded: Annotated[bool, typer.Option("--fold", help="One line a phase instead of its progress.")] = False,
) -> None:
    """Print the engine's log; it is kept after the end.

    Example: kimisession logs -f --fold
    """
    from kimisession.cli.looking import run_logs

    run_logs(name, follow, run, folded)


def ask_three(
    name: NameArg = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Per answer; a reasoning model needs 1024 or more.")
    ] = 1024,
    json: JsonOpt = False,
) -> None:
    """Ask three questions and time the answers.

    Example: kimisession test --max-tokens 2048
    """
    from kimisession.cli.looking import run_test

    run_test(name, max_tokens, json)


def bench(
    name: NameArg = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Requests of each client, one after the other.")] = 3,
    concurrent: Annotated[
        list[str] | None,
        typer.Option(metavar="N,N", help="Requests at once, like 2 or 2,16,64; one at a time always comes first."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of each answer.")] = 128,
    thinking: Annotated[
        Literal["on", "off"] | None, typer.Option(help="Default: as the model's chat template has it.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What to call it; default: the session's name.")
    ] = None,
    everything: Annotated[bool, typer.Option("--list", help="What was measured so far.")] = False,
    against: Annotated[
        tuple[str, str] | None,
        typer.Option("--compare", metavar="A B", help="Two benches: number, label, session's name or id."),
    ] = None,
    json: JsonOpt = False,
) -> None:
    """Measure latency, tokens per second, time to first token.

    What was measured is kept in the ledger.

    Examples:

      kimisession bench --rounds 3 --concurrent 2,16

      kimisession bench --compare kimi-k2.5 3
    """
    from kimisession.cli.benching import compare, list_benches, load_of, run_bench

    if against:
        compare(*against, json)
    elif everything:
        list_benches(json)
    else:
        run_bench(name, load_of(rounds, concurrent or ["2"], max_tokens, thinking), label, json)


def extend(
    added: Annotated[str, typer.Argument(metavar="DURATION", help="How much longer, like 30m.")],
    name: NameArg = None,
    dry_run: DryOpt = False,
    json: JsonOpt = False,
) -> None:
    """Move the hard cap, up to what the profile allows.

    Every layer is moved, the last to die first. A budget never moves.

    Example: kimisession extend 30m
    """
    from kimisession.cli.ending import run_extend

    if name and name[0].isdigit() and not added[0:1].isdigit():  # as with every other command, the name first
        added, name = name, added
    run_extend(name, _duration("", added) or 0, dry_run, json)


def restart(
    name: NameArg = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="An engine flag, as max-model-len=16384.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Back to the flags of before.")] = False,
    dry_run: DryOpt = False,
    json: JsonOpt = False,
) -> None:
    """Change engine flags on the running machine.

    Weights and caches stay. An engine that does not start with them goes back to those of before.

    Examples:

      kimisession restart --set max-model-len=16384

      kimisession restart --undo
    """
    from kimisession.cli.restarting import run_restart

    run_restart(name, tuple(sets or ()), undo, dry_run, json)


def stop(
    name: NameArg = None,
    everything: Annotated[bool, typer.Option("--all", help="Every session of this ledger.")] = False,
    dry_run: DryOpt = False,
    json: JsonOpt = False,
) -> None:
    """End a session and prove that nothing is left.

    Then the receipt. Stopping twice is fine.

    Example: kimisession stop --all
    """
    from kimisession.cli.ending import run_stop

    run_stop(name, everything, dry_run, json)


def cost(
    name: AnyNameArg = None,
    newest: Annotated[int, typer.Option("--last", min=1, metavar="N", help="How many sessions to list.")] = 20,
    storage: Annotated[bool, typer.Option("--storage", help="Ask the buckets what the weights cost a month.")] = False,
    json: JsonOpt = False,
) -> None:
    """List what sessions took, or print one receipt.

    Example: kimisession cost --json
    """
    from kimisession.cli.ending import run_cost

    run_cost(name, newest, json, storage)
