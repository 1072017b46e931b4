"""Where things live on the user's machine: the XDG base directories, each overridable by KIMISESSION_*_HOME."""

import os
from pathlib import Path


def _home(ours: str, xdg: str, default: str) -> Path:
    own = os.environ.get(ours)
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get(xdg)
    return (Path(base) if base else Path.home() / default) / "kimisession"


def state_home() -> Path:
    """Ledger, keys, machines of the local engine."""
    return _home("KIMISESSION_STATE_HOME", "XDG_STATE_HOME", ".local/state")


def config_home() -> Path:
    """`config.toml` and the user's own profiles."""
    return _home("KIMISESSION_CONFIG_HOME", "XDG_CONFIG_HOME", ".config")


def data_home() -> Path:
    """Local buckets."""
    return _home("KIMISESSION_DATA_HOME", "XDG_DATA_HOME", ".local/share")


def cache_home() -> Path:
    """Copies of price lists: can be deleted at any time."""
    return _home("KIMISESSION_CACHE_HOME", "XDG_CACHE_HOME", ".cache")


def machines_home() -> Path:
    """Where the local engine keeps its machines: the stand-in for a cloud's list of instances."""
    return state_home() / "machines"


def rented_home() -> Path:
    """What this machine remembers of sessions on rented machines; the places themselves know the truth."""
    return state_home() / "rented"


def buckets_home() -> Path:
    """Where local buckets are made unless `--bucket` says otherwise."""
    return data_home() / "buckets"
