"""Seeding: the end is one seal over the right bytes, or no seal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kimisession.weights.bucket import FolderBucket, Reader
from kimisession.weights.errors import (
    BadSource,
    BucketTaken,
    Corrupt,
    NotSeeded,
    SourceChanged,
    TryAgain,
    WeightsError,
)
from kimisession.weights.manifest import CONTROL, SEAL, Manifest
from kimisession.weights.seal import Deleted, Progress, delete, ignore, read_seal, verify
from kimisession.weights.seed import SESSIONS, seed
from kimisession.weights.source import FolderSource
from kimisession.weights.writer import is_dead, writer_id
from tests.weights.making import (
    HASTY,
    PART_BYTES,
    WatchedSource,
    cut_every,
    flip_once,
    same_files,
    weights_folder,
)

SHARD = "model-00002-of-00004.safetensors"


def bring(source: FolderSource, bucket: FolderBucket, **more: object) -> Manifest:
    return seed(source, bucket, model="mini", part_bytes=PART_BYTES, patience=HASTY, **more)  # type: ignore[arg-type]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return weights_folder(tmp_path / "weights")


@pytest.fixture
def bucket(tmp_path: Path) -> FolderBucket:
    return FolderBucket(tmp_path / "bucket")


def test_a_seeded_bucket_holds_the_source_and_a_seal(weights: Path, bucket: FolderBucket) -> None:
    manifest = bring(FolderSource(weights), bucket)
    assert same_files(weights, bucket.path)
    assert read_seal(bucket) == manifest
    assert "kimisession" in manifest.written_by
    verify(bucket, manifest, deep=True)
    assert [stat.name for stat in bucket.list(CONTROL)] == [SEAL]


def test_files_stand_in_load_order(weights: Path, bucket: FolderBucket) -> None:
    paths = [entry.path for entry in bring(FolderSource(weights), bucket).files]
    assert paths[:4] == ["config.json", "empty.txt", "model.safetensors.index.json", "sub/tokenizer.json"]
    assert paths[4:] == [f"model-{number:05d}-of-00004.safetensors" for number in (4, 3, 2, 1)]


def test_a_second_run_moves_no_bytes(weights: Path, bucket: FolderBucket) -> None:
    first = bring(FolderSource(weights), bucket)
    again = WatchedSource(weights)
    assert bring(again, bucket) == first
    assert again.read_bytes == 0


def test_without_a_seal_a_bucket_is_not_seeded(weights: Path, bucket: FolderBucket) -> None:
    with pytest.raises(NotSeeded):
        read_seal(bucket)
    bring(FolderSource(weights), bucket)
    bucket.delete(SEAL)
    with pytest.raises(NotSeeded) as caught:
        read_seal(bucket)
    assert caught.value.exit_code == 5


def test_a_missing_shard_is_refused_before_anything_is_written(weights: Path, bucket: FolderBucket) -> None:
    (weights / SHARD).unlink()
    with pytest.raises(BadSource, match=SHARD):
        bring(FolderSource(weights), bucket)
    assert not bucket.path.exists()


def test_a_name_that_cannot_be_an_object_is_refused_before_anything_is_written(
    weights: Path, bucket: FolderBucket
) -> None:
    (weights / "read me.md").write_text("x")
    with pytest.raises(BadSource, match="read me"):
        bring(FolderSource(weights), bucket)
    assert not bucket.path.exists()


def test_a_branch_is_no_revision(weights: Path, bucket: FolderBucket) -> None:
    with pytest.raises(BadSource):
        bring(FolderSource(weights), bucket, revision="main")


def test_a_flipped_byte_is_read_again_and_never_sealed(weights: Path, bucket: FolderBucket) -> None:
    manifest = bring(WatchedSource(weights, flip_once(SHARD, 100_000)), bucket)
    verify(bucket, manifest, deep=True)
    assert same_files(weights, bucket.path)


def test_a_byte_that_changes_in_the_store_before_the_seal_is_not_sealed(weights: Path, bucket: FolderBucket) -> None:
    def spoil(name: str, offset: int, chunk: memoryview) -> int:
        if name == "model-00001-of-00004.safetensors" and not offset:  # the last; the first is stored already
            stored = bucket.path / "model-00004-of-00004.safetensors"
            stored.write_bytes(stored.read_bytes()[:-1] + b"?")
        return len(chunk)

    with pytest.raises(Corrupt, match="model-00004"):
        bring(WatchedSource(weights, spoil), bucket, streams=1)
    with pytest.raises(NotSeeded):
        read_seal(bucket)


def test_a_source_that_stays_wrong_ends_without_a_seal_and_without_the_file(
    weights: Path, bucket: FolderBucket
) -> None:
    with pytest.raises(SourceChanged, match=SHARD):
        bring(WatchedSource(weights, flip_once(SHARD, 100_000, times=99)), bucket)
    assert not (bucket.path / SHARD).exists()
    with pytest.raises(NotSeeded):
        read_seal(bucket)


def test_cut_connections_and_early_ends_are_gone_on_with(weights: Path, bucket: FolderBucket) -> None:
    source = WatchedSource(weights, cut_every(5))
    manifest = bring(source, bucket, streams=2)
    assert same_files(weights, bucket.path)
    index = (weights / "model.safetensors.index.json").stat().st_size
    assert source.read_bytes == manifest.total_bytes + index, "after a cut it goes on where it stopped"


def test_a_source_that_never_answers_ends_with_a_sentence(weights: Path, bucket: FolderBucket) -> None:
    with pytest.raises(TryAgain):
        bring(WatchedSource(weights, cut_every(1)), bucket)


def test_another_revision_does_not_get_into_a_sealed_bucket(weights: Path, bucket: FolderBucket) -> None:
    bring(FolderSource(weights), bucket)
    (weights / "config.json").write_text("{}")
    with pytest.raises(BucketTaken):
        bring(FolderSource(weights), bucket)


def test_another_revision_does_not_get_into_a_half_seeded_bucket(weights: Path, bucket: FolderBucket) -> None:
    with pytest.raises(SourceChanged):
        bring(WatchedSource(weights, flip_once(SHARD, 5, times=99)), bucket)
    (weights / "config.json").write_text("{}")
    with pytest.raises(BucketTaken, match="half seeded"):
        bring(FolderSource(weights), bucket)


def test_files_of_another_origin_are_not_touched(weights: Path, bucket: FolderBucket) -> None:
    bucket.path.mkdir()
    (bucket.path / "config.json").write_text("mine")
    with pytest.raises(BucketTaken, match=r"config\.json"):
        bring(FolderSource(weights), bucket)
    assert (bucket.path / "config.json").read_text() == "mine"
    assert list(bucket.path.iterdir()) == [bucket.path / "config.json"]


def test_a_stored_byte_that_changed_is_named(weights: Path, bucket: FolderBucket) -> None:
    manifest = bring(FolderSource(weights), bucket)
    content = bytearray((bucket.path / SHARD).read_bytes())
    content[70_000] ^= 1
    (bucket.path / SHARD).write_bytes(content)
    with pytest.raises(Corrupt, match=SHARD):
        verify(bucket, manifest)
    with pytest.raises(Corrupt, match="part 1"):
        verify(bucket, manifest, deep=True)


def test_a_stored_file_that_is_gone_or_short_is_noticed_by_a_second_run(weights: Path, bucket: FolderBucket) -> None:
    bring(FolderSource(weights), bucket)
    (bucket.path / SHARD).unlink()
    with pytest.raises(Corrupt, match="missing"):
        bring(FolderSource(weights), bucket)


def test_delete_wants_the_name_and_leaves_nothing(weights: Path, bucket: FolderBucket) -> None:
    bring(FolderSource(weights), bucket)
    with pytest.raises(WeightsError, match="is not the name"):
        delete(bucket, "buckett")
    assert read_seal(bucket)
    assert delete(bucket, "bucket") == Deleted(9, 0)
    assert list(bucket.list()) == []


def test_progress_ends_at_the_total(weights: Path, bucket: FolderBucket) -> None:
    seen: list[Progress] = []
    manifest = bring(FolderSource(weights), bucket, progress=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes == manifest.total_bytes
    assert seen[-1].done_files == seen[-1].total_files == 8


def test_two_seeders_at_once_end_with_one_seal(weights: Path, bucket: FolderBucket) -> None:
    sealed: list[Manifest] = []
    sources = [WatchedSource(weights), WatchedSource(weights)]

    def run(number: int) -> None:
        # Named as of two other machines, so that neither may ask the process table about the other.
        sealed.append(bring(sources[number], FolderBucket(bucket.path), writer=f"vm-{number}/boot/1/1"))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sealed) == 2
    assert sealed[0] == sealed[1] == read_seal(bucket)
    assert same_files(weights, bucket.path)
    index = (weights / "model.safetensors.index.json").stat().st_size
    assert sum(source.read_bytes for source in sources) <= sealed[0].total_bytes + 2 * index, "each file once"


def test_the_file_of_a_dead_seeder_elsewhere_is_taken_over_after_its_silence(
    weights: Path, bucket: FolderBucket
) -> None:
    manifest_total = sum(path.stat().st_size for path in weights.rglob("*") if path.is_file())
    stopped = WatchedSource(weights, cut_every(3))
    with pytest.raises(TryAgain):
        seed(
            stopped,
            bucket,
            model="mini",
            part_bytes=PART_BYTES,
            patience=HASTY.__class__(tries=0),
            writer="vm/b/1/1",
        )
    assert any(stat.name.startswith(SESSIONS) for stat in bucket.list())
    began = time.monotonic()
    manifest = bring(FolderSource(weights), bucket)
    assert time.monotonic() - began >= HASTY.stale_s
    assert manifest.total_bytes == manifest_total
    assert same_files(weights, bucket.path)


def test_a_process_that_ended_is_dead_and_this_one_is_not() -> None:
    assert not is_dead(writer_id())
    host, boot, _, started = writer_id().split("/")
    assert is_dead(f"{host}/{boot}/999999999/{started}")
    assert not is_dead(f"elsewhere/{boot}/999999999/{started}")
    assert not is_dead("nonsense")


KILLED = """
import sys, time
from pathlib import Path
from kimisession.weights.bucket import FolderBucket
from tests.weights.making import HASTY, PART_BYTES, WatchedSource
from kimisession.weights.seed import seed

def slow(name, offset, chunk):
    time.sleep(0.004)
    print(name, offset, flush=True)
    return len(chunk)

seed(WatchedSource(Path(sys.argv[1]), slow), FolderBucket(Path(sys.argv[2])), model="mini",
     part_bytes=PART_BYTES, patience=HASTY, streams=3)
print("sealed", flush=True)
"""


@pytest.mark.slow
def test_kill_9_at_any_point_is_gone_on_with(weights: Path, bucket: FolderBucket) -> None:
    """Killed after ever more reads, until a run lives to seal; nothing sent is sent again."""
    kills = 0
    for reads in range(2, 60, 4):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(weights), str(bucket.path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        with contextlib.closing(process.stdout) as lines:
            last = ""
            for seen, line in enumerate(lines, 1):
                last = line.strip()
                if seen == reads:
                    os.kill(process.pid, signal.SIGKILL)
                    break
        process.wait()
        if last == "sealed":
            break
        kills += 1
        with pytest.raises(NotSeeded):
            read_seal(bucket)
    assert kills >= 2
    manifest = bring(FolderSource(weights), bucket)
    verify(bucket, manifest, ignore, deep=True)
    assert same_files(weights, bucket.path)
    assert [stat.name for stat in bucket.list(CONTROL)] == [SEAL]


def test_a_half_sent_file_is_sent_from_where_the_store_ends(weights: Path, bucket: FolderBucket) -> None:
    with pytest.raises(TryAgain):
        seed(
            WatchedSource(weights, cut_every(9)),
            bucket,
            model="mini",
            part_bytes=PART_BYTES,
            patience=HASTY.__class__(tries=0),
            streams=1,
            writer=writer_id().rsplit("/", 2)[0] + "/999999999/1",
        )
    halves = [json.loads(bucket.read(stat.name)[0]) for stat in bucket.list(SESSIONS)]
    upload = bucket.path / CONTROL / "uploads" / halves[0]["uri"]
    before = upload.stat()
    assert before.st_size > 0
    seen: list[int] = []
    bring(FolderSource(weights), bucket, progress=lambda progress: seen.append(progress.done_bytes))
    assert any(path.stat().st_ino == before.st_ino for path in bucket.path.glob("*.safetensors")), (
        "the upload that was there became the object"
    )


def test_links_are_followed_because_the_cache_of_the_hub_is_made_of_them(
    weights: Path, bucket: FolderBucket, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in weights.glob("*.*"):
        (snapshot / path.name).symlink_to(path)
    manifest = bring(FolderSource(snapshot), bucket)
    assert len(manifest.files) == 7
    assert same_files(snapshot, bucket.path)


@pytest.mark.parametrize("target", ["nowhere", "sub"])
def test_what_a_link_cannot_bring_is_refused_and_not_left_out(weights: Path, bucket: FolderBucket, target: str) -> None:
    (weights / "extra.safetensors").symlink_to(weights / target)
    with pytest.raises(BadSource, match=r"extra\.safetensors is a link"):
        bring(FolderSource(weights), bucket)
    assert not bucket.path.exists()


def test_a_download_that_was_broken_off_is_not_sealed(weights: Path, bucket: FolderBucket) -> None:
    os.truncate(weights / SHARD, (weights / SHARD).stat().st_size - 1)
    with pytest.raises(BadSource, match=f"{SHARD} is cut off"):
        bring(FolderSource(weights), bucket)
    assert not bucket.path.exists()


def test_a_folder_without_weights_is_not_sealed(bucket: FolderBucket, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "diary.txt").write_text("dear diary")
    with pytest.raises(BadSource, match="no safetensors files"):
        bring(FolderSource(tmp_path / "docs"), bucket)
    assert not bucket.path.exists()


def test_tensors_of_another_origin_are_not_sealed_in_because_an_engine_would_load_them(
    weights: Path, bucket: FolderBucket
) -> None:
    bucket.path.mkdir()
    (bucket.path / "old.safetensors").write_text("mine")
    with pytest.raises(BucketTaken, match=r"old\.safetensors"):
        bring(FolderSource(weights), bucket)


def test_delete_does_not_empty_a_folder_that_was_never_seeded(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    for name in ("home", "nowhere"):
        with pytest.raises(NotSeeded, match="nothing was deleted"):
            delete(FolderBucket(tmp_path / name), name)
    assert [path.name for path in tmp_path.rglob("*")] == ["home", "thesis.txt"]


def test_delete_leaves_what_kimisession_did_not_write(weights: Path, bucket: FolderBucket) -> None:
    bring(FolderSource(weights), bucket)
    bring(FolderSource(weights), FolderBucket(bucket.path / "other"))
    (bucket.path / "thesis.txt").write_text("years of work")
    assert delete(bucket, "bucket") == Deleted(9, 11), "the thesis, eight files, a seal and a lock stay"
    assert (bucket.path / "thesis.txt").exists()
    other = FolderBucket(bucket.path / "other")
    verify(other, read_seal(other), deep=True)


def test_a_deletion_that_was_broken_off_is_gone_on_with(weights: Path, bucket: FolderBucket) -> None:
    class Dying(FolderBucket):
        left = 3

        def delete(self, name: str, generation: int | None = None) -> None:
            self.left -= 1
            if not self.left:
                raise TryAgain("killed")
            super().delete(name, generation)

    bring(FolderSource(weights), bucket)
    (bucket.path / "thesis.txt").write_text("years of work")
    with pytest.raises(TryAgain):
        delete(Dying(bucket.path), "bucket")
    with pytest.raises(NotSeeded):
        read_seal(bucket)
    with pytest.raises(BucketTaken, match="was broken off"):
        bring(FolderSource(weights), bucket)
    assert delete(bucket, "bucket").left == 1
    assert [stat.name for stat in bucket.list()] == ["thesis.txt"]


def test_one_cut_while_everything_is_read_back_is_not_the_end_of_it(weights: Path, bucket: FolderBucket) -> None:
    class Cutting(FolderBucket):
        opened = 0

        def open(self, name: str, offset: int, size: int, generation: int | None = None) -> Reader:
            self.opened += 1
            if self.opened % 3 == 0:
                raise TryAgain("cut off")
            return super().open(name, offset, size, generation)

    manifest = bring(FolderSource(weights), bucket)
    seen: list[Progress] = []
    verify(Cutting(bucket.path), manifest, seen.append, deep=True, patience=HASTY)
    assert len({progress.done_bytes for progress in seen}) > len(manifest.files), "a shard of 10 GB moves the line, too"


def test_what_an_earlier_run_finished_is_told_apart_from_what_moves_now(weights: Path, bucket: FolderBucket) -> None:
    last = "model-00001-of-00004.safetensors"
    with pytest.raises(SourceChanged):
        bring(WatchedSource(weights, flip_once(last, 5, times=99)), bucket, streams=1)
    seen: list[Progress] = []
    manifest = bring(FolderSource(weights), bucket, progress=seen.append)
    assert seen[-1].kept_bytes == manifest.total_bytes - (weights / last).stat().st_size
