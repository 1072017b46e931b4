"""From a request to an answer: document, token, validity, faults, permission, act, and our own answer's validity."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from . import auth, billing, compute_instances, compute_places, faults, identity
from .calls import ANSWERS, Call
from .cloud import Cloud
from .driver import Machines, NullMachines
from .errors import LostReply, Refused, not_found
from .state import OWNER, Json, State
from .validate import SERVICES, Method, check_request, check_response, document, documents_folder

_MODULES = (compute_instances, compute_places, identity)  # importing them fills ANSWERS
_UNLOCKED = frozenset({"compute.zoneOperations.wait", "compute.globalOperations.wait"})
_OTHER_PROJECTS = frozenset({"compute.images.get", "compute.images.getFromFamily"})


@dataclass(frozen=True)
class Reply:
    """What goes back over the wire."""

    status: int
    body: Json = field(default_factory=dict)


class Emulator:
    """One project's Google. `documents` is the folder of discovery documents, by default the installed package's."""

    def __init__(self, state: State, machines: Machines | None = None, documents: Path | None = None) -> None:
        self.state = state
        self.machines: Machines = machines or NullMachines()
        self.cloud = Cloud(state, self.machines)
        self.calls: list[tuple[str, str, int]] = []
        folder = documents or documents_folder()
        self._documents = {host: document(folder, name) for host, name in SERVICES.items()}
        with state.changing() as data:
            data["firewalls"] = data["firewalls"] or compute_places.default_rules(state)

    def start(self) -> None:
        """Begin with the clockwork, and go on with what was under way before a restart."""
        self.cloud.start()

    def close(self) -> None:
        """Stop the clockwork."""
        self.cloud.close()

    def token(self, member: str = "", scopes: tuple[str, ...] = (auth.CLOUD_PLATFORM,)) -> str:
        """An access token for a member, the project's owner unless one is named."""
        return auth.mint(self.state, member or OWNER, scopes)

    def bill(self) -> Json:
        """What Google would bill until now."""
        return billing.bill(self.state)

    def answer(self, verb: str, host: str, target: str, authorization: str, raw: bytes) -> Reply:
        """Answer one request. Raises LostReply where the connection is to be closed without an answer."""
        url = urlsplit(target)
        path = unquote(url.path).lstrip("/")
        name, status = f"{verb} {path}", 500
        try:
            if verb == "POST" and path == "token" and host not in self._documents:
                name, status = "oauth2.token", 200
                return Reply(200, auth.exchange(self.state, raw.decode()))
            method, values = self._find(verb, host, path)
            name = method.id
            reply = Reply(200, self._act(method, values, dict(parse_qsl(url.query)), authorization, raw))
            status = reply.status
            return reply
        except Refused as refused:
            status = refused.code
            return Reply(status, refused.body())
        except LostReply:
            raise
        except Exception as error:  # a mistake of the emulator's own: said so, and noted for the tests
            self.state.violation(f"the emulator failed: {error!r}", method=name)
            return Reply(500, Refused(500, "backendError", f"The emulator failed: {error!r}").body())
        finally:
            self.calls.append((name, host, status))

    def _find(self, verb: str, host: str, path: str) -> tuple[Method, dict[str, str]]:
        """By the host; where that is none of Google's (a test on 127.0.0.1), by the path alone."""
        name = host.partition(":")[0]
        services = [self._documents[name]] if name in self._documents else list(self._documents.values())
        for service in services:
            found = service.find(verb, path)
            if found:
                return found
        self.state.violation("no such method", method=verb, host=host, path=path)
        raise Refused(404, "notFound", f"The requested URL /{path} was not found on this server.")

    def _act(
        self, method: Method, values: dict[str, str], query: dict[str, str], authorization: str, raw: bytes
    ) -> Json:
        state = self.state
        member = auth.who(state, authorization, method)
        body = _parsed(raw)
        wrong = check_request(method, values, query, body)
        if wrong:
            state.violation("bad request", method=method.id, wrong=wrong)
            raise Refused(400, "invalid", " ".join(wrong))
        call = Call(self.cloud, method, member, values, query, body or {})
        faults.before(state, method.id, call.zone, call.resource.rpartition("/")[2])
        if method.id not in _OTHER_PROJECTS and self._names_another_project(method, values):
            raise not_found(f"projects/{values['project']}")
        call.demand(*auth.permissions_of(method.id))
        result = self._result(call)
        unfit = check_response(method, result)
        if unfit:
            state.violation("our answer does not fit", method=method.id, wrong=unfit)
            raise Refused(500, "backendError", f"The emulator's answer does not fit: {unfit[0]}")
        if faults.strike(state, "lost_reply", method.id, call.zone, call.resource.rpartition("/")[2]):
            raise LostReply
        return result

    def _names_another_project(self, method: Method, values: dict[str, str]) -> bool:
        return method.id.startswith("compute.") and values.get("project") != self.state.project

    def _result(self, call: Call) -> Json:
        """Act, once per requestId, and give back a copy that no later change reaches."""
        function = ANSWERS.get(call.method.id)
        if function is None:
            self.state.violation("not emulated", method=call.method.id)
            raise Refused(501, "notImplemented", f"{call.method.id} is not emulated.")
        if call.method.id in _UNLOCKED:
            return function(call)
        if call.method.described["httpMethod"] == "GET":
            with self.state.reading():
                return copy.deepcopy(function(call))
        with self.state.changing() as data:
            request = call.query.get("requestId", "")
            known = data["operations"].get(data["requests"].get(request, ""))
            if known:
                return dict(copy.deepcopy(known["wire"]))
            result = copy.deepcopy(function(call))
            if request:
                data["requests"][request] = result["name"]
                data["operations"][result["name"]]["wire"]["clientOperationId"] = result["clientOperationId"] = request
            return result


def _parsed(raw: bytes) -> Any:
    if not raw.strip():
        return None
    try:
        return json.loads(raw)
    except ValueError as error:
        raise Refused(400, "parseError", f"Parse Error: {error}") from error
