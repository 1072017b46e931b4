"""What the shell completes: names of sessions, profiles and places. Never fails, asks nobody, and loads next to nothing."""

from pathlib import Path

from kimisession.paths import config_home, state_home

#: As many sessions that are gone are offered where those count as well.
_NEWEST = 50

PLACES = ("gcp", "kubernetes", "local", "slurm")


def live_sessions(incomplete: str) -> list[str]:
    """Names of sessions that may cost money, newest first."""
    return _sessions("live = 1", incomplete)


def all_sessions(incomplete: str) -> list[str]:
    """Names of sessions, newest first, those that are gone as well."""
    return _sessions("1", incomplete)


def _sessions(which: str, incomplete: str) -> list[str]:
    import sqlite3  # --help is faster without it

    path = state_home() / "ledger.db"
    try:
        ledger = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=0.2)
        try:
            sql = f"SELECT name FROM sessions WHERE {which} ORDER BY live DESC, requested_at DESC LIMIT {_NEWEST}"  # noqa: S608
            names = [str(name) for (name,) in ledger.execute(sql)]
        finally:
            ledger.close()
    except sqlite3.Error:
        return []
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def profile_names(incomplete: str) -> list[str]:
    """Names of profiles: the package's and the user's own."""
    folders = (Path(__file__).parent.parent / "profiles", config_home() / "profiles")
    names = {path.stem for folder in folders for path in folder.glob("*.toml")}
    return sorted(name for name in names if name.startswith(incomplete))


def places(incomplete: str) -> list[str]:
    """Values of --infra."""
    return [place for place in PLACES if place.startswith(incomplete)]


def help_words(incomplete: str) -> list[str]:
    """Topics of `kimisession help`."""
    from kimisession.cli.topics import TOPICS

    return [topic for topic in TOPICS if topic.startswith(incomplete)]


def schema_names(incomplete: str) -> list[str]:
    """Commands that have a schema."""
    from kimisession.cli.schemas import names

    return [name for name in names() if name.startswith(incomplete)]
