"""The preflight as a real process. Stand-ins, made on the spot: an `nvidia-smi`, a libcuda that takes PTX up to a version
(compiled, and asked through the real ctypes calls), and an engine's Python that plays one rank of the all-gather."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kimisession.node import leash, preflight, preflight_disk, preflight_gpus, preflight_ptx
from kimisession.node.preflight import Machine, Outcome, Probe, parse, run_probes
from kimisession.node.preflight_finding import Done, Failed, Skipped
from tests.hooks.pretended_cloud import Cloud

ROOT = Path(__file__).parents[2]

NVIDIA_SMI = """#!/bin/sh
# STAND-IN for nvidia-smi.
case "$*" in
    *compute-apps*) cat "$STAND_IN/apps" ;;
    *) cat "$STAND_IN/gpus"; exit $(cat "$STAND_IN/smi-code") ;;
esac
"""

LIBCUDA = """
/* STAND-IN for libcuda: one GPU of compute capability 9.0 that takes PTX up to STAND_IN_PTX. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGet(int *d, int n) { *d = n; return 0; }
int cuDeviceGetName(char *b, int n, int d) { strncpy(b, "NVIDIA H200", n); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = 9; return 0; }
int cuCtxCreate_v2(void **c, unsigned f, int d) { return 0; }
int cuCtxDestroy_v2(void *c) { return 0; }
int cuModuleLoadData(void **m, const char *s) {
    int major, minor, most, least;
    if (sscanf(s, ".version %d.%d", &major, &minor) != 2 || !strstr(s, ".target sm_80")) return 218;
    sscanf(getenv("STAND_IN_PTX"), "%d.%d", &most, &least);
    return major * 100 + minor > most * 100 + least ? 222 : 0;
}
int cuModuleGetFunction(void **f, void *m, const char *n) { return strcmp(n, "probe") ? 500 : 0; }
"""

RANK = """#!/bin/sh
# STAND-IN for the engine's Python: one rank, behaving as the file says.
echo "stage start"; echo "stage torch"
case $(cat "$STAND_IN/gather") in
    good) [ "$RANK" = 0 ] && echo '{"gb_per_s": 256.0, "world": '$WORLD_SIZE', "torch": "2.11.0", "nccl": "2.28.9"}'; exit 0 ;;
    hang) echo $$ >> "$STAND_IN/pids"; [ "$RANK" = 1 ] || echo "stage group"; sleep 600 ;;
    gib) echo "ncclInternalError: Internal check failed."; exit 1 ;;
    wrong) [ "$RANK" = 0 ] && exit 0; echo "rank 1 gathered the sums [1, 2], they should be [1, 3]"; exit 1 ;;
    no-torch) echo "ModuleNotFoundError: No module named 'torch'"; exit 1 ;;
esac
"""


@dataclass
class Stage:
    """A pretended machine with GPUs."""

    folder: Path
    libraries: Path

    def gpus(self, count: int = 2, driver: str = "580.159.04", free: int = 143000) -> None:
        rows = [f"{n}, GPU-{n}, NVIDIA H200, {driver}, 143771, {free if n else 143000}\n" for n in range(count)]
        self.write("gpus", "".join(rows))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="ascii")

    def run(self, *words: str, ptx: str = "9.0", **env: str) -> "Ran":
        clean = {
            "PATH": f"{self.folder}:{os.defpath}:/usr/sbin:/sbin",
            "HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "LD_LIBRARY_PATH": str(self.libraries),
            "STAND_IN": str(self.folder),
            "STAND_IN_PTX": ptx,
            **env,
        }
        argv = [
            sys.executable,
            "-m",
            "kimisession.node.preflight",
            "--engine-python",
            str(self.folder / "engine-python"),
        ]
        began = time.monotonic()
        done = subprocess.run(
            [*argv, "--gpus", "2", *words], env=clean, capture_output=True, text=True, check=False, timeout=60
        )
        assert not done.stderr, done.stderr
        return Ran(done.returncode, done.stdout.splitlines(), time.monotonic() - began)


@dataclass
class Ran:
    """What it printed and how it ended."""

    code: int
    lines: list[str]
    seconds: float

    @property
    def probes(self) -> dict[str, dict[str, Any]]:
        found = [json.loads(line) for line in self.lines if line.startswith("{")]
        return {line["probe"]: line for line in found if "probe" in line}

    def failed_as(self, *words: str) -> None:
        assert self.code == 5, self.lines
        for word in words:
            assert word in self.lines[-1]
        assert self.lines[-1].startswith("preflight: ")
        assert self.lines[-1].endswith(".")
        assert json.loads(self.lines[-2]) == {"failed": {"exit": 5, "message": self.lines[-1][len("preflight: ") :]}}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gcc = shutil.which("gcc") or shutil.which("cc")
    if gcc is None:
        pytest.skip("there is no C compiler for the stand-in of libcuda")
    folder = tmp_path_factory.mktemp("libcuda")
    argv = [gcc, "-shared", "-fPIC", "-w", "-o", str(folder / "libcuda.so.1"), "-x", "c", "-"]
    subprocess.run(argv, input=LIBCUDA, text=True, check=True)
    return folder


@pytest.fixture
def stage(tmp_path: Path, libraries: Path) -> Stage:
    stage = Stage(tmp_path, libraries)
    for name, text in (("nvidia-smi", NVIDIA_SMI), ("engine-python", RANK)):
        stage.write(name, text)
        (tmp_path / name).chmod(0o755)
    stage.gpus()
    for name, text in (("apps", ""), ("smi-code", "0"), ("gather", "good")):
        stage.write(name, text)
    return stage


def test_a_good_machine_passes_and_every_probe_is_a_line(stage: Stage) -> None:
    ran = stage.run()
    assert ran.code == 0, ran.lines
    verdicts = {name: line["verdict"] for name, line in ran.probes.items()}
    good = dict.fromkeys(("driver", "memory", "ptx", "gib", "allgather"), "ok")
    assert verdicts == {**good, "disk": "skipped", "permission": "skipped"}
    assert ran.probes["driver"]["evidence"] == "driver 580.159.04, 2 x NVIDIA H200"
    assert ran.probes["ptx"]["evidence"] == "PTX up to 9.0 loads (9.0 is wanted), CUDA 13000, NVIDIA H200"
    assert "256.0 GB/s" in ran.probes["allgather"]["evidence"]
    assert json.loads(ran.lines[-1])["progress"] == {"done": 7, "total": 7, "unit": "probes"}
    assert "whoever lent it" in ran.probes["permission"]["evidence"]


def test_an_old_driver_is_told_before_anything_runs_on_the_gpus(stage: Stage) -> None:
    stage.gpus(driver="570.211.01")
    ran = stage.run()
    ran.failed_as("incident 2", "driver 570.211.01 is older than 580", "run scripts/hooks/driver.sh --min 580")
    assert {ran.probes[name]["verdict"] for name in ("memory", "ptx", "allgather")} == {"skipped"}


def test_a_driver_that_refuses_the_engines_ptx_is_told(stage: Stage) -> None:
    stage.run(ptx="8.7").failed_as("incident 2", "takes PTX up to 8.7 and the engine's kernels may carry 9.0")
    assert stage.run("--ptx", "8.7", ptx="8.7").code == 0


def test_memory_in_use_names_the_process(stage: Stage) -> None:
    stage.gpus(free=100_000)
    # Gone with this test, and its command line can be seen.
    with subprocess.Popen(["sleep", "600"]) as holder:
        stage.write("apps", f"GPU-0, 1, 5\nGPU-1, {holder.pid}, 40960\n")
        ran = stage.run()
        holder.kill()
    ran.failed_as(
        "GPU memory in use: GPU 1 has 97.7 of 140.4 GiB free", f"held by pid {holder.pid} (sleep 600) with 40.0"
    )
    assert ran.probes["allgather"]["verdict"] == "ok", "the other probes have their say all the same"


def test_missing_gpus_are_told(stage: Stage) -> None:
    stage.run("--gpus", "8").failed_as("missing GPUs: the driver shows 2 GPUs and the session wants 8")


def test_a_half_swapped_driver_is_named(stage: Stage) -> None:
    stage.write("gpus", "Failed to initialize NVML: Driver/library version mismatch\n")
    stage.write("smi-code", "18")
    stage.run().failed_as("half-swapped driver", "version mismatch", "run scripts/hooks/driver.sh again")


def test_gib_in_the_environment_is_incident_5(stage: Stage) -> None:
    ran = stage.run("--env", "NCCL_NET=gIB")
    ran.failed_as("incident 5 (GIB breaks NCCL inside one machine): NCCL_NET=gIB is set here", "gib.sh remove")
    assert stage.run("--env", "NCCL_NET=gIB", "--nodes", "2").probes["gib"]["verdict"] == "skipped"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("gib", ("incident 5", "NCCL failed to start with a network plugin")),
        ("wrong", ("incident 6", "rank 1 gathered the sums [1, 2], they should be [1, 3]")),
        ("no-torch", ("broken engine stack", "run scripts/hooks/stack.sh")),
    ],
)
def test_an_all_gather_that_fails_says_why(stage: Stage, how: str, words: tuple[str, ...]) -> None:
    stage.write("gather", how)
    stage.run().failed_as(*words)


def test_an_all_gather_that_hangs_says_where_and_leaves_no_process(stage: Stage) -> None:
    stage.write("gather", "hang")
    ran = stage.run("--gather-s", "2")
    ran.failed_as("hung for 2s, rank 0 after 'group', rank 1 after 'torch'")
    pids = [int(pid) for pid in (stage.folder / "pids").read_text(encoding="ascii").split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if leash.start_ticks(pid)]


def test_a_missing_engine_python_is_told(stage: Stage) -> None:
    stage.run("--engine-python", "/nowhere/python").failed_as("broken engine stack", "/nowhere/python cannot be run")


def test_slow_links_fail_where_a_speed_is_asked_for(stage: Stage) -> None:
    stage.run("--min-gather-gb-per-s", "300").failed_as("slow GPU links: GPUs exchange 256.0 GB/s and 300 is wanted")


def test_all_failures_are_named_and_the_first_cause_is_told(stage: Stage) -> None:
    stage.write("gather", "gib")
    stage.run("--env", "NCCL_NET=gIB", ptx="8.7").failed_as("incident 2", "(failed as well: gib, allgather)")


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    stand_in = Cloud()
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()


def test_a_machine_that_may_delete_itself_is_known_by_asking_the_cloud(stage: Stage, cloud: Cloud) -> None:
    words, env = ("--compute", f"http://{cloud.host}"), {"GCE_METADATA_HOST": cloud.host}
    assert "has compute.instances.delete" in stage.run(*words, **env).probes["permission"]["evidence"]
    cloud.permissions = []
    stage.run(*words, **env).failed_as(
        "a machine that cannot delete itself", "lacks compute.instances.delete on itself"
    )
    cloud.metadata_faults = [404] * 10
    stage.run(*words, **env).failed_as("a machine that cannot delete itself", "HTTP 404")
    assert cloud.deletions() == 0, "asking is not doing"


def machine() -> Machine:
    return Machine(parse(["--gpus", "1"]), {})


def outcomes(*table: Probe) -> tuple[dict[str, Outcome], float]:
    told: list[Outcome] = []
    began = time.monotonic()
    found = run_probes(table, machine(), told.append)
    assert sorted(o.probe for o in told) == sorted(p.name for p in table)
    return {outcome.probe: outcome for outcome in found}, time.monotonic() - began


def test_probes_that_do_not_need_each_other_run_side_by_side() -> None:
    both = threading.Barrier(2)

    def meet(_: Machine) -> str:
        both.wait(5)  # raises unless the other is there at the same time
        return "met"

    found, _ = outcomes(Probe("one", meet, 10), Probe("two", meet, 10))
    assert {outcome.verdict for outcome in found.values()} == {"ok"}


def test_a_probe_that_hangs_is_failed_at_its_own_limit_and_holds_up_nothing() -> None:
    never = threading.Event()
    hang = Probe("hang", lambda _: str(never.wait(30)), 0.3)
    found, seconds = outcomes(hang, Probe("next", lambda _: "fine", 5, after=("hang",)))
    never.set()
    assert found["hang"].verdict == "failed"
    assert found["hang"].evidence == "hang did not answer in 0.3s"
    assert found["next"].verdict == "ok"
    assert seconds < 5


def test_a_probe_that_breaks_is_failed_because_not_knowing_is_no_reason_to_spend() -> None:
    def broken(_: Machine) -> str:
        raise KeyError("x")

    found, _ = outcomes(Probe("broken", broken, 5), Probe("after", lambda _: "no", 5, ("broken",), ("broken",)))
    assert (found["broken"].verdict, found["after"].verdict) == ("failed", "skipped")


def test_room_and_speed_of_a_disk_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    wrote, read, how = preflight_disk.measure(tmp_path, 32 << 20)
    assert wrote > 0
    assert read > 0
    assert how in ("direct", "through the page cache")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Failed, match="GB free and the weights need 999999999"):
        preflight_disk.check(tmp_path / "not" / "yet", int(999999999.0e9), 0)


def test_a_disk_that_is_too_slow_for_the_weights_is_told_alone_and_before_them(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "kimisession.node.preflight",
        "--gpus",
        "1",
        "--only",
        "disk",
        "--disk",
        str(tmp_path),
    ]
    for wanted, code, verdict in (("0.1", preflight.OK, "ok"), ("1e9", preflight.FAILED, "failed")):
        done = subprocess.run([*words, "--min-disk-mb-per-s", wanted], capture_output=True, text=True, check=False)
        told = done.stdout.splitlines()
        assert (done.returncode, json.loads(told[0])["verdict"]) == (code, verdict), done.stderr
    assert told[-1].startswith("preflight: incident 12 (a slow disk or a mount)")


def test_versions_compare_as_numbers() -> None:
    assert preflight_gpus.numbers("580.126.09") > preflight_gpus.numbers("580.9")
    assert preflight_ptx.order("8.10") > preflight_ptx.order("8.9")
    assert [preflight_ptx.of_driver(branch) for branch in (535, 570, 575, 580, 585, 600)] == [
        *("8.2", "8.7", "8.8", "9.0", "9.0", "9.1"),
    ]


def test_a_single_gpu_gathers_from_nobody() -> None:
    with pytest.raises(Skipped, match="one GPU"):
        preflight.allgather(machine())


def test_a_rank_that_died_without_a_word_is_told() -> None:
    with pytest.raises(Failed, match="ended with code -9"):
        preflight.read_gather([Done(0, "stage done"), Done(-9, "stage group\n")], 0, 90)
