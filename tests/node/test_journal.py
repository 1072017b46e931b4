"""The journal: lines of many writers never mix, a torn line is reported, and a full disk stops nobody."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimisession.node.journal import Journal, read_journal, utc_now

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the journal is."""
    return tmp_path / "journal.jsonl"


def test_a_line_comes_back_with_its_time_and_its_writer(path: Path) -> None:
    Journal(path, "keeper").write("phase", phase="load", state="began")
    ((line,), offset) = read_journal(path)
    assert (line["kind"], line["by"], line["phase"], line["state"]) == ("phase", "keeper", "load", "began")
    assert line["at"].endswith("Z")
    assert offset == path.stat().st_size


def test_a_reader_goes_on_where_it_was(path: Path) -> None:
    journal = Journal(path, "keeper")
    journal.write("one")
    _, offset = read_journal(path)
    journal.write("two")
    lines, end = read_journal(path, offset)
    assert [line["kind"] for line in lines] == ["two"]
    assert read_journal(path, end) == ([], end)


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(path: Path) -> None:
    path.write_bytes(b'{"kind": "one"}\n{"kind": "tw')
    lines, offset = read_journal(path)
    assert [line["kind"] for line in lines] == ["one"]
    with path.open("ab") as file:
        file.write(b'o"}\n')
    assert read_journal(path, offset)[0] == [{"kind": "two"}]


@pytest.mark.parametrize("line", [b"{torn", b"", b"[]", b"null", b'{"kind": 5}', b'{"at": "now"}', b"\xff\xfe\x00"])
def test_a_torn_or_foreign_line_is_reported_and_the_next_one_is_read(path: Path, line: bytes) -> None:
    path.write_bytes(line + b'\n{"kind": "after"}\n')
    lines, _ = read_journal(path)
    assert [line["kind"] for line in lines] == ["damaged", "after"]


@given(st.binary(max_size=200))
def test_no_bytes_whatsoever_make_reading_fail(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    lines, offset = read_journal(path)
    assert all(isinstance(line["kind"], str) for line in lines)
    assert offset == data.rfind(b"\n") + 1


def test_a_missing_journal_is_an_empty_one(path: Path) -> None:
    assert read_journal(path) == ([], 0)


def test_lines_of_many_writers_never_mix(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kimisession.node.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), sys.argv[2])\n"
        "for number in range(200): journal.write('beat', number=number, text='x' * 500)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), name], env=env) for name in ("a", "b", "c")]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    lines, _ = read_journal(path)
    for name in ("a", "b", "c"):
        assert [line["number"] for line in lines if line.get("by") == name] == list(range(200))


def test_what_cannot_be_written_is_counted_and_stops_nobody(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "no such folder" / "journal.jsonl", "keeper")
    journal.write("one")
    journal.write("two")
    assert journal.dropped == 2


def test_a_line_that_a_full_disk_tore_costs_no_other_line(path: Path) -> None:
    Journal(path, "keeper").write("beat")
    path.write_bytes(path.read_bytes()[:-9])
    Journal(path, "wrapper").write("closed", exit_code=10)
    assert [line["kind"] for line in read_journal(path)[0]] == ["damaged", "closed"]


def test_a_full_disk_stops_nobody() -> None:
    journal = Journal(Path("/dev/full"), "keeper")
    journal.write("one")
    assert journal.dropped == 1


def test_what_is_no_json_is_written_as_text(path: Path) -> None:
    Journal(path, "keeper").write("note", error=ValueError("no"), path=Path("/x"))
    ((line,), _) = read_journal(path)
    assert (line["error"], line["path"]) == ("no", "/x")


def test_beats_and_progress_are_not_echoed_into_the_jobs_log(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(path, "keeper", echo=True)
    for kind in ("beat", "progress", "ready"):
        journal.write(kind)
    echoed = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert echoed == ["ready"]


def test_the_journal_is_its_owners_alone(path: Path) -> None:
    Journal(path, "keeper").write("one")
    assert path.stat().st_mode & 0o077 == 0


def test_a_moment_is_utc_with_milliseconds() -> None:
    assert len(utc_now()) == len("2026-11-20T12:00:00.000Z")
