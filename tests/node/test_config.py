"""What the keeper is told: read whole or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
from good_values import NOON, PROFILE, choices

from kimisession.core.quote import launch_spec, make_quote
from kimisession.node.config import Config, fill, from_json, load

GOOD: dict[str, Any] = json.loads(launch_spec(make_quote(PROFILE, choices(), NOON), "demo-1", "me").node_config())


def test_a_good_config_is_read_from_a_machines_folder(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(GOOD))
    config = load(tmp_path)
    assert (config.session, config.idle_s, config.steps[-1].name) == ("demo-1", 1200, "weights")
    assert config.engine.port == 8000


@pytest.mark.parametrize("key", GOOD)
def test_a_config_without_one_of_its_keys_is_refused(key: str) -> None:
    without = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises((KeyError, TypeError)):
        from_json(json.dumps(without))


def test_a_config_with_a_key_that_this_keeper_does_not_know_is_refused() -> None:
    """Better no engine than a limit that somebody set and nobody keeps."""
    with pytest.raises(TypeError, match="moon_s"):
        from_json(json.dumps({**GOOD, "moon_s": 5}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"'])
def test_what_is_no_config_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        from_json(text)


def test_every_limit_is_a_number_of_seconds_or_a_moment() -> None:
    config: Config = from_json(json.dumps(GOOD))
    for name in Config.__dataclass_fields__:
        if name.endswith(("_s", "_utc")) and name != "budget_utc":
            assert float(getattr(config, name)) > 0, name


def test_the_machines_own_paths_are_filled_in_and_nothing_else() -> None:
    argv = ("@{python}", "--model", "@{disk}/model", "--port=@{port}", "@{unheard}", "a@b", "{port}", "@{port}@{port}")
    values = {"python": "/usr/bin/python3", "disk": "/mnt", "port": "8000"}
    assert fill(argv, values) == [
        "/usr/bin/python3",
        "--model",
        "/mnt/model",
        "--port=8000",
        "@{unheard}",
        "a@b",
        "{port}",
        "80008000",
    ]


def test_a_filled_in_value_is_not_filled_in_again() -> None:
    assert fill(("@{disk}",), {"disk": "@{port}", "port": "1"}) == ["@{port}"]
