"""The command line: which commands there are, in the order of `--help`, and what becomes of their errors.

Exit codes: 0 ok, 1 error, 2 usage, 3 no capacity or quota, 4 budget refused, 5 does not fit, 6 engine failed,
7 leak suspected (outranks all others), 124 timeout, 130 Ctrl-C. See kimisession/errors.py.

The commands are in kimisession/cli/commands. Each is a paragraph: parse, build, call, render. Heavy imports stay inside the
functions.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from kimisession import __version__
from kimisession.cli import show
from kimisession.cli.commands import about, before, project, session, weights
from kimisession.errors import Interrupted, KimiError, LeakSuspected, UsageMistake


def _narrow() -> int | None:
    """The width of help on a terminal of under 52 columns, below which the parser does not go by itself; None elsewhere."""
    width = show.columns(sys.stdout)
    return max(20, width - 2) if 0 < width < 52 else None


app = typer.Typer(
    name="kimisession",
    help="Ephemeral GPU sessions with trillion-parameter open-weight models.\n\n"
    "Start one, work against an OpenAI-compatible endpoint, walk away: it ends by itself, nothing is left running, "
    "and `kimisession cost` says what it took.",
    epilog="First time here? `kimisession rehearse` plays a whole session on this machine, without GPU, cloud or bill.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": _narrow()},
)


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


guard = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
config = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
for _group, _name, _about in (
    (guard, "guard", "The reaper: ends what all other layers forgot."),
    (config, "config", "Show settings, and where each is from."),
):
    app.add_typer(_group, name=_name, help=_about, short_help=_about)

#: Every command in the order of `--help`.
_COMMANDS: dict[typer.Typer, dict[str, Callable[..., None]]] = {
    app: {
        "profiles": before.profiles,
        "plan": before.plan,
        "seed": weights.seed,
        "start": session.start,
        "status": session.status,
        "connect": session.connect,
        "logs": session.logs,
        "test": session.ask_three,
        "bench": session.bench,
        "extend": session.extend,
        "restart": session.restart,
        "stop": session.stop,
        "cost": session.cost,
        "sweep": project.sweep,
        "quota": before.quota,
        "rehearse": about.rehearse,
        "schema": about.print_schema,
        "help": about.print_help,
    },
    guard: {
        "enable": project.guard_enable,
        "status": project.guard_status,
        "disable": project.guard_disable,
        "permissions": project.guard_permissions,
    },
    config: {"show": about.config_show},
}
for _group, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        # The whole first sentence in the list: the parser would cut it on a narrow terminal.
        _group.command(
            _name, short_help=(_command.__doc__ or "").partition("\n")[0].partition(". ")[0].rstrip(".") + "."
        )(_command)

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
