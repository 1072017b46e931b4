"""Seed from the hub on a machine that was rented for it, and tell the keeper how it goes, one JSON object a line.

    python -m kimisession.weights.seeder --model OWNER/NAME --from OWNER/NAME --revision COMMIT --bucket gs://NAME

    {"progress": {"done": BYTES, "total": BYTES, "unit": "bytes"}}   when bytes moved, at most once in five seconds
    {"done": {...}}                                                  last, when the bucket is sealed
    {"failed": {"exit": CODE, "message": "one sentence"}}            last, else

A token for the hub comes from the file that HF_TOKEN_PATH names. Nobody looks: what hangs ends by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time

from kimisession.errors import KimiError
from kimisession.node.policy import span
from kimisession.weights.bucket import open_bucket
from kimisession.weights.hub import HubSource
from kimisession.weights.seal import Progress
from kimisession.weights.seed import seed

EVERY_S = 5.0

#: No patience of the seeder's own lasts so long: ten minutes of Retry-After are the longest.
STALLED_S = 20 * 60.0


class Telling:
    """Progress as lines, and the moment of the last."""

    def __init__(self) -> None:
        self.told_at = -EVERY_S
        self.moved_at = time.monotonic()
        self.done_bytes = -1

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.done_bytes == self.done_bytes:
            return
        self.done_bytes, self.moved_at = progress.done_bytes, now
        if now - self.told_at >= EVERY_S or progress.done_bytes == progress.total_bytes:
            self.told_at = now
            say("progress", done=progress.done_bytes, total=progress.total_bytes, unit="bytes")

    def watch(self) -> None:
        """End this process when nothing has moved for STALLED_S: a rented machine must not wait for a dead connection."""
        while (still_s := time.monotonic() - self.moved_at) < STALLED_S:
            time.sleep(STALLED_S - still_s)
        say("failed", exit=1, message=f"no byte moved for {span(STALLED_S)}")
        os._exit(1)


def say(kind: str, **what: object) -> None:
    """One line for the keeper."""
    print(json.dumps({kind: what}), flush=True)


def main() -> int:
    """Entry point. Exit codes: those of the errors in kimisession/errors.py."""
    parser = argparse.ArgumentParser(description="Seed a bucket from the hub.")
    parser.add_argument("--model", required=True, help="what the seal calls it")
    parser.add_argument("--from", dest="repo", required=True, help="OWNER/NAME on the hub")
    parser.add_argument("--revision", required=True, help="a full commit")
    parser.add_argument("--bucket", required=True, help="gs://NAME, or file:///FOLDER")
    chosen = parser.parse_args()
    telling = Telling()
    threading.Thread(target=telling.watch, daemon=True).start()
    began = time.monotonic()
    try:
        manifest = seed(
            HubSource(chosen.repo, chosen.revision),
            open_bucket(chosen.bucket),
            model=chosen.model,
            revision=chosen.revision,
            progress=telling,
        )
    except KimiError as error:
        say("failed", exit=error.exit_code, message=error.message)
        print(f"seed: {error.message}", file=sys.stderr)
        return error.exit_code
    took_s = round(time.monotonic() - began, 3)
    say("done", bytes=manifest.total_bytes, files=len(manifest.files), seconds=took_s, manifest=manifest.digest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
