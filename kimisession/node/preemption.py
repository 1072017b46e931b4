"""Google's notice that a spot machine is about to be taken back: about 30 seconds before its power goes.

The metadata server's `instance/preempted` turns TRUE at that moment; `wait_for_change` with the ETag of what was read last
tells at once, also of a change in between (Compute Engine documentation, "Query VM metadata" and "Spot VMs"). SkyPilot's own
preemption hooks do not fire on GCP (0.14.1).
"""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

METADATA = "169.254.169.254"
_PATH = "computeMetadata/v1/instance/preempted"
_DMI = Path("/sys/class/dmi/id/product_name")

#: One question waits so long at most: a connection that died without a word is noticed after that.
WAIT_S = 60

#: Pause after a question that failed.
PAUSE_S = 5.0


def on_google(dmi: Path = _DMI) -> bool:
    """Whether this is a machine of Compute Engine, or of a rig that says where its metadata server is."""
    if os.environ.get("GCE_METADATA_HOST"):
        return True
    try:
        return "Google" in dmi.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False


def _get(query: str, timeout_s: float) -> tuple[str, str]:
    host = os.environ.get("GCE_METADATA_HOST") or METADATA
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"http://{host}/{_PATH}{query}", headers={"Metadata-Flavor": "Google"})
    with opener.open(request, timeout=timeout_s) as answer:
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise OSError(f"{host} is not Google's metadata server")
        return answer.read(64).decode("ascii", "replace").strip(), answer.headers.get("ETag") or ""


def is_preempted(timeout_s: float = 1.0) -> bool:
    """Whether it is being taken back, as of now. Raises OSError."""
    return _get("", timeout_s)[0] == "TRUE"


def wait_for_notice(wait_s: int = WAIT_S) -> bool:
    """True as soon as it is being taken back; False when that did not happen for `wait_s`. Raises OSError."""
    told, etag = _get("", 5.0)
    if told != "TRUE":
        seen = f"&last_etag={etag}" if etag else ""
        told, _ = _get(f"?wait_for_change=true&timeout_sec={wait_s}{seen}", wait_s + 10.0)
    return told == "TRUE"
