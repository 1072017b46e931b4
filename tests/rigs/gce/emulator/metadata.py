"""The metadata server that every VM asks: who it is, a token for its own account, and whether it is being preempted."""

import hashlib
import json
import re
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from . import auth
from .state import NUMBER, Json, State, last

#: From the address that a request comes from to "zone/name" of its instance; None for a stranger.
Resolver = Callable[[str], str | None]


def etag_of(text: str) -> str:
    """The ETag of a value: sixteen hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_ROOT = "/computeMetadata/v1/"
_LONGEST_WAIT_S = 3600.0


def _recursive(below: Json) -> Json:
    """A folder as Google tells it in one answer: camel case, lists where there can be several, no token."""
    found: Json = {}
    for key, value in below.items():
        name = re.sub("-(.)", lambda match: match[1].upper(), key) if "@" not in key else key
        if isinstance(value, dict):
            found[name] = value if key == "attributes" else _recursive(value)
        elif key != "token":
            found[name] = value.split() if key in ("aliases", "scopes") else value
    return found


def by_address(state: State) -> Resolver:
    """VMs by the inner or outer address that the emulator gave them."""

    def resolve(address: str) -> str | None:
        with state.reading() as data:
            for key, instance in data["instances"].items():
                if address in (instance["networkInterfaces"][0]["networkIP"], data["inside"][key]["nat"]):
                    return str(key)
        return None

    return resolve


class Metadata:
    """Answers (status, content type, text). Whoever asks without the header is refused, as Google does."""

    def __init__(self, state: State, resolve: Resolver) -> None:
        self._state, self._resolve = state, resolve

    def answer(self, address: str, target: str, flavor: str, forwarded: bool = False) -> tuple[int, str, str]:
        """`flavor` is the header Metadata-Flavor; a request with X-Forwarded-For is refused."""
        url = urlsplit(target)
        if url.path == "/":
            return 200, "application/text", "computeMetadata/\n"
        if flavor != "Google" or forwarded:
            return 403, "text/html", "Missing Metadata-Flavor:Google header.\n"
        key = self._resolve(address)
        if key is None or not url.path.startswith(_ROOT):
            return 404, "text/html", f"Not found: {url.path} for {address}\n"
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        path = url.path.removeprefix(_ROOT)
        if query.get("wait_for_change") == "true":
            self._wait(key, path, query.get("last_etag"), float(query.get("timeout_sec", _LONGEST_WAIT_S)))
        found = self._read(key, path.rstrip("/"), query.get("recursive") == "true")
        if found is None:
            return 404, "text/html", f"Not found: {url.path}\n"
        return 200, "application/json" if found.startswith("{") else "application/text", found

    def _wait(self, key: str, path: str, last_etag: str | None, timeout_s: float) -> None:
        """Until the value is another than the client has seen; without `last_etag`, another than it is now."""
        seen = last_etag or etag_of(self._read(key, path) or "")
        self._state.wait_until(lambda data: etag_of(self._read(key, path) or "") != seen, timeout_s)

    def _read(self, key: str, path: str, recursive: bool = False) -> str | None:
        """The value at a path; for a folder what is below it, as JSON, or the names alone, one per line."""
        if path.endswith("/token"):
            return self._token(key) if path.startswith("instance/service-accounts/") else None
        with self._state.reading():
            tree = self._tree(key)
        at: object = tree
        for part in filter(None, path.split("/")):
            at = at.get(part) if isinstance(at, dict) else None
        if at is None:
            return None
        if isinstance(at, dict) and recursive:
            return json.dumps(_recursive(at))
        if isinstance(at, dict):
            return "".join(f"{name}/\n" if isinstance(below, dict) else f"{name}\n" for name, below in at.items())
        return str(at)

    def _tree(self, key: str) -> Json:
        state, instance = self._state, self._state.data["instances"].get(key)
        if instance is None:
            return {}
        zone, name = key.split("/")
        nic, inside = instance["networkInterfaces"][0], state.data["inside"][key]
        accounts = {
            account["email"]: {
                "email": account["email"],
                "aliases": "default",
                "scopes": "".join(f"{scope}\n" for scope in account["scopes"]),
                "token": "",
            }
            for account in instance["serviceAccounts"]
        }
        if accounts:
            accounts["default"] = next(iter(accounts.values()))
        scheduling = instance["scheduling"]
        return {
            "project": {"project-id": state.project, "numeric-project-id": NUMBER, "attributes": {}},
            "instance": {
                "attributes": {item["key"]: item["value"] for item in instance["metadata"]["items"]},
                "hostname": f"{name}.{zone}.c.{state.project}.internal",
                "id": instance["id"],
                "image": "",
                "machine-type": f"projects/{NUMBER}/machineTypes/{last(instance['machineType'])}",
                "maintenance-event": "NONE",
                "name": name,
                "network-interfaces": {
                    "0": {"ip": nic["networkIP"], "access-configs": {"0": {"external-ip": inside["nat"]}}}
                },
                "preempted": "TRUE" if inside["preempted"] else "FALSE",
                "scheduling": {
                    "automatic-restart": str(scheduling["automaticRestart"]).upper(),
                    "on-host-maintenance": scheduling["onHostMaintenance"],
                    "preemptible": str(scheduling["preemptible"]).upper(),
                },
                "service-accounts": accounts,
                "zone": f"projects/{NUMBER}/zones/{zone}",
            },
        }

    def _token(self, key: str) -> str | None:
        with self._state.reading() as data:
            instance = data["instances"].get(key)
            accounts = instance["serviceAccounts"] if instance else []
        if not accounts:
            return None
        member = f"serviceAccount:{accounts[0]['email']}"
        token = auth.mint(self._state, member, accounts[0]["scopes"])
        return f'{{"access_token":"{token}","expires_in":{auth.TOKEN_S},"token_type":"Bearer"}}'
