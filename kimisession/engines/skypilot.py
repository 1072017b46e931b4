"""Sessions on machines that SkyPilot rents: GCP, Slurm, Kubernetes. The one module that imports `sky`.

SkyPilot launches, and its autodown is one of the layers that end a session. What exists is asked of the place itself where
that can be done (`place`): SkyPilot's records are its own belief. `sky` takes seconds to import, so only `launch`, and ending
what SkyPilot has a record of, import it; looking at a session is one ssh round trip.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from kimisession.core.launch import LABEL_DEADLINE, LABEL_SESSION, LaunchSpec, deadline_label, edit_argv, flags_to_argv
from kimisession.core.lifecycle import Layer, Observation, SeenResource
from kimisession.core.profile import FlagValue
from kimisession.engines.base import Found
from kimisession.engines.local_machine import lock_is_held, read_json, write_json
from kimisession.engines.payload import lay_out
from kimisession.engines.place import Place, Sight
from kimisession.engines.remote import Remote
from kimisession.engines.sky_ssh import ask, sky_desk, sky_ssh_config
from kimisession.engines.slurm import FOLDER
from kimisession.engines.task import AUTODOWN_MINUTES, AUTODOWN_MINUTES_GCP, GRACE_S, task_config
from kimisession.engines.tunnel import close_tunnel, open_endpoint, open_tunnel
from kimisession.errors import (
    INSTALL_CLOUD,
    BudgetRefused,
    DoesNotFit,
    EngineFailed,
    EngineMissing,
    KimiError,
    NoCapacity,
    NotYetGone,
    QuotaExceeded,
    Unconfirmed,
    UsageMistake,
)
from kimisession.node import job

#: SkyPilot releases that the rigs ran. Its SDK moves between minor versions.
TESTED = ("0.14.1", "0.15")

#: One question to the place per second is enough for any eye.
PACE_S = 1.0

#: A keeper that has not been heard for this long is not counted on.
SILENT_S = 60.0

#: A machine that is up this long without a keeper has none coming: SkyPilot's set-up takes one to three minutes.
ARM_WITHIN_S = 15 * 60.0

#: Two empty lists this far apart, after a launch that was broken off: its last request may still have been on its way.
SETTLE_S = 5.0

#: On GCP: a keeper that ends in order, a deletion that takes its minutes, and two empty lists a minute apart.
CONFIRM_WITHIN_S = {"gcp": 600.0}

#: Of each log, this much is kept here once a session is ending.
KEPT_BYTES = 20_000

#: So many times longer when the launch could not even be cancelled.
LOST = 6

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_PROGRESS = logging.getLogger("kimisession.progress")


def installed() -> str:
    """SkyPilot's version. Raises EngineMissing when it is not there: a bare folder `sky`, like the one in our checkout,
    imports as an empty package and is not it."""
    found = importlib.util.find_spec("sky")
    try:
        version = importlib.metadata.version("skypilot") if found and found.origin else ""
    except importlib.metadata.PackageNotFoundError:
        version = ""  # a checkout of SkyPilot that was never installed
    if not version:
        raise EngineMissing("SkyPilot is not installed, and this place is rented through it", INSTALL_CLOUD)
    return version


def utc_now() -> datetime:
    """Aware wall-clock time."""
    return datetime.now(UTC)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


class SkyPilotEngine:
    """`home` holds what this machine remembers of each session, one folder each; nothing there is needed to find, stop
    or prove gone what exists."""

    def __init__(
        self,
        infra: str,
        home: Path,
        place: Place,
        sdk: Callable[[], Any] | None = None,
        settle_s: float = SETTLE_S,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.name = infra
        self.confirm_within_s = CONFIRM_WITHIN_S.get(infra, 120.0)
        self.home = home
        self.place = place
        self.sdk = sdk or _sky
        self.settle_s = settle_s
        self.now = now
        self._seen: dict[str, tuple[float, Observation]] = {}
        self._journals: dict[str, tuple[int, list[dict[str, Any]]]] = {}

    # -- start ---------------------------------------------------------------------------------------------------------

    def check(self, spec: LaunchSpec) -> None:
        """The task can be rendered, the weights can be reached from there, the place has such machines."""
        try:
            task_config(spec, self.name, "payload", self.now())
        except ValueError as mistake:
            raise DoesNotFit(str(mistake), "mend the profile") from None
        if self.name != "slurm" and any(arg.startswith("file://") for step in spec.steps for arg in step.argv):
            raise DoesNotFit(
                f"the weights are in a folder of this machine, and a machine on {self.name} cannot read it",
                f"seed a bucket: kimisession seed {spec.profile} --bucket gs://NAME",
            )
        self.place.check(spec)

    def launch(self, spec: LaunchSpec, secrets: Mapping[str, str]) -> None:
        """By SkyPilot, with its autodown in the same call. What exists is left as it is."""
        folder = self._folder(spec.session_id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._seen.pop(spec.session_id, None)
        lock = job.hold_lock(folder / "launch.lock")
        payload = folder / "payload"
        try:
            if (folder / "forbidden").exists() or self.place.look(spec.session_id).present:
                return
            write_json(folder / "session.json", {"name": spec.name, "stop_grace_s": spec.limits.stop_grace_s})
            self.place.launching(spec.session_id)
            payload.mkdir(mode=0o700, exist_ok=True)
            lay_out(payload, spec, secrets)
            for spot in (True, False) if spec.placement.on_demand_fallback and self.name == "gcp" else (True,):
                try:
                    self._launch(spec, folder, payload, spot)
                    self.place.after_launch(spec.session_id)
                    break
                except NoCapacity as error:
                    if not spot or not spec.placement.on_demand_fallback:
                        raise
                    _PROGRESS.warning("no spot machine: %s; trying on demand, as asked for", error.message)
        finally:
            shutil.rmtree(payload, ignore_errors=True)  # it holds the key
            os.close(lock)

    def _launch(self, spec: LaunchSpec, folder: Path, payload: Path, spot: bool) -> None:
        sky = self.sdk()
        told = _Progress()
        try:
            task = sky.Task.from_yaml_config(task_config(spec, self.name, str(payload), self.now(), spot))
            # SkyPilot prints on standard output, where our data goes.
            with contextlib.redirect_stdout(told):
                request = sky.launch(
                    task,
                    cluster_name=spec.session_id,
                    idle_minutes_to_autostop=AUTODOWN_MINUTES_GCP if self.name == "gcp" else AUTODOWN_MINUTES,
                    wait_for=sky.skylet.autostop_lib.AutostopWaitFor.JOBS,
                    down=True,
                )
                write_json(folder / "launch.json", {"request": str(request), "over": False})
                _, handle = sky.stream_and_get(request, output_stream=told)
                usd_per_hour = Decimal(str(handle.launched_resources.get_cost(3600)))
        except Exception as error:
            raise translated(error, self.name) from error
        write_json(folder / "launch.json", {"request": str(request), "over": True})
        if not spot and usd_per_hour > spec.usd_per_hour:
            raise BudgetRefused(
                f"the machine on demand costs ${usd_per_hour:.2f} an hour, and --price allows ${spec.usd_per_hour:.2f}",
                f"it is being deleted; give --price {usd_per_hour:.2f} or leave --on-demand-fallback out",
            )
        if self.name != "slurm":
            # Its command, not its SDK, writes the entry with which ssh reaches the machine.
            argv = [sys.executable, "-m", "sky.client.cli.command", "status", spec.session_id]
            subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )

    # -- observe -------------------------------------------------------------------------------------------------------

    def observe(self, session_id: str) -> Observation:
        """By the place and the machine's folder, at most once a second."""
        at, seen = self._seen.get(session_id, (0.0, None))
        if seen is None or time.monotonic() - at > PACE_S:
            try:
                seen = self._observe(session_id)
            except Unconfirmed as error:
                seen = Observation(self.now(), None, error.message)
            self._seen[session_id] = (time.monotonic(), seen)
            if seen.present is False:
                self._forget(session_id)
        return seen

    def _observe(self, session_id: str) -> Observation:
        now = self.now()
        machine = f"{FOLDER}/{session_id}"
        offset, lines = self._journals.get(session_id, (0, []))
        commands = (
            f"cat {machine}/run/layers.json 2>/dev/null",
            f"tail -c +{offset + 1} {machine}/run/journal.jsonl 2>/dev/null",
            # Once it is ending, what people will ask for when the machine is no longer there to be asked.
            f'grep -q \'"kind":"end\' {machine}/run/journal.jsonl 2>/dev/null &&'
            f" tail -q -c {KEPT_BYTES} {machine}/run/step-*.log {machine}/run/engine.log 2>/dev/null",
        )
        sight = self.place.look(session_id, commands)
        launching = not sight.present and self._launching(session_id, bool(lines or any(sight.files[1:])))
        layers_text, news, last = (*sight.files, "", "", "")[:3]
        if last:
            self._keep_log(session_id, last)
        whole = news.rfind("\n") + 1
        lines = [*lines, *_lines(news[:whole])]
        self._journals[session_id] = (offset + len(news[:whole].encode()), lines)
        if launching:
            return Observation(now, True, "SkyPilot is launching it", sight.resources, sight.lines)
        keeper = self._keeper(lines, now)
        if lines:
            with contextlib.suppress(OSError):
                self._heard(session_id).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._heard(session_id).touch()
        elif not sight.files:
            keeper = Layer("keeper", False, "the machine cannot be reached from here now")
        layers = (keeper, _autodown(layers_text), *sight.layers) if sight.present else ()
        return Observation(
            now,
            sight.present,
            sight.why,
            sight.resources,
            (*lines, *sight.lines),
            layers,
            bool(sight.present) and self._unguarded(session_id, sight, lines, keeper, now),
            open_endpoint(self._folder(session_id)) if sight.present else "",
        )

    def _keep_log(self, session_id: str, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk keeps no log
            folder = self._folder(session_id)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / "last.log").write_text(text, encoding="utf-8")

    @staticmethod
    def _keeper(lines: list[dict[str, Any]], now: datetime) -> Layer:
        last = next((line for line in reversed(lines) if line.get("by") == "keeper"), None)
        if last is None:
            return Layer("keeper", False, "not heard yet")
        heard_s = (now - datetime.fromisoformat(last["at"])).total_seconds()
        over = any(line.get("kind") == "closed" for line in lines[-20:])
        return Layer("keeper", heard_s < SILENT_S and not over, f"last heard {max(0.0, heard_s):.0f} s ago")

    def _heard(self, session_id: str) -> Path:
        """There once the keeper was heard from this machine."""
        return self._folder(session_id) / "heard"

    def _unguarded(
        self, session_id: str, sight: Sight, lines: list[dict[str, Any]], keeper: Layer, now: datetime
    ) -> bool:
        """Stopped, or up for long enough and nobody on the machine who would end the session soon. A machine that cannot be
        reached for a while says nothing: a bad line from here must not end what works."""
        if sight.stopped:
            return True
        folder = self._folder(session_id)
        # Of a machine that was not launched from here, no silence proves anything: this side may have no key to it.
        unreachable = not sight.files and (self._heard(session_id).exists() or not (folder / "session.json").exists())
        if keeper.armed or sight.since is None or unreachable:
            return False
        last = max([sight.since, *(datetime.fromisoformat(line["at"]) for line in lines[-1:])])
        return (now - last).total_seconds() > (SILENT_S * 3 if lines else ARM_WITHIN_S)

    def _launching(self, session_id: str, began: bool) -> bool:
        """Whether a launch is on its way: by a command that lives, or by SkyPilot after that command died."""
        folder = self._folder(session_id)
        if lock_is_held(folder / "launch.lock"):
            return True
        launch = read_json(folder / "launch.json")
        if launch is None or launch["over"] or began:
            return False
        return self._request_runs(str(launch["request"]))

    def _request_runs(self, request: str) -> bool:
        try:
            found = self.sdk().api_status([request])
        except Exception as error:
            raise Unconfirmed(f"SkyPilot's API server does not say what became of a launch: {_first(error)}") from None
        return any(str(row.status).upper().rsplit(".", 1)[-1] in ("PENDING", "RUNNING", "WAITING") for row in found)

    def find(self) -> tuple[Found, ...]:
        """By the place's own list."""
        return self.place.find()

    def logs(self, session_id: str, follow: bool, run: int | None = None) -> Iterator[str]:
        """Steps first, then the engine. On Slurm they stay after the end; of a machine that is gone what was read as it
        ended, as far as somebody looked then."""
        told = False
        with contextlib.suppress(KimiError):
            for line in self._logs_there(session_id, follow, run):
                told = True
                yield line
        kept = self._folder(session_id) / "last.log"
        if not told and kept.exists():
            yield from kept.read_text(encoding="utf-8", errors="replace").splitlines()

    def _logs_there(self, session_id: str, follow: bool, run: int | None) -> Iterator[str]:
        there = self._desk(session_id)
        run_folder = f"{FOLDER}/{session_id}/run"
        if run is not None:
            yield from there.follow(f"cat {run_folder}/engine-{run}.log 2>/dev/null || cat {run_folder}/engine.log")
            return
        script = f"cat {run_folder}/step-*.log 2>/dev/null\n"
        if not follow:
            yield from there.follow(f"{script} cat {run_folder}/engine.log 2>/dev/null")
            return
        yield from there.follow(
            f"tail -q -n +1 -F {run_folder}/step-*.log {run_folder}/engine.log 2>/dev/null & tail=$!\n"
            f'until grep -q \'"kind":"closed"\' {run_folder}/journal.jsonl 2>/dev/null || ! kill -0 $PPID; do sleep 1\n'
            "done; sleep 1; kill $tail"
        )

    # -- reach ---------------------------------------------------------------------------------------------------------

    def base_url(self, session_id: str, port: int) -> str:
        """A local port at the end of a tunnel that reconnects by itself."""
        self._seen.pop(session_id, None)
        return f"http://127.0.0.1:{open_tunnel(self._folder(session_id), self.ssh_words(session_id), port)}"

    def ssh_words(self, session_id: str) -> tuple[str, ...]:
        """What to tell ssh to reach the machine. Writes the entry that makes `ssh NAME` work."""
        folder = self._folder(session_id)
        config = folder / "ssh_config"
        if not config.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            name = str((read_json(folder / "session.json") or {}).get("name", session_id))
            block = self.place.ssh_config(session_id, tuple(dict.fromkeys((name, session_id))))
            block += f"    UserKnownHostsFile {folder}/known_hosts\n"
            config.touch(mode=0o600)
            config.write_text(block, encoding="utf-8")
            _include(self.home)
        return ("-F", str(config), session_id)

    def extend(self, session_id: str, deadline: datetime, added_s: float) -> None:
        """The place first, then the keeper."""
        self._seen.pop(session_id, None)
        self.place.prolong(session_id, deadline, {LABEL_DEADLINE: deadline_label(deadline)})
        self._tell(session_id, "extend.json", {"hard_cap_utc": deadline.timestamp(), "added_s": added_s})

    def restart(self, session_id: str, sets: Mapping[str, FlagValue] | None) -> None:
        """Hand the keeper the new arguments, worked out from those that run now."""
        text = self._desk(session_id).run(f"cat {FOLDER}/{session_id}/run/argv.json 2>/dev/null || echo '{{}}'")
        running = json.loads(text)
        if sets is None and not running.get("before"):
            raise UsageMistake("this engine was not restarted: there are no flags of before", "restart it with --set")
        argv = list(running["before"] if sets is None else edit_argv(running["argv"], sets))
        flags = "as before" if sets is None else " ".join(flags_to_argv(sets))
        self._tell(session_id, "restart.json", {"id": uuid.uuid4().hex, "argv": argv, "flags": flags})

    def _desk(self, session_id: str) -> Any:
        there = self.place.desk(session_id)
        if there is None:
            raise EngineFailed(f"session {session_id} has no machine to ask", "kimisession status")
        return there

    def _tell(self, session_id: str, name: str, content: Mapping[str, Any]) -> None:
        self._desk(session_id).write_json(f"{FOLDER}/{session_id}/control/{name}", content)

    # -- end -----------------------------------------------------------------------------------------------------------

    def down(self, session_id: str, by: str, reason: str) -> None:
        """Break off the launch, ask the keeper, then the place, then SkyPilot; gone is what the place says."""
        self._seen.pop(session_id, None)
        folder = self._folder(session_id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "forbidden").touch()
        self._cancel_launch(session_id)
        try:
            seen = self._observe(session_id)
        except Unconfirmed:
            with contextlib.suppress(KimiError, OSError):  # the machine may be reached all the same, and ends itself
                self._tell(session_id, "stop.json", {"by": by, "reason": reason})
            raise
        asked = read_json(folder / "asked.json")
        if asked is None:
            asked = {"at": self.now().timestamp(), "empty_at": None}
            write_json(folder / "asked.json", asked)
            with contextlib.suppress(KimiError):  # it may have no machine yet, or none any more
                self._tell(session_id, "stop.json", {"by": by, "reason": reason})
        asked_s = self.now().timestamp() - float(asked["at"])
        if seen.present is None:
            raise NotYetGone(seen.why)
        if not seen.present:
            self._settle(session_id, asked)
            return
        grace_s = float((read_json(folder / "session.json") or {}).get("stop_grace_s", 20.0)) + 10
        keeper = any(layer.name == "keeper" and layer.armed for layer in seen.layers)
        if not keeper or asked_s > grace_s:
            self.place.end(session_id, force=asked_s > 2 * grace_s)
        raise NotYetGone(f"it is ending: {seen.why}")

    def _settle(self, session_id: str, asked: dict[str, Any]) -> None:
        """After a launch that was broken off, one empty list is not enough."""
        folder = self._folder(session_id)
        launch = read_json(folder / "launch.json")
        if launch is not None and not launch["over"]:
            if asked["empty_at"] is None:
                write_json(folder / "asked.json", {**asked, "empty_at": self.now().timestamp()})
            wait_s = self.settle_s * (1 if launch.get("cancelled") else LOST)
            if asked["empty_at"] is None or self.now().timestamp() - float(asked["empty_at"]) < wait_s:
                raise NotYetGone("nothing is there; looking once more, for its launch was broken off")
        self._forget(session_id)

    def _cancel_launch(self, session_id: str) -> None:
        folder = self._folder(session_id)
        launch = read_json(folder / "launch.json")
        if launch is None or launch["over"] or "cancelled" in launch:
            return
        request, sky, cancelled = str(launch["request"]), self.sdk(), True
        try:
            with contextlib.redirect_stdout(_Progress()):
                try:
                    sky.get(sky.api_cancel([request], silent=True))
                except Exception:
                    # A server that died in this very process is taken for alive by its client: start it by name.
                    sky.api_start()
                    sky.get(sky.api_cancel([request], silent=True))
        except Exception as error:
            # The job is ended all the same. Should a worker of the dead server still create one, it finds the request to
            # stop where it begins, and the next command finds the job.
            _PROGRESS.warning("SkyPilot's launch could not be cancelled: %s", _first(error))
            cancelled = False
        write_json(folder / "launch.json", {**launch, "cancelled": cancelled})
        self.place.launching(session_id)  # what was listed before it was broken off proves nothing

    def _forget(self, session_id: str) -> None:
        """It is gone: close what is ours here, and let SkyPilot look, so that its record goes too."""
        folder = self._folder(session_id)
        if not (folder / "session.json").exists():
            return
        _PROGRESS.info("having SkyPilot look whether its record of %s can go", session_id)
        close_tunnel(folder)
        (folder / "ssh_config").unlink(missing_ok=True)
        self.place.tidy(session_id)
        try:
            _forget_record(self.sdk(), session_id)
        except Exception as error:  # its record is not the truth, and costs nothing
            _PROGRESS.warning("SkyPilot keeps a record of what is gone: %s", _first(error))
        (folder / "session.json").unlink(missing_ok=True)

    def _folder(self, session_id: str) -> Path:
        return self.home / session_id


def _forget_record(sky: Any, cluster: str) -> None:
    """Have SkyPilot look whether a cluster is there, which removes the record of one that is not; end it if it is."""
    with contextlib.redirect_stdout(_Progress()):
        records = sky.get(sky.status([cluster], refresh=sky.StatusRefreshMode.FORCE))
        if records:
            sky.get(sky.down(cluster))


class _Progress(io.TextIOBase):
    """Text that SkyPilot prints, as whole plain lines to those who follow the progress."""

    def __init__(self) -> None:
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + _ANSI.sub("", text)).split("\n")
        for line in lines:
            if line.strip():
                _PROGRESS.info("%s", line.strip())
        return len(text)


def _lines(text: str) -> list[dict[str, Any]]:
    """Journal lines; one that is damaged is left out."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "at" in record:
                found.append(record)
    return found


def _autodown(text: str) -> Layer:
    """SkyPilot's autodown, as skylet on the machine has it."""
    try:
        there = json.loads(text)
    except ValueError:
        return Layer("SkyPilot autodown", False, "not read back from the machine yet")
    armed = there["down"] and there["idle_minutes"] >= 0 and there["same_boot"] and there["skylet"]
    armed = armed and there["wait_for"] == "jobs"
    words = (
        f"skylet: down={there['down']}, {there['idle_minutes']} min after the last job, wait_for={there['wait_for']}"
    )
    return Layer("SkyPilot autodown", bool(armed), f"{words}, {'alive' if there['skylet'] else 'not running'}")


def _include(home: Path) -> None:
    """Let ssh find the entries of our sessions: one line in the user's configuration, once."""
    line = f"Include {home}/*/ssh_config"
    config = Path.home() / ".ssh" / "config"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    if line not in text.splitlines():
        config.parent.mkdir(mode=0o700, exist_ok=True)
        part = config.with_name(f".config.{os.getpid()}")
        part.touch(mode=0o600)
        part.write_text(f"# kimisession: `ssh NAME` reaches a session\n{line}\n{text}", encoding="utf-8")
        part.replace(config.resolve())


def translated(error: Exception, infra: str) -> KimiError:
    """SkyPilot's error as one of ours."""
    if isinstance(error, KimiError):
        return error
    name, text = type(error).__name__, _first(error)
    if name == "ResourcesUnavailableError":
        tried = tuple(str(one).splitlines()[0] for one in getattr(error, "failover_history", ()) if str(one))
        places = f" ({len(tried)} places tried)" if tried else ""
        if "quota" in f"{error} {' '.join(tried)}".lower():
            return QuotaExceeded(f"{infra} does not let this account have such a machine{places}: {text}", "", tried)
        return NoCapacity(f"no such machine is to be had on {infra} now{places}: {text}", "try again later", tried)
    if name in ("NoCloudAccessError", "CloudUserIdentityError", "InvalidCloudCredentials", "PermissionDeniedError"):
        return EngineFailed(f"SkyPilot may not use {infra}: {text}", f"sky check {infra}")
    return EngineFailed(f"SkyPilot could not launch: {text}", "sky api logs -l tells more")


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in _ANSI.sub("", str(error)).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _sky() -> Any:
    """SkyPilot's SDK, imported on first use. Raises EngineMissing."""
    installed()
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    # Its log handlers keep the standard output that they find when they are made, and ours is for data.
    with contextlib.redirect_stdout(_Progress()):
        import sky.skylet.autostop_lib

    return sky


class SkyPlace:
    """GCP and Kubernetes as SkyPilot tells them: its status, refreshed from the cloud, and its ssh entry of the machine. What
    SkyPilot lost track of is not seen here."""

    def __init__(self, infra: str) -> None:
        self.infra = infra
        self._began: dict[str, datetime] = {}

    def check(self, spec: LaunchSpec) -> None:
        """SkyPilot itself refuses a place that it has no access to."""

    def launching(self, session_id: str) -> None:
        """No list of before is remembered here."""

    def after_launch(self, session_id: str) -> None:
        """Nothing is left to be set."""

    def look(self, session_id: str, commands: tuple[str, ...] = ()) -> Sight:
        """By the machine itself where ssh reaches it, else by SkyPilot's refreshed status."""
        there = self.desk(session_id)
        if there is not None and session_id in self._began:
            with contextlib.suppress(Unconfirmed):
                return self._sight(session_id, "ssh reaches it", ask(there, commands))
        records = self._records(session_id)
        if not records:
            return Sight(False, f"SkyPilot asked {self.infra} and found nothing of it")
        self._began[session_id] = datetime.fromtimestamp(records[0]["launched_at"], UTC)
        files: tuple[str, ...] = ()
        if (there := self.desk(session_id)) is not None:
            with contextlib.suppress(Unconfirmed):
                files = ask(there, commands)
        return self._sight(session_id, f"SkyPilot says {records[0]['status'].value}", files)

    def _sight(self, session_id: str, why: str, files: tuple[str, ...]) -> Sight:
        began = self._began[session_id]
        resource = SeenResource(f"{self.infra}/{session_id}", "machine", began, None, why)
        return Sight(True, why, (resource,), (), began, files)

    def _records(self, session_id: str) -> list[dict[str, Any]]:
        sky = _sky()
        try:
            with contextlib.redirect_stdout(_Progress()):
                names = [session_id] if session_id else None
                return list(sky.get(sky.status(names, refresh=sky.StatusRefreshMode.FORCE)))
        except Exception as error:
            raise Unconfirmed(f"SkyPilot could not ask {self.infra}: {_first(error)}", "sky status -r") from None

    def find(self) -> tuple[Found, ...]:
        """What SkyPilot has a record of, with our labels."""
        found = []
        for record in self._records(""):
            labels = dict(record.get("labels") or {})
            if LABEL_SESSION in labels:
                found.append(Found(labels[LABEL_SESSION], labels, datetime.fromtimestamp(record["launched_at"], UTC)))
        return tuple(found)

    def desk(self, session_id: str) -> Remote | None:
        """The machine, by SkyPilot's entry in ssh's configuration."""
        return sky_desk(session_id)

    def ssh_config(self, session_id: str, names: tuple[str, ...]) -> str:
        """SkyPilot's entry under our names."""
        return sky_ssh_config(session_id, names)

    def prolong(self, session_id: str, deadline: datetime, labels: Mapping[str, str]) -> None:
        """The machine's own timer, where it has one."""
        there = self.desk(session_id)
        if there is None:
            raise UsageMistake(f"session {session_id} cannot be reached", "kimisession status")
        arm = f"{FOLDER}/{session_id}/scripts/deadline/arm.sh"
        moment = int(deadline.timestamp()) + GRACE_S
        there.run(f"[ ! -e {arm} ] || sudo {arm} --deadline {moment}")

    def end(self, session_id: str, force: bool) -> None:
        """By SkyPilot."""
        sky = _sky()
        try:
            with contextlib.redirect_stdout(_Progress()):
                sky.get(sky.down(session_id))
        except Exception as error:
            raise Unconfirmed(f"SkyPilot could not delete it: {_first(error)}", f"sky down {session_id}") from None

    def tidy(self, session_id: str) -> None:
        """Its disk goes with the machine."""


@functools.cache
def skypilot_engine(infra: str, home: Path) -> SkyPilotEngine:
    """The engine of a place, one a process: what it has seen is not asked twice. Raises EngineMissing."""
    version = installed()
    low, high = TESTED
    if not _numbers(low) <= _numbers(version) < _numbers(high):
        _PROGRESS.warning("SkyPilot %s was not tested; %s to below %s were", version, low, high)
    makers: dict[str, Callable[[], Place]] = {
        "slurm": lambda: _slurm(home),
        "gcp": lambda: _gcp(home),
        "kubernetes": lambda: SkyPlace("kubernetes"),
    }
    return SkyPilotEngine(infra, home, makers[infra]())


def _gcp(home: Path) -> Place:
    from kimisession.engines.gcp import GcpPlace

    return GcpPlace(home)


def _slurm(home: Path) -> Place:
    from kimisession.engines.slurm import SlurmPlace

    return SlurmPlace(home=home)
