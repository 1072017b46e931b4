"""The last layer on a rented machine: delete it through the cloud's API with its own identity, power off last.

    python3 -I -S -B deadline.py --deadline-utc 1764000000 --longest-uptime-s 9000 --without-keeper-s 240

Started every minute by a systemd timer that survives reboots (scripts/deadline). One run looks once and ends, unless
something is due; then it does not end before the machine does. Due is, whichever comes first:

- the deadline (seconds since 1970), plus `--grace-s` in which the keeper may end the session in order;
- `--longest-uptime-s` of uptime, on a clock that never steps: a wrong wall clock must not keep the machine;
- no keeper alive for `--without-keeper-s`, counted from the boot, from the arming, or from when one was last seen.

With `--because` the session has ended already, with that exit code, and nothing can extend it any more: a look waits for a
moment that comes before the next one would. The code travels in the deletion's request id, which Compute Engine keeps
with the operation for days (its documentation, `clientOperationId`): why a machine went can be read when it is gone, and
no permission beyond its deletion is needed for it. Without one it is 42 (deadline) or 44 (no keeper).

Nothing here needs the disk: one file, the standard library, no bytecode; what it remembers (when a keeper was last
seen) is a file under /run, which is memory, and if even that cannot be written the machine goes earlier, not later.
Python and not a shell with curl: the keeper needs the same Python, curl is not on every image, and retries over HTTP
with a deadline each are code that has to be tested. It runs alone (`-I -S`): no site-packages can break it.

A guest's power-off leaves a stopped machine and a billed disk on Google Compute Engine; hence deletion first. DELETE
answering 200 means accepted, so the operation is followed until it is done, and asked again when it failed.
The addresses are those of Google's documents: the metadata server, `GCE_METADATA_HOST` naming another as in Google's
own client libraries; Compute Engine's REST API v1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any, Callable

METADATA = "169.254.169.254"  # metadata.google.internal; the number needs no working name service
COMPUTE = "https://compute.googleapis.com"
CALL_S = 10.0
SEEN = Path("/run/kimisession-keeper-seen")
KEEPER = b"kimisession.node.keeper"
PAST_DEADLINE, NO_KEEPER = 42, 44

#: The timer looks every minute.
LOOK_S = 60.0

#: The first digits of our request ids: "kimi". The code follows.
MARK = "6b696d69"


class CloudError(Exception):
    """The cloud said no, or nothing. `status` is HTTP's, 0 when there was no answer."""

    def __init__(self, what: str, status: int = 0) -> None:
        super().__init__(what)
        self.status = status


class Google:
    """This machine as Compute Engine knows it. Every method raises CloudError."""

    def __init__(self, metadata: str, compute: str, call_s: float = CALL_S) -> None:
        self.metadata = metadata
        self.compute = compute.rstrip("/")
        self.call_s = call_s
        # A proxy that a user configured must not stand between a machine and its end.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _open(self, request: urllib.request.Request, what: str) -> tuple[bytes, Any]:
        try:
            with self.opener.open(request, timeout=self.call_s) as answer:
                return answer.read(1 << 20), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(2000).decode("utf-8", "replace")
            raise CloudError(f"{what}: HTTP {error.code} {_message(body)}", error.code) from None
        except (OSError, ValueError) as error:
            raise CloudError(f"{what}: {getattr(error, 'reason', None) or error}") from None

    def about_me(self, path: str) -> str:
        """One value of the metadata server, which has to say that it is Google's."""
        url = f"http://{self.metadata}/computeMetadata/v1/{path}"
        body, headers = self._open(
            urllib.request.Request(url, headers={"Metadata-Flavor": "Google"}), f"metadata {path}"
        )
        if headers.get("Metadata-Flavor") != "Google":
            raise CloudError(f"{self.metadata} is not Google's metadata server")
        return body.decode("utf-8", "replace").strip()

    def url(self) -> str:
        """This instance in Compute Engine's API."""
        project = self.about_me("project/project-id")
        zone = self.about_me("instance/zone").rpartition("/")[2]
        return f"{self.compute}/compute/v1/projects/{project}/zones/{zone}/instances/{self.about_me('instance/name')}"

    def call(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One call to Compute Engine with this machine's own token."""
        try:
            token = str(json.loads(self.about_me("instance/service-accounts/default/token"))["access_token"])
        except (ValueError, KeyError, TypeError):
            raise CloudError("the metadata server gave no token for the default service account") from None
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        payload = None if body is None else json.dumps(body).encode()
        # S310: the scheme is ours, or the operator's own on the command line.
        request = urllib.request.Request(url, payload, headers, method=method)  # noqa: S310
        text, _ = self._open(request, f"{method} {url.partition('/compute/v1/')[2]}")
        try:
            found = json.loads(text or b"{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CloudError(f"{method} {url} was answered with something that is not an object")
        return found

    def may(self, permission: str) -> bool:
        """Whether this machine's identity has `permission` on the machine itself (instances.testIamPermissions)."""
        found = self.call("POST", f"{self.url()}/testIamPermissions", {"permissions": [permission]})
        return permission in found.get("permissions", [])

    def delete_self(self, patience_s: float, pause_s: float, code: int) -> None:
        """Ask for deletion, then follow the operation. Returns when it says DONE, or when `patience_s` has passed;
        normally this process is gone before either."""
        url = self.url()
        try:
            operation = self.call("DELETE", f"{url}?requestId={request_id(code)}")
        except CloudError as error:
            if error.status != 400:
                raise
            operation = self.call("DELETE", url)  # should our id ever be refused, its end matters more than its reason
        until = time.monotonic() + patience_s
        while operation.get("status") != "DONE" and time.monotonic() < until:
            time.sleep(pause_s)
            name = str(operation.get("name", ""))
            operation = self.call("GET", f"{url.rpartition('/instances/')[0]}/operations/{name}")
        errors = (operation.get("error") or {}).get("errors") or []
        if errors:
            raise CloudError(f"the deletion failed: {errors[0].get('code')} {errors[0].get('message', '')}".strip())


def request_id(code: int) -> str:
    """A UUID (version 4) that no other request has, and that says with which exit code the session ended."""
    rest = str(uuid.uuid4())[14:]
    return f"{MARK}-{code & 0xFFFF:04x}-{rest[:5]}8{rest[6:]}"


def _message(body: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return " ".join(body.split())[:200]


def uptime_s() -> float:
    """Seconds since this machine booted, suspend included; never steps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def keeper_lives(proc: Path = Path("/proc")) -> bool:
    """Whether a keeper runs on this machine, by its command line; a zombie has none."""
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if KEEPER in (entry / "cmdline").read_bytes().split(b"\0"):
                    return True
    return False


def boot_id() -> str:
    """The kernel's name for this boot: what was seen before a reboot does not count after it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def last_seen(path: Path, alive: bool, uptime: float) -> float:
    """The uptime at which a keeper was last seen; 0, the boot, when none ever was or nothing is known."""
    if alive:
        with contextlib.suppress(OSError):
            path.write_text(f"{boot_id()} {uptime:.0f}", encoding="ascii")
        return uptime
    try:
        boot, seen = path.read_text(encoding="ascii").split()
        return min(uptime, float(seen)) if boot == boot_id() else 0.0
    except (OSError, ValueError):
        return 0.0


def due(args: argparse.Namespace, wall: float, uptime: float, keeper_at: float) -> str:
    """Why the machine has to go now; empty while it may stay. `keeper_at` is an uptime."""
    if wall >= args.deadline_utc + args.grace_s:
        return f"the deadline passed {wall - args.deadline_utc:.0f}s ago"
    if uptime >= args.longest_uptime_s + args.grace_s:
        return f"up for {uptime:.0f}s, the session was to last until {args.longest_uptime_s:.0f}s"
    if uptime - keeper_at >= args.without_keeper_s:
        since = "since the boot" if not keeper_at else "since it was last seen"
        return f"no keeper for {uptime - keeper_at:.0f}s {since}"
    return ""


def end(google: Google | None, args: argparse.Namespace, say: Callable[[str], None], code: int) -> None:
    """Delete the machine, again and again for `--try-s` seconds; then power off, which also ends most of the bill."""
    until = time.monotonic() + args.try_s
    pause = args.pause_s
    while google is not None:
        try:
            google.delete_self(min(args.patience_s, max(0.0, until - time.monotonic())), args.pause_s, code)
            say("deletion is accepted, and this machine still runs: asking again")
        except Exception as error:
            say(f"could not delete this machine: {error}")
        left = until - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(2 * pause, 60.0)
    say("powering off; the disk of a machine that was not deleted is still billed")
    for argv in (["poweroff"], ["poweroff", "--force"], ["poweroff", "--force", "--force"]):
        try:
            subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"{' '.join(argv)}: {error}")
        time.sleep(args.off_s)


def main(argv: list[str] | None = None) -> int:
    """Entry point. 0: nothing is due; 1: something was, and the machine is somehow still here."""
    parser = argparse.ArgumentParser(description="Delete this machine when its time is over.")
    parser.add_argument("--deadline-utc", type=float, required=True, help="seconds since 1970")
    parser.add_argument("--longest-uptime-s", type=float, required=True)
    parser.add_argument("--without-keeper-s", type=float, default=240.0)
    parser.add_argument("--grace-s", type=float, default=180.0, help="what the keeper gets for ending in order")
    parser.add_argument("--cloud", choices=("gcp", "none"), default="gcp")
    parser.add_argument("--compute", default=COMPUTE)
    parser.add_argument("--try-s", type=float, default=900.0, help="how long to ask for deletion before powering off")
    parser.add_argument("--patience-s", type=float, default=180.0, help="how long an accepted deletion may take")
    parser.add_argument("--pause-s", type=float, default=2.0, help="the first pause between two tries; it doubles")
    parser.add_argument("--call-s", type=float, default=CALL_S, help="how long one answer may take")
    parser.add_argument("--off-s", type=float, default=90.0, help="how long a power-off may take")
    parser.add_argument("--seen", type=Path, default=SEEN)
    parser.add_argument("--because", type=int, default=-1, help="the session has ended, with this exit code")
    args = parser.parse_args(argv)

    def say(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"kimisession deadline: {text}", flush=True)

    uptime = uptime_s()
    try:
        alive = keeper_lives()
    except OSError:
        alive = False
    keeper_at = last_seen(args.seen, alive, uptime)
    why = due(args, time.time(), uptime, keeper_at)
    left_s = args.deadline_utc + args.grace_s - time.time()
    if not why and args.because >= 0 and 0 < left_s < LOOK_S:
        time.sleep(left_s)
        why = due(args, time.time(), uptime_s(), keeper_at)
    if not why:
        return 0
    say(f"{why}: ending this machine")
    google = None
    if args.cloud == "gcp":
        google = Google(os.environ.get("GCE_METADATA_HOST") or METADATA, args.compute, args.call_s)
    code = args.because if args.because >= 0 else NO_KEEPER if why.startswith("no keeper") else PAST_DEADLINE
    end(google, args, say, code)
    return 1


if __name__ == "__main__":
    sys.exit(main())
