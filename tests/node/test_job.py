"""The wrapper's scratch folder: what an engine leaves in TMPDIR goes with the session."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kimisession.node import job


def a_machine(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


def test_a_session_has_a_tmpdir_of_its_own_and_it_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    scratch = Path(job.make_scratch(machine)["TMPDIR"])
    (scratch / "vllm_dist_0").write_text("left behind")
    (scratch / "folder").mkdir()
    job.release_scratch(machine)
    assert not scratch.exists()
    job.release_scratch(machine)


def test_its_maker_removes_it_although_the_machines_folder_is_gone(tmp_path: Path) -> None:
    scratch = job.make_scratch(a_machine(tmp_path))["TMPDIR"]
    job.release_scratch(tmp_path / "gone", scratch)
    assert not Path(scratch).exists()


def test_its_path_leaves_room_for_the_names_of_sockets(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path / ("x" * 60))
    try:
        scratch = job.make_scratch(machine)["TMPDIR"]
    finally:
        tempfile.tempdir = before
    assert len(scratch) + 37 <= 107
    job.release_scratch(machine)


def test_a_record_that_names_anything_else_removes_nothing(tmp_path: Path) -> None:
    machine = a_machine(tmp_path)
    precious = tmp_path / "precious"
    precious.mkdir()
    for named in (str(precious), "relative/kimi-run-x", ""):
        (machine / "run" / "scratch").write_text(named)
        job.release_scratch(machine)
    assert precious.exists()


def test_where_none_can_be_made_the_session_begins_all_the_same(tmp_path: Path) -> None:
    before = tempfile.tempdir
    tempfile.tempdir = "/proc/no"
    try:
        assert job.make_scratch(a_machine(tmp_path)) == dict(os.environ)
    finally:
        tempfile.tempdir = before


def test_a_scratch_folder_that_cannot_be_written_down_is_used_and_goes_all_the_same(tmp_path: Path) -> None:
    scratch = job.make_scratch(tmp_path / "no machine")["TMPDIR"]
    assert Path(scratch).name.startswith("kimi-run-")
    job.release_scratch(tmp_path / "no machine", scratch)
    assert not Path(scratch).exists()
