"""The manifest: strict to read, the same bytes for the same content."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimisession.weights.manifest import (
    FileEntry,
    Hashing,
    Manifest,
    ManifestError,
    check_path,
    decode,
    encode,
)


def manifest(content: bytes = b"x" * 150, part_bytes: int = 64) -> Manifest:
    hashing = Hashing(part_bytes)
    hashing.update(memoryview(content))
    entry = hashing.entry("a/shard-1.safetensors", 7)
    return Manifest("kimi", "ab" * 20, (entry,), part_bytes, "me@here", datetime(2026, 11, 21, 10, tzinfo=UTC))


def test_a_manifest_reads_back_as_it_was_written() -> None:
    assert decode(encode(manifest())) == manifest()
    assert decode(encode(manifest())).digest == manifest().digest
    assert manifest().total_bytes == 150


def test_another_byte_is_another_digest() -> None:
    assert manifest(b"x" * 149 + b"y").digest != manifest().digest


def test_checksums_are_those_that_gcs_returns() -> None:
    entry = manifest(b"123456789").files[0]
    assert entry.crc32c == "4waSgw=="  # 0xE3069283, the check value of crc32c
    assert entry.sha256.startswith("15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225")


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 200))
def test_parts_do_not_depend_on_how_the_stream_was_cut(pieces: list[bytes], part_bytes: int) -> None:
    split, whole = Hashing(part_bytes), Hashing(part_bytes)
    for piece in pieces:
        split.update(memoryview(piece))
    whole.update(memoryview(b"".join(pieces)))
    entry = split.entry("a", None)
    assert entry == whole.entry("a", None)
    assert sum(part.size for part in entry.parts) == entry.size


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../up",
        "a/../b",
        "./a",
        "a//b",
        "",
        "a/",
        "a b",
        "a\nb",
        "a\\b",
        "caf\u00e9",
        ".kimisession/x",
        "-rf",
    ],
)
def test_a_path_that_leaves_the_folder_or_looks_odd_is_refused(path: str) -> None:
    with pytest.raises(ManifestError):
        check_path(path)


@pytest.mark.parametrize("path", ["config.json", "a/b/c.safetensors", ".hidden", "a+b=c@d,e_f-1", "..x"])
def test_names_of_real_repositories_are_taken(path: str) -> None:
    assert check_path(path) == path


def spoiled(change: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(encode(manifest()))
    change(value)
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.update(extra=1), "extra: unknown key"),
        (lambda m: m.pop("model"), "model: missing"),
        (lambda m: m.update(schema=2), "schema is 2"),
        (lambda m: m.update(revision="main"), "revision: 'main' is no commit"),
        (lambda m: m.update(part_bytes=True), "part_bytes: expected a whole number"),
        (lambda m: m.update(written_at="yesterday"), "written_at"),
        (lambda m: m["files"][0].update(path="../x"), "files[0].path: '../x' leaves its folder"),
        (lambda m: m["files"][0].update(size=151), "files[0].parts"),
        (lambda m: m["files"][0].update(sha256="zz"), "files[0].sha256"),
        (lambda m: m["files"][0].update(crc32c="AAAA"), "files[0].crc32c"),
        (lambda m: m["files"][0].update(generation=0), "files[0].generation"),
        (lambda m: m["files"][0].update(note=""), "files[0].note: unknown key"),
        (lambda m: m["files"][0]["parts"].pop(), "files[0].parts"),
        (lambda m: m["files"][0]["parts"].reverse(), "files[0].parts[0]"),
        (lambda m: m["files"][0]["parts"][1].pop("sha256"), "files[0].parts[1].sha256: missing"),
        (lambda m: m["files"].append(m["files"][0]), "listed twice"),
        (lambda m: m["files"].append({**m["files"][0], "path": "a"}), "both a file and the folder"),
        (lambda m: m.update(files={}), "files: expected a list"),
    ],
)
def test_a_mistake_is_one_sentence_with_file_and_key(change: Callable[[dict[str, Any]], object], named: str) -> None:
    with pytest.raises(ManifestError) as caught:
        decode(spoiled(change), "m.json")
    assert str(caught.value).startswith("m.json: ")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"schema": 1}'])
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(ManifestError):
        decode(text)


def test_the_empty_file_has_no_parts() -> None:
    entry = Hashing(64).entry("empty", None)
    assert entry == FileEntry("empty", 0, entry.sha256, "AAAAAA==", None, ())
    assert decode(encode(dataclasses.replace(manifest(), files=(entry,)))).files == (entry,)
