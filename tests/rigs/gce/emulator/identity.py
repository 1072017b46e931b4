"""Calls to the other services: the project and its policy, service accounts, roles, enabled services."""

from .auth import ROLES, may
from .calls import Call, answers
from .errors import Refused
from .state import NUMBER, Json

_SERVICES = ("compute", "cloudresourcemanager", "iam", "tpu", "storage", "serviceusage")


@answers("cloudresourcemanager.projects.get")
def get_project(call: Call) -> Json:
    return {
        "projectNumber": NUMBER,
        "projectId": call.state.project,
        "lifecycleState": "ACTIVE",
        "name": call.state.project,
        "createTime": "2020-01-01T00:00:00.000Z",
    }


@answers("cloudresourcemanager.projects.testIamPermissions")
def test_permissions(call: Call) -> Json:
    held = [one for one in call.body.get("permissions", []) if may(call.state, call.member, one)]
    return {"permissions": held} if held else {}


@answers("cloudresourcemanager.projects.getIamPolicy")
def get_policy(call: Call) -> Json:
    data = call.state.data
    bindings = [{"role": role, "members": members} for role, members in data["bindings"].items() if members]
    return {"version": 1, "etag": f"BwX{data['etag']:09d}", "bindings": bindings}


@answers("cloudresourcemanager.projects.setIamPolicy")
def set_policy(call: Call) -> Json:
    """The whole policy is replaced; a stale etag is refused."""
    policy = call.body.get("policy", {})
    if policy.get("etag") not in (None, get_policy(call)["etag"]):
        raise Refused(409, "aborted", "There were concurrent policy changes. Please retry the whole read-modify-write.")
    bindings: dict[str, list[str]] = {}
    for binding in policy.get("bindings", []):
        bindings.setdefault(binding["role"], []).extend(binding.get("members", []))
    for member in [one for members in bindings.values() for one in members if one.startswith("serviceAccount:")]:
        if member.partition(":")[2] not in call.state.data["service_accounts"]:
            raise Refused(400, "badRequest", f"Service account {member.partition(':')[2]} does not exist.")
    call.state.data["bindings"] = {role: sorted(set(members)) for role, members in bindings.items()}
    call.state.data["etag"] += 1
    return get_policy(call)


def _account(call: Call, email: str) -> Json:
    return {
        "name": f"projects/{call.state.project}/serviceAccounts/{email}",
        "projectId": call.state.project,
        "uniqueId": str(sum(email.encode()) + 10**20),
        "email": email,
        "displayName": call.state.data["service_accounts"][email],
    }


@answers("iam.projects.serviceAccounts.get")
def get_account(call: Call) -> Json:
    email = call.path["serviceAccountsId"]
    if email not in call.state.data["service_accounts"]:
        raise Refused(404, "notFound", "Unknown service account")
    return _account(call, email)


@answers("iam.projects.serviceAccounts.create")
def create_account(call: Call) -> Json:
    email = f"{call.body['accountId']}@{call.state.project}.iam.gserviceaccount.com"
    if email in call.state.data["service_accounts"]:
        raise Refused(
            409, "alreadyExists", f"Service account {call.body['accountId']} already exists within the project."
        )
    call.state.data["service_accounts"][email] = call.body.get("serviceAccount", {}).get("displayName", "")
    return _account(call, email)


@answers("iam.roles.get")
def get_role(call: Call) -> Json:
    """Permissions are patterns here: enough for a client that looks for one by name to see that it is not there."""
    role = f"roles/{call.path['rolesId']}"
    if role not in ROLES:
        raise Refused(404, "notFound", f"The role named {role} was not found.")
    return {"name": role, "title": role, "stage": "GA", "includedPermissions": list(ROLES[role])}


@answers("serviceusage.services.list")
def list_services(call: Call) -> Json:
    parent = f"projects/{NUMBER}"
    names = [f"{one}.googleapis.com" for one in _SERVICES]
    return {
        "services": [
            {"name": f"{parent}/services/{one}", "parent": parent, "state": "ENABLED", "config": {"name": one}}
            for one in names
        ]
    }
