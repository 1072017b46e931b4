"""About the program itself: a rehearsal, settings, schemas, topics."""

from typing import Annotated

import typer

from kimisession.cli import completing
from kimisession.cli.commands.options import JsonOpt


def rehearse(
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="standin, or vllm (needs the CPU build: make rehearse ENGINE=vllm).")
    ] = "standin",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with ledger, logs and bucket.")] = False,
    sets: Annotated[
        list[str] | None, typer.Option("--set", hidden=True, metavar="NAME=VALUE", help="Passed to start: faults, say.")
    ] = None,
) -> None:
    """Play a whole session here: no GPU, no cloud, no bill.

    Uses the real commands on a ledger of its own, and leaves nothing behind.

    Example: kimisession rehearse --keep
    """
    from kimisession.cli.rehearsing import run_rehearse

    run_rehearse(engine, keep, tuple(sets or ()))


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
