"""Long-running operations: accepted at once, done in a thread of their own, taken up again after a restart."""

import copy
import secrets
import threading
import time
from collections.abc import Callable, Mapping

from .errors import Failed
from .state import Json, State, new_id

Work = Callable[[Json], None]

_HTTP_OF = {"QUOTA_EXCEEDED": (403, "FORBIDDEN"), "RESOURCE_NOT_FOUND": (404, "NOT FOUND")}


class Operations:
    """`work` says what each kind does: called with its args, without the state's lock; raises Failed.

    Work may be done a second time, when the emulator died before it was recorded as done.
    """

    def __init__(self, state: State, work: Mapping[str, Work]) -> None:
        self._state, self._work = state, work
        self._closing = threading.Event()

    def start(
        self,
        kind: str,
        scope: str,
        target: str,
        do: str,
        args: Json,
        user: str,
        *,
        failed: Failed | None = None,
        delay_s: float = 0.0,
        group: str = "",
    ) -> Json:
        """Accept an operation and return it as the client sees it now.

        `scope` is zones/z, regions/r or global; `target` the path of the resource; with `failed` the operation ends in
        that error and does nothing.
        """
        name = self._record(kind, scope, target, user, group)
        with self._state.changing() as data:
            entry = data["operations"][name]
            error = [failed.code, failed.message] if failed else None
            entry |= {"do": do, "args": args, "delay_s": delay_s, "failed": error}
            entry["wire"]["status"] = "RUNNING"
            seen = copy.deepcopy(entry["wire"])
        threading.Thread(target=self._run, args=(name,), daemon=True, name=name).start()
        return dict(seen)

    def system(self, kind: str, scope: str, target: str, message: str) -> None:
        """Record what Google did by itself (`compute.instances.preempted`): done as soon as it is seen."""
        name = self._record(kind, scope, target, "system@google.com", "")
        with self._state.changing() as data:
            data["operations"][name]["wire"]["statusMessage"] = message
        self._finish(name, [])

    def resume(self) -> None:
        """Go on with what a predecessor left undone."""
        with self._state.reading() as data:
            undone = [name for name, entry in data["operations"].items() if entry["wire"]["status"] != "DONE"]
        for name in undone:
            threading.Thread(target=self._run, args=(name,), daemon=True, name=name).start()

    def close(self) -> None:
        """Start nothing that has not begun."""
        self._closing.set()

    def _record(self, kind: str, scope: str, target: str, user: str, group: str) -> str:
        state = self._state
        name = f"operation-{int(time.time() * 1000)}-{secrets.token_hex(7)}-{secrets.token_hex(4)}"
        with state.changing() as data:
            wire = {
                "kind": "compute#operation",
                "id": new_id(),
                "name": name,
                "operationType": kind,
                "targetLink": state.link(target),
                "targetId": new_id(),
                "status": "PENDING",
                "user": user.partition(":")[2] or user,
                "progress": 0,
                "insertTime": state.stamp(),
                "startTime": state.stamp(),
                "selfLink": state.link(f"{scope}/operations/{name}"),
            }
            if scope != "global":
                wire[scope.partition("/")[0].removesuffix("s")] = state.link(scope)
            if group:
                wire["operationGroupId"] = group
            for resources in ("instances", "disks"):
                resource = data[resources].get(target.removeprefix("zones/").replace(f"/{resources}/", "/"))
                if resource is not None:
                    wire["targetId"] = resource["id"]
            data["operations"][name] = {"wire": wire, "do": "", "args": {}, "delay_s": 0.0, "failed": None}
        return name

    def _run(self, name: str) -> None:
        with self._state.reading() as data:
            entry = copy.deepcopy(data["operations"][name])
        if self._closing.wait(entry["delay_s"]):
            return
        errors = [entry["failed"]] if entry["failed"] else []
        if not errors and entry["do"]:
            try:
                self._work[entry["do"]](entry["args"])
            except Failed as failed:
                errors = [[failed.code, failed.message]]
            except Exception as error:  # a machine's driver broke: the client hears of it, and so do the tests
                errors = [["INTERNAL_ERROR", f"Internal error. {error}"]]
                self._state.violation(f"{entry['do']}: {error!r}", operation=name)
        self._finish(name, errors)

    def _finish(self, name: str, errors: list[list[str]]) -> None:
        with self._state.changing() as data:
            if name not in data["operations"]:
                return
            wire = data["operations"][name]["wire"]
            wire |= {"status": "DONE", "progress": 100, "endTime": self._state.stamp()}
            if errors:
                code, text = _HTTP_OF.get(errors[0][0], (503, "SERVICE UNAVAILABLE"))
                wire["error"] = {"errors": [{"code": code_, "message": message} for code_, message in errors]}
                wire |= {"httpErrorStatusCode": code, "httpErrorMessage": text}
