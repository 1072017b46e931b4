"""Plain Kubernetes manifests for a profile: a volume for the weights, a job that fills it, a job that serves. Pure.

For clusters where SkyPilot cannot be used: nothing of ours runs in the pod, so there is no idle limit and no receipt. What
ends the session is the job's own `activeDeadlineSeconds`, and a job that ended is not started again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from kimisession.core.durations import parse_duration
from kimisession.core.launch import flags_to_argv
from kimisession.core.profile import Checkpoint, FlagValue, Profile

PORT = 8000
MOUNT = "/models"
SHM_GIB = 16
"""Shared memory of the pod. It counts against the memory limit: 128 GiB of it would be taken from the experts."""
DOWNLOAD_S = 12 * 3600
KEEP_ENDED_S = 3600

#: Images by what they hold. Tags as their publishers name them; none was pulled here, and no digest is pinned.
SERVE_IMAGE = "pytorch/pytorch:2.9.1-cuda12.8-cudnn9-devel"
DOWNLOAD_IMAGE = "python:3.12-slim"
_PACKAGES = {"vllm": "vllm=={version}", "sglang": "sglang-{version}"}


def manifests(
    profile: Profile, checkpoint: Checkpoint, flags: Mapping[str, FlagValue], count: int, duration_s: int | None = None
) -> list[dict[str, Any]]:
    """The manifests, in the order to apply them. The server listens inside its pod only: `kubectl port-forward` is the
    way in, and the cluster decides who may. So there is no key, and none in anybody's argv."""
    name = profile.name.replace(".", "-")
    folder = _folder(checkpoint, flags)
    return [
        _volume(name, checkpoint),
        _download(name, checkpoint, folder),
        _serve(name, profile, flags, count, folder, duration_s),
    ]


def _folder(checkpoint: Checkpoint, flags: Mapping[str, FlagValue]) -> str:
    """Where the weights are in the pod: where a flag says so, else a folder named like the repository."""
    stated = str(flags.get("kt-weight-path", ""))
    name = checkpoint.repo.partition("@")[0].rpartition("/")[2]
    return stated if stated.startswith(f"{MOUNT}/") else f"{MOUNT}/{name.lower()}"


def _labels(name: str, part: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/component": part,
        "app.kubernetes.io/managed-by": "kimisession",
    }


def _volume(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    gib = -(-checkpoint.bytes * 115 // 100 // 2**30 // 10) * 10  # 15% of room, in tens
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{name}-weights", "labels": _labels(name, "weights")},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{gib}Gi"}}},
    }


def _download(name: str, checkpoint: Checkpoint, folder: str) -> dict[str, Any]:
    repo, _, revision = checkpoint.repo.partition("@")
    wanted = f"{shlex.quote(repo)} --revision {shlex.quote(revision)}" if revision else shlex.quote(repo)
    script = f"pip install --no-cache-dir huggingface_hub && hf download {wanted} --local-dir {folder}"
    container = {
        "name": "download",
        "image": DOWNLOAD_IMAGE,
        "command": ["sh", "-ec", script],
        "env": [{"name": "HF_HOME", "value": f"{MOUNT}/.cache"}],
        "resources": {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"memory": "16Gi"}},
        "volumeMounts": [{"name": "weights", "mountPath": MOUNT}],
    }
    return _job(name, "download", DOWNLOAD_S, 3, container, [_claim(name, False)])


def _serve(
    name: str, profile: Profile, flags: Mapping[str, FlagValue], count: int, folder: str, duration_s: int | None
) -> dict[str, Any]:
    argv = [arg.replace("@{engine_python}", "python3") for arg in profile.engine.command]
    model = "--model-path" if profile.engine.kind == "sglang" else "--model"
    argv += [model, folder, "--served-model-name", profile.model.served_name, "--host", "127.0.0.1"]
    argv += ["--port", str(PORT), *flags_to_argv(flags)]
    package = _PACKAGES[profile.engine.kind].format(version=profile.engine.version.replace("kt-", "kt=="))
    health = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{PORT}/health', timeout=5)"
    cpus = str(flags.get("kt-cpuinfer", 16))
    memory = f"{profile.hardware.ram_gib}Gi" if profile.hardware.ram_gib else "256Gi"
    amount = {"cpu": cpus, "memory": memory, **({"nvidia.com/gpu": str(count)} if count else {})}
    container = {
        "name": "serve",
        "image": SERVE_IMAGE,
        "command": ["sh", "-ec", f'pip install --no-cache-dir {package} && exec "$@"', "serve"],
        "args": argv,
        "env": [
            {"name": "HF_HUB_OFFLINE", "value": "1"},
            *({"name": key, "value": value} for key, value in profile.engine.env.items()),
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"exec": {"command": ["python3", "-c", health]}, "periodSeconds": 10, "timeoutSeconds": 10},
        "resources": {"requests": amount, "limits": amount},
        "volumeMounts": [
            {"name": "weights", "mountPath": MOUNT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the pod's, not ours
        ],
    }
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHM_GIB}Gi"}}
    seconds = duration_s or parse_duration(profile.limits.duration)
    job = _job(name, "serve", seconds, 0, container, [_claim(name, True), shm])
    # Else it would hold its GPUs over an empty volume, and fail, while the download goes on. The deadline waits as well.
    job["spec"]["suspend"] = True
    return job


def _claim(name: str, read_only: bool) -> dict[str, Any]:
    return {"name": "weights", "persistentVolumeClaim": {"claimName": f"{name}-weights", "readOnly": read_only}}


def _job(
    name: str, part: str, seconds: int, tries: int, container: Mapping[str, Any], volumes: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{name}-{part}", "labels": _labels(name, part)},
        "spec": {
            "activeDeadlineSeconds": seconds,
            "backoffLimit": tries,
            "ttlSecondsAfterFinished": KEEP_ENDED_S,
            "template": {
                "metadata": {"labels": _labels(name, part)},
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "containers": [dict(container)],
                    "volumes": volumes,
                },
            },
        },
    }


def to_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """YAML of JSON-like documents. Every string is quoted as JSON quotes it, which YAML reads the same."""
    return "---\n".join("\n".join(_lines(document, 0)) + "\n" for document in documents)


def _lines(value: Any, depth: int) -> Iterable[str]:
    pad = "  " * depth
    if isinstance(value, Mapping):
        for key, of in value.items():
            yield from _entry(f"{pad}{key}:", of, depth + 1)
    else:
        for of in value:
            if isinstance(of, Mapping) and of:
                first, *rest = _lines(of, depth + 1)
                yield f"{pad}- {first.lstrip()}"
                yield from rest
            else:
                yield f"{pad}- {json.dumps(of)}"


def _entry(head: str, value: Any, depth: int) -> Iterable[str]:
    if isinstance(value, Mapping | list) and value:
        yield head
        yield from _lines(value, depth)
    else:
        yield f"{head} {json.dumps(value)}"
