"""Who asks, with which scopes, and whether they may: OAuth tokens, roles, bindings, and the permission of each call."""

import base64
import fnmatch
import json
import re
import secrets
from collections.abc import Iterable
from urllib.parse import parse_qs

from .errors import Refused
from .state import NUMBER, OWNER, Json, State
from .validate import Method

CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
TOKEN_S = 3600

#: Permissions of the predefined roles that are met here, as patterns. A project may overrule one (POST /admin/role).
ROLES: dict[str, tuple[str, ...]] = {
    "roles/owner": ("*",),
    "roles/editor": (
        "compute.*",
        "iam.serviceAccounts.actAs",
        "iam.serviceAccounts.get",
        "iam.serviceAccounts.list",
        "resourcemanager.projects.get",
        "serviceusage.*",
        "storage.buckets.*",
    ),
    "roles/viewer": ("compute.*.get", "compute.*.list", "resourcemanager.projects.get", "serviceusage.services.list"),
    "roles/compute.admin": ("compute.*", "resourcemanager.projects.get", "serviceusage.services.get"),
    "roles/compute.instanceAdmin.v1": (
        "compute.instances.*",
        "compute.disks.*",
        "compute.images.*",
        "compute.addresses.*",
        "compute.subnetworks.use*",
        "compute.networks.use*",
        "compute.*.get",
        "compute.*.list",
        "resourcemanager.projects.get",
        "serviceusage.services.get",
    ),
    "roles/compute.viewer": ("compute.*.get", "compute.*.list", "resourcemanager.projects.get"),
    "roles/iam.serviceAccountUser": ("iam.serviceAccounts.actAs", "iam.serviceAccounts.get"),
    "roles/iam.roleViewer": ("iam.roles.get", "iam.roles.list"),
    "roles/storage.admin": ("storage.*",),
}

#: Methods whose permission is not named after them. An empty text: a token is enough.
_PERMISSION = {
    "compute.instances.insert": "compute.instances.create",
    "compute.instances.bulkInsert": "compute.instances.create",
    "compute.disks.insert": "compute.disks.create",
    "compute.addresses.insert": "compute.addresses.create",
    "compute.firewalls.insert": "compute.firewalls.create",
    "compute.zoneOperations.wait": "compute.zoneOperations.get",
    "compute.globalOperations.wait": "compute.globalOperations.get",
    "compute.globalOperations.aggregatedList": "compute.globalOperations.list",
    "compute.instances.testIamPermissions": "",
    "cloudresourcemanager.projects.get": "resourcemanager.projects.get",
    "cloudresourcemanager.projects.getIamPolicy": "resourcemanager.projects.getIamPolicy",
    "cloudresourcemanager.projects.setIamPolicy": "resourcemanager.projects.setIamPolicy",
    "cloudresourcemanager.projects.testIamPermissions": "",
    "iam.projects.serviceAccounts.get": "iam.serviceAccounts.get",
    "iam.projects.serviceAccounts.create": "iam.serviceAccounts.create",
    "iam.roles.get": "",  # predefined roles are public
}
#: What a call needs besides its own permission, per Google's pages on firewall rules.
_ALSO = {
    "compute.firewalls.insert": ("compute.networks.updatePolicy",),
    "compute.firewalls.delete": ("compute.networks.updatePolicy",),
}


def permissions_of(method: str) -> tuple[str, ...]:
    """What IAM demands for a method, before what its body adds (see `needs_of_insert`).

    Deleting an instance demands nothing of its disks that go with it: SkyPilot's list of minimal permissions has no
    compute.disks.delete, and its machines go with their disks.
    """
    own = _PERMISSION.get(method)
    if own is None:
        own = method.removesuffix("aggregatedList") + "list" if method.endswith(".aggregatedList") else method
    return ((own,) if own else ()) + _ALSO.get(method, ())


def needs_of_insert(properties: Json) -> tuple[str, ...]:
    """What creating an instance needs besides `compute.instances.create`, by what the body sets.

    After the list of permissions on Google's page on creating instances. SkyPilot's list of minimal permissions lacks
    setMetadata though it sends SSH keys as metadata; the page is followed here.
    """
    needs = {"compute.disks.create", "compute.subnetworks.use"}
    needs |= {
        permission
        for field, permission in (
            ("labels", "compute.instances.setLabels"),
            ("metadata", "compute.instances.setMetadata"),
            ("tags", "compute.instances.setTags"),
            ("serviceAccounts", "compute.instances.setServiceAccount"),
            ("serviceAccounts", "iam.serviceAccounts.actAs"),
        )
        if properties.get(field)
    }
    if any(nic.get("accessConfigs") for nic in properties.get("networkInterfaces", [])):
        needs.add("compute.subnetworks.useExternalIp")
    return tuple(sorted(needs))


def mint(state: State, member: str, scopes: Iterable[str] = (CLOUD_PLATFORM,), seconds: float = TOKEN_S) -> str:
    """A new access token for `user:...` or `serviceAccount:...`."""
    token, now = f"ya29.{secrets.token_urlsafe(24)}", state.clock()
    with state.changing() as data:
        data["tokens"] = {old: entry for old, entry in data["tokens"].items() if entry["expires"] > now}
        data["tokens"][token] = {"member": member, "scopes": list(scopes), "expires": now + seconds}
    return token


def exchange(state: State, form: str) -> Json:
    """The answer of oauth2.googleapis.com/token: for a service account's signed JWT, or for a user's refresh token.

    Signatures are not checked (the key's public half is nowhere here); that the account exists is. A refresh token
    is the e-mail address of its user, who must have some role.
    """
    fields = {name: values[0] for name, values in parse_qs(form).items()}
    if fields.get("grant_type") == "urn:ietf:params:oauth:grant-type:jwt-bearer":
        claims = _claims(fields.get("assertion", ""))
        email, scopes = str(claims.get("iss", "")), str(claims.get("scope", "")).split()
        if email not in state.data["service_accounts"]:
            raise Refused(400, "invalid_grant", f"Invalid grant: account not found: {email}")
        member = f"serviceAccount:{email}"
    elif fields.get("grant_type") == "refresh_token":
        member, scopes = f"user:{fields.get('refresh_token', '')}", [CLOUD_PLATFORM]
        if member != OWNER and not any(member in members for members in state.data["bindings"].values()):
            raise Refused(400, "invalid_grant", "Token has been expired or revoked.")
    else:
        raise Refused(400, "unsupported_grant_type", f"Invalid grant_type: {fields.get('grant_type')}")
    return {
        "access_token": mint(state, member, scopes),
        "expires_in": TOKEN_S,
        "token_type": "Bearer",
        "scope": " ".join(scopes),
    }


def _claims(assertion: str) -> Json:
    try:
        payload = assertion.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError) as error:
        raise Refused(400, "invalid_grant", "Invalid JWT.") from error
    return claims if isinstance(claims, dict) else {}


def who(state: State, header: str, method: Method) -> str:
    """The member behind a bearer token, with one of the scopes that the method takes. 401 and 403 otherwise."""
    token = header.removeprefix("Bearer ")
    entry = state.data["tokens"].get(token) or _self_signed(state, token)
    if not header.startswith("Bearer ") or entry is None or entry["expires"] < state.clock():
        raise Refused(
            401,
            "authError",
            "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other valid "
            "authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project.",
        )
    if method.scopes and entry["scopes"] is not None and not set(method.scopes) & set(entry["scopes"]):
        raise Refused(403, "insufficientPermissions", "Request had insufficient authentication scopes.")
    return str(entry["member"])


def _self_signed(state: State, token: str) -> Json | None:
    """What Google's newer libraries send for a service account's key: a JWT of their own for one service, not exchanged for a
    token (google.aip.dev/auth/4111). One for an audience has no scopes. The signature is not checked, as in `exchange`."""
    if token.count(".") != 2 or token.startswith("ya29."):
        return None
    claims = _claims(token)
    email, audience = str(claims.get("iss", "")), str(claims.get("aud", ""))
    scopes = str(claims["scope"]).split() if "scope" in claims else None
    if email != claims.get("sub") or email not in state.data["service_accounts"]:
        return None
    if scopes is None and not re.fullmatch(r"https://[a-z]+\.googleapis\.com/", audience):
        return None
    return {"member": f"serviceAccount:{email}", "scopes": scopes, "expires": float(claims.get("exp", 0))}


def may(state: State, member: str, permission: str) -> bool:
    """Whether some binding gives it and nobody took it away (POST /admin/deny)."""
    with state.reading() as data:
        if [member, permission] in data["denied"]:
            return False
        roles = [role for role, members in data["bindings"].items() if member in members]
        patterns = [pattern for role in roles for pattern in data["roles"].get(role, ROLES.get(role, ()))]
    return any(fnmatch.fnmatchcase(permission, pattern) for pattern in patterns)


def demand(state: State, member: str, permissions: Iterable[str], resource: str) -> None:
    """403 in Google's words for the first permission that is missing. `resource`: projects/p/zones/z/instances/i."""
    for permission in permissions:
        if not may(state, member, permission):
            raise Refused(403, "forbidden", f"Required '{permission}' permission for '{resource}'")


def default_account(email: str) -> str:
    """The address behind `default` and behind nothing."""
    return f"{NUMBER}-compute@developer.gserviceaccount.com" if email in ("", "default") else email
