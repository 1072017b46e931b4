"""The published JSON Schemas: made from the types, one for each command that prints documents, and held to by what commands
print (tests/cli/test_json.py validates every document that it meets)."""

import json
import re
from pathlib import Path

import pytest
from command_line import ROOT, Home
from json_schema import mistakes

from kimisession.cli.documents import DOCUMENTS, DRAFT, schemas
from kimisession.cli.schemas import folder, names
from kimisession.errors import KimiError

GOLDEN = Path(__file__).parent / "golden"
PUBLISHED = sorted(schemas())


def test_the_published_files_are_those_of_the_types() -> None:
    assert names() == PUBLISHED, "run: python -m kimisession.cli.documents kimisession/schemas"
    for name, schema in schemas().items():
        kept = json.loads((folder() / f"{name}.json").read_text(encoding="utf-8"))
        assert kept == json.loads(json.dumps(schema)), (
            f"{name}: python -m kimisession.cli.documents kimisession/schemas"
        )
        assert kept["$schema"] == DRAFT


def test_every_command_with_json_has_a_schema() -> None:
    speaking = {path.stem for path in GOLDEN.glob("*.txt") if re.search(r"^  --json\b", path.read_text(), re.MULTILINE)}
    assert speaking
    assert speaking == set(names()) - {"error"}


def test_every_exit_code_of_an_error_is_in_its_schema() -> None:
    def codes(kind: type[KimiError]) -> set[int]:
        return {kind.exit_code}.union(*map(codes, kind.__subclasses__()))

    assert codes(KimiError) <= set(schemas()["error"]["properties"]["exit_code"]["enum"])


def test_a_schema_is_printed_for_a_command_however_it_is_spelled(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.type("schema").out.split() == names()
    for command in ("status", "config show", "config-show", "error"):
        assert json.loads(home.type("schema", command).out)["$schema"] == DRAFT
    said = home.type("schema", "statsu")
    assert (said.code, said.sentence) == (2, "there is no schema of 'statsu'")
    assert "did you mean status?" in said.hint


def test_money_times_and_missing_keys_are_told_apart() -> None:
    """The validator of these tests is no rubber stamp."""
    schema = schemas()["extend"]
    good = {"session": "a-1", "name": "a", "added_s": 60, "deadline": "2026-11-21T03:47:01Z", "latest": None}
    line = {"schema_version": 1, "kind": "extended", "data": good}
    assert mistakes(line, schema, schema) == []
    for key, wrong in (("deadline", "2026-11-21T03:47:01+01:00"), ("added_s", "60"), ("name", None), ("more", 1)):
        assert mistakes({**line, "data": {**good, key: wrong}}, schema, schema), key
    assert mistakes({**line, "data": {k: v for k, v in good.items() if k != "latest"}}, schema, schema)
    cost = schemas()["cost"]
    for usd, fine in (("0.00", True), ("1234.123456", True), ("1.1234567", False), ("1E+2", False), (1.5, False)):
        data = {"sessions": [], "usd": usd, "count": 0, "weeks": [], "profiles": [], "storage": None}
        costs = {"schema_version": 1, "kind": "costs", "data": data}
        assert (mistakes(costs, cost, cost) == []) is fine, usd


@pytest.mark.parametrize("words", [("stop", "nobody"), ("start", "--port", "http"), ("start", "zzz", "-y"), ("strat",)])
def test_an_error_under_json_is_one_object_on_standard_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    said = Home(tmp_path).type(*words, "--json")
    assert (said.code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    error = json.loads(line)
    schema = schemas()["error"]
    assert mistakes(error, schema, schema) == []
    assert error["exit_code"] == 2
    assert error["hint"]


def test_every_kind_of_document_that_is_printed_is_described() -> None:
    kinds = {kind for of_command in DOCUMENTS.values() for kind in of_command}
    printed = set()
    for path in (ROOT / "kimisession").rglob("*.py"):
        printed |= set(re.findall(r'as_json\(\s*"([\w-]+)"', path.read_text(encoding="utf-8")))
    assert printed == kinds
