"""`kimisession config show`."""

from dataclasses import asdict

from kimisession.cli import show
from kimisession.paths import buckets_home, config_home, state_home
from kimisession.settings import KNOWN, settings


def show_config(origin: bool, json: bool) -> None:
    """Every setting, its value, and with `origin` who said so."""
    found = settings()
    places = {"state": state_home(), "config": config_home(), "buckets": buckets_home()}
    if json:
        data = {"settings": {k: asdict(s) for k, s in found.items()}, "places": {k: str(v) for k, v in places.items()}}
        show.as_json("config", data)
        return
    head = ("SETTING", "VALUE", "FROM", "WHAT FOR") if origin else ("SETTING", "VALUE", "WHAT FOR")
    rows = []
    for key, what in KNOWN.items():
        value = found[key].value or "-"
        rows.append((key, value, found[key].origin or "-", what) if origin else (key, value, what))
    show.table(head, rows)
    show.out()
    show.pairs([(name, str(path)) for name, path in places.items()])
    show.next_step(f"edit {config_home() / 'config.toml'}, or ./kimisession.toml, or set KIMISESSION_<SETTING>")
