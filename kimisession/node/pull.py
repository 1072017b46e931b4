"""Pull sealed weights onto this machine, each part verified before it counts.

    python3 -m kimisession.node.pull --from gs://bucket/prefix --to /models/kimi [--processes N --threads M]

Runs alone: Python 3.9+, the standard library, and PyPI's crc32c where it is installed (else sha256 is checked).
Prints JSON lines on stdout, for the keeper and for people:

    {"progress": {"done": BYTES, "total": BYTES, "unit": "bytes"}}   at most twice a second
    {"done": {"bytes", "fetched", "files", "seconds", "manifest", "model", "revision", "verified_by"}}
    {"failed": {"exit": CODE, "message": "one sentence"}}            the sentence stands on stderr, too

Exit codes: 0 all bytes are here and verified; 1 any other failure; 2 usage; 3 the bucket is not sealed; 4 a part kept
coming with a wrong checksum; 5 no space; 130 Ctrl-C. After any end, also kill -9, the same command goes on: parts that
the journal names are read back and verified from the local disk, the rest is fetched. Files come in the manifest's
order, which is the order in which an engine loads them. With --spread, shards go to the local SSDs that are mounted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kimisession.node.manifest import PULLED, SEAL, Manifest, ManifestError, decode
from kimisession.node.pull_crew import ABREAST, TRIES, Crew, backoff_s, plan, say
from kimisession.node.pull_place import (
    INTERRUPTED,
    JOURNAL,
    NOT_SEALED,
    OK,
    OTHER,
    PullError,
    boot_id,
    local_ssds,
    prepare,
    read_marker,
    refuse_others,
    sizes_agree,
    take_lock,
    unwritable,
    write_marker,
)
from kimisession.node.pull_worker import best_check
from kimisession.node.wire import WireError, open_wire


def main(arguments: list[str] | None = None) -> int:
    """Parse, pull, and turn the end into an exit code."""
    parser = argparse.ArgumentParser(prog="kimisession.node.pull", description="Pull sealed weights, verified.")
    parser.add_argument(
        "--from", dest="url", required=True, help="gs://bucket/prefix, http(s)://host/path or file:///folder"
    )
    parser.add_argument("--to", required=True, help="the folder that the engine will load from")
    cores = cores_here()
    parser.add_argument("--processes", type=int, default=max(1, min(16, cores)), help="default: cores, at most 16")
    parser.add_argument("--threads", type=int, default=4, help="connections per process (default 4)")
    parser.add_argument(
        "--spread", action="store_true", help="put shards on the mounted local SSDs, with links in --to"
    )
    chosen = parser.parse_args(arguments)
    if chosen.processes < 1 or chosen.threads < 1:
        parser.error("--processes and --threads must be at least 1")
    try:
        folder = Path(chosen.to).absolute()
        spread = [point / "kimisession-weights" / folder.name for point in local_ssds()] if chosen.spread else []
        pull(chosen.url, folder, chosen.processes, chosen.threads, spread or [folder])
    except PullError as error:
        say({"failed": {"exit": error.code, "message": error.message}})
        print(f"pull: {error.message}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pull(url: str, folder: Path, processes: int, threads: int, spread: Sequence[Path] = ()) -> None:
    """Bring every file of the sealed bucket into `folder`, verified; large ones lie in `spread`, if given.

    Raises PullError; may be repeated.
    """
    started = time.monotonic()
    manifest = read_manifest(url)
    try:
        for each in (folder, *spread):
            each.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder)
    except OSError as error:
        raise PullError(OTHER, f"{folder} cannot be used: {error.strerror}; choose another --to") from None
    try:
        fetched = 0
        marker = read_marker(folder)
        whole = marker.get("manifest") == manifest.digest and sizes_agree(folder, manifest)
        if not whole or marker.get("boot") != boot_id() or not boot_id():
            with contextlib.suppress(FileNotFoundError):
                (folder / PULLED).unlink()
            refuse_others(folder, manifest)
            prepare(folder, spread or [folder], manifest)
            # What an earlier boot wrote may not have reached the disk: then every part is read back.
            jobs = plan(folder, manifest, whole, min(ABREAST, processes * threads))
            crew = Crew(url, folder, manifest, jobs, processes, threads)
            fetched = crew.run()
            write_marker(folder, manifest)
        with contextlib.suppress(FileNotFoundError):
            (folder / JOURNAL).unlink()
    except OSError as error:  # our own small files: the disk filled up under them, or is no longer there
        raise unwritable(Path(error.filename or folder / JOURNAL), error) from None
    finally:
        os.close(lock)
    say({"progress": {"done": manifest.total_bytes, "total": manifest.total_bytes, "unit": "bytes"}})
    say(
        {
            "done": {
                "bytes": manifest.total_bytes,
                "fetched": fetched,
                "files": len(manifest.files),
                "seconds": round(time.monotonic() - started, 3),
                "manifest": manifest.digest,
                "model": manifest.model,
                "revision": manifest.revision,
                "verified_by": best_check().key,
            }
        }
    )


def read_manifest(url: str) -> Manifest:
    """The seal of the bucket, read strictly. Raises PullError 3 when there is none."""
    for failures in range(TRIES):
        try:
            return decode(open_wire(url).read(SEAL), f"{url}/{SEAL}")
        except WireError as error:
            if error.kind == "missing":
                raise PullError(
                    NOT_SEALED, f"{url} is not sealed, so it is not served; run 'kimisession seed'"
                ) from None
            if error.kind not in ("busy", "cut") or failures == TRIES - 1:
                raise PullError(OTHER, error.message) from None
            time.sleep(backoff_s(failures, error.retry_after_s))
        except ManifestError as error:
            raise PullError(OTHER, f"{error}") from None
    raise AssertionError("the last try returns or raises")


if __name__ == "__main__":
    sys.exit(main())
