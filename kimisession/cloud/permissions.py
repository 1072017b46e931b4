"""Exactly which permissions the user, a session's machine and the reaper need in a Google Cloud project, and which one is
missing first. The words for people are in notes/permissions.md."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

REAPER_ACCOUNT = "kimisession-reaper"
REAPER_ROLE = "kimisession_reaper"

#: What SkyPilot 0.14.1 asks of who launches (VM_MINIMAL_PERMISSIONS in its provision/gcp/constants.py), and two that it uses
#: and does not ask for: acting as the machine's account, and metadata, by which its SSH key reaches the machine.
SKYPILOT = (
    "compute.disks.create",
    "compute.disks.list",
    "compute.firewalls.get",
    "compute.instances.create",
    "compute.instances.delete",
    "compute.instances.get",
    "compute.instances.list",
    "compute.instances.setLabels",
    "compute.instances.setMetadata",
    "compute.instances.setServiceAccount",
    "compute.instances.start",
    "compute.instances.stop",
    "compute.networks.get",
    "compute.networks.list",
    "compute.networks.getEffectiveFirewalls",
    "compute.globalOperations.get",
    "compute.subnetworks.use",
    "compute.subnetworks.list",
    "compute.subnetworks.useExternalIp",
    "compute.projects.get",
    "compute.zoneOperations.get",
    "iam.roles.get",
    "iam.serviceAccounts.actAs",
    "iam.serviceAccounts.get",
    "serviceusage.services.use",
    "resourcemanager.projects.get",
    "resourcemanager.projects.getIamPolicy",
)

#: `status`, `stop`, `sweep`: lists of all zones, deletion, labels, and the operations that prove an end.
LOOK_AND_DELETE = (
    "compute.instances.list",
    "compute.instances.get",
    "compute.instances.delete",
    "compute.instances.setLabels",
    "compute.disks.list",
    "compute.disks.delete",
    "compute.addresses.list",
    "compute.addresses.delete",
    "compute.zoneOperations.get",
    "compute.globalOperations.list",
    "compute.zoneOperations.list",
    "compute.zones.list",
    "compute.regions.list",
)

#: `quota`.
QUOTA = ("compute.projects.get", "compute.regions.list")

#: `guard enable`, beside LOOK_AND_DELETE.
GUARD = (
    "compute.instances.create",
    "compute.instances.setMetadata",
    "compute.instances.setServiceAccount",
    "compute.disks.create",
    "compute.subnetworks.use",
    "compute.subnetworks.useExternalIp",
    "iam.serviceAccounts.actAs",
)

#: A machine on demand (`--on-demand-fallback`) is told not to start again after a crash of its host.
ON_DEMAND = ("compute.instances.setScheduling",)

USER = tuple(dict.fromkeys((*SKYPILOT, *LOOK_AND_DELETE, *QUOTA, *GUARD, *ON_DEMAND)))

#: The reaper lists, deletes, and writes its heartbeat on itself. It can neither create, nor read a disk, nor log in anywhere.
REAPER = (
    "compute.instances.list",
    "compute.instances.get",
    "compute.instances.delete",
    "compute.instances.setLabels",
    "compute.disks.list",
    "compute.disks.delete",
    "compute.addresses.list",
    "compute.addresses.delete",
    "compute.zoneOperations.get",
    "compute.globalOperations.list",
    "compute.zoneOperations.list",
    "compute.zones.list",
    "compute.regions.list",
)

#: A session's machine deletes itself (kimisession/node/deadline.py), and SkyPilot's autodown on it, which stands behind that,
#: lists the machines of its cluster first. It also reads the weights.
MACHINE = ("compute.instances.delete", "compute.zoneOperations.get", "compute.instances.list")
#: On the bucket; the second for profiles that stream, whose reader lists what it reads.
MACHINE_ON_BUCKET = ("storage.objects.get", "storage.objects.list")


class Asked(Protocol):
    """What can tell which permissions its account has."""

    @property
    def project(self) -> str:
        """The project's id."""

    def permitted(self, permissions: Iterable[str]) -> frozenset[str]:
        """Those of these that the account has."""


@dataclass(frozen=True)
class Missing:
    """Permissions that are lacking, in the order in which they are needed, and the command that grants them."""

    permissions: tuple[str, ...]
    command: str


def missing(cloud: Asked, wanted: tuple[str, ...] = USER) -> Missing | None:
    """What the account lacks in the project; None when it has all of it. 100 permissions can be tested in one call
    (Cloud Resource Manager, projects.testIamPermissions)."""
    has = cloud.permitted(wanted)
    lacking = tuple(p for p in wanted if p not in has)
    return Missing(lacking, grant_command(cloud.project, lacking)) if lacking else None


def grant_command(project: str, lacking: tuple[str, ...]) -> str:
    """What somebody who may grant types: a custom role with these permissions, made or added to, and its binding."""
    words = f"kimisession_user --project={project}"
    return (
        f"(gcloud iam roles create {words} --permissions={','.join(lacking)} || "
        f"gcloud iam roles update {words} --add-permissions={','.join(lacking)}) && "
        f"gcloud projects add-iam-policy-binding {project} --member=user:EMAIL "
        f"--role=projects/{project}/roles/kimisession_user"
    )


def reaper_account_commands(project: str) -> tuple[str, ...]:
    """What makes the reaper's account, with a role of its own. To be run once for a project."""
    email = f"{REAPER_ACCOUNT}@{project}.iam.gserviceaccount.com"
    return (
        f"gcloud iam roles create {REAPER_ROLE} --project={project} --title='kimisession reaper' "
        f"--permissions={','.join(REAPER)}",
        f"gcloud iam service-accounts create {REAPER_ACCOUNT} --project={project}",
        f"gcloud projects add-iam-policy-binding {project} --member=serviceAccount:{email} "
        f"--role=projects/{project}/roles/{REAPER_ROLE}",
    )
