"""Seed side by side: hub to bucket as a stream, against downloading everything and uploading it again.

    python benchmarks/seed.py [--runs 5] [--shards 16] [--shard-mib 256] [--only NAME ...]

The stand-in hub and store of the tests run on this machine at fixed rates: 50 MB/s per connection on both sides and
400 MB/s into the store in all, 8 streams, so the one-way ideal of the standard set (4 GiB) is 10.7 s. The others are
huggingface_hub's snapshot_download followed by gcloud storage cp, or by gsutil over TLS (the recipe of the project's
first users), both with the hash checks that they come with; the store tells the crc32c of what it was sent and the
md5 that belongs to it, computed before the clock runs: Google's own takes nobody's core. What is not installed is
named and left out. Ends with one line per ratio and exits 1 when one is missed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.movers import Mover, Result, Verdict, interleave, scratch, shard_set, table  # noqa: E402
from benchmarks.pull import certificate  # noqa: E402
from tests.weights.gcs_server import GcsServer, crc_of  # noqa: E402
from tests.weights.hub_server import HubServer  # noqa: E402
from tests.weights.servers import serving  # noqa: E402

PER_CONNECTION = 50e6
IN_ALL = 400e6
STREAMS = 8

OURS = """
import sys
from kimisession.weights.gcs import GcsBucket
from kimisession.weights.hub import HubSource
from kimisession.weights.seed import seed
prefix = sys.argv[1].strip("/").replace("/", "-") + "-%d" % __import__("os").getpid()
seed(HubSource("owner/mini"), GcsBucket.at("gs://weights/" + prefix), model="mini", streams=8)
"""

SNAPSHOT = """
import sys
from huggingface_hub import snapshot_download
snapshot_download("owner/mini", local_dir=sys.argv[1], max_workers=8)
"""


@contextmanager
def servers(work: Path) -> Iterator[list[str]]:
    """The hub and the store, http and TLS, in a process of their own; yields their addresses and the pid."""
    command = [sys.executable, __file__, "--serve", str(work)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield [*process.stdout.readline().split(), str(process.pid)]
    finally:
        process.stdin.close()
        process.wait()


def serve(work: Path) -> int:
    """Serve until stdin ends."""
    hub = HubServer(work / "set", per_connection=PER_CONNECTION)
    options = {"per_connection": PER_CONNECTION, "in_all": IN_ALL, "keep": False, "strict": False}
    plain = GcsServer(work / "plain", **options)  # type: ignore[arg-type]
    secure = GcsServer(work / "secure", **options)  # type: ignore[arg-type]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(work / "cert.pem", work / "key.pem")
    secure.socket = context.wrap_socket(secure.socket, server_side=True, do_handshake_on_connect=False)
    secure.url = secure.url.replace("http://127.0.0.1", "https://localhost")
    for path in (work / "set").iterdir():
        with path.open("rb") as file:
            md5 = base64.b64encode(hashlib.file_digest(file, "md5").digest()).decode()
        plain.md5_of[crc_of(path)] = secure.md5_of[crc_of(path)] = md5
    with ExitStack() as stack:
        for server in (hub, plain, secure):
            stack.enter_context(serving(server))
        print(hub.url, plain.url, secure.url, flush=True)
        sys.stdin.read()
    return 0


def movers(work: Path, disk: Path, hub: str, plain: str, secure: str) -> list[Mover]:
    """Ours, and the recipes that this machine has."""
    python = {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0"}
    cloud = {
        **python,
        "HF_HOME": str(disk / "hf"),
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_PROJECT": "bench",
        "CLOUDSDK_CONFIG": str(work / "gcloud"),
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
        "CLOUDSDK_STORAGE_PARALLEL_COMPOSITE_UPLOAD_ENABLED": "false",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": plain + "/storage/v1/",
        "BOTO_CONFIG": str(work / "boto"),
        "CLOUDSDK_CORE_PASS_CREDENTIALS_TO_GSUTIL": "false",
    }
    (work / "boto").write_text("[Credentials]\n[Boto]\n")
    target = disk / "to"
    found = [
        Mover(
            "kimisession",
            lambda to: [sys.executable, "-c", OURS, str(to)],
            {**python, "STORAGE_EMULATOR_HOST": plain},
            target,
        )
    ]
    snapshot = f'{sys.executable} -c \'{SNAPSHOT}\' "$0" && rm -rf "$0/.cache" && '
    recipes = {"gcloud": 'exec gcloud storage cp --quiet "$0"/* gs://weights/'}
    port = secure.rpartition(":")[2]
    recipes["gsutil"] = (
        f"exec gsutil -q -o Credentials:gs_json_host=localhost -o Credentials:gs_json_port={port} "
        "-o GSUtil:prefer_api=json -o Boto:https_validate_certificates=False -o Boto:num_retries=1 "
        f"-o GSUtil:software_update_check_period=0 -o GSUtil:state_dir={work}/gsutil "
        '-o GSUtil:parallel_composite_upload_threshold=0 -m cp "$0"/* gs://weights/'
    )
    for tool, upload in recipes.items():
        if shutil.which(tool):
            script = snapshot + upload
            command = lambda to, script=script: ["bash", "-c", script, str(to)]  # noqa: E731
            found.append(Mover(f"snapshot + {tool}", command, cloud, target))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--shard-mib", type=int, default=256)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder in memory, for the set")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a folder on a disk, for the recipes' copy")
    parser.add_argument("--only", nargs="*", help="movers by the start of their name")
    parser.add_argument("--quiet", type=float, help="see benchmarks/movers.py: the share of others that spoils a run")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        return serve(chosen.serve)
    with scratch(chosen.memory, chosen.disk) as (work, disk):
        total_bytes = shard_set(work / "set", chosen.shards, chosen.shard_mib)
        certificate(work)
        with servers(work) as (hub, plain, secure, pid):
            picked = [
                mover
                for mover in movers(work, disk, hub, plain, secure)
                if not chosen.only or any(mover.name.startswith(word) for word in chosen.only)
            ]
            results = interleave(picked, chosen.runs, [int(pid)], total_bytes, quiet=chosen.quiet)
    print()
    print("\n".join(table(results, total_bytes)))
    print()
    return verdict(results, total_bytes)


def verdict(results: dict[str, list[Result]], total_bytes: int) -> int:
    """One line per ratio, with its bound."""
    verdict = Verdict()
    ours = results.get("kimisession", [])
    for theirs, bound in (("snapshot + gcloud", 0.50), ("snapshot + gsutil", 0.45)):
        if ours and results.get(theirs):
            pairs = zip(ours, results[theirs], strict=True)
            verdict.line(f"seed against {theirs}", [a.wall_s / b.wall_s for a, b in pairs], bound, at_least=False)
        else:
            print(f"-      seed against {theirs}: not measured")
    if ours:
        ideal_s = total_bytes / min(STREAMS * PER_CONNECTION, IN_ALL)
        verdict.line("seed against the one-way ideal", [run.wall_s / ideal_s for run in ours], 1.15, at_least=False)
        verdict.line("seed: RssAnon MiB at 8 streams", [run.rss_anon_mib for run in ours], 64, at_least=False)
        verdict.line("seed: MiB written to disk", [run.disk_mib for run in ours], 1, at_least=False)
    return 1 if verdict.missed else 0


if __name__ == "__main__":
    sys.exit(main())
