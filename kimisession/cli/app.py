"""The commands. Each is a paragraph: parse, build, call, render. Heavy imports stay inside the functions.

Exit codes: 0 ok, 1 error, 2 usage, 3 no capacity or quota, 4 budget refused, 5 does not fit, 6 engine failed,
7 leak suspected (outranks all others), 124 timeout, 130 Ctrl-C. See kimisession/errors.py.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from kimisession import __version__
from kimisession.cli import completing, show
from kimisession.cli.amounts import dollars as _dollars
from kimisession.cli.amounts import duration as _duration
from kimisession.errors import Interrupted, KimiError, LeakSuspected, UsageMistake

app = typer.Typer(
    name="kimisession",
    help="Ephemeral GPU sessions with trillion-parameter open-weight models.\n\n"
    "Start one, work against an OpenAI-compatible endpoint, walk away: it ends by itself, nothing is left running, "
    "and `kimisession cost` says what it took.",
    epilog="First time here? `kimisession rehearse` plays a whole session on this machine, without GPU, cloud or bill.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NameArg = Annotated[
    str | None,
    typer.Argument(
        help="The session; may be left out while there is only one.", autocompletion=completing.live_sessions
    ),
]
AnyNameArg = Annotated[
    str | None, typer.Argument(help="The session; default: the live one.", autocompletion=completing.all_sessions)
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print JSON (money as strings, times in UTC).")]
DryOpt = Annotated[bool, typer.Option("--dry-run", help="Say what would happen and change nothing.")]
YesOpt = Annotated[bool, typer.Option("--yes", "-y", help="Skip the question, never the caps.")]


def _version(wanted: bool) -> None:
    if wanted:
        show.out(f"kimisession {__version__}")
        raise typer.Exit


@app.callback()
def common(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only data and errors.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colour (NO_COLOR works too).")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of one sentence.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""
    show.SETTINGS.quiet, show.SETTINGS.colour, show.SETTINGS.debug = quiet, not no_color, debug
    show.follow_progress()


@app.command()
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


@app.command()
def plan(
    profile: Annotated[
        str | None,
        typer.Argument(
            help="A profile, or a file with one; default kimi-k2.5.", autocompletion=completing.profile_names
        ),
    ] = None,
    int4: Annotated[bool, typer.Option("--int4", help="The kimi-k2.5-int4 profile.")] = False,
    gpus: Annotated[str | None, typer.Option(help="On other devices, like H200:8.")] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens that a request must have, like 64k: what does it take?")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests of that length at once: what does it take?")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Force one of the profile's checkpoints.")] = None,
    infra: Annotated[
        str | None, typer.Option(help="Where; default: what the profile says.", autocompletion=completing.places)
    ] = None,
    duration: Annotated[str | None, typer.Option(help="Hard cap of the session, like 2h.")] = None,
    ram: Annotated[
        int | None, typer.Option(min=1, help="GiB of host memory, or the quota on it, for experts in host memory.")
    ] = None,
    price: Annotated[str | None, typer.Option(help="Dollars per hour, where the figure shown is not yours.")] = None,
    preemptions: Annotated[
        str | None, typer.Option("--preemptions-per-hour", help="A rate that you know, to price what they cost.")
    ] = None,
    api_price: Annotated[
        str | None, typer.Option("--api-price", help="Dollars per million output tokens, for the break-even.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="An engine flag over the profile's, like max-model-len=16384.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="The arithmetic, line by line, with sources.")] = False,
    compare: Annotated[tuple[str, str] | None, typer.Option(metavar="A B", help="Two profiles side by side.")] = None,
    script: Annotated[
        Path | None, typer.Option("--from", help="A script with `vllm serve`: it becomes a profile.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model without a profile: owner/name@revision on the hub, or a folder; needs --gpus."),
    ] = None,
    as_profile: Annotated[
        bool, typer.Option("--as-profile", help="With --model: print a profile of it instead, to change and start.")
    ] = False,
    engine_version: Annotated[
        str | None, typer.Option(help="With --from or --model: the version that the script is for, or to plan with.")
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

    if int4 and profile not in (None, "kimi-k2.5", "kimi-k2.5-int4"):
        raise UsageMistake(f"--int4 is a form of kimi-k2.5, not of {profile}", "leave one of the two out")
    if engine_version and not (model or script):
        raise UsageMistake("--engine-version belongs to --from or --model", "a profile pins its own; leave it out")
    options = PlanOptions(
        profile="kimi-k2.5-int4" if int4 else profile or "kimi-k2.5",
        infra=infra,
        gpus=gpus,
        context=parse_tokens("context", context),
        concurrency=concurrency,
        checkpoint=checkpoint,
        sets=parse_sets(sets),
        duration_s=_duration("duration", duration),
        ram_gib=ram,
        price_usd=_dollars("price", price),
        preemptions_per_hour=_dollars("preemptions-per-hour", preemptions),
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


@app.command()
def seed(
    profile: Annotated[
        str, typer.Argument(help="Whose weights.", autocompletion=completing.profile_names)
    ] = "kimi-k2.5",
    source: Annotated[
        str | None,
        typer.Option("--from", help="A folder with the weights, or hub:OWNER/NAME. Default: the profile's repository."),
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Which of the profile's checkpoints.")] = None,
    revision: Annotated[str | None, typer.Option(help="A commit, or a branch that is resolved to one, once.")] = None,
    bucket: Annotated[
        str | None, typer.Option(help="Where to: gs://NAME or file:///folder. Default: a folder of your own.")
    ] = None,
    region: Annotated[
        str | None, typer.Option(help="Make the bucket there, where the GPUs will be, unless it exists.")
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Send it from this machine; no byte touches its disk.")] = False,
    infra: Annotated[str | None, typer.Option(help="Where to rent the machine that sends it; default: gcp.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="vCPUs of that machine; default: 16.")] = None,
    duration: Annotated[str | None, typer.Option(help="Its hard cap, like 3h; default: 6h.")] = None,
    budget: Annotated[str | None, typer.Option(help="Its dollar cap.")] = None,
    price: Annotated[
        str | None, typer.Option(help="Its dollars per hour, where the figure shown is not yours.")
    ] = None,
    unguarded: Annotated[
        bool, typer.Option("--unguarded", help="Although no reaper would end it from outside (kimisession guard).")
    ] = False,
    yes: YesOpt = False,
    verify: Annotated[bool, typer.Option("--verify", help="Only read everything back and compare.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the seeded weights; asks for the name.")] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="With --delete: the bucket's name, instead of asking.")
    ] = None,
    dry_run: DryOpt = False,
    json: JsonOpt = False,
) -> None:
    """Put weights into a bucket, sealed and checksummed.

    Into gs:// a rented spot machine without GPUs sends them, after a quote and a question, and goes away; Ctrl-C leaves it
    running, the same command comes back to it. With --here this machine sends them.
    May be broken off at any moment and started again, here or elsewhere: finished files are not sent twice.
    Repositories that ask for a token: export HF_TOKEN.

    Examples:

      kimisession seed kimi-k2.5 --bucket gs://NAME --region us-central1

      kimisession seed kimi-k2.5 --here --bucket gs://NAME --region us-central1

      kimisession seed kimi-k2.5 --from /data/Kimi-K2.5

      kimisession seed kimi-k2.5 --verify --bucket gs://NAME
    """
    from kimisession.cli.seeding import SeedWords, run_seed

    run_seed(
        SeedWords(
            profile,
            source,
            checkpoint,
            revision,
            bucket,
            region,
            here,
            verify,
            delete,
            name,
            dry_run,
            json,
            infra,
            cpus,
            _duration("duration", duration),
            _dollars("budget", budget),
            _dollars("price", price),
            unguarded,
            yes,
        )
    )


@app.command()
def start(
    profile: Annotated[
        str | None, typer.Argument(help="What to run; default kimi-k2.5.", autocompletion=completing.profile_names)
    ] = None,
    int4: Annotated[
        bool, typer.Option("--int4", help="The kimi-k2.5-int4 profile: 4-bit weights, 32K context.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="The session's name; default: the profile's.")] = None,
    infra: Annotated[
        str | None,
        typer.Option(
            help="Where: gcp, slurm, kubernetes or local. Default: what the profile says.",
            autocompletion=completing.places,
        ),
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="What it may use there, like H100:8.")] = None,
    idle: Annotated[str | None, typer.Option(help="End after this long without requests, like 20m.")] = None,
    duration: Annotated[str | None, typer.Option(help="Hard cap of the whole session, like 2h.")] = None,
    budget: Annotated[str | None, typer.Option(help="Dollar cap: becomes a moment at the agreed price.")] = None,
    price: Annotated[
        str | None, typer.Option(help="Dollars per hour, where the profile's figure is not yours.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Force one of the profile's checkpoints.")] = None,
    bucket: Annotated[str | None, typer.Option(help="Where the seeded weights are.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port on loopback; default: the first free from 8000.")
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
        str | None, typer.Option(help="The Python that has the engine; default: this one.")
    ] = None,
    webhook_file: Annotated[str | None, typer.Option(help="A file with a URL that is told before the end.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="An engine flag over the profile's, like max-model-len=16384.")
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
                )
                if value is not None
            ),
            yes=yes,
            dry_run=dry_run,
            json=json,
            force_fit=force_fit,
        )
    )


@app.command()
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


@app.command()
def connect(
    name: NameArg = None,
    export: Annotated[
        bool, typer.Option("--export", help='Print exports: eval "$(kimisession connect --export)".')
    ] = False,
    thinking: Annotated[str, typer.Option(help="on, or off: show how a request switches reasoning off.")] = "on",
    json: JsonOpt = False,
) -> None:
    """Show base URL and key, with lines for curl and the OpenAI SDK.

    Example: eval "$(kimisession connect --export)"
    """
    from kimisession.cli.looking import run_connect

    if thinking not in ("on", "off"):
        raise UsageMistake(f"--thinking: {thinking!r} is neither on nor off", "kimisession connect --thinking off")
    run_connect(name, export, thinking == "on", json)


@app.command()
def logs(
    name: AnyNameArg = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the session ends.")] = False,
    run: Annotated[int | None, typer.Option(min=1, help="Of which start of the engine; default: the last.")] = None,
    folded: Annotated[bool, typer.Option("--fold", help="One line a phase instead of its progress.")] = False,
) -> None:
    """Print the engine's log; it is kept after the end.

    Example: kimisession logs -f --fold
    """
    from kimisession.cli.looking import run_logs

    run_logs(name, follow, run, folded)


@app.command("test")
def ask_three(
    name: NameArg = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Per answer; a reasoning model needs 1024 or more.")] = 1024,
    json: JsonOpt = False,
) -> None:
    """Ask three questions and time the answers.

    Example: kimisession test --max-tokens 2048
    """
    from kimisession.cli.looking import run_test

    run_test(name, max_tokens, json)


@app.command()
def bench(
    name: NameArg = None,
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each client, one after the other.")] = 3,
    concurrent: Annotated[
        list[str] | None, typer.Option(help="Requests at once, like 2 or 2,16,64; one at a time always comes first.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 128,
    thinking: Annotated[
        Literal["on", "off"] | None, typer.Option(help="Default: as the model's chat template has it.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="What to call it; default: the session's name.")] = None,
    everything: Annotated[bool, typer.Option("--list", help="What was measured so far.")] = False,
    against: Annotated[
        tuple[str, str] | None, typer.Option("--compare", help="Two benches: number, label, session's name or id.")
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


@app.command()
def extend(
    added: Annotated[str, typer.Argument(help="How much longer, like 30m.")],
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


@app.command()
def restart(
    name: NameArg = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="An engine flag, like max-model-len=16384.")] = None,
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


@app.command()
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


@app.command()
def cost(
    name: AnyNameArg = None,
    newest: Annotated[int, typer.Option("--last", min=1, help="How many sessions to list.")] = 20,
    storage: Annotated[bool, typer.Option("--storage", help="Ask the buckets what the weights cost a month.")] = False,
    json: JsonOpt = False,
) -> None:
    """List what sessions took, or print one receipt.

    Example: kimisession cost --json
    """
    from kimisession.cli.ending import run_cost

    run_cost(name, newest, json, storage)


ProjectOpt = Annotated[str, typer.Option(help="Google Cloud project; default: that of your credentials.")]


@app.command()
def sweep(
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete what is left over, and look until it is gone.")
    ] = False,
    adopt: Annotated[bool, typer.Option("--adopt", help="Let this ledger know the sessions that it does not.")] = False,
    owner: Annotated[
        str | None, typer.Option(help="Only this one's, as it stands in the labels; default: everybody's.")
    ] = None,
    project: ProjectOpt = "",
    install_timer: Annotated[
        bool, typer.Option("--install-timer", help="Sweep with --delete every 15 minutes, by systemd.")
    ] = False,
    remove_timer: Annotated[bool, typer.Option("--remove-timer", help="Do that no more.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    json: JsonOpt = False,
) -> None:
    """List what of ours exists in a project, by labels alone.

    Whoever began it, with or without this ledger. Exit code 7: something is left over.

    Examples:

      kimisession sweep

      kimisession sweep --delete -y
    """
    from kimisession.cli.sweep_timer import install, remove
    from kimisession.cli.sweeping import SweepOptions, run_sweep

    if install_timer or remove_timer:
        install(project) if install_timer else remove()
        return
    run_sweep(SweepOptions(project, owner, delete, adopt, yes, json))


guard = typer.Typer(help="The reaper: ends what all other layers forgot.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(guard, name="guard")


@guard.command("enable")
def guard_enable(
    zone: Annotated[str, typer.Option(help="Where its machine runs.")] = "us-central1-a",
    service_account: Annotated[
        str, typer.Option(help="E-mail of the account that it acts as; default: kimisession-reaper@PROJECT...")
    ] = "",
    network: Annotated[str, typer.Option(help="Of its machine.")] = "default",
    project: ProjectOpt = "",
    dry_run: DryOpt = False,
) -> None:
    """Create the reaper, or bring it up to date.

    A tiny machine, one a project, that deletes sessions past their deadline every 3 minutes.

    Example: kimisession guard enable --project my-project
    """
    from kimisession.cli.guarding import run_enable

    run_enable(project, zone, service_account, network, dry_run)


@guard.command("status")
def guard_status(project: ProjectOpt = "", json: JsonOpt = False) -> None:
    """Show when the reaper last looked. Exit code 1: not armed.

    Example: kimisession guard status
    """
    from kimisession.cli.guarding import run_status

    run_status(project, json)


@guard.command("disable")
def guard_disable(project: ProjectOpt = "", yes: YesOpt = False, dry_run: DryOpt = False) -> None:
    """Delete the reaper.

    Asks first where sessions run that nothing else outside of their machines would end, anybody's.

    Example: kimisession guard disable
    """
    from kimisession.cli.guarding import run_disable

    run_disable(project, dry_run, yes=yes)


@guard.command("permissions")
def guard_permissions(project: ProjectOpt = "", json: JsonOpt = False) -> None:
    """Name what your account lacks in the project.

    Example: kimisession guard permissions
    """
    from kimisession.cli.guarding import run_permissions

    run_permissions(project, json)


@app.command()
def quota(
    profile: Annotated[
        str, typer.Argument(help="For which machine.", autocompletion=completing.profile_names)
    ] = "kimi-k2.5",
    gpus: Annotated[str | None, typer.Option(help="For other devices, like H200:8.")] = None,
    region: Annotated[str | None, typer.Option(help="Only there.")] = None,
    project: ProjectOpt = "",
    json: JsonOpt = False,
) -> None:
    """Show the GPU quotas that a profile needs, and how to ask.

    Exit code 3: no region has enough.

    Example: kimisession quota kimi-k2.5 --region us-central1
    """
    from kimisession.cli.quotas import run_quota

    run_quota(profile, gpus, region, project, json)


config = typer.Typer(help="Show settings, and where each is from.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config, name="config")


@config.command("show")
def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="Say which file or variable won.")] = False,
    json: JsonOpt = False,
) -> None:
    """List every setting and its value.

    What wins: flag > KIMISESSION_* > ./kimisession.toml > config.toml > default.

    A value that no command could use is named, with exit code 2.

    Example: kimisession config show --origin
    """
    from kimisession.cli.configuring import show_config

    show_config(origin, json)


@app.command()
def rehearse(
    engine: Annotated[
        str, typer.Option(help="standin, or vllm (needs the CPU build: make rehearse ENGINE=vllm).")
    ] = "standin",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with ledger, logs and bucket.")] = False,
    sets: Annotated[list[str] | None, typer.Option("--set", hidden=True, help="Passed to start: faults, say.")] = None,
) -> None:
    """Play a whole session here: no GPU, no cloud, no bill.

    Uses the real commands on a ledger of its own, and leaves nothing behind.

    Example: kimisession rehearse --keep
    """
    from kimisession.cli.rehearsing import run_rehearse

    run_rehearse(engine, keep, tuple(sets or ()))


@app.command("schema")
def print_schema(
    command: Annotated[
        str | None, typer.Argument(help="Of which command's --json.", autocompletion=completing.schema_names)
    ] = None,
) -> None:
    """Print the JSON Schema of what a command's --json prints.

    Example: kimisession schema status
    """
    from kimisession.cli.schemas import print_schema

    print_schema(command)


@app.command("help")
def print_help(
    topic: Annotated[
        str | None, typer.Argument(help="Which; without one they are listed.", autocompletion=completing.help_words)
    ] = None,
) -> None:
    """Explain exit codes, --json, money, settings, editors.

    Example: kimisession help exit-codes
    """
    from kimisession.cli.topics import print_topic

    print_topic(topic)


#: What the parser raises for words that it cannot read: a public name of typer's for the click inside it.
_CannotBeParsed: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """The console script: one place where errors become a sentence and an exit code."""
    debug, show.SETTINGS.json = "--debug" in sys.argv, "--json" in sys.argv
    try:
        code = app(prog_name="kimisession", standalone_mode=False)
        if code == Interrupted.exit_code:  # Ctrl-C where a command has nothing of its own to say
            raise Interrupted("interrupted")
        _leave(code or 0)
    except _CannotBeParsed as error:
        _cannot_be_parsed(error)
    except (KeyboardInterrupt, typer.Abort):
        show.error("interrupted", "", Interrupted.exit_code)
        sys.exit(Interrupted.exit_code)
    except KimiError as error:
        if debug:
            raise
        show.error(error.message, error.hint, error.exit_code)
        _leave(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if debug:
            raise
        show.error(
            f"{error.filename or 'the system'}: {error.strerror or error}", "free space or mend permissions, try again"
        )
        sys.exit(1)


def _leave(code: int) -> NoReturn:
    """Exit. A session that is not proven gone outranks whatever else the command has to say."""
    opening = sys.modules.get("kimisession.cli.opening")
    told = opening.not_proven_gone() if opening and code != LeakSuspected.exit_code else None
    if told:
        show.error(told.message, told.hint, told.exit_code)
    sys.exit(told.exit_code if told else code)


def _cannot_be_parsed(error: Any) -> NoReturn:
    """One sentence and the help to look at; a group without a command gets its help instead."""
    from kimisession.cli.usage import usage_sentence

    ctx = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" and ctx:
        show.out(ctx.get_help())
    else:
        show.error(*usage_sentence(error, sys.argv[1:]), UsageMistake.exit_code)
    sys.exit(UsageMistake.exit_code)


if __name__ == "__main__":
    main()
