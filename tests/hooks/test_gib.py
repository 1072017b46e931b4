"""The GIB hook, run for real: real ldconfig and real login shells in a private mount namespace with a planted GIB."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hooks.private_mounts import HOOKS, host_fingerprint, needs_namespaces, run_privately

ROOT = Path(__file__).parents[2]
PLANT = """
mkdir -p /usr/local/gib/lib64 /usr/local/gib/scripts
for name in libnccl-net.so libnccl-tuner.so; do
    echo 'int gib;' | gcc -shared -fPIC -Wl,-soname,$name -o /usr/local/gib/lib64/$name -x c -
done
echo 'export NCCL_NET=gIB NCCL_FUTURE_KNOB=1' > /usr/local/gib/scripts/set_nccl_env.sh
echo /usr/local/gib/lib64 > /etc/ld.so.conf.d/aaa-gib.conf
cat > /etc/profile.d/nccl.sh <<'END'
export NCCL_NVLS_ENABLE=0
if [ -d /usr/local/gib ]; then
    source /usr/local/gib/scripts/set_nccl_env.sh
    export LD_LIBRARY_PATH=/usr/local/gib/lib64:/opt/mine
fi
export NCCL_IB_TC=52
END
cat > /etc/environment <<'END'
NCCL_CROSS_NIC=0
NCCL_TUNER_CONFIG_PATH=/usr/local/gib/configs/tuner_config_a3u.txtpb
LANG=C.UTF-8
END
ldconfig
login() { env -i HOME=/root PATH=/usr/bin:/bin bash -l -c 'env | grep -E "^(NCCL|LD)_" | sort' || true; }
sums() { sha256sum /etc/profile.d/nccl.sh /etc/environment /etc/ld.so.conf.d/aaa-gib.conf | sha256sum; }
"""

pytestmark = needs_namespaces


@pytest.fixture(autouse=True)
def _the_host_is_untouched() -> Iterator[None]:
    before = host_fingerprint()
    yield
    assert host_fingerprint() == before


def sections(done: "subprocess.CompletedProcess[str]") -> dict[str, list[str]]:
    """What a script printed after each `== NAME` line."""
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("== "):
            found[line[3:]] = []
        elif found:
            found[list(found)[-1]].append(line)
    assert done.returncode == 0, done.stdout + done.stderr
    return found


def test_gib_leaves_the_linker_and_the_login_shell_and_restore_brings_it_back(tmp_path: Path) -> None:
    script = f"""{PLANT}
    before=$(sums)
    echo "== linker before"; ldconfig -p | grep gib
    echo "== login before"; login
    echo "== preflight before"; cd {ROOT}
    {sys.executable} -c '
from kimisession.node import preflight_gib
print(len(preflight_gib.residue({{}}, 10)) >= 4)'
    "$HOOKS/gib.sh" check > /tmp/out-$$ && exit 9 || echo "== check before"; tail -n 1 /tmp/out-$$; rm /tmp/out-$$
    echo "== remove"; "$HOOKS/gib.sh" remove
    echo "== linker after"; ldconfig -p | grep -c gib || true
    echo "== login after"; login
    echo "== environment after"; cat /etc/environment
    echo "== check after"; "$HOOKS/gib.sh" check | tail -n 1
    echo "== preflight after"
    {sys.executable} -c '
from kimisession.node import preflight_gib
print(preflight_gib.residue({{}}, 10))'
    echo "== again"; "$HOOKS/gib.sh" remove | head -n 1
    echo "== restore"; "$HOOKS/gib.sh" restore | head -n 1
    echo "== linker restored"; ldconfig -p | grep gib
    echo "== login restored"; login
    [ "$before" = "$(sums)" ] && echo "== same files"
    """
    found = sections(run_privately(tmp_path, script))
    assert len(found["linker before"]) == 2
    assert found["preflight before"] == ["True"]
    assert found["check before"][0].startswith("gib: incident 5 (GIB breaks NCCL inside one machine): /usr/local/gib")
    assert json.loads(found["remove"][-1]) == {"progress": {"done": 5, "total": 5, "unit": "steps"}}
    assert found["linker after"] == ["0"]
    assert found["login after"] == ["NCCL_NVLS_ENABLE=0"], "somebody's own choice stays"
    assert [line for line in found["environment after"] if not line.startswith("#")] == ["LANG=C.UTF-8"]
    assert found["preflight after"] == ["[]"]
    assert found["linker restored"] == found["linker before"]
    assert found["login restored"] == found["login before"]
    assert "NCCL_NET=gIB" in found["login restored"]
    assert "same files" in found, "every edited file is byte for byte what it was"


def test_a_search_path_loses_only_its_gib_parts(tmp_path: Path) -> None:
    script = f"""{PLANT}
    echo 'export LD_LIBRARY_PATH=/usr/local/gib/lib64:/opt/mine' > /etc/profile.d/path.sh
    "$HOOKS/gib.sh" remove > /dev/null
    echo "== login"; login
    """
    found = sections(run_privately(tmp_path, script))
    assert "LD_LIBRARY_PATH=/opt/mine" in found["login"]


def test_a_session_on_two_machines_keeps_gib(tmp_path: Path) -> None:
    script = f"""{PLANT}
    "$HOOKS/gib.sh" remove --nodes 2; "$HOOKS/gib.sh" check --nodes 2
    echo "== linker"; ldconfig -p | grep gib
    """
    assert len(sections(run_privately(tmp_path, script))["linker"]) == 2


def test_a_library_that_the_linker_still_finds_elsewhere_is_named(tmp_path: Path) -> None:
    script = f"""{PLANT}
    mkdir -p /opt/../usr/local/other; cp -r /usr/local/gib /usr/local/other/gib
    echo /usr/local/other/gib/lib64 > /usr/local/other/here.conf
    # A folder that is linked into the linker's own search path under another name.
    cp /usr/local/gib/lib64/libnccl-net.so /usr/local/other/gib/lib64/
    ln -s /usr/local/other/gib /usr/local/lib/gib; echo /usr/local/lib/gib/lib64 >> /etc/ld.so.conf.d/zz.conf
    "$HOOKS/gib.sh" remove >/dev/null; ldconfig -p | grep -c gib || true
    echo 'include /usr/local/other/here.conf' >> /etc/ld.so.conf; ldconfig
    "$HOOKS/gib.sh" check > /usr/local/out && exit 9
    echo "== check"; tail -n 1 /usr/local/out
    """
    found = sections(run_privately(tmp_path, script))
    assert "ldconfig -p has libnccl-" in found["check"][0]
    assert "/usr/local/other/gib/lib64" in found["check"][0]


def test_a_shell_that_is_older_than_the_removal_starts_commands_without_gibs_variables() -> None:
    env = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "NCCL_NET": "gIB",
        "NCCL_NVLS_ENABLE": "0",
        "LD_LIBRARY_PATH": "/usr/local/gib/lib64:/opt/mine",
    }
    done = subprocess.run(
        [HOOKS / "gib.sh", "exec", "env"], env=env, capture_output=True, text=True, check=True, timeout=20
    )
    lines = done.stdout.splitlines()
    assert {"NCCL_NVLS_ENABLE=0", "LD_LIBRARY_PATH=/opt/mine"} <= set(lines)
    assert not [line for line in lines if line.startswith("NCCL_NET=")]
