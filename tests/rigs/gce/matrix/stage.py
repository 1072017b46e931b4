"""Where wire cells are played: one emulated project over HTTP, laptops with the real controller and engine, a reaper, a clock.

Time that somebody sleeps away is jumped over; all else goes by as it does. The emulator, the reaper, the commands and the
ledger go by the same clock, so the seconds of a cell are those of production. A cell in which the emulator itself takes its
time (slow operations, STOPPING) sets `rate`: then sleeping goes that much faster, and no more.
"""

import contextlib
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kimisession.cloud import guard
from kimisession.cloud.compute import Compute
from kimisession.cloud.permissions import REAPER
from kimisession.cloud.reaper import reap
from kimisession.cloud.sweep import Sweeper
from kimisession.controller import Controller
from kimisession.core.cost import cost_of
from kimisession.core.guard import EVERY_S, NAME
from kimisession.core.inventory import Inventory
from kimisession.core.ledger import Session, State
from kimisession.core.lifecycle import Layer
from kimisession.core.quote import make_quote
from kimisession.engines.gcp import GcpPlace
from kimisession.engines.skypilot import SkyPilotEngine
from kimisession.errors import KimiError
from kimisession.store import Store
from tests.good_values import PROFILE, choices
from tests.rigs.gce.emulator import auth
from tests.rigs.gce.emulator.admin import Admin
from tests.rigs.gce.emulator.driver import NullMachines
from tests.rigs.gce.emulator.emulator import Emulator
from tests.rigs.gce.emulator.server import serve
from tests.rigs.gce.emulator.state import NUMBER, OWNER
from tests.rigs.gce.emulator.state import State as Google

PROJECT = "kimi-rig"
ZONE, NEXT_ZONE = "us-central1-a", "us-east5-a"
REAPER_EMAIL = f"kimisession-reaper@{PROJECT}.iam.gserviceaccount.com"
NODE_EMAIL = f"{NUMBER}-compute@developer.gserviceaccount.com"
SWEEPER = "user:sweeper@example.com"
USD_PER_HOUR = Decimal(26)

#: Who a user of an operation is, as a layer.
LAYERS = {
    OWNER.partition(":")[2]: "command",
    REAPER_EMAIL: "reaper",
    NODE_EMAIL: "timer",
    SWEEPER.partition(":")[2]: "sweep",
}
STEP_S = 2.0


class Clock:
    """Seconds since 1970, ahead of the host's by what was slept away."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.rate = 0.0
        self.due: list[tuple[float, Callable[[], object]]] = []
        self.settle: Callable[[], object] = lambda: None

    def time(self) -> float:
        return time.time() + self.ahead_s

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.time(), UTC)

    def sleep(self, seconds: float) -> None:
        """In steps, after each of which what was due in it has happened."""
        self.settle()
        until = self.time() + seconds
        while (left := until - self.time()) > 0:
            step = min(left, STEP_S)
            if self.rate:
                time.sleep(step / self.rate)
                step -= step / self.rate
            self.ahead_s += step
            for entry in [one for one in self.due if one[0] <= self.time()]:
                self.due.remove(entry)
                entry[1]()
            self.settle()

    def at(self, moment: float, act: Callable[[], object]) -> None:
        """Do it while somebody sleeps past that moment."""
        self.due.append((moment, act))


class AtClock:
    """A `Cloud` whose lists are dated by the stage's clock, and whose login never expires."""

    def __init__(self, stage: "Stage", member: str) -> None:
        self._stage, self._member = stage, member
        self._made, self._compute = 0.0, stage.compute(member)

    def _fresh(self) -> Compute:
        if self._stage.clock.time() - self._made > auth.TOKEN_S / 2:
            self._made, self._compute = self._stage.clock.time(), self._stage.compute(self._member)
        return self._compute

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fresh(), name)
        if name not in ("ours", "labelled", "everything"):
            return found

        def dated(*words: Any) -> Inventory:
            at = self._stage.clock.now()
            listed: Inventory = found(*words)
            return replace(listed, at=at)

        return dated


class Sky:
    """SkyPilot as the engine sees it: a launch is a bulkInsert in one zone after the other; it remembers nothing."""

    StatusRefreshMode = SimpleNamespace(FORCE="force")
    skylet = SimpleNamespace(autostop_lib=SimpleNamespace(AutostopWaitFor=SimpleNamespace(JOBS="jobs")))
    Task = SimpleNamespace(from_yaml_config=lambda config: config)

    def __init__(self, stage: "Stage") -> None:
        self.stage = stage
        self.zones: tuple[str, ...] = (ZONE,)
        self.spot = True
        self.then: Callable[[dict[str, Any]], object] = lambda task: None  # once the request is sent
        self.instead: Callable[[dict[str, Any]], object] | None = None
        self.downs = 0

    def launch(self, task: dict[str, Any], **options: Any) -> str:
        self.task = {**task, **options}
        return "r1"

    def stream_and_get(self, request: str, output_stream: object) -> tuple[int, Any]:
        if self.instead is not None:
            self.instead(self.task)
        failed = []
        for zone in self.zones:
            operation = self.stage.insert(self.task["cluster_name"], self.task["resources"]["labels"], zone, self.spot)
            self.then(self.task)
            error = self.stage.outcome(operation)
            if not error:
                return 1, SimpleNamespace(launched_resources=SimpleNamespace(get_cost=lambda seconds: 26.0))
            failed.append(Exception(f"{zone}: {error}"))
        raise ResourcesUnavailableError(failed)

    def get(self, answer: Any) -> Any:
        return answer

    def api_cancel(self, requests: list[str], silent: bool) -> None:
        """It is cancelled at once."""

    def api_status(self, requests: list[str]) -> list[Any]:
        return [SimpleNamespace(status="CANCELLED")]

    def status(self, names: list[str], refresh: str) -> list[Any]:
        """It has no record of anything."""
        return []

    def down(self, name: str) -> None:
        """Says that all is well, and does nothing."""
        self.downs += 1


class ResourcesUnavailableError(Exception):
    """SkyPilot's, when no place had a machine."""

    def __init__(self, failed: list[Exception]) -> None:
        super().__init__("no resources")
        self.failover_history = failed


class Laptop:
    """A ledger and commands on it."""

    def __init__(self, stage: "Stage", folder: Path) -> None:
        self.stage, self.folder = stage, folder
        folder.mkdir()
        self.store = Store(folder / "ledger.db")
        self.sky = Sky(stage)

    def engine(self, infra: str) -> SkyPilotEngine:
        """A new one each time, as each command has."""
        stage, sky = self.stage, self.sky
        cloud: Any = AtClock(stage, OWNER)
        place = GcpPlace(
            self.folder / "rented",
            lambda: cloud,
            guard=lambda cloud, now: Layer("reaper", True, "it looks"),
            desk=lambda session_id: None,
            now=stage.clock.now,
        )
        return SkyPilotEngine("gcp", self.folder / "rented", place, lambda: sky, now=stage.clock.now)

    def controller(self) -> Controller:
        clock = self.stage.clock
        return Controller(self.store, self.folder / "keys", self.engine, clock.now, clock.sleep, places=("gcp",))

    def start(self, **more: Any) -> Session:
        """`kimisession start` until SkyPilot has answered."""
        controller = self.controller()
        chosen = choices(infra="gcp", bucket_url="gs://weights", usd_per_hour=USD_PER_HOUR, **more)
        quote = make_quote(replace(PROFILE, load="copy"), chosen, self.stage.clock.now())
        spec = controller.check(quote)
        return controller.launch(controller.request(quote, spec), spec)

    def failing_start(self, **more: Any) -> BaseException | None:
        """What it ended with."""
        try:
            self.start(**more)
        except (KimiError, KeyboardInterrupt) as error:
            return error
        return None

    def stop(self) -> BaseException | None:
        """`kimisession stop`; what it ended with."""
        try:
            self.controller().stop(self.session(), "kimisession stop", "user")
        except KimiError as error:
            return error
        return None

    def look(self) -> None:
        """`kimisession status`."""
        self.controller().live()

    def look_until_gone(self, within_s: float, every_s: float = 20) -> None:
        """A person who looks now and then."""
        until = self.stage.clock.time() + within_s
        while self.session().live and self.stage.clock.time() < until:
            self.look()
            self.stage.clock.sleep(every_s)

    def session(self) -> Session:
        """The only one in its ledger."""
        return self.store.session(self.store.rows()[0].session)


@dataclass
class Stage:
    """`problems`: what a play found that should not be. `reason`, `receipt`: of the ledger, where there is one."""

    folder: Path
    clock: Clock = field(default_factory=Clock)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.google = Google(self.folder / "project.json", PROJECT, self.clock.time)
        self.machines = NullMachines()
        self.emulator = Emulator(self.google, self.machines)
        self.servers = serve(self.emulator, [("127.0.0.1", 0)])
        # All requests come from this host: the metadata server speaks to the one machine that there is beside the reaper.
        self.metadata_port = self.servers.metadata(("127.0.0.1", 0), lambda address: next(iter(self.held_keys()), None))
        self.url = f"http://127.0.0.1:{self.servers.ports[0]}"
        self._admin = Admin(self.emulator)
        self.clock.settle = self._settle
        self.said: list[str] = []
        self.tell("bind", member=SWEEPER, role="roles/owner")
        self.tell("prices", **{"a3-highgpu-8g": [str(USD_PER_HOUR), str(USD_PER_HOUR)]})

    def close(self) -> None:
        """Stop listening."""
        self.servers.close()
        self.emulator.close()

    def check(self, true: object, otherwise: str) -> None:
        """Note what does not hold, and go on: the seconds are wanted all the same."""
        if not true:
            self.problems.append(otherwise)

    def _settle(self) -> None:
        """What is due in the emulator has happened, unless it takes its own time."""

        def still(data: dict[str, Any]) -> bool:
            quick = [op for op in data["operations"].values() if op["wire"]["status"] != "DONE" and not op["delay_s"]]
            late = [one for one in data["later"] if one["at"] <= self.clock.time()]
            return not quick and not late

        if not self.clock.rate:
            self.google.wait_until(still, 2.0)

    # -- Google --------------------------------------------------------------------------------------------------------

    def compute(self, member: str = OWNER) -> Compute:
        """A client of somebody's."""
        from google.oauth2 import credentials

        token = self.emulator.token(member)
        return Compute(PROJECT, credentials.Credentials(token), self.url, self.clock.sleep, self.clock.time)  # type: ignore[no-untyped-call]

    def tell(self, what: str, **words: Any) -> Any:
        """The emulator's back door."""
        status, answer = self._admin.answer("POST", f"/admin/{what}", words)
        assert status == 200, answer
        return answer

    def fault(self, kind: str, **words: Any) -> None:
        """Arm one."""
        self.tell("faults", kind=kind, **words)

    def heal(self) -> None:
        """No faults any more."""
        self._admin.answer("DELETE", "/admin/faults", {})

    def insert(
        self,
        session_id: str,
        labels: Mapping[str, str],
        zone: str = ZONE,
        spot: bool = True,
        keep_disk: bool = False,
        machine_type: str = "a3-highgpu-8g",
    ) -> dict[str, Any]:
        """A bulkInsert over the wire, as SkyPilot asks. Raises what the connection or the answer brings."""
        scheduling: dict[str, Any] = {"onHostMaintenance": "TERMINATE"}
        if spot:
            scheduling |= {
                "provisioningModel": "SPOT",
                "automaticRestart": False,
                "instanceTerminationAction": "DELETE",
            }
        image = "projects/debian-cloud/global/images/family/debian-12"
        body = {
            "count": "1",
            "perInstanceProperties": {f"{session_id}-0f0f0f0f-head-{secrets.token_hex(4)}-compute": {}},
            "instanceProperties": {
                "machineType": machine_type,
                "labels": dict(labels),
                "disks": [{"boot": True, "autoDelete": not keep_disk, "initializeParams": {"sourceImage": image}}],
                "networkInterfaces": [
                    {
                        "network": f"projects/{PROJECT}/global/networks/default",
                        "accessConfigs": [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}],
                    }
                ],
                "scheduling": scheduling,
                "serviceAccounts": [{"email": NODE_EMAIL, "scopes": [auth.CLOUD_PLATFORM]}],
            },
        }
        request = urllib.request.Request(
            f"{self.url}/compute/v1/projects/{PROJECT}/zones/{zone}/instances/bulkInsert",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.emulator.token(OWNER)}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def outcome(self, operation: Mapping[str, Any]) -> str:
        """Its error once it is done; empty when it went well."""
        name = operation["name"]
        self.google.wait_until(lambda data: data["operations"][name]["wire"]["status"] == "DONE", 60)
        errors = self.google.data["operations"][name]["wire"].get("error", {}).get("errors", [])
        return f"{errors[0]['code']} {errors[0]['message']}" if errors else ""

    def held_keys(self, session_id: str = "") -> list[str]:
        """zone/name of all machines, disks and addresses (of a session); the reaper's own and decoys are left out."""
        with self.google.reading() as data:
            keys = {**data["instances"], **data["disks"], **data["addresses"]}
        return sorted(key for key in keys if f"/{session_id}" in key and NAME not in key and "decoy" not in key)

    def held(self, session_id: str = "") -> bool:
        """Whether the emulator still holds something, or bills it."""
        with self.google.reading() as data:
            billed = [row for row in data["bill"] if row["end"] is None and f"/{session_id}" in row["resource"]]
        return bool(self.held_keys(session_id)) or any(
            NAME not in row["resource"] and "decoy" not in row["resource"] for row in billed
        )

    def name(self, session_id: str = "") -> str:
        """The machine of a session."""
        return next(key for key in self.held_keys(session_id)).rpartition("/")[2]

    def last_end(self, session_id: str = "") -> float:
        """When the last of it went, by the bill."""
        rows = [row for row in self.google.data["bill"] if f"/{session_id}" in row["resource"]]
        ends = [row["end"] for row in rows if NAME not in row["resource"] and "decoy" not in row["resource"]]
        return max((end for end in ends if end is not None), default=0.0)

    def layer(self, session_id: str = "") -> str:
        """Who deleted its last machine, or disk, by Compute Engine's operations."""
        with self.google.reading() as data:
            wires = [entry["wire"] for entry in data["operations"].values()]
        done = [w for w in wires if w["operationType"] == "delete" and "error" not in w]
        mine = [w for w in done if f"/{session_id}" in w["targetLink"] and NAME not in w["targetLink"]]
        return LAYERS.get(mine[-1]["user"], mine[-1]["user"]) if mine else "Google"

    # -- who looks without a ledger ------------------------------------------------------------------------------------

    def arm_reaper(self) -> None:
        """`guard enable`, its account with exactly the documented permissions, and a first look."""
        role = f"projects/{PROJECT}/roles/kimisession_reaper"
        self.tell("account", email=REAPER_EMAIL)
        self.tell("role", role=role, permissions=list(REAPER))
        self.tell("bind", member=f"serviceAccount:{REAPER_EMAIL}", role=role)
        guard.enable(self.compute(), ZONE, "", "default", lambda _: None)
        assert self.reap_once(), self.said

    def reap_once(self) -> bool:
        """One run, as its machine does it."""
        sweeper = Sweeper(AtClock(self, f"serviceAccount:{REAPER_EMAIL}"), now=self.clock.now, sleep=self.clock.sleep)
        try:
            return reap(sweeper, ZONE, NAME, self.clock.time, self.said.append)
        except KimiError as error:
            self.said.append(error.message)
            return False

    def reap_until_gone(self, until: float) -> None:
        """Run, pause, run: until nothing is held, or that moment has passed."""
        while self.held() and self.clock.time() < until:
            self.reap_once()
            if self.held():
                self.clock.sleep(EVERY_S)

    def sweep(self, owner: str = "", known: tuple[str, ...] = ()) -> None:
        """`kimisession sweep --delete` on a laptop whose ledger knows these sessions."""
        cloud = AtClock(self, SWEEPER)
        Sweeper(cloud, owner, known=known, now=self.clock.now, sleep=self.clock.sleep).delete_until_gone(600)

    # -- receipts ------------------------------------------------------------------------------------------------------

    def compare_receipt(self, session: Session, within_s: float) -> str:
        """Our lines against Google's bill: each within so many seconds. How many were compared, and the largest difference."""
        self.check(session.state is State.GONE, f"the ledger says {session.state.value}")
        ours = {line.resource.id: line for line in cost_of(session, self.clock.now()).lines}
        rows = [row for row in self.google.data["bill"] if f"/{session.id}" in row["resource"]]
        worst = 0.0
        for row in rows:
            suffix = "" if row["kind"] == "instance" else f"/{row['kind']}"
            line = ours.pop(f"gcp/{row['resource']}{suffix}", None)
            if line is None:
                self.problems.append(f"no line for the {row['kind']} {row['resource']}")
                continue
            off_s = abs(float(line.seconds) - (row["end"] - row["start"]))
            worst = max(worst, off_s)
            self.check(off_s <= within_s, f"the receipt's {row['kind']} is {off_s:.2f} s off Google's bill")
            self.check(line.usd is not None, f"the receipt's {row['kind']} has no price")
            if line.usd is not None:
                theirs = Decimal(row["usd_per_hour"]) * Decimal(row["end"] - row["start"]) / 3600
                off, most = abs(line.usd - theirs), Decimal(row["usd_per_hour"]) / 3600 * Decimal(within_s)
                self.check(off <= most, f"the receipt's {row['kind']} is ${off:.4f} off Google's bill")
        # What was deleted before it ran is not billed.
        extra = sorted(key for key, line in ours.items() if line.seconds > 1)
        self.check(not extra, f"lines that Google has no bill for: {extra}")
        return f"{len(rows)} lines, {worst:.2f} s off"


@contextlib.contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """One, closed afterwards."""
    made = Stage(folder)
    try:
        yield made
    finally:
        made.close()
