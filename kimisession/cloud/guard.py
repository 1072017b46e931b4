"""The reaper's machine: made, looked at, deleted. One per project, found by its label in whatever zone it is.

It is the smallest machine there is, on demand (a spot one could be taken away just when it is needed), restarted by Compute
Engine after a crash of its host, and its startup-script runs at each boot. The code that it runs is that of this very
installation, as a zip in the machine's metadata.
"""

import ast
import base64
import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from kimisession.cloud.base import Cloud
from kimisession.cloud.google_errors import Denied
from kimisession.cloud.permissions import REAPER_ACCOUNT, reaper_account_commands
from kimisession.core.guard import EVERY_S, LABEL_CODE, LABEL_GUARD, NAME, RUN_S, guard_layer
from kimisession.core.inventory import Machine
from kimisession.core.lifecycle import Layer
from kimisession.errors import KimiError, Unconfirmed, UsageMistake

#: The release of google-cloud-compute that the tests of this project ran with.
LIBRARY = "1.56.0"

#: In a region of Compute Engine's free tier (https://cloud.google.com/free/docs/free-cloud-features#compute).
ZONE = "us-central1-a"
MACHINE_TYPE = "e2-micro"
IMAGE = "projects/debian-cloud/global/images/family/debian-12"
DISK_GB = 10

#: A value in a machine's metadata may have 256 KB (Compute Engine documentation, custom metadata limits).
LARGEST_VALUE = 256 * 1024

_PACKAGE = Path(__file__).parents[1]
_ENTRY = "kimisession.cloud.reaper"


def code_zip() -> bytes:
    """The modules that the reaper needs, as a zip that Python imports from. The same code makes the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(_files(_ENTRY)):
            entry = zipfile.ZipInfo(str(path.relative_to(_PACKAGE.parent)), (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    return buffer.getvalue()


def code_version() -> str:
    """A label's value that changes with the code."""
    return hashlib.sha256(code_zip()).hexdigest()[:12]


def _files(entry: str) -> set[Path]:
    """The file of a module, and of every module of ours that it imports, and so on."""
    found: set[Path] = set()
    waiting = [entry]
    while waiting:
        path = _file(waiting.pop())
        if path is None or path in found:
            continue
        found.add(path)
        for folder in path.parents:
            if _PACKAGE in (folder, *folder.parents):
                found.add(folder / "__init__.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kimisession"):
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names if alias.name.startswith("kimisession")]
    return found


def _file(module: str) -> Path | None:
    base = _PACKAGE.parent.joinpath(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()), None)


def startup_script(zone: str) -> str:
    """What the machine runs at each boot."""
    text = (Path(__file__).parent / "reaper_startup.sh").read_text(encoding="utf-8")
    filled = {"LIBRARY": LIBRARY, "ZONE": zone, "NAME": NAME, "RUN_S": str(RUN_S), "EVERY_S": str(EVERY_S)}
    for word, value in filled.items():
        text = text.replace(f"@{word}@", value)
    return text


def machine_body(project: str, zone: str, account: str, network: str = "default") -> Mapping[str, Any]:
    """The instance as Compute Engine's REST API wants it."""
    code = base64.b64encode(code_zip()).decode("ascii")
    if len(code) > LARGEST_VALUE:
        raise KimiError(f"the reaper's code has {len(code)} characters, and metadata takes {LARGEST_VALUE}")
    region = zone.rpartition("-")[0]
    return {
        "name": NAME,
        "description": "Deletes kimisession machines past their deadline. See `kimisession guard status`.",
        "machineType": f"zones/{zone}/machineTypes/{MACHINE_TYPE}",
        "labels": {LABEL_GUARD: "reaper", LABEL_CODE: code_version()},
        "disks": [
            {
                "boot": True,
                "autoDelete": True,
                "initializeParams": {
                    "sourceImage": IMAGE,
                    "diskSizeGb": str(DISK_GB),
                    "diskType": f"zones/{zone}/diskTypes/pd-standard",
                },
            }
        ],
        "networkInterfaces": [
            {
                "network": f"projects/{project}/global/networks/{network}",
                # Its one package comes from the package index; nothing listens on the address.
                "accessConfigs": [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}],
                **(
                    {"subnetwork": f"projects/{project}/regions/{region}/subnetworks/{network}"}
                    if network != "default"
                    else {}
                ),
            }
        ],
        "metadata": {
            "items": [
                {"key": "startup-script", "value": startup_script(zone)},
                {"key": "kimisession-code", "value": code},
                {"key": "serial-port-logging-enable", "value": "true"},
                {"key": "block-project-ssh-keys", "value": "true"},
            ]
        },
        "scheduling": {"automaticRestart": True, "onHostMaintenance": "MIGRATE", "provisioningModel": "STANDARD"},
        "serviceAccounts": [{"email": account, "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}],
    }


def account_of(project: str, account: str = "") -> str:
    """The e-mail of the account that the reaper acts as."""
    return account or f"{REAPER_ACCOUNT}@{project}.iam.gserviceaccount.com"


def guards(cloud: Cloud) -> tuple[Machine, ...]:
    """The reaper's machines of a project: one, none, or by accident several. Raises Unconfirmed where a zone is silent and
    none was found elsewhere."""
    found = cloud.labelled(LABEL_GUARD)
    if not found.machines and found.unreachable:
        raise Unconfirmed(
            f"{', '.join(found.unreachable)} did not answer: a reaper may be there", "try again in a minute"
        )
    return found.machines


def guard_state(cloud: Cloud, now: datetime) -> Layer:
    """The reaper as a layer of a session that is about to start in this project, or runs in it."""
    return guard_layer(guards(cloud), cloud.project, now, code_version())


def enable(cloud: Cloud, zone: str, account: str, network: str, say: Callable[[str], None]) -> Machine:
    """Have the reaper's machine: what exists with this very code is left as it is, another is replaced. Raises
    UsageMistake when the account does not exist or may not be used."""
    email = account_of(cloud.project, account)
    for machine in guards(cloud):
        if machine.labels.get(LABEL_CODE) == code_version() and machine.status in (
            "RUNNING",
            "STAGING",
            "PROVISIONING",
        ):
            say(f"{machine.name} in {machine.zone} is there already")
            return machine
        say(f"replacing {machine.name} in {machine.zone}: {machine.status}, with the code of another version")
        _delete(cloud, machine)
    try:
        cloud.create_machine(zone, machine_body(cloud.project, zone, email, network))
    except (Denied, Unconfirmed) as error:
        if isinstance(error, Denied) and error.permission:
            raise  # the person's own account lacks it
        if "serviceaccount" in error.message.lower().replace(" ", "") or email in error.message:
            commands = "\n".join(reaper_account_commands(cloud.project))
            raise UsageMistake(
                f"the reaper cannot act as {email}: {error.message}", f"run these once:\n{commands}"
            ) from None
        raise
    made = cloud.machine(zone, NAME)
    if made is None:
        raise Unconfirmed(f"{NAME} was created in {zone} and is not there", "kimisession guard status")
    return made


def disable(cloud: Cloud, say: Callable[[str], None]) -> int:
    """Delete every reaper of the project. Returns how many there were."""
    found = guards(cloud)
    for machine in found:
        say(f"deleting {machine.name} in {machine.zone}")
        _delete(cloud, machine)
    return len(found)


def _delete(cloud: Cloud, machine: Machine) -> None:
    """Have it deleted, and look whether it is. Raises Unconfirmed."""
    operation, where = cloud.delete(machine), f"{machine.name} in {machine.zone}"
    if operation is not None:
        operation = cloud.wait(operation, 300.0)
        if not operation.done:
            raise Unconfirmed(f"{where} is not deleted after 5 minutes", "kimisession guard status")
        for code, message in operation.errors:
            raise Unconfirmed(f"{where} was not deleted: {code} {message}".strip(), "the same command again")
    if cloud.machine(machine.zone, machine.name) is not None:
        raise Unconfirmed(f"{where} is still there, though its deletion says that it is done", "the same command again")
