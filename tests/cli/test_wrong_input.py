"""Wrong input gets one sentence with the next step, the documented exit code, and nothing is created."""

import json
import os
import re
import shutil
import socket
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from command_line import Home, Said
from good_values import requested

from kimisession.rehearsal.standin_model import make_standin_model

PROFILE = (Path(__file__).parents[2] / "kimisession" / "profiles" / "rehearsal.toml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data home with the weights of the rehearsal."""
    home = Home(tmp_path_factory.mktemp("seeded"))
    make_standin_model(home.folder / "model", shards=1, shard_bytes=5000)
    said = home.type("seed", "rehearsal", "--from", str(home.folder / "model"), "--json")
    assert said.code == 0, said.err
    return home.data


@pytest.fixture
def home(tmp_path: Path, seeded: Path) -> Iterator[Home]:
    """A home whose weights are seeded. Whatever a test did there, nothing may have been created."""
    home = Home(tmp_path)
    shutil.copytree(seeded, home.data)
    yield home
    assert home.machines() == []


def refused(said: Said, code: int, sentence: str, hint: str) -> None:
    """One sentence, one next step, the code, and no traceback."""
    assert said.code == code, said.err
    assert re.search(sentence, said.sentence), said.sentence
    assert re.search(hint, said.hint), said.hint
    assert "Traceback" not in said.err
    assert said.out == ""
    lines = said.err.splitlines()
    assert [line.partition(":")[0] for line in lines[-2:]] == ["error", "next"]
    assert len(said.sentence) < 300


START = ("start", "rehearsal", "-y")
TYPED = {
    "an unknown profile": (("start", "kimi-k25", "-y"), 2, r"no profile 'kimi-k25'", r"did you mean kimi-k2\.5\?"),
    "a profile like none": (("start", "zzz", "-y"), 2, r"no profile 'zzz'", r"`kimisession profiles` lists them"),
    "a profile to show": (("profiles", "rehersal"), 2, r"no profile 'rehersal'", r"did you mean rehearsal\?"),
    "a profile to seed": (("seed", "rehersal", "--from", "."), 2, r"no profile 'rehersal'", r"rehearsal"),
    "an idle time": ((*START, "--idle", "5x"), 2, r"--idle: '5x' is not a duration", r"--idle 20m"),
    "an empty name": ((*START, "--name", ""), 2, r"--name: .. cannot name a session", r"start --help"),
    "a version of a profile's engine": (("plan", "--engine-version", "0.15"), 2, r"belongs to --from or --model", r"leave it out"),
    "no time at all": ((*START, "--duration", "0s"), 2, r"--duration: '0s' is no time", r"--duration 20m"),
    "a week and a day": ((*START, "--duration", "192h"), 2, r"longer than a week", r"--duration"),
    "past the longest": ((*START, "--duration", "1h"), 2, r"longer than the 10m", r"--help"),
    "a budget too small": ((*START, "--budget", "4.32"), 4, r"\$4\.32 does not reach ten minutes at \$26", r"--budget 4\."),
    "no money": ((*START, "--budget", "much"), 2, r"--budget: 'much' is not an amount", r"--budget 60"),
    "a debt": ((*START, "--budget", "-5"), 2, r"--budget: '-5' is not an amount", r"--budget 60"),
    "all money": ((*START, "--budget", "1e999999"), 2, r"--budget: '1e999999' is not an amount", r"--budget 60"),
    "no price": ((*START, "--price", "NaN"), 2, r"--price: 'NaN' is not an amount", r"--price 60"),
    "next to no price": ((*START, "--price", "1e-9999", "--budget", "1"), 2, r"--price: ", r"--price 60"),
    "a budget without end": ((*START, "--price", "0", "--budget", "5"), 2, r"at \$0\.00 an hour .* never spent", r"--price"),
    "a flag without a value": ((*START, "--set", "max-model-len"), 2, r"--set: .* is not NAME=VALUE", r"max-model-len=\d+"),
    "a flag without a name": ((*START, "--set", "=5"), 2, r"--set: '=5' is not NAME=VALUE", r"--set"),
    "unknown GPUs": ((*START, "--gpus", "H9000:8"), 2, r"--gpus: 'H9000' is not an accelerator", r"start --help"),
    "no number of GPUs": ((*START, "--gpus", "CPU:many"), 2, r"--gpus: 'CPU:many' has no count", r"start --help"),
    "no GPUs": ((*START, "--gpus", "CPU:0"), 2, r"--gpus: 'CPU:0' has no count", r"start --help"),
    "a name that is none": ((*START, "--name", "Demo 1"), 2, r"--name: 'Demo 1' cannot name a session", r"start --help"),
    "a name with a dash last": ((*START, "--name", "demo-"), 2, r"--name: 'demo-' cannot name", r"start --help"),
    "a path for a name": ((*START, "--name", "../x"), 2, r"--name: '\.\./x' cannot name a session", r"start --help"),
    "a place that is none": ((*START, "--infra", "moon"), 2, r"'moon' is not a place", r"--infra"),
    "GPUs without weights": ((*START, "--gpus", "H100:8"), 2, r"--gpus: .* no checkpoint for hopper", r"start --help"),
    "a checkpoint": ((*START, "--checkpoint", "fp1"), 2, r"has no checkpoint 'fp1'; it has stand-in", r"start --help"),
    "no terminal": (("start", "rehearsal"), 2, r"there is no terminal to ask", r"add --yes; nothing was created"),
    "int4 of another": (("start", "rehearsal", "--int4"), 2, r"--int4 is a form of kimi-k2\.5", r"leave one"),
    "a session to stop": (("stop", "nobody"), 2, r"there is no session 'nobody'", r"status --all"),
    "a session to extend": (("extend", "30m", "nobody"), 2, r"there is no session 'nobody'", r"status --all"),
    "an extension": (("extend", "soon", "nobody"), 2, r"'soon' is not a duration", r"20m"),
    "no session": (("connect",), 2, r"no session is running", r"kimisession start"),
    "no session to log": (("logs",), 2, r"no session is running", r"kimisession start"),
    "no folder to seed": (("seed", "rehearsal", "--from", "/none"), 2, r"/none", r"--from|folder"),
    "nobody to confirm": (("seed", "rehearsal", "--delete"), 2, r"asks for the bucket's name", r"add --name"),
    "another bucket's name": (("seed", "rehearsal", "--delete", "--name", "x"), 1, r"nothing was deleted", r"its name is"),
    "memory that nothing goes by": (("plan", "--ram", "900"), 2, r"kimi-k2\.5 keeps no experts in host memory", r"leave --ram out"),
    "memory for neither": (("plan", "--compare", "kimi-k2.5", "rehearsal", "--ram", "9"), 2, r"neither kimi-k2\.5 nor", r"--ram"),
    "two forms of one plan": (("plan", "--lock", "--manifests"), 2, r"--lock and --manifests do not go together", r"leave one"),
    "a plan of two things": (("plan", "kimi-k2.5", "--from", "x"), 2, r"a profile and --from do not go", r"leave one"),
    "a profile of no model": (("plan", "--as-profile"), 2, r"--as-profile belongs to --model", r"plan --model"),
    "a rate": (("plan", "--preemptions-per-hour", "often"), 2, r"'often' is not a rate", r"--preemptions-per-hour 0\.1"),
    "no script": (("plan", "--from", "/none"), 2, r"--from: /none: No such file", r"script"),
    "GPUs for a CPU": (("quota", "rehearsal"), 2, r"runs on a CPU: it needs no GPU quota", r"plan rehearsal"),
    "a cap moved back": (("extend", "-5m"), 2, r"only ever moved on", r"extend 20m"),
    "an engine to rehearse": (("rehearse", "--engine", "gpt"), 2, r"'gpt' is neither standin nor vllm", r"standin"),
}  # fmt: skip


@pytest.mark.parametrize("what", TYPED)
def test_what_cannot_be_meant_is_told_in_one_sentence(home: Home, what: str) -> None:
    words, code, sentence, hint = TYPED[what]
    refused(home.type(*words), code, sentence, hint)
    assert home.live() == []


UNPARSED = {
    "a port too large": (("start", "--port", "70000"), r"^--port: .*65535", r"kimisession start --help"),
    "a port that is a word": (("start", "--port", "http"), r"^--port: ", r"kimisession start --help"),
    "a port without a number": (("start", "--port"), r"^--port needs a value", r"kimisession start --help"),
    "a misspelt command": (("strat",), r"no command 'strat', did you mean .*'start'", r"kimisession --help"),
    "a misspelt option": (("status", "--wacth"), r"no option --wacth, did you mean --watch\?", r"kimisession status --help"),
    "an option of all commands": (("status", "-q"), r"^-q goes before the command$", r"kimisession -q status$"),
    "a number too small": (("cost", "--last", "0"), r"^--last: .*1", r"kimisession cost --help"),
    "a word that is none of two": (("bench", "--thinking", "maybe"), r"^--thinking: 'maybe' is not one of", r"bench --help"),
    "nothing to add": (("extend",), r"the argument DURATION is missing", r"kimisession extend --help"),
    "a word too many": (("stop", "a", "b"), r"one word too many: b", r"kimisession stop --help"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNPARSED)
def test_what_cannot_be_parsed_is_one_sentence_and_the_help_to_look_at(home: Home, what: str) -> None:
    words, sentence, hint = UNPARSED[what]
    said = home.type(*words)
    refused(said, 2, sentence, hint)
    assert len(said.err.splitlines()) == 2
    assert home.live() == []


def test_a_group_without_a_command_shows_its_help(home: Home) -> None:
    for words in ((), ("config",)):
        said = home.type(*words)
        assert (said.code, said.err) == (2, "")
        assert said.out.startswith("Usage: kimisession")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("idle", "soon", "'soon' is not a duration"),
        ("budget", "much", "'much' is not an amount of dollars"),
        ("gpus", "H9000:8", "'H9000' is not an accelerator"),
        ("infra", "moon", "'moon' is not a place"),
        ("profile", "kimi", "there is no profile 'kimi'"),
        ("webhook_file", "/none", "'/none' is no file"),
        ("engine_python", "/none", "'/none' is no program"),
    ],
)
def test_a_setting_that_no_command_could_use_is_named_and_the_others_are_shown(
    home: Home, key: str, value: str, why: str
) -> None:
    said = home.type("config", "show", "--origin", **{f"KIMISESSION_{key.upper()}": value})
    assert said.code == 2
    assert said.sentence.startswith(f"{key}, from KIMISESSION_{key.upper()}: {why}")
    assert f"WRONG: {why}" in said.out
    assert "hard cap of a session" in said.out
    data = json.loads(home.type("config", "show", "--json", **{f"KIMISESSION_{key.upper()}": value}).out)["data"]
    assert data["settings"][key]["mistake"].startswith(why)


def test_a_cap_in_a_misspelled_variable_is_refused_by_start_and_told_by_stop(home: Home) -> None:
    typo = {"KIMISESSION_BUGDET": "5"}
    refused(home.type(*START, **typo), 2, r"KIMISESSION_BUGDET is not a setting", r"unset KIMISESSION_BUGDET")
    assert "did you mean KIMISESSION_BUDGET?; going on without settings" in home.type("status", **typo).err


def test_a_port_in_use_is_told_before_anything_is_rented(home: Home) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = home.type(*START, "--port", str(port))
    refused(said, 5, rf"port {port} on 127\.0\.0\.1 is in use", r"another with --port")
    assert home.live() == []


def test_weights_that_are_not_seeded_are_told_with_the_command_that_seeds_them(home: Home) -> None:
    shutil.rmtree(home.data)
    refused(home.type(*START), 5, r"is not seeded", r"kimisession seed rehearsal")
    assert home.live() == []


def test_weights_with_one_wrong_byte_are_refused(home: Home) -> None:
    (shard,) = [path for path in home.data.rglob("*.safetensors") if path.is_file()]
    shard.chmod(0o600)
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    refused(home.type(*START), 5, r"crc32c|sha256", r"kimisession seed rehearsal")
    assert home.live() == []


def test_weights_that_are_cut_short_are_refused(home: Home) -> None:
    (shard,) = [path for path in home.data.rglob("*.safetensors") if path.is_file()]
    shard.chmod(0o600)
    os.truncate(shard, 100)
    refused(home.type(*START), 5, r"has 100 bytes, not \d+", r"kimisession seed rehearsal")


def test_a_name_that_another_profile_has_is_refused_and_its_session_lives_on(home: Home) -> None:
    store = home.store()
    event = requested(datetime.now(UTC), name="demo", profile="another", infra="local")
    store.append("demo-0123abcd", [event])
    store.claim("demo-0123abcd")  # somebody is making it right now
    said = home.type(*START, "--name", "demo")
    store.unclaim("demo-0123abcd")
    store.close()
    refused(
        said,
        2,
        r"session demo exists already and runs profile another",
        r"another --name, or run: kimisession stop demo",
    )
    assert [row.session for row in home.live()] == ["demo-0123abcd"]


@pytest.mark.parametrize("words", [START, ("status",), ("cost",), ("stop", "--all")], ids=" ".join)
def test_a_ledger_of_a_newer_version_is_refused_and_left_alone(home: Home, words: tuple[str, ...]) -> None:
    home.store().close()
    path = home.state / "ledger.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    before = path.read_bytes()
    refused(
        home.type(*words),
        1,
        r"was written by a newer kimisession \(format 99, this one knows 1\)",
        r"upgrade kimisession",
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize("words", [START, ("status",)], ids=" ".join)
def test_a_state_folder_that_cannot_be_written_is_told_with_the_variable_that_moves_it(
    home: Home, words: tuple[str, ...]
) -> None:
    home.state.write_text("a file in the way")
    refused(home.type(*words), 1, r"the ledger .*state/ledger\.db cannot be used", r"KIMISESSION_STATE_HOME")
    home.state.unlink()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_state_folder_without_permission_is_told_alike(home: Home) -> None:
    home.state.mkdir(mode=0o500)
    refused(home.type(*START), 1, r"cannot be used", r"KIMISESSION_STATE_HOME")


OWN_PROFILES = {
    "a misspelt key": ("idle = ", "idel = ", r"limits\.idel is not a key here, did you mean idle\?"),
    "a wrong duration": ('idle = "6s"', 'idle = "6 moons"', r"limits\.idle: '6 moons' is not a duration"),
    "a number that is none": ("max-model-len = 8192", "max-model-len = []", r"engine\.flags|max-model-len"),
    "a wrong type": ("bytes = 16777216", 'bytes = "many"', r"checkpoints\.0\.bytes: "),
    "an unknown accelerator": ('["CPU:1"]', '["CPU:1", "TPU:8"]', r"hardware\.accelerators\.1: 'TPU'"),
    "a missing table": ("[price]", "[prices]", r"prices is not a key here, did you mean price\?"),
    "no TOML": ("[model]", "[model", r"this is not TOML"),
}


@pytest.mark.parametrize("what", OWN_PROFILES)
def test_a_mistake_in_ones_own_profile_is_told_with_file_and_key(home: Home, what: str) -> None:
    old, new, sentence = OWN_PROFILES[what]
    assert old in PROFILE
    mine = home.config / "profiles" / "mine.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text(PROFILE.replace(old, new, 1).replace('name = "rehearsal"', 'name = "mine"', 1))
    said = home.type("start", "mine", "-y")
    if what == "a number that is none" and said.code != 2:
        pytest.skip("an empty list is a flag's value")
    refused(said, 2, sentence, r"mend")
    assert str(mine) in said.sentence
    assert home.live() == []


def test_two_mistakes_are_told_at_once(home: Home) -> None:
    mine = home.config / "profiles" / "mine.toml"
    mine.parent.mkdir(parents=True)
    text = PROFILE.replace('name = "rehearsal"', 'name = "mine"', 1).replace('idle = "6s"', 'idle = "6 moons"')
    mine.write_text(text.replace('["CPU:1"]', '["TPU:8"]'))
    said = home.type("start", "mine", "-y")
    assert said.code == 2
    assert "limits.idle" in said.sentence
    assert "hardware.accelerators.0" in said.sentence


def test_a_dry_run_creates_nothing(home: Home) -> None:
    said = home.type("start", "rehearsal", "--dry-run", "--budget", "10")
    assert said.code == 0, said.err
    assert "dry run: nothing was created" in said.err
    assert home.live() == []


def test_a_dry_run_shows_the_quote_also_where_something_is_missing(home: Home) -> None:
    said = home.type("start", "kimi-k2.5-int4", "--infra", "local", "--gpus", "H100:8", "--dry-run")
    assert said.code in (1, 5)
    assert "worst case" in said.err
    assert said.err.index("worst case") < said.err.index("error: ")
    assert home.live() == []


def test_a_quote_names_what_the_dearest_zone_asks_when_that_is_more_than_it_counts_with(home: Home) -> None:
    quote = ("start", "kimi-k2.5-int4", "--dry-run")
    assert re.search(r"up to +\$\d\d\.\d\d/h in .*; budget and worst case go by it", home.type(*quote).err)
    assert "up to" not in home.type(*quote, "--price", "26").err


def test_debug_shows_the_traceback_that_is_otherwise_kept_away(home: Home) -> None:
    said = home.type("--debug", "stop", "nobody")
    assert said.code == 1
    assert "Traceback" in said.err


def test_a_ledger_with_a_torn_record_still_lists_and_says_so(home: Home) -> None:
    store = home.store()
    store.append("demo-0123abcd", [requested(datetime.now(UTC), name="demo", infra="local")])
    store._db.execute("INSERT INTO events (session, at, kind, body) VALUES ('demo-0123abcd', 'x', 'Ready', '{\"at')")
    store.claim("demo-0123abcd")
    said = home.type("status", "--json")
    store.close()
    assert said.code == 0, said.err
    (session,) = json.loads(said.out)["data"]
    assert len(session["damage"]) == 1
    assert "damaged record 2: Ready cannot be read" in said.err
