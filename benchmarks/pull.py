"""Pull side by side: the puller, gcloud storage, gsutil, google-cloud-storage, runai, and the limits of loopback.

    python benchmarks/pull.py [--runs 5] [--shards 16] [--shard-mib 256] [--only NAME ...]

Needs nginx (PATH or $NGINX_PATH), gcc and openssl; each mover that is not installed is named and left out. The set lies in
memory, nginx serves it on the paths of the JSON API with checksums in its headers, all on this machine. Ends with one
line per ratio with its bound and exits 1 when one is missed. Runs are interleaved; what else the machine did is recorded.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from urllib.parse import quote

from crc32c import crc32c

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.movers import GIB, Mover, Result, Verdict, interleave, scratch, shard_set, table  # noqa: E402
from kimisession.weights.bucket import FolderBucket  # noqa: E402
from kimisession.weights.seed import seed  # noqa: E402
from kimisession.weights.source import FolderSource  # noqa: E402

PROCESSES, THREADS = 2, 4

RECEIVER = r"""
/* The limits of this machine: four threads that receive the set in 32 MiB ranges, and throw it away or, given a folder
   and not -, store it there, unverified. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#define RANGE (32l << 20)
static int port, files, *stores; static char **names; static long *sizes; static int next_file; static long next_at;
static void keep(int file, char *bytes, long size, long at) {
    while (file >= 0 && size > 0) {
        long n = pwrite(file, bytes, size, at);
        if (n <= 0) exit(1);
        bytes += n; size -= n; at += n;
    }
}
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *run(void *unused) {
    int s = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    if (connect(s, (void *)&to, sizeof to)) exit(1);
    char *buffer = malloc(1 << 20), request[600];
    for (;;) {
        pthread_mutex_lock(&lock);
        if (next_file < files && next_at >= sizes[next_file]) { next_file++; next_at = 0; }
        if (next_file >= files) { pthread_mutex_unlock(&lock); break; }
        char *name = names[next_file]; long from = next_at, size = sizes[next_file] - from; int store = stores[next_file];
        if (size > RANGE) size = RANGE;
        next_at += size;
        pthread_mutex_unlock(&lock);
        int n = snprintf(request, sizeof request,
            "GET /download/storage/v1/b/weights/o/%s?alt=media HTTP/1.1\r\nHost: x\r\nRange: bytes=%ld-%ld\r\n\r\n",
            name, from, from + size - 1);
        if (send(s, request, n, 0) != n) exit(1);
        long got = 0; char *end = 0;
        while (!end) {
            long n = recv(s, buffer + got, (1 << 20) - 1 - got, 0);
            if (n <= 0) exit(1);
            got += n; buffer[got] = 0; end = strstr(buffer, "\r\n\r\n");
        }
        if (strncmp(buffer, "HTTP/1.1 206", 12)) exit(1);
        long left = size - (got - (end + 4 - buffer));
        keep(store, end + 4, size - left, from);
        while (left > 0) {
            long n = recv(s, buffer, left < (1 << 20) ? left : (1 << 20), store < 0 ? 0 : MSG_WAITALL);
            if (n <= 0) exit(1);
            keep(store, buffer, n, from + size - left);
            left -= n;
        }
    }
    return unused;
}
int main(int count, char **words) {
    port = atoi(words[1]); files = (count - 3) / 2; names = malloc(files * sizeof *names); sizes = malloc(files * sizeof *sizes);
    stores = malloc(files * sizeof *stores);
    for (int i = 0; i < files; i++) {
        names[i] = words[3 + 2 * i]; sizes[i] = atol(words[4 + 2 * i]);
        char path[4096]; snprintf(path, sizeof path, "%s/%s", words[2], names[i]);
        stores[i] = strcmp(words[2], "-") ? open(path, O_WRONLY | O_CREAT, 0600) : -1;
        if (strcmp(words[2], "-") && stores[i] < 0) exit(1);
    }
    pthread_t t[4];
    for (int i = 0; i < 4; i++) pthread_create(&t[i], 0, run, 0);
    for (int i = 0; i < 4; i++) pthread_join(t[i], 0);
    return 0;
}
"""

DOWNLOAD_MANY = """
import os, sys
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage import transfer_manager
client = storage.Client(project="p", credentials=AnonymousCredentials(),
                        client_options={"api_endpoint": os.environ["STORAGE_EMULATOR_HOST"]})
names = [blob.name for blob in client.list_blobs("weights")]
done = transfer_manager.download_many_to_path(client.bucket("weights"), names, sys.argv[1], max_workers=8)
assert not any(isinstance(one, Exception) for one in done), done
"""

RUNAI = """
import sys
from runai_model_streamer import SafetensorsStreamer
with SafetensorsStreamer() as streamer:
    streamer.stream_files(["gs://weights/" + name for name in sys.argv[2:]])
    count = sum(tensor.numel() for _, tensor in streamer.get_tensors())
assert count > 1000
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe(bucket: Path, meta: Path, origin: str) -> str:
    """The JSON API's answers as files, and the map of nginx from a name to its checksum header."""
    items, hashes = [], []
    for path in sorted(path for path in bucket.rglob("*") if path.is_file()):
        name = path.relative_to(bucket).as_posix()
        if name.endswith("/lock"):
            continue
        value = 0
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                value = crc32c(chunk, value)
        crc = base64.b64encode(value.to_bytes(4, "big")).decode()
        item = {
            "kind": "storage#object",
            "name": name,
            "bucket": "weights",
            "generation": "7",
            "metageneration": "1",
            "size": str(path.stat().st_size),
            "crc32c": crc,
            "etag": "CAc=",
            "id": f"weights/{name}/7",
            "selfLink": f"{origin}/storage/v1/b/weights/o/{quote(name, safe='')}",
            "mediaLink": f"{origin}/download/storage/v1/b/weights/o/{quote(name, safe='')}?generation=7&alt=media",
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            "timeCreated": "2026-11-21T00:00:00.000Z",
            "updated": "2026-11-21T00:00:00.000Z",
        }
        items.append(item)
        (meta / name).parent.mkdir(parents=True, exist_ok=True)
        (meta / name).write_text(json.dumps(item))
        hashes.append(f'"{name}" "crc32c={crc}";')
    visible = [item for item in items if not str(item["name"]).startswith(".")]
    (meta / "list.json").write_text(json.dumps({"kind": "storage#objects", "items": visible}))
    (meta / "bucket.json").write_text(
        json.dumps(
            {"kind": "storage#bucket", "id": "weights", "name": "weights", "location": "US", "storageClass": "STANDARD"}
        )
    )
    return "\n".join(hashes)


@contextmanager
def served(bucket: Path, work: Path, http: int, tls: int) -> Iterator[list[int]]:
    """nginx over a bucket in a folder; yields the pids of its processes."""
    nginx = os.environ.get("NGINX_PATH") or shutil.which("nginx")
    if not nginx:
        raise SystemExit("benchmarks/pull.py needs nginx: install it or set NGINX_PATH to its path")
    hashes = describe(bucket, work / "meta-http", f"http://127.0.0.1:{http}")
    describe(bucket, work / "meta-https", f"https://localhost:{tls}")
    meta = f"{work}/meta-$scheme"
    certificate(work)
    (work / "nginx.conf").write_text(
        f"""daemon off; worker_processes 2; pid {work}/pid; error_log {work}/errors;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; default_type application/octet-stream;
  client_body_temp_path {work}/t1; proxy_temp_path {work}/t2; fastcgi_temp_path {work}/t3;
  uwsgi_temp_path {work}/t4; scgi_temp_path {work}/t5; map_hash_bucket_size 256; ssl_session_cache shared:s:1m;
  map $name $checksum {{ {hashes} }}
  server {{
    listen 127.0.0.1:{http}; listen 127.0.0.1:{tls} ssl;
    ssl_certificate {work}/cert.pem; ssl_certificate_key {work}/key.pem; ssl_protocols TLSv1.3 TLSv1.2;
    set $name "";
    location = /storage/v1/b/weights/o {{ alias {meta}/list.json; default_type application/json; }}
    location = /storage/v1/b/weights {{ alias {meta}/bucket.json; default_type application/json; }}
    location ~ ^/(?:download/)?storage/v1/b/weights/o/(?<wanted>.+)$ {{
      set $name $wanted;
      if ($arg_alt = media) {{ rewrite ^ /media/$wanted last; }}
      rewrite ^ /meta/$wanted last;
    }}
    location /media/ {{
      internal; alias {bucket}/;
      add_header x-goog-hash $checksum; add_header x-goog-generation 7; add_header x-goog-stored-content-encoding identity;
    }}
    location /meta/ {{ internal; alias {meta}/; default_type application/json; }}
  }}
}}
"""
    )
    process = subprocess.Popen([nginx, "-p", str(work), "-c", str(work / "nginx.conf")])
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", http), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield [process.pid, *map(int, workers)]
    finally:
        process.terminate()
        process.wait()


def certificate(work: Path) -> None:
    """A certificate for localhost that only this run trusts."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(work / "key.pem"), "-out", str(work / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )


def movers(work: Path, disk: Path, bucket: Path, http: int, tls: int) -> list[Mover]:
    """Every mover that this machine has, in the order of a round."""
    memory = work / "to"
    shards = sorted(bucket.glob("*.safetensors"))
    plain = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{http}"}
    secure = {"STORAGE_EMULATOR_HOST": f"https://localhost:{tls}", "SSL_CERT_FILE": str(work / "cert.pem")}
    cloud = {
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_PROJECT": "bench",
        "CLOUDSDK_CONFIG": str(work / "gcloud"),
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
        "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE": str(work / "cert.pem"),
        "REQUESTS_CA_BUNDLE": str(work / "cert.pem"),
    }
    (work / "receiver.c").write_text(RECEIVER)
    subprocess.run(["gcc", "-O2", "-pthread", "-o", work / "receiver", work / "receiver.c"], check=True)
    sizes = [word for path in shards for word in (path.name, str(path.stat().st_size))]

    def ours(to: Path) -> list[str]:
        puller = [sys.executable, "-m", "kimisession.node.pull", "--from", "gs://weights", "--to", str(to)]
        return [*puller, "--processes", str(PROCESSES), "--threads", str(THREADS)]

    def curl(to: Path) -> list[str]:
        urls = [f"https://localhost:{tls}/download/storage/v1/b/weights/o/{path.name}?alt=media" for path in shards]
        one = f"xargs -P 4 -n 1 curl -sSf --http1.1 --cacert {work / 'cert.pem'} -o /dev/null"
        return ["sh", "-c", f'printf "%s\\n" "$@" | {one}', "sh", *urls]

    def gcloud(to: Path) -> list[str]:
        return ["gcloud", "storage", "cp", "--quiet", "gs://weights/*", str(to)]

    def gsutil(to: Path) -> list[str]:
        options = {
            "Credentials:gs_json_host": "localhost",
            "Credentials:gs_json_port": str(tls),
            "GSUtil:prefer_api": "json",
            "Boto:https_validate_certificates": "False",
            "Boto:num_retries": "1",
            "GSUtil:software_update_check_period": "0",
            "GSUtil:state_dir": str(work / "gsutil"),
        }
        words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        return ["gsutil", "-q", *words, "-m", "cp", "gs://weights/*", str(to)]

    python = {"PYTHONPATH": str(ROOT)}
    found = [
        Mover("C receiver, http", lambda to: [str(work / "receiver"), str(http), "-", *sizes], {}, memory),
        Mover("C receiver, http, stored", lambda to: [str(work / "receiver"), str(http), str(to), *sizes], {}, memory),
        Mover(
            "C receiver, http, disk", lambda to: [str(work / "receiver"), str(http), str(to), *sizes], {}, disk / "to"
        ),
        Mover("kimisession, http", ours, {**plain, **python}, memory),
        Mover("kimisession, TLS", ours, {**secure, **python}, memory),
        Mover("kimisession, http, disk", ours, {**plain, **python}, disk / "to"),
    ]
    if shutil.which("curl"):
        found.append(Mover("curl to nothing, TLS", curl, {}, memory))
    if shutil.which("gcloud"):
        api = "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"
        found += [
            Mover("gcloud, http", gcloud, {**cloud, api: f"http://127.0.0.1:{http}/storage/v1/"}, memory),
            Mover("gcloud, TLS", gcloud, {**cloud, api: f"https://localhost:{tls}/storage/v1/"}, memory),
            Mover("gcloud, http, disk", gcloud, {**cloud, api: f"http://127.0.0.1:{http}/storage/v1/"}, disk / "to"),
        ]
    if shutil.which("gsutil"):
        boto = {"BOTO_CONFIG": str(work / "boto"), "CLOUDSDK_CORE_PASS_CREDENTIALS_TO_GSUTIL": "false"}
        (work / "boto").write_text("[Credentials]\n[Boto]\nca_certificates_file = system\n")
        found.append(Mover("gsutil, TLS", gsutil, {**cloud, **boto}, memory))
    found.append(
        Mover("google-cloud-storage, http", lambda to: [sys.executable, "-c", DOWNLOAD_MANY, str(to)], plain, memory)
    )
    runai = {
        **plain,
        "CLOUD_STORAGE_EMULATOR_ENDPOINT": f"http://127.0.0.1:{http}",
        "RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS": "true",
        "RUNAI_STREAMER_CONCURRENCY": "8",
    }
    names = [path.name for path in shards]
    found.append(
        Mover("runai (to memory), http", lambda to: [sys.executable, "-c", RUNAI, str(to), *names], runai, memory)
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--shard-mib", type=int, default=256)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder in memory, for twice the set")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a folder on a disk, for the set")
    parser.add_argument("--only", nargs="*", help="movers by the start of their name")
    parser.add_argument("--quiet", type=float, help="do a run again when others used more than this share of the CPU")
    chosen = parser.parse_args()
    with scratch(chosen.memory, chosen.disk) as (work, disk):
        shard_set(work / "set", chosen.shards, chosen.shard_mib)
        bucket = work / "bucket"
        bucket.mkdir()
        for path in (work / "set").iterdir():
            os.link(path, bucket / path.name)  # the seeder would copy; the seal is what is wanted
        manifest = seal_in_place(work, bucket)
        http, tls = free_port(), free_port()
        with served(bucket, work, http, tls) as servers:
            chosen_movers = [
                mover
                for mover in movers(work, disk, bucket, http, tls)
                if not chosen.only or any(mover.name.startswith(word) for word in chosen.only)
            ]
            results = interleave(chosen_movers, chosen.runs, servers, manifest, quiet=chosen.quiet)
    print()
    print("\n".join(table(results, manifest)))
    print()
    return verdict(results, manifest)


def seal_in_place(work: Path, bucket: Path) -> int:
    """Seal a copy made of links: seed a twin, move its seal over; the bytes in all."""
    twin = FolderBucket(work / "twin")
    manifest = seed(FolderSource(bucket), twin, model="bench")
    (bucket / ".kimisession").mkdir()
    os.link(twin.path / ".kimisession/manifest.json", bucket / ".kimisession/manifest.json")
    shutil.rmtree(twin.path)
    return manifest.total_bytes


def verdict(results: dict[str, list[Result]], total_bytes: int) -> int:
    """One line per ratio, with its bound."""
    verdict = Verdict()

    def faster(ours: str, theirs: str, bound: float) -> None:
        if results.get(ours) and results.get(theirs):
            pairs = zip(results[ours], results[theirs], strict=True)
            verdict.line(f"{ours} against {theirs}", [b.wall_s / a.wall_s for a, b in pairs], bound, at_least=True)
        else:
            print(f"-      {ours} against {theirs}: not measured")

    faster("kimisession, http", "gcloud, http", 3.0)
    faster("kimisession, TLS", "gcloud, TLS", 2.5)
    faster("kimisession, TLS", "gsutil, TLS", 4.0)
    faster("kimisession, http", "C receiver, http", 0.80)
    faster("kimisession, http, disk", "gcloud, http, disk", 2.5)
    for name, bound in (("kimisession, http", 0.45), ("kimisession, TLS", 0.95)):
        if runs := results.get(name):
            cpu = [run.cpu_s / (total_bytes / GIB) for run in runs]
            verdict.line(f"{name}: client CPU seconds per GiB", cpu, bound, at_least=False)
            verdict.line(f"{name}: RssAnon MiB, 8 connections", [run.rss_anon_mib for run in runs], 64, at_least=False)
    for ours, theirs in (
        ("C receiver, http, stored", "gcloud, http"),
        ("curl to nothing, TLS", "gcloud, TLS"),
        ("C receiver, http, stored", "C receiver, http"),
        ("C receiver, http, disk", "gcloud, http, disk"),
    ):
        if results.get(ours) and results.get(theirs):
            ratios = [b.wall_s / a.wall_s for a, b in zip(results[ours], results[theirs], strict=True)]
            print(
                f"limit  {ours} against {theirs}: {median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}] (not judged)"
            )
    return 1 if verdict.missed else 0


if __name__ == "__main__":
    sys.exit(main())
