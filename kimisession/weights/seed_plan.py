"""What a bucket is getting: the plan that every seeder of it agrees with, and whether it has it already."""

from __future__ import annotations

import json
from typing import Any

from kimisession.weights.bucket import Bucket
from kimisession.weights.errors import BucketTaken, Conflict, Missing, NotSeeded, SourceChanged
from kimisession.weights.manifest import Manifest, canonical
from kimisession.weights.seal import DELETING, PLAN, quick_check, read_seal
from kimisession.weights.source import SourceFile


def agree(
    bucket: Bucket, source: str, model: str, revision: str, part_bytes: int, files: tuple[SourceFile, ...]
) -> int:
    """Write the plan, or agree with the one that is there; nothing else may be written before that. Returns the size of a part
    in bytes: that of whoever wrote the plan. `source` is what errors call it. Raises BucketTaken, SourceChanged."""
    mine = {
        "schema": 1,
        "model": model,
        "revision": revision,
        "part_bytes": part_bytes,
        "files": [[file.path, file.size, file.sha256 or file.git_sha1] for file in files],
    }
    if bucket.stat(DELETING) is not None:
        raise BucketTaken(
            f"the deletion of {bucket.url} was broken off",
            f"finish it with 'kimisession seed --delete --bucket {bucket.url}', then seed",
        )
    theirs = _plan_of(bucket)
    if theirs is None:
        names = {file.path for file in files}
        # An engine that streams loads every safetensors file that it finds there.
        there = (stat.name for stat in bucket.list())
        foreign = next((name for name in there if name in names or name.endswith(".safetensors")), None)
        theirs = _plan_of(bucket)
        if theirs is None and foreign is not None:
            raise BucketTaken(
                f"{bucket.url} already holds {foreign}, which kimisession did not write",
                "seed into an empty folder or prefix",
            )
    if theirs is None:
        try:
            bucket.write(PLAN, canonical(mine), replaces=None)
        except Conflict:
            theirs = _plan_of(bucket)
    if theirs is None:
        return part_bytes
    _refuse_other(bucket, theirs, model, revision)
    if theirs.get("files") != json.loads(canonical(mine))["files"]:
        raise SourceChanged(
            f"{source} no longer lists the files that the plan of {revision} has",
            f"delete the bucket with 'kimisession seed --delete --bucket {bucket.url}' and seed it again",
        )
    agreed = theirs.get("part_bytes")
    return agreed if isinstance(agreed, int) and agreed > 0 else part_bytes


def sealed_already(bucket: Bucket, model: str, revision: str) -> Manifest | None:
    """The seal, where this very revision is sealed and whole; None where it may be seeded. Raises BucketTaken for a bucket that
    is sealed, or half seeded, with something else. Writes nothing."""
    try:
        manifest = read_seal(bucket)
    except NotSeeded:
        _refuse_other(bucket, _plan_of(bucket), model, revision)
        return None
    if (manifest.model, manifest.revision) != (model, revision):
        raise BucketTaken(
            f"{bucket.url} is sealed with {manifest.model} at {manifest.revision}, not {model} at {revision}",
            f"seed into another folder or prefix, or delete this one with 'kimisession seed --delete --bucket {bucket.url}'",
        )
    quick_check(bucket, manifest)
    return manifest


def _plan_of(bucket: Bucket) -> dict[str, Any] | None:
    """The plan; None without one, empty where it cannot be read."""
    try:
        text, _ = bucket.read(PLAN)
        value = json.loads(text)
    except Missing:
        return None
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _refuse_other(bucket: Bucket, plan: dict[str, Any] | None, model: str, revision: str) -> None:
    if plan is not None and (plan.get("revision") != revision or plan.get("model") != model):
        raise BucketTaken(
            f"{bucket.url} is half seeded with {plan.get('model')} at {plan.get('revision')}, "
            f"the source is {model} at {revision}",
            f"finish it with that revision, or delete it with 'kimisession seed --delete --bucket {bucket.url}'",
        )
