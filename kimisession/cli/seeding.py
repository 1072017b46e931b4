"""`kimisession seed`."""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from kimisession.cli import show
from kimisession.core.launch import label_value
from kimisession.core.profile import Checkpoint, Profile
from kimisession.errors import Interrupted, KimiError, UsageMistake
from kimisession.node.policy import span
from kimisession.paths import buckets_home
from kimisession.profile_file import load_profile
from kimisession.rehearsal.dummy_kimi import make_dummy_kimi
from kimisession.rehearsal.mini_kimi import make_mini_kimi
from kimisession.rehearsal.standin_model import make_standin_model
from kimisession.weights.bucket import Bucket, open_bucket
from kimisession.weights.manifest import Manifest, is_commit
from kimisession.weights.pace import Pacing
from kimisession.weights.seal import Progress, delete, read_seal, verify
from kimisession.weights.seed import seed
from kimisession.weights.source import FolderSource, Source

#: Profiles whose weights are made on the spot: nothing has to be downloaded for a rehearsal.
MADE_HERE: dict[str, Callable[[Path], object]] = {
    "rehearsal": make_standin_model,
    "rehearsal-vllm": make_mini_kimi,
    "kimi-k2.5-dummy": make_dummy_kimi,
}


def bucket_url(profile: str, given: str | None) -> str:
    """Where the weights of a profile are: what the user says, else a folder of the user's own. A path becomes an address, which
    means the same in every folder and on a machine that only gets the address."""
    if given and "://" not in given and "/" in given:
        return Path(given).expanduser().absolute().as_uri()
    return given or f"file://{buckets_home() / profile}"


@dataclass(frozen=True)
class SeedWords:
    """What `kimisession seed` was told. `source` is a folder, or `hub:owner/name`; None: the profile's own checkpoint."""

    profile: str
    source: str | None = None
    checkpoint: str | None = None
    revision: str | None = None
    bucket: str | None = None
    region: str | None = None
    here: bool = False
    verify: bool = False
    delete: bool = False
    name: str | None = None
    dry_run: bool = False
    json: bool = False
    infra: str | None = None  # with these the seeding runs on a machine of its own
    cpus: int | None = None
    duration_s: int | None = None
    budget_usd: Decimal | None = None
    price_usd: Decimal | None = None
    unguarded: bool = False
    yes: bool = False


def run_seed(words: SeedWords) -> None:
    """Seed, verify or delete."""
    profile = load_profile(words.profile)
    url = bucket_url(profile.name, words.bucket)
    if words.delete:
        _delete(open_bucket(url), words.name, words.dry_run)
        return
    if words.verify:
        manifest = read_seal(open_bucket(url))
        verify(open_bucket(url), manifest, _Telling("verified"), deep=True)
        show.clear()
        show.say(
            f"every byte read back: {len(manifest.files)} files, {show.size(manifest.total_bytes)}, as they were sealed"
        )
        print_manifest(url, manifest, words.json)
        return
    checkpoint = _checkpoint(profile, words.checkpoint)
    maker = MADE_HERE.get(profile.name) if words.source is None else None
    if maker is None and not words.here and (url.startswith("gs://") or words.infra):
        from kimisession.cli.seeding_away import seed_away

        seed_away(words, profile, checkpoint, url)
        return
    source = None if maker else _source(checkpoint.repo, words)
    if words.dry_run:
        show.would(f"seed {source.name if source else 'weights made on the spot'} into {url}")
        return
    if url.startswith("gs://"):
        ensure_bucket(url, words.region, profile.name)
    if isinstance(source, FolderSource):
        show.say(f"reading {source.name} once for its checksums, then sending it")
    with tempfile.TemporaryDirectory(prefix="kimisession-weights-") as made:
        if source is None and maker is not None:
            maker(Path(made))
        began = time.monotonic()
        try:
            manifest = seed(
                source or FolderSource(Path(made)),
                open_bucket(url),
                model=checkpoint.repo,
                revision=words.revision if words.revision and is_commit(words.revision) else None,
                progress=_Telling("seeded"),
            )
        except KeyboardInterrupt:
            show.clear()
            raise Interrupted(
                f"interrupted: {url} is not sealed, and keeps what was sent", "the same command again goes on there"
            ) from None
    took = time.monotonic() - began
    show.say(f"sealed {len(manifest.files)} files, {show.size(manifest.total_bytes)} in {took:.1f} s")
    print_manifest(url, manifest, words.json)
    if not words.json:
        show.next_step(f"kimisession start {profile.name}" + (f" --bucket {url}" if words.bucket else ""))


def _checkpoint(profile: Profile, wanted: str | None) -> Checkpoint:
    """The profile's checkpoint of this name; the first without a name. Raises UsageMistake."""
    for checkpoint in profile.checkpoints:
        if wanted in (None, checkpoint.name):
            return checkpoint
    names = " or ".join(checkpoint.name for checkpoint in profile.checkpoints)
    raise UsageMistake(f"profile {profile.name} has no checkpoint {wanted!r}", f"use --checkpoint {names}")


def _source(repo: str, words: SeedWords) -> Source:
    """Where the weights come from. Raises UsageMistake before anything is asked of the network."""
    given = words.source
    if given is None or given.startswith("hub:"):
        from kimisession.weights.hub import HubSource

        return HubSource(given.removeprefix("hub:") if given else repo, words.revision or "main")
    if words.revision:
        raise UsageMistake("--revision is a commit on the hub, and --from is a folder", "leave --revision out")
    if not Path(given).is_dir():
        raise UsageMistake(f"{given} is not a folder", "point --from at the folder with the safetensors files")
    return FolderSource(Path(given))


def ensure_bucket(url: str, region: str | None, profile: str) -> None:
    """Make the bucket when a region was given; say what it costs there. Raises WeightsError, UsageMistake."""
    from kimisession.weights.gcs import GcsBucket, create_bucket

    bucket = GcsBucket.at(url)
    if region is None:
        if not bucket.exists():
            raise UsageMistake(
                f"{url} does not exist", "add --region, where the GPUs will be, to make it: --region us-central1"
            )
        return
    labels = {"kimisession": "weights", "kimisession-profile": label_value(profile)}
    if create_bucket(bucket.client, bucket.bucket_name, location=region, labels=labels):
        show.say(
            f"made gs://{bucket.bucket_name} in {region}: standard class, uniform access, nothing public, no soft delete"
        )


def print_manifest(url: str, manifest: Manifest, json: bool) -> None:
    """What is sealed, file by file."""
    if json:
        show.as_json(
            "manifest",
            {
                "bucket": url,
                "model": manifest.model,
                "revision": manifest.revision,
                "digest": manifest.digest,
                "bytes": manifest.total_bytes,
                "files": [
                    {"path": f.path, "bytes": f.size, "sha256": f.sha256, "crc32c": f.crc32c} for f in manifest.files
                ],
            },
        )
        return
    show.out(show.paint("Sealed manifest", "bold", sys.stdout) + f"  {manifest.digest[:16]}")
    show.pairs(
        [
            ("bucket", url),
            ("model", f"{manifest.model}, revision {manifest.revision[:16]}"),
            ("written", f"{show.moment(manifest.written_at)} by {manifest.written_by}"),
        ]
    )
    monthly = _monthly(url, manifest.total_bytes)
    if monthly:
        show.pairs([("to keep", monthly)])
    rows = [(f.path, show.size(f.size), str(len(f.parts)), f.crc32c, f.sha256[:16]) for f in manifest.files]
    total = ("total", show.size(manifest.total_bytes), str(sum(len(f.parts) for f in manifest.files)), "", "")
    show.table(("FILE", "SIZE", "PARTS", "CRC32C", "SHA256"), [*rows, total], frozenset({1, 2}))


def _monthly(url: str, weights_bytes: int) -> str:
    """What keeping the weights costs a month, in words; empty for a folder."""
    if not url.startswith("gs://"):
        return ""
    from kimisession.weights.gcs import GcsBucket

    return f"{keeping(weights_bytes, *GcsBucket.at(url).place())}; deletion: kimisession seed --delete --bucket {url}"


def keeping(weights_bytes: int, location: str, storage_class: str) -> str:
    """Dollars a month, where from and for what; a class or a place without a known price is named, not guessed."""
    from kimisession.weights.storage_cost import usd_per_month

    usd = usd_per_month(weights_bytes, location) if storage_class == "STANDARD" else None
    where = f"{location or 'an unknown place'}, {storage_class.lower() or 'unknown'} class"
    return f"not priced: no price is known here for {where}" if usd is None else f"${usd} a month in {where}"


class _Telling:
    """Progress as one line that changes: the whole, and the shard that will take longest. Where no line can change, one for
    every tenth, so that a log shows that it moves."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.pacing = Pacing()
        self.told = 0

    def __call__(self, progress: Progress) -> None:
        whole, *shards = self.pacing.feed(progress, time.monotonic())
        left = f"{span(whole.left_s)} left" if whole.left_s is not None else "time left not known yet"
        done = f"{show.size(progress.done_bytes)} of {show.size(progress.total_bytes)}"
        line = f"  {self.verb} {done}, {progress.done_files}/{progress.total_files} files, "
        line += f"{show.size(int(whole.bytes_per_s))}/s, {left}"
        slow = max((shard for shard in shards if shard.left_s is not None), key=lambda s: s.left_s or 0.0, default=None)
        if slow is not None and len(shards) > 1:
            line += f"; {len(shards)} at once, slowest {slow.path} at {show.size(int(slow.bytes_per_s))}/s"
        show.flash(line)
        tenth = 10 * progress.done_bytes // progress.total_bytes if progress.total_bytes else 0
        if not show.moves_cursor(sys.stderr) and self.told < tenth < 10:
            self.told = tenth
            show.say(line)


def _delete(bucket: Bucket, given: str | None, dry_run: bool) -> None:
    """Weights are hours of downloading: deleting them asks for the bucket's name."""
    if dry_run:
        show.would(f"delete the seeded weights in {bucket.url}")
        return
    if given is None:
        if not sys.stdin.isatty():
            raise UsageMistake(
                "deleting weights asks for the bucket's name", f"add --name {bucket.name} if you mean it"
            )
        show.say(f"This deletes the seeded weights in {bucket.url}.")
        given = input(f"Type {bucket.name} to go on: ").strip()
    if given != bucket.name:
        raise KimiError(f"{given!r} is not the bucket's name: nothing was deleted", f"its name is {bucket.name}")
    deleted = delete(bucket, given)
    if show.SETTINGS.json:
        show.as_json("deleted", {"bucket": bucket.url, "objects": deleted.objects})
    show.say(f"deleted {deleted.objects} objects of {bucket.url}")
    if deleted.left:
        show.say(f"{deleted.left} other objects stay there: kimisession did not write them")
