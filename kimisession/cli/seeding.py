"""`kimisession seed`."""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kimisession.cli import show
from kimisession.errors import KimiError, UsageMistake
from kimisession.node.policy import span
from kimisession.paths import buckets_home
from kimisession.profile_file import load_profile
from kimisession.rehearsal.dummy_kimi import make_dummy_kimi
from kimisession.rehearsal.mini_kimi import make_mini_kimi
from kimisession.rehearsal.standin_model import make_standin_model
from kimisession.weights.bucket import Bucket, open_bucket
from kimisession.weights.manifest import Manifest
from kimisession.weights.seal import Progress, delete, read_seal, verify
from kimisession.weights.seed import seed
from kimisession.weights.source import FolderSource

#: Profiles whose weights are made on the spot: nothing has to be downloaded for a rehearsal.
MADE_HERE: dict[str, Callable[[Path], object]] = {
    "rehearsal": make_standin_model,
    "rehearsal-vllm": make_mini_kimi,
    "kimi-k2.5-dummy": make_dummy_kimi,
}


def bucket_url(profile: str, given: str | None) -> str:
    """Where the weights of a profile are: what the user says, else a folder of the user's own."""
    return given or f"file://{buckets_home() / profile}"


def run_seed(
    profile_name: str,
    source: Path | None,
    bucket: str | None,
    check_only: bool,
    remove: bool,
    confirm_name: str | None,
    dry_run: bool,
    json: bool,
) -> None:
    """Seed, verify or delete."""
    profile = load_profile(profile_name)
    url = bucket_url(profile.name, bucket)
    if remove:
        _delete(open_bucket(url), confirm_name, dry_run)
        return
    if check_only:
        manifest = read_seal(open_bucket(url))
        verify(open_bucket(url), manifest, _Telling("verified"), deep=True)
        _print(url, manifest, json)
        return
    maker = MADE_HERE.get(profile.name)
    if source is None and maker is None:
        raise UsageMistake(
            "this version seeds from a folder only",
            f"download the weights, then: kimisession seed {profile.name} --from FOLDER",
        )
    if source is not None and not source.is_dir():
        raise UsageMistake(f"{source} is not a folder", "point --from at the folder with the safetensors files")
    if dry_run:
        show.out(f"would seed {source or 'weights made on the spot'} into {url}")
        return
    with tempfile.TemporaryDirectory(prefix="kimisession-weights-") as made:
        if source is None and maker is not None:
            maker(Path(made))
        began = time.monotonic()
        folder = FolderSource(source or Path(made))
        manifest = seed(folder, open_bucket(url), model=profile.checkpoints[0].repo, progress=_Telling("seeded"))
    took = time.monotonic() - began
    show.say(f"sealed {len(manifest.files)} files, {show.size(manifest.total_bytes)} in {took:.1f} s")
    _print(url, manifest, json)
    if not json:
        show.next_step(f"kimisession start {profile.name}")


def _print(url: str, manifest: Manifest, json: bool) -> None:
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
            ("written", f"{manifest.written_at} by {manifest.written_by}"),
        ]
    )
    rows = [(f.path, show.size(f.size), str(len(f.parts)), f.crc32c, f.sha256[:16]) for f in manifest.files]
    total = ("total", show.size(manifest.total_bytes), str(sum(len(f.parts) for f in manifest.files)), "", "")
    show.table(("FILE", "SIZE", "PARTS", "CRC32C", "SHA256"), [*rows, total], frozenset({1, 2}))


class _Telling:
    """Progress as one line that changes."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.began = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        took = max(0.001, time.monotonic() - self.began)
        rate = progress.done_bytes / took
        left = span((progress.total_bytes - progress.done_bytes) / rate) if rate else "?"
        done = f"{show.size(progress.done_bytes)} of {show.size(progress.total_bytes)}"
        show.flash(
            f"  {self.verb} {done}, {progress.done_files}/{progress.total_files} files, {show.size(rate)}/s, {left} left"
        )


def _delete(bucket: Bucket, given: str | None, dry_run: bool) -> None:
    """Weights are hours of downloading: deleting them asks for the bucket's name."""
    if dry_run:
        show.out(f"would delete every object of {bucket.url}")
        return
    if given is None:
        if not sys.stdin.isatty():
            raise UsageMistake(
                "deleting weights asks for the bucket's name", f"add --name {bucket.name} if you mean it"
            )
        show.say(f"This deletes every object of {bucket.url}.")
        given = input(f"Type {bucket.name} to go on: ").strip()
    if given != bucket.name:
        raise KimiError(f"{given!r} is not the bucket's name: nothing was deleted", f"its name is {bucket.name}")
    show.say(f"deleted {delete(bucket, given)} objects of {bucket.url}")
