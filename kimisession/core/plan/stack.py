"""Does the whole stack go together: driver, CUDA, torch, engine, NCCL, number formats, GPU, host CPU, containers.

One table of rules. Each says what it looks at, where its knowledge is from, and which incident it prevents (the
numbers are those of notes/incidents.md; 0 is one that others had). A rule that lacks its facts is silent: what is not
stated is not guessed. `resolve` gives a Lock, or the contradictions, each in one sentence with the key to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kimisession.core.catalog import Accelerator
from kimisession.core.launch import flags_to_argv
from kimisession.core.plan.flags import FlagTable
from kimisession.core.plan.models import ModelCard
from kimisession.core.profile import Checkpoint, FlagValue, Profile

Version = tuple[int, ...]

#: (driver branch, the CUDA that it serves, the PTX ISA that it can compile): NVIDIA's CUDA release notes (toolkit and
#: driver versions) and PTX ISA release notes. Probed on driver 580.159.04: PTX 9.0 loads, 9.1 returns 222 (own run,
#: two H200, 2026-11-20).
DRIVERS: tuple[tuple[int, Version, Version], ...] = (
    (525, (12, 0), (8, 0)),
    (535, (12, 2), (8, 2)),
    (545, (12, 3), (8, 3)),
    (550, (12, 4), (8, 4)),
    (555, (12, 5), (8, 5)),
    (560, (12, 6), (8, 5)),
    (565, (12, 7), (8, 6)),
    (570, (12, 8), (8, 7)),
    (575, (12, 9), (8, 8)),
    (580, (13, 0), (9, 0)),
    (590, (13, 1), (9, 1)),
)


@dataclass(frozen=True, slots=True)
class Build:
    """What an engine's wheel was built with. `ptx` is the ISA of kernels that have no machine code for the GPU and are
    compiled by the driver when they are first used; () where none was found or nobody looked."""

    engine: str
    since: str
    cuda: Version
    ptx: Version
    source: str


_READ = "read in the wheel's shared objects, 2026-11-21"
BUILDS = (
    Build("vllm", "0.15.0", (12, 9), (8, 8), f"{_READ}: nvcc 12.9; _moe_C has 15 PTX texts, .version 8.8 for sm_80"),
    Build("vllm", "0.19.1", (12, 9), (8, 8), f"{_READ}: nvcc 12.9; _moe_C has 15 PTX texts, .version 8.8 for sm_80"),
    Build("vllm", "0.26.0", (13, 0), (), f"{_READ}: nvcc 13.0, libcudart.so.13; no PTX text in the clear"),
    Build("vllm", "0.33.0", (13, 0), (), f"{_READ}: nvcc 13.0, libcudart.so.13; no PTX text in the clear"),
)


@dataclass(frozen=True, slots=True)
class Torch:
    """What a torch release on PyPI brings along: the CUDA of its wheel and the NCCL that it pins."""

    version: str
    cuda: Version
    nccl: str


#: The wheels' own metadata (Requires-Dist), read on 2026-11-21.
TORCHES = (
    Torch("2.9.1", (12, 8), "2.27.5"),
    Torch("2.10.0", (12, 8), "2.27.5"),
    Torch("2.11.0", (13, 0), "2.28.9"),
    Torch("2.13.0", (13, 0), "2.29.7"),
    Torch("2.14.0", (13, 0), "2.30.7"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What the rules look at. Everything that is not stated is empty."""

    profile: Profile
    accelerator: Accelerator
    count: int
    checkpoint: Checkpoint
    flags: Mapping[str, FlagValue]
    infra: str
    nodes: int = 1
    container: bool = False
    table: FlagTable | None = None
    card: ModelCard | None = None

    @property
    def driver(self) -> int:
        """The driver's branch: 580 of "580.126.09"; 0 where it is not stated."""
        found = re.match(r"\d+", self.profile.stack.driver)
        return int(found[0]) if found else 0

    @property
    def build(self) -> Build | None:
        """The row of BUILDS for the engine, if this very version was read."""
        engine = self.profile.engine
        version = engine.version.partition(" ")[0]
        return next((b for b in BUILDS if (b.engine, b.since) == (engine.kind, version)), None)

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU at all."""
        return self.accelerator.architecture != "cpu"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule has to say. `weight`: a contradiction stops; a warning is told and goes into the lock."""

    rule: str
    weight: Literal["contradiction", "warning"]
    sentence: str
    source: str
    incident: int


@dataclass(frozen=True, slots=True)
class Rule:
    """One row. `says` gives a sentence, or None where the rule does not apply or is kept."""

    name: str
    weight: Literal["contradiction", "warning"]
    says: Callable[[Case], str | None]
    source: str
    incident: int


@dataclass(frozen=True, slots=True)
class Lock:
    """A stack that goes together: the text of kimisession.lock.toml, and what it warns of."""

    text: str
    warnings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A stack that does not go together, each finding with the key to change."""

    findings: tuple[Finding, ...]
    warnings: tuple[Finding, ...] = field(default=())

    def __str__(self) -> str:
        return "; ".join(finding.sentence for finding in self.findings)


def version_of(text: str) -> Version:
    """(12, 8) of "12.8" or "==12.8"; () where there is no number."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def written(version: Version) -> str:
    """12.8 of (12, 8)."""
    return ".".join(str(part) for part in version)


def driver_serves(driver: int) -> tuple[Version, Version] | None:
    """(CUDA, PTX ISA) of a driver branch, of the newest branch in the table that is not newer than it."""
    rows = [(cuda, ptx) for branch, cuda, ptx in DRIVERS if branch <= driver]
    return rows[-1] if rows else None


def oldest_driver(*, cuda: Version = (), ptx: Version = ()) -> int:
    """The first driver branch that serves both; 0 if none in the table does."""
    return next((branch for branch, c, p in DRIVERS if c >= cuda and p >= ptx), 0)


def _cuda_for_driver(case: Case) -> str | None:
    cuda, serves = version_of(case.profile.stack.cuda), driver_serves(case.driver)
    if not case.on_gpu or not cuda or not serves or cuda <= serves[0]:
        return None
    return (
        f"stack.cuda is {written(cuda)} and driver {case.driver} serves up to {written(serves[0])}; "
        f"set stack.driver to {oldest_driver(cuda=cuda)} or take wheels for CUDA {written(serves[0])}"
    )


def _kernels_for_driver(case: Case) -> str | None:
    build, serves = case.build, driver_serves(case.driver)
    if not case.on_gpu or build is None or not serves:
        return None
    name = f"{build.engine} {build.since}"
    if build.ptx and build.ptx > serves[1] and _is_int4(case):
        return (
            f"the Marlin kernels of {name} for INT4 experts carry PTX {written(build.ptx)} and driver {case.driver} "
            f"compiles up to {written(serves[1])} ('PTX JIT compilation failed' after minutes of loading); "
            f"set stack.driver to {max(580, oldest_driver(ptx=build.ptx))}"
        )
    if build.cuda[0] > serves[0][0]:
        return (
            f"{name} is built with CUDA {written(build.cuda)} and driver {case.driver} serves up to "
            f"{written(serves[0])}; set stack.driver to {oldest_driver(cuda=build.cuda)}"
        )
    return None


def _is_int4(case: Case) -> bool:
    return case.card is not None and case.card.experts_format == "int4-g32"


def _torch_of_engine(case: Case) -> str | None:
    wanted = case.table.requires.get("torch", "") if case.table else ""
    has = case.profile.stack.torch
    if not has or not wanted.startswith("==") or version_of(wanted) == version_of(has):
        return None
    engine = case.profile.engine
    return f"{engine.kind} {engine.version} is compiled against torch {wanted[2:]}, not {has}; set stack.torch to it"


def _torch(case: Case) -> Torch | None:
    pinned = case.profile.stack.torch
    if not pinned and case.table:
        pinned = case.table.requires.get("torch", "").removeprefix("==")
    return next((t for t in TORCHES if t.version == pinned.partition("+")[0]), None)


def _cuda_of_torch(case: Case) -> str | None:
    torch, cuda = _torch(case), version_of(case.profile.stack.cuda)
    if torch is None or not cuda or cuda[:2] == torch.cuda or not case.on_gpu:
        return None
    return (
        f"torch {torch.version} from PyPI is a CUDA {written(torch.cuda)} build and stack.cuda is {written(cuda)}; "
        f"install with an explicit backend (uv pip install --torch-backend=cu{''.join(map(str, cuda[:2]))}) "
        f"or set stack.cuda to {written(torch.cuda)}"
    )


def _cuda_major_of_engine(case: Case) -> str | None:
    build, cuda = case.build, version_of(case.profile.stack.cuda)
    if build is None or not cuda or build.cuda[0] == cuda[0] or not case.on_gpu:
        return None
    return (
        f"{build.engine} {build.since} links libcudart.so.{build.cuda[0]} and stack.cuda is {written(cuda)}; "
        f"set stack.cuda to {build.cuda[0]}.x"
    )


def _nccl_of_torch(case: Case) -> str | None:
    torch, nccl = _torch(case), version_of(case.profile.stack.nccl)
    if torch is None or not nccl or nccl >= version_of(torch.nccl):
        return None
    return f"stack.nccl {written(nccl)} is older than the {torch.nccl} that torch {torch.version} is built with"


def _nccl_of_image(case: Case) -> str | None:
    torch = _torch(case)
    if case.profile.stack.nccl or torch is None or case.infra != "gcp" or case.count == 1 or not case.on_gpu:
        return None
    return (
        f"stack.nccl is not pinned and GCP's GPU images bring an NCCL of their own (2.26.2 in January 2026); "
        f"pin the {torch.nccl} of torch {torch.version} or a later one"
    )


def _gib_on_one_node(case: Case) -> str | None:
    if case.infra != "gcp" or case.nodes != 1 or case.count == 1 or not case.on_gpu or case.container:
        return None
    if case.profile.stack.gib == "remove":
        return None
    return (
        "GCP's GIB libraries break NCCL inside one machine, at the first collective after the weights are loaded; "
        'set stack.gib to "remove"'
    )


def _gib_on_several_nodes(case: Case) -> str | None:
    if case.infra != "gcp" or case.nodes == 1 or case.profile.stack.gib != "remove":
        return None
    return (
        f"{case.nodes} machines talk through GIB (NCCL's RDMA plugin on GCP) and stack.gib removes it; "
        'set stack.gib to "keep"'
    )


def _nvfp4(case: Case) -> str | None:
    if case.card is None or case.card.experts_format not in ("nvfp4", "mxfp4"):
        return None
    if case.accelerator.architecture in ("blackwell", "cpu"):
        return None
    return (
        f"{case.card.experts_format.upper()} is Blackwell's format: on {case.accelerator.name} vLLM unpacks it in Marlin "
        "to 16-bit products: 0.7% fewer bytes than the native INT4, and no gain in speed was shown; take the native one"
    )


def _blackwell_cuda(case: Case) -> str | None:
    cuda, name = version_of(case.profile.stack.cuda), case.accelerator.name
    needs = (12, 9) if name == "B300" else (12, 8)
    if case.accelerator.architecture != "blackwell" or not cuda or cuda >= needs:
        return None
    return f"{name} needs CUDA {written(needs)} and stack.cuda is {written(cuda)}; set stack.cuda to {written(needs)} or later"


def _container_compat(case: Case) -> str | None:
    engine = case.profile.engine
    old = engine.kind == "vllm" and (0, 15) <= version_of(engine.version) < (0, 26)
    if not case.container or not old or case.driver < 580:
        return None
    return (
        f"images of vLLM {engine.version} carry CUDA 12.9 compatibility libraries that may shadow those of driver "
        f"{case.driver} ('Error 803: system has unsupported display driver / cuda driver combination'); set "
        "engine.env LD_LIBRARY_PATH to where the driver is mounted, like /usr/local/nvidia/lib64:/usr/local/nvidia/lib"
    )


def _on_marlin(case: Case) -> bool:
    """Whether vLLM runs this model's INT4 experts in Marlin: always on NVIDIA but with --moe-backend triton in 0.33."""
    engine = case.profile.engine
    triton = version_of(engine.version) >= (0, 33) and case.flags.get("moe-backend") == "triton"
    return engine.kind == "vllm" and case.on_gpu and _is_int4(case) and not triton


def _eplb(case: Case) -> str | None:
    if case.flags.get("enable-eplb") is not True or not _on_marlin(case):
        return None
    version = case.profile.engine.version
    has_triton = version_of(version) >= (0, 33)
    way = "add --moe-backend triton" if has_triton else "or take vLLM 0.33.0 with --moe-backend triton"
    return (
        f"vLLM {version} raises 'EPLB is not supported' for INT4 experts, which it runs in Marlin; "
        f"drop --enable-eplb, {'or ' if has_triton else ''}{way}"
    )


def _tuned(case: Case) -> str | None:
    if "VLLM_TUNED_CONFIG_FOLDER" not in case.profile.engine.env or not _on_marlin(case):
        return None
    return (
        "VLLM_TUNED_CONFIG_FOLDER is read by the Triton kernels only, and INT4 experts run in Marlin: tuning them "
        "changes nothing; drop it"
    )


def _amx(case: Case) -> str | None:
    method = str(case.flags.get("kt-method", ""))
    cpu = case.profile.hardware.cpu
    if not method.startswith("AMX") or not cpu or cpu == "amx":
        return None
    return f"--kt-method {method} needs Intel AMX and hardware.cpu is {cpu}; use RAWINT4, which AVX-512 is enough for"


def _driver_name(case: Case) -> str | None:
    if case.infra != "gcp" or not case.driver or not case.on_gpu or case.container:
        return None
    return (
        f"the packages for driver {case.driver} are named by branch, not by version (nvidia-driver-575-server installed "
        "580.126.09 in February 2026): look the version up; swap modules in place, a reboot ends SkyPilot's setup"
    )


_WRITE_UP = "public write-up of a day with 8xH100 on GCP, February 2026"
_METADATA = "the wheels' own metadata, read 2026-11-21"

RULES: tuple[Rule, ...] = (
    Rule("cuda-driver", "contradiction", _cuda_for_driver, f"NVIDIA CUDA release notes; {_WRITE_UP}", 1),
    Rule("kernels-driver", "contradiction", _kernels_for_driver, f"{_READ}; the error in {_WRITE_UP}", 2),
    Rule("torch-engine", "contradiction", _torch_of_engine, _METADATA, 1),
    Rule("torch-cuda", "contradiction", _cuda_of_torch, f"{_METADATA}; {_WRITE_UP}", 1),
    Rule("engine-cuda", "contradiction", _cuda_major_of_engine, _READ, 1),
    Rule("nccl-torch", "contradiction", _nccl_of_torch, f"{_METADATA}; {_WRITE_UP}", 6),
    Rule("nccl-image", "warning", _nccl_of_image, _WRITE_UP, 6),
    Rule("gib-one-node", "contradiction", _gib_on_one_node, _WRITE_UP, 5),
    Rule("gib-many-nodes", "contradiction", _gib_on_several_nodes, "Google's GPU networking guide; not tried here", 5),
    Rule(
        "fp4-gpu",
        "warning",
        _nvfp4,
        "vLLM 0.15.0 to 0.33.0, quantization/utils/marlin_utils_fp4.py; sizes: notes/claims.md",
        0,
    ),
    Rule(
        "blackwell-cuda",
        "contradiction",
        _blackwell_cuda,
        "NVIDIA CUDA 12.8 and 12.9 release notes (sm_100, sm_103); sgl-project/sglang issue 14075, November 2025",
        0,
    ),
    Rule(
        "container-driver",
        "warning",
        _container_compat,
        "gpustack/gpustack issue 4678 and vllm-project/vllm issue 33447, early 2026",
        0,
    ),
    Rule(
        "eplb-int4",
        "contradiction",
        _eplb,
        "read in the wheels of 0.15.0, 0.19.1, 0.26.0 and 0.33.0: supports_eplb of the compressed-tensors MoE methods",
        0,
    ),
    Rule(
        "tuned-marlin", "warning", _tuned, "read in the wheel of 0.19.1: fused_moe.py reads it, the Marlin path not", 0
    ),
    Rule(
        "amx-cpu", "contradiction", _amx, "kt-kernel 0.7.2's own table of methods; K2.5 on EPYC 9654, public notes", 0
    ),
    Rule("driver-name", "warning", _driver_name, _WRITE_UP, 3),
)


def examine(case: Case) -> tuple[Finding, ...]:
    """What the rules say of a case, in the table's order."""
    found = []
    for rule in RULES:
        sentence = rule.says(case)
        if sentence:
            found.append(Finding(rule.name, rule.weight, sentence, rule.source, rule.incident))
    return tuple(found)


def resolve(case: Case) -> Lock | Contradiction:
    """The stack as a lock, or what contradicts what."""
    found = examine(case)
    warnings = tuple(f for f in found if f.weight == "warning")
    contradictions = tuple(f for f in found if f.weight == "contradiction")
    if contradictions:
        return Contradiction(contradictions, warnings)
    return Lock(lock_text(case, warnings), warnings)


def lock_text(case: Case, warnings: tuple[Finding, ...] = ()) -> str:
    """kimisession.lock.toml: the whole stack from machine to flags, with hashes where they are known.

    What nobody pinned is a comment that says so: no value stands here that was not stated or read.
    """
    profile, stack, table = case.profile, case.profile.stack, case.table
    torch = _torch(case)
    serves = driver_serves(case.driver)
    served = (
        [f"# driver {case.driver} serves CUDA {written(serves[0])} and compiles PTX {written(serves[1])}"]
        if serves
        else []
    )
    lines = [
        "# The whole stack of one profile. Made by `kimisession plan --lock`; a comment is what nobody has pinned.",
        f"profile = {_toml(profile.name)}",
        "",
        "[machine]",
        f"accelerators = {_toml(f'{case.accelerator.name}:{case.count}')}",
        f"architecture = {_toml(case.accelerator.architecture)}",
        f"infra = {_toml(case.infra)}",
        f"nodes = {case.nodes}",
        "# image: not pinned: the place's default",
        _or_comment("driver", stack.driver, "not pinned: whatever the machine has"),
        *served,
        _or_comment("gib", stack.gib, "not stated"),
        "",
        "[software]",
        _or_comment("cuda", stack.cuda, "not pinned"),
        _or_comment("torch", stack.torch or (torch.version if torch else ""), "not pinned"),
        _or_comment("nccl", stack.nccl or (torch.nccl if torch else ""), "not pinned"),
        *(
            f"{name} = {_toml(spec)}"
            for name, spec in sorted((table.requires if table else {}).items())
            if name != "torch"
        ),
        "",
        "[engine]",
        f"kind = {_toml(profile.engine.kind)}",
        f"version = {_toml(profile.engine.version)}",
        _or_comment("wheel", table.wheel if table else "", "this version's wheel was not read"),
        _or_comment("wheel_sha256", table.sha256 if table else "", "not known"),
        f"argv = {_toml_list(flags_to_argv(case.flags))}",
        "",
        "[engine.env]",
        *(f"{name} = {_toml(value)}" for name, value in sorted(profile.engine.env.items())),
        "",
        "[weights]",
        f"repo = {_toml(case.checkpoint.repo)}",
        f"checkpoint = {_toml(case.checkpoint.name)}",
        f"bytes = {case.checkpoint.bytes}",
        "# revision and checksums: in the seal of the bucket (`kimisession seed --verify` reads everything back)",
    ]
    for finding in warnings:
        lines += ["", "[[warning]]", f"rule = {_toml(finding.rule)}", f"says = {_toml(finding.sentence)}"]
    return "\n".join(lines) + "\n"


def _toml(text: str) -> str:
    """A basic TOML string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _toml_list(items: tuple[str, ...]) -> str:
    return "[" + ", ".join(_toml(item) for item in items) + "]"


def _or_comment(key: str, value: str, otherwise: str) -> str:
    return f"{key} = {_toml(value)}" if value else f"# {key}: {otherwise}"
