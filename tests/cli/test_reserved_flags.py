"""What `--set` may not change, and what a session that exists is not silently told."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from command_line import Home
from good_values import requested

from kimisession.cli.starting import parse_set
from kimisession.errors import UsageMistake


@pytest.mark.parametrize(
    "text",
    ["host=0.0.0.0", "--host=::", "ho=0.0.0.0", "api-key=x", "api_key=x", "port=1", "uds=/x", "model=m", "hf-token=x"],
)
def test_where_the_engine_listens_and_its_secrets_are_not_for_set(text: str) -> None:
    with pytest.raises(UsageMistake, match="is not for --set"):
        parse_set(text)


def test_other_flags_are() -> None:
    assert parse_set("max_model_len=16384") == ("max-model-len", "16384")


@pytest.mark.parametrize("cap", [("--duration", "3h"), ("--budget", "9"), ("--idle", "9m"), ("--port", "9")], ids=str)
def test_a_cap_typed_for_a_session_that_exists_is_refused_and_not_dropped(tmp_path: Path, cap: tuple[str, ...]) -> None:
    home = Home(tmp_path)
    store = home.store()
    store.append("demo-0123abcd", [requested(datetime.now(UTC), name="demo", profile="rehearsal", infra="local")])
    store.claim("demo-0123abcd")  # somebody is making it right now
    said = home.type("start", "rehearsal", "--name", "demo", "-y", *cap)
    store.unclaim("demo-0123abcd")
    store.close()
    assert said.code == 2
    assert f"session demo exists already, so {cap[0]} would change nothing" in said.sentence


def test_a_dry_run_of_a_session_that_exists_says_so_and_follows_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path)
    store = home.store()
    store.append("demo-0123abcd", [requested(datetime.now(UTC), name="demo", profile="rehearsal", infra="local")])
    store.claim("demo-0123abcd")
    said = home.type("start", "rehearsal", "--name", "demo", "--infra", "local", "--dry-run")
    store.unclaim("demo-0123abcd")
    store.close()
    assert (said.code, said.out) == (0, "would go on with session demo, which exists already\n")
