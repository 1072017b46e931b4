"""Arguments and options that several commands have."""

from typing import Annotated

import typer

from kimisession.cli import completing

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
ProjectOpt = Annotated[
    str, typer.Option(metavar="NAME", help="Google Cloud project; default: that of your credentials.")
]
