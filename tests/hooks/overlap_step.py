"""A cold-start step that really works: download (at the server's rate), unpack, and copy at a limited rate.

overlap_step.py URL FOLDER [COPY_BYTES_PER_S]
"""

import json
import shutil
import sys
import tarfile
import time
import urllib.request
from pathlib import Path

BLOCK = 1 << 16


def main() -> None:
    url, folder = sys.argv[1], Path(sys.argv[2])
    rate = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "archive.tar"
    told = 0.0
    with urllib.request.urlopen(url, timeout=30) as source, archive.open("wb") as target:
        total = int(source.headers["Content-Length"])
        while data := source.read1(BLOCK):
            target.write(data)
            if time.monotonic() - told > 0.2:
                told = time.monotonic()
                print(json.dumps({"progress": {"done": target.tell(), "total": total, "unit": "bytes"}}), flush=True)
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    if rate:
        for path in sorted((folder / "unpacked").iterdir()):
            with path.open("rb") as one, (folder / f"copy-{path.name}").open("wb") as other:
                while data := one.read(BLOCK):
                    other.write(data)
                    time.sleep(len(data) / rate)
    shutil.rmtree(folder / "unpacked")


main()
