"""One call of a method, and the table of who answers which."""

from collections.abc import Callable
from dataclasses import dataclass, field

from . import auth, faults
from .cloud import Cloud
from .errors import Failed, not_found
from .state import Json, State
from .validate import Method


@dataclass
class Call:
    """A request that has passed the documents and the permissions of its method."""

    cloud: Cloud
    method: Method
    member: str
    path: dict[str, str]
    query: dict[str, str]
    body: Json = field(default_factory=dict)

    @property
    def state(self) -> State:
        return self.cloud.state

    @property
    def zone(self) -> str:
        return self.path.get("zone", "")

    @property
    def resource(self) -> str:
        """What the call is about, as Google names it: projects/p/zones/z/instances/i."""
        place = "".join(f"/{kind}s/{self.path[kind]}" for kind in ("zone", "region") if kind in self.path)
        name = next((value for kind, value in self.path.items() if kind not in ("project", "zone", "region")), "")
        name = name or str(self.body.get("name", ""))
        collection = self.method.id.split(".")[-2]
        path = f"projects/{self.state.project}{place or '/global'}"
        return f"{path}/{collection}/{name}" if name else f"projects/{self.state.project}"

    def demand(self, *permissions: str) -> None:
        """403 unless the caller has them all."""
        auth.demand(self.state, self.member, permissions, self.resource)

    def find(self, kind: str, key: str) -> Json:
        """The resource; 404 in Google's words. The lock is held."""
        if key not in self.state.data[kind]:
            raise not_found(self.resource)
        return dict(self.state.data[kind][key])

    def operation(
        self, kind: str, do: str, args: Json, *, target: str = "", failed: Failed | None = None, group: str = ""
    ) -> Json:
        """Start the operation of this call, with the faults that are armed for it."""
        scope = f"zones/{self.zone}" if self.zone else f"regions/{r}" if (r := self.path.get("region")) else "global"
        name = (target or self.resource).rpartition("/")[2]
        error, delay_s = faults.of_operation(self.state, self.method.id, self.zone, name)
        path = target or self.resource.removeprefix(f"projects/{self.state.project}/")
        return self.cloud.operations.start(
            kind, scope, path, do, args, self.member, failed=failed or error, delay_s=delay_s, group=group
        )


Answer = Callable[[Call], Json]

ANSWERS: dict[str, Answer] = {}


def answers(*methods: str) -> Callable[[Answer], Answer]:
    """Register a function for methods by their ids."""

    def register(function: Answer) -> Answer:
        ANSWERS.update(dict.fromkeys(methods, function))
        return function

    return register
