"""The back door for tests: what Google would never let one ask or do. Everything is JSON.

| call | what |
|---|---|
| GET /admin/bill, /admin/violations, /admin/faults, /admin/state, /admin/calls | look |
| POST /admin/faults {kind, times?, method?, zone?, name?, ...} | arm a fault (faults.py); answers {"id": ...} |
| DELETE /admin/faults, /admin/violations | forget them all |
| POST /admin/preempt {name, notice_s?} | take a spot instance back |
| POST /admin/vanish, /admin/reboot, /admin/host_error {name} | what their names say |
| POST /admin/token {member?, scopes?} | {"access_token": ...}; the owner's without a member |
| POST /admin/deny, /admin/allow {member, permission} | take one permission away, and give it back |
| POST /admin/bind, /admin/unbind {member, role} | a role for `user:...` or `serviceAccount:...` |
| POST /admin/role {role, permissions} | what a role consists of, patterns allowed |
| POST /admin/account {email} | a service account that exists |
| POST /admin/quota {metric, limit, region?} | without a region: of the project |
| POST /admin/prices {sku: [on demand, spot]} | dollars per hour, as text |
| POST /admin/settings {boot_s?, stopping_s?, notice_s?} | how long things take |
"""

import copy
from collections.abc import Callable
from typing import Any

from . import auth, faults
from .emulator import Emulator
from .state import Json


class Admin:
    """Answers (status, JSON)."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator, self._state = emulator, emulator.state
        cloud = emulator.cloud
        self._posts: dict[str, Callable[..., Any]] = {
            "faults": lambda **fault: {"id": faults.add(self._state, fault)},
            "preempt": cloud.preempt,
            "vanish": cloud.vanish,
            "reboot": cloud.reboot,
            "host_error": cloud.host_error,
            "token": lambda member="", scopes=(auth.CLOUD_PLATFORM,): {"access_token": emulator.token(member, scopes)},
            "deny": self._deny,
            "allow": self._allow,
            "bind": self._bind,
            "unbind": self._unbind,
            "role": self._role,
            "account": self._account,
            "quota": self._quota,
            "prices": lambda **prices: self._update("prices", prices),
            "settings": self._settings,
        }

    def answer(self, verb: str, path: str, body: Json) -> tuple[int, Any]:
        """400 with a sentence for what makes no sense."""
        name = path.removeprefix("/admin/").rstrip("/")
        try:
            if verb == "GET":
                return 200, self._look(name)
            if verb == "DELETE" and name in ("faults", "violations"):
                with self._state.changing() as data:
                    data[name].clear()
                return 200, {}
            if verb == "POST" and name in self._posts:
                return 200, self._posts[name](**body) or {}
        except Exception as error:  # whatever it was, the test that asked is told
            return 400, {"error": f"{type(error).__name__}: {error}"}
        return 404, {"error": f"no {verb} {path}; see admin.py"}

    def _look(self, name: str) -> Any:
        if name == "bill":
            return self._emulator.bill()
        if name == "calls":
            return list(self._emulator.calls)
        with self._state.reading() as data:
            return copy.deepcopy(data if name == "state" else data[name])

    def _deny(self, member: str, permission: str) -> None:
        with self._state.changing() as data:
            data["denied"].append([member, permission])

    def _allow(self, member: str, permission: str) -> None:
        with self._state.changing() as data:
            data["denied"].remove([member, permission])

    def _bind(self, member: str, role: str) -> None:
        with self._state.changing() as data:
            data["bindings"].setdefault(role, []).append(member)

    def _unbind(self, member: str, role: str) -> None:
        with self._state.changing() as data:
            data["bindings"][role].remove(member)

    def _role(self, role: str, permissions: list[str]) -> None:
        self._update("roles", {role: permissions})

    def _account(self, email: str) -> None:
        self._update("service_accounts", {email: email})

    def _quota(self, metric: str, limit: float, region: str = "") -> None:
        self._update("quotas", {f"{region}/{metric}".lstrip("/"): limit})

    def _settings(self, **settings: float) -> None:
        unknown = set(settings) - set(self._state.data["settings"])
        if unknown:
            raise ValueError(f"no such settings: {sorted(unknown)}")
        self._update("settings", settings)

    def _update(self, section: str, entries: Json) -> None:
        with self._state.changing() as data:
            data[section] |= entries
