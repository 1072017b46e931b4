"""Weights, before any session: into a bucket, checked there, deleted."""

from typing import Annotated

import typer

from kimisession.cli import completing
from kimisession.cli.amounts import dollars as _dollars
from kimisession.cli.amounts import duration as _duration
from kimisession.cli.commands.options import DryOpt, JsonOpt, YesOpt


def seed(
    profile: Annotated[
        str, typer.Argument(help="Whose weights.", autocompletion=completing.profile_names)
    ] = "kimi-k2.5",
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="A folder with the weights, or hub:OWNER/NAME. Default: the profile's repository.",
        ),
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(metavar="NAME", help="Which of the profile's checkpoints.")] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="COMMIT", help="A commit, or a branch that is resolved to one, once.")
    ] = None,
    bucket: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where to: gs://NAME or file:///folder. Default: a folder of your own."),
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(metavar="REGION", help="Make the bucket there, where the GPUs will be, unless it exists."),
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Send it from this machine; no byte touches its disk.")] = False,
    infra: Annotated[
        str | None, typer.Option(metavar="PLACE", help="Where to rent the machine that sends it; default: gcp.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, metavar="N", help="vCPUs of that machine; default: 16.")] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Its hard cap, like 3h; default: 6h.")
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="USD", help="Its dollar cap.")] = None,
    price: Annotated[
        str | None, typer.Option(metavar="USD", help="Its dollars per hour, where the figure shown is not yours.")
    ] = None,
    unguarded: Annotated[
        bool, typer.Option("--unguarded", help="Although no reaper would end it from outside (kimisession guard).")
    ] = False,
    yes: YesOpt = False,
    verify: Annotated[bool, typer.Option("--verify", help="Only read everything back and compare.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the seeded weights; asks for the name.")] = False,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="With --delete: the bucket's name, instead of asking.")
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
