"""A whole cloud project: what of ours exists there, and the reaper that ends it."""

from typing import Annotated

import typer

from kimisession.cli.commands.options import DryOpt, JsonOpt, ProjectOpt


def sweep(
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete what is left over, and look until it is gone.")
    ] = False,
    adopt: Annotated[bool, typer.Option("--adopt", help="Let this ledger know the sessions that it does not.")] = False,
    owner: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this one's, as it stands in the labels; default: everybody's."),
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


def guard_enable(
    zone: Annotated[str, typer.Option(metavar="ZONE", help="Where its machine runs.")] = "us-central1-a",
    service_account: Annotated[
        str,
        typer.Option(
            metavar="EMAIL", help="E-mail of the account that it acts as; default: kimisession-reaper@PROJECT..."
        ),
    ] = "",
    network: Annotated[str, typer.Option(metavar="NAME", help="Of its machine.")] = "default",
    project: ProjectOpt = "",
    dry_run: DryOpt = False,
) -> None:
    """Create the reaper, or bring it up to date.

    A tiny machine, one a project, that deletes sessions past their deadline every 3 minutes.

    Example: kimisession guard enable --project my-project
    """
    from kimisession.cli.guarding import run_enable

    run_enable(project, zone, service_account, network, dry_run)


def guard_status(project: ProjectOpt = "", json: JsonOpt = False) -> None:
    """Show when the reaper last looked. Exit code 1: not armed.

    Example: kimisession guard status
    """
    from kimisession.cli.guarding import run_status

    run_status(project, json)


def guard_disable(
    project: ProjectOpt = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the question.")] = False,
    dry_run: DryOpt = False,
) -> None:
    """Delete the reaper.

    Asks first where sessions run that nothing else outside of their machines would end, anybody's.

    Example: kimisession guard disable
    """
    from kimisession.cli.guarding import run_disable

    run_disable(project, dry_run, yes=yes)


def guard_permissions(project: ProjectOpt = "", json: JsonOpt = False) -> None:
    """Name what your account lacks in the project.

    Example: kimisession guard permissions
    """
    from kimisession.cli.guarding import run_permissions

    run_permissions(project, json)
