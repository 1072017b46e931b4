"""The puller, as the real file in a real process: what it calls done is byte for byte what was sealed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kimisession.node import pull_place as pull
from kimisession.node.manifest import PULLED, SEAL, FileEntry, Manifest
from kimisession.node.pull import main
from kimisession.weights.bucket import FolderBucket
from kimisession.weights.seed import seed
from kimisession.weights.source import FolderSource
from tests.weights.making import PART_BYTES, same_files, tensors, weights_folder

ROOT = Path(__file__).parents[2]
SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return weights_folder(tmp_path / "weights")


@pytest.fixture
def bucket(tmp_path: Path, weights: Path) -> FolderBucket:
    bucket = FolderBucket(tmp_path / "bucket")
    seed(FolderSource(weights), bucket, model="mini", part_bytes=PART_BYTES)
    return bucket


def command(bucket: FolderBucket, to: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "kimisession.node.pull", "--from", bucket.url, "--to", str(to), *more]


def run(bucket: FolderBucket, to: Path, *more: str, **environment: str) -> tuple[int, list[dict[str, Any]], str]:
    done = subprocess.run(
        command(bucket, to, "--processes", "2", "--threads", "2", *more),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_what_was_sealed_arrives_and_is_marked(weights: Path, bucket: FolderBucket, tmp_path: Path) -> None:
    code, lines, _ = run(bucket, tmp_path / "to")
    assert code == pull.OK
    assert same_files(weights, tmp_path / "to")
    assert lines[-1]["done"]["verified_by"] == "crc32c"
    total = lines[-1]["done"]["bytes"]
    assert lines[-2] == {"progress": {"done": total, "total": total, "unit": "bytes"}}
    assert json.loads((tmp_path / "to" / PULLED).read_text())["manifest"] == lines[-1]["done"]["manifest"]


def test_a_second_run_fetches_nothing(bucket: FolderBucket, tmp_path: Path) -> None:
    run(bucket, tmp_path / "to")
    code, lines, _ = run(bucket, tmp_path / "to")
    assert code == pull.OK
    assert lines[-1]["done"]["fetched"] == 0


def test_without_crc32c_sha256_is_checked(weights: Path, bucket: FolderBucket, tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "crc32c.py").write_text("raise ImportError")
    code, lines, _ = run(bucket, tmp_path / "to", PYTHONPATH=str(tmp_path / "hidden"))
    assert (code, lines[-1]["done"]["verified_by"]) == (pull.OK, "sha256")
    assert same_files(weights, tmp_path / "to")


@pytest.mark.parametrize("hide", [False, True])
def test_a_wrong_byte_names_file_part_and_checksums(bucket: FolderBucket, tmp_path: Path, hide: bool) -> None:
    content = bytearray((bucket.path / SHARD).read_bytes())
    content[PART_BYTES + 5] ^= 1
    (bucket.path / SHARD).write_bytes(content)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "crc32c.py").write_text("raise ImportError")
    more = {"PYTHONPATH": str(tmp_path / "hidden")} if hide else {}
    code, lines, sentence = run(bucket, tmp_path / "to", **more)
    assert code == pull.WRONG_BYTES
    for word in (SHARD, "part 1", "expected", "sha256" if hide else "crc32c"):
        assert word in sentence
    assert lines[-1]["failed"]["exit"] == pull.WRONG_BYTES
    assert not (tmp_path / "to" / PULLED).exists()


def test_an_unsealed_bucket_is_not_served(bucket: FolderBucket, tmp_path: Path) -> None:
    bucket.delete(SEAL)
    code, _, sentence = run(bucket, tmp_path / "to")
    assert code == pull.NOT_SEALED
    assert "not sealed" in sentence
    assert not (tmp_path / "to").exists()


def test_a_seal_with_a_path_that_leaves_the_folder_is_refused(bucket: FolderBucket, tmp_path: Path) -> None:
    text = (bucket.path / SEAL).read_text().replace(SHARD, "../../outside")
    (bucket.path / SEAL).write_text(text)
    code, _, sentence = run(bucket, tmp_path / "to")
    assert code == pull.OTHER
    assert "leaves its folder" in sentence
    assert not (tmp_path / "outside").exists()


def test_weights_that_cannot_fit_are_refused_before_a_byte_moves(bucket: FolderBucket, tmp_path: Path) -> None:
    seal = json.loads((bucket.path / SEAL).read_text())
    entry = seal["files"][-1]
    entry["size"] = 2**50
    seal["part_bytes"] = 2**50
    for other in seal["files"]:
        other["parts"] = [{"offset": 0, "size": other["size"], "crc32c": "AAAAAA==", "sha256": "0" * 64}]
        if not other["size"]:
            other["parts"] = []
    (bucket.path / SEAL).write_text(json.dumps(seal))
    code, _, sentence = run(bucket, tmp_path / "to")
    assert code == pull.NO_SPACE
    assert "GB free" in sentence
    assert not list((tmp_path / "to").glob("*.json"))


def test_a_part_that_changed_on_disk_is_fetched_again(weights: Path, bucket: FolderBucket, tmp_path: Path) -> None:
    """After another boot nothing is believed: every part is read back, and only what is wrong is fetched."""
    to = tmp_path / "to"
    run(bucket, to)
    marker = json.loads((to / PULLED).read_text())
    (to / PULLED).write_text(json.dumps({**marker, "boot": "another"}))
    content = bytearray((to / SHARD).read_bytes())
    content[PART_BYTES + 5] ^= 1
    (to / SHARD).write_bytes(content)
    code, lines, _ = run(bucket, to)
    assert code == pull.OK
    assert lines[-1]["done"]["fetched"] == PART_BYTES
    assert same_files(weights, to)


def test_a_marker_of_another_manifest_means_nothing(bucket: FolderBucket, tmp_path: Path, weights: Path) -> None:
    to = tmp_path / "to"
    run(bucket, to)
    (weights / SHARD).write_bytes(tensors(b"new" * 66667))
    shutil.rmtree(bucket.path)
    seed(FolderSource(weights), bucket, model="mini", part_bytes=PART_BYTES)
    code, _, _ = run(bucket, to)
    assert code == pull.OK
    assert same_files(weights, to)


def test_kill_9_costs_only_the_parts_under_way(weights: Path, bucket: FolderBucket, tmp_path: Path) -> None:
    to = tmp_path / "to"
    total = sum(entry.stat().st_size for entry in weights.rglob("*") if entry.is_file())
    # A fifo in place of one shard holds the puller in the middle, without any clock.
    (bucket.path / SHARD).rename(tmp_path / "shard")
    os.mkfifo(bucket.path / SHARD)
    process = subprocess.Popen(
        command(bucket, to, "--processes", "1", "--threads", "1"), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["progress"]["done"] > 300_000:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (to / PULLED).exists()
    (bucket.path / SHARD).unlink()
    (tmp_path / "shard").rename(bucket.path / SHARD)
    with (to / pull.JOURNAL).open("ab") as journal:
        journal.write(b"12")  # a torn last line
    code, lines, _ = run(bucket, to)
    assert code == pull.OK
    assert same_files(weights, to)
    assert 0 < lines[-1]["done"]["fetched"] <= total - 300_000 + 2 * PART_BYTES


def test_a_worker_that_dies_is_replaced(weights: Path, bucket: FolderBucket, tmp_path: Path) -> None:
    to = tmp_path / "to"
    (bucket.path / SHARD).rename(tmp_path / "shard")
    os.mkfifo(bucket.path / SHARD)
    process = subprocess.Popen(
        command(bucket, to, "--processes", "1", "--threads", "1"), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("progress", {}).get("done", 0) > 300_000:
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (bucket.path / SHARD).unlink()
    (tmp_path / "shard").rename(bucket.path / SHARD)
    os.kill(int(children[0]), signal.SIGKILL)
    lines = [json.loads(line) for line in process.stdout]
    process.stdout.close()
    assert process.wait() == pull.OK
    assert "done" in lines[-1]
    assert same_files(weights, to)


def test_two_pullers_do_not_write_into_one_folder(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    lock = pull.take_lock(tmp_path / "to", wait_s=0)
    with pytest.raises(pull.PullError, match="another pull"):
        pull.take_lock(tmp_path / "to", wait_s=0.1)
    os.close(lock)


def sealed(sizes: dict[str, int]) -> Manifest:
    files = tuple(FileEntry(path, size, "0" * 64, "AAAAAA==", None, ()) for path, size in sizes.items())
    return Manifest("kimi", "a" * 40, files, PART_BYTES, "me", datetime(2026, 11, 21, tzinfo=UTC))


def test_shards_are_spread_with_links_and_stay_where_they_are(tmp_path: Path) -> None:
    to, disks = tmp_path / "to", [tmp_path / "ssd0", tmp_path / "ssd1"]
    for folder in (to, *disks):
        folder.mkdir()
    manifest = sealed({"config.json": 10, **{f"{n}.safetensors": pull.LARGE_BYTES for n in range(4)}})
    pull.prepare(to, disks, manifest)
    assert (to / "config.json").stat().st_size == 10
    assert not (to / "config.json").is_symlink()
    places = {path.name: path.resolve() for path in to.glob("*.safetensors")}
    assert all(path.is_symlink() for path in to.glob("*.safetensors"))
    assert all(place.parent in disks and place.stat().st_size == pull.LARGE_BYTES for place in places.values())
    (to / "3.safetensors").unlink()
    pull.prepare(to, [*disks[::-1], to], manifest)
    assert {path.name: path.resolve() for path in to.glob("*.safetensors")} == places
    assert pull.sizes_agree(to, manifest)


def test_only_local_ssds_are_taken_for_spreading(tmp_path: Path) -> None:
    for device, model in (("nvme0n1", "nvme_card-pd"), ("nvme0n2", "nvme_card3"), ("sda", "PersistentDisk")):
        (tmp_path / f"sys/block/{device}/device").mkdir(parents=True)
        (tmp_path / f"sys/block/{device}/device/model").write_text(model + "\n")
    for array, members in (("md0", ["nvme0n2"]), ("md1", ["nvme0n2", "nvme0n1"])):
        for member in members:
            (tmp_path / f"sys/block/{array}/slaves/{member}").mkdir(parents=True)
    assert pull.is_local_ssd("nvme0n2", tmp_path)
    assert pull.is_local_ssd("md0", tmp_path)
    assert not any(pull.is_local_ssd(device, tmp_path) for device in ("md1", "nvme0n1", "sda", "sdb"))
    (tmp_path / "mnt").mkdir()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        f"26 1 9:0 / {tmp_path}/mnt rw,relatime shared:1 - ext4 /dev/md0 rw\n"
        "27 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1 rw\n"
        "28 1 0:25 / /dev/shm rw shared:3 - tmpfs tmpfs rw\n"
    )
    assert pull.local_ssds(tmp_path) == [tmp_path / "mnt"]
    assert pull.local_ssds(tmp_path / "nowhere") == []


@pytest.mark.parametrize("words", [[], ["--from", "file:///x"], ["--from", "x", "--to", "y", "--threads", "0"]])
def test_wrong_words_exit_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


def test_the_puller_imports_nothing_but_its_neighbours_and_the_standard_library() -> None:
    probe = (
        "import sys; import kimisession.node.pull; "
        "print([m for m in sys.modules if 'kimisession.' in m and not m.startswith('kimisession.node')])"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_shards_of_another_revision_are_not_served_among_these(bucket: FolderBucket, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "old.safetensors").write_text("of the revision before")
    code, _, sentence = run(bucket, tmp_path / "to")
    assert (code, "old.safetensors is not one of mini's files" in sentence) == (pull.OTHER, True)


@pytest.mark.parametrize("name", [pull.JOURNAL + ".new", PULLED + ".new"])
def test_a_disk_that_refuses_our_own_small_files_is_one_sentence(
    bucket: FolderBucket, tmp_path: Path, name: str
) -> None:
    (tmp_path / "to" / name).mkdir(parents=True)
    code, _, sentence = run(bucket, tmp_path / "to")
    assert (code, sentence.count("\n")) == (pull.OTHER, 1)
    assert "cannot be written" in sentence
