#!/usr/bin/env bash
# The startup-script of the reaper's machine: Compute Engine runs it as root at every boot, and it never ends.
#
# Everything that it needs from this project travels in the machine's metadata and is fetched anew before each run; the one
# package that it does not have comes from the package index, pinned. Words between two at signs are filled
# in by kimisession/cloud/guard.py.
set -u
home=/var/lib/kimisession-reaper
say() { echo "kimisession reaper: $*"; }
try() { until "$@"; do say "failed: $1; again in 30 s" && sleep 30; done; }

# The operator's own variables, such as PIP_INDEX_URL for a package index that can be reached from here.
if [ -r /etc/default/kimisession-reaper ]; then
    set -a
    # shellcheck disable=SC1091
    . /etc/default/kimisession-reaper
    set +a
fi

fetch_code() { # python3 and not curl: the reaper needs the one anyway
    python3 - "$home/code.zip" <<'PYTHON'
import base64, os, sys, urllib.request
host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
url = f"http://{host}/computeMetadata/v1/instance/attributes/kimisession-code"
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
with opener.open(urllib.request.Request(url, headers={"Metadata-Flavor": "Google"}), timeout=30) as answer:
    code = base64.b64decode(answer.read(), validate=True)
part = f"{sys.argv[1]}.part"
with open(part, "wb") as file:
    file.write(code)
os.replace(part, sys.argv[1])
PYTHON
}

install_library() {
    [ -x "$home/venv/bin/pip" ] || python3 -m venv "$home/venv" ||
        { apt-get update -q && apt-get install -y -q python3-venv && python3 -m venv --clear "$home/venv"; } || return
    "$home/venv/bin/pip" install -q --disable-pip-version-check "google-cloud-compute==@LIBRARY@"
}

mkdir -p "$home"
try fetch_code
python=python3
if ! python3 -c 'import google.cloud.compute_v1' 2>/dev/null; then
    python=$home/venv/bin/python
    "$python" -c 'import google.cloud.compute_v1' 2>/dev/null || try install_library
fi
while true; do
    # Code that cannot be fetched just now is no reason not to look with the code of before.
    fetch_code || say "the code could not be fetched anew"
    PYTHONPATH=$home/code.zip timeout -k 10 @RUN_S@ "$python" -B -m kimisession.cloud.reaper --zone "@ZONE@" --name "@NAME@" ||
        say "this run was not complete; the next one is in @EVERY_S@ s"
    sleep @EVERY_S@
done
