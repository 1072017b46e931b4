"""Sessions on machines that SkyPilot rents: GCP, Slurm, Kubernetes.

SkyPilot launches, and its autodown is one of the layers that end a session. What exists is asked of the place itself where
that can be done (`place`): SkyPilot's records are its own belief. `sky` takes seconds to import, so only `launch`, and ending
what SkyPilot has a record of, import it; looking at a session is one ssh round trip.
"""

import contextlib
import functools
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kimisession.core.clocks import by_the_other
from kimisession.core.launch import LABEL_DEADLINE, LaunchSpec, deadline_label, edit_argv, flags_to_argv
from kimisession.core.lifecycle import Layer, Observation
from kimisession.core.profile import FlagValue
from kimisession.engines.base import Found
from kimisession.engines.gcp import GcpPlace
from kimisession.engines.layers import autodown_layer, clock_told, journal_lines, keeper_layer, left_to_itself
from kimisession.engines.local_machine import read_json, write_json
from kimisession.engines.payload import lay_out
from kimisession.engines.place import Place, Sight
from kimisession.engines.remote import Remote
from kimisession.engines.sky_launch import SkyLaunch, forget_record
from kimisession.engines.sky_place import SkyPlace
from kimisession.engines.sky_sdk import PROGRESS, first_line, gcp_project, import_sky, warn_of_untested
from kimisession.engines.slurm import FOLDER, SlurmPlace
from kimisession.engines.ssh_entry import write_entry
from kimisession.engines.task import task_config
from kimisession.engines.tunnel import close_tunnel, open_endpoint, open_tunnel
from kimisession.errors import DoesNotFit, EngineFailed, KimiError, NoCapacity, NotYetGone, Unconfirmed, UsageMistake

#: One question to the place per second is enough for any eye.
PACE_S = 1.0

#: Two empty lists this far apart, after a launch that was broken off: its last request may still have been on its way.
SETTLE_S = 5.0

#: On GCP: a keeper that ends in order, a deletion that takes its minutes, and two empty lists a minute apart.
CONFIRM_WITHIN_S = {"gcp": 600.0}

#: Of each log, this much is kept here once a session is ending.
KEPT_BYTES = 20_000

#: So many times longer when the launch could not even be cancelled.
LOST = 6


def utc_now() -> datetime:
    """Aware wall-clock time."""
    return datetime.now(UTC)


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
        self.sdk = sdk or import_sky
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
        payload = folder / "payload"
        launch = self._launch(spec.session_id)
        with launch.held():
            try:
                if (folder / "forbidden").exists() or self.place.look(spec.session_id).present:
                    return
                write_json(folder / "session.json", {"name": spec.name, "stop_grace_s": spec.limits.stop_grace_s})
                self.place.launching(spec.session_id)
                payload.mkdir(mode=0o700, exist_ok=True)
                lay_out(payload, spec, secrets)
                fallback = spec.placement.on_demand_fallback and self.name == "gcp"
                for spot in (True, False) if fallback else (True,):
                    try:
                        launch.run(spec, self.name, payload, self.now(), spot)
                        self.place.after_launch(spec.session_id)
                        break
                    except NoCapacity as error:
                        if not spot or not fallback:
                            raise
                        PROGRESS.warning("no spot machine: %s; trying on demand, as asked for", error.message)
            finally:
                shutil.rmtree(payload, ignore_errors=True)  # it holds the key

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
        here = self.now()
        machine = f"{FOLDER}/{session_id}"
        offset, lines = self._journals.get(session_id, (0, []))
        commands = (
            f"cat {machine}/run/layers.json 2>/dev/null",
            f"tail -c +{offset + 1} {machine}/run/journal.jsonl 2>/dev/null",
            # Once it is ending, what people will ask for when the machine is no longer there to be asked.
            f'grep -q \'"kind":"end\' {machine}/run/journal.jsonl 2>/dev/null &&'
            f" tail -q -c {KEPT_BYTES} {machine}/run/step-*.log {machine}/run/engine.log 2>/dev/null",
            f"[ ! -e {machine}/run/journal.jsonl ] || date +%s",
        )
        sight = self.place.look(session_id, commands)
        began = bool(lines or any(sight.files[1:]))
        launching = not sight.present and self._launch(session_id).on_its_way(began)
        layers_text, news, last, clock = (*sight.files, "", "", "", "")[:4]
        # What was heard is judged by the clock of whoever told it: this one may be wrong, and a beating keeper is not silent.
        theirs = clock_told(clock)
        now, on_machine = by_the_other(here, sight.at or theirs), by_the_other(here, theirs or sight.at)
        if last:
            self._keep_log(session_id, last)
        whole = news.rfind("\n") + 1
        lines = [*lines, *journal_lines(news[:whole])]
        self._journals[session_id] = (offset + len(news[:whole].encode()), lines)
        if launching:
            return Observation(now, True, "SkyPilot is launching it", sight.resources, sight.lines)
        keeper = keeper_layer(lines, on_machine)
        if lines:
            with contextlib.suppress(OSError):
                self._heard(session_id).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._heard(session_id).touch()
        elif not sight.files:
            keeper = Layer("keeper", False, "the machine cannot be reached from here now")
        layers = (keeper, autodown_layer(layers_text), *sight.layers) if sight.present else ()
        return Observation(
            now,
            sight.present,
            sight.why,
            sight.resources,
            (*lines, *sight.lines),
            layers,
            bool(sight.present) and self._unguarded(session_id, sight, lines, keeper, now, on_machine),
            open_endpoint(self._folder(session_id)) if sight.present else "",
        )

    def _keep_log(self, session_id: str, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk keeps no log
            folder = self._folder(session_id)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / "last.log").write_text(text, encoding="utf-8")

    def _heard(self, session_id: str) -> Path:
        """There once the keeper was heard from this machine."""
        return self._folder(session_id) / "heard"

    def _unguarded(
        self, session_id: str, sight: Sight, lines: list[dict[str, Any]], keeper: Layer, now: datetime, there: datetime
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
        return left_to_itself(sight.since, lines, now, there)

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
        if not (folder / "ssh_config").exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            name = str((read_json(folder / "session.json") or {}).get("name", session_id))
            write_entry(folder, self.place.ssh_config(session_id, tuple(dict.fromkeys((name, session_id)))))
        return ("-F", str(folder / "ssh_config"), session_id)

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

    def _desk(self, session_id: str) -> Remote:
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
        if self._launch(session_id).cancel():
            self.place.launching(session_id)  # what was listed before it was broken off proves nothing
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
        launch = self._launch(session_id).unfinished()
        if launch is not None:
            if asked["empty_at"] is None:
                write_json(folder / "asked.json", {**asked, "empty_at": self.now().timestamp()})
            wait_s = self.settle_s * (1 if launch.get("cancelled") else LOST)
            if asked["empty_at"] is None or self.now().timestamp() - float(asked["empty_at"]) < wait_s:
                raise NotYetGone("nothing is there; looking once more, for its launch was broken off")
        self._forget(session_id)

    def _forget(self, session_id: str) -> None:
        """It is gone: close what is ours here, and let SkyPilot look, so that its record goes too."""
        folder = self._folder(session_id)
        if not (folder / "session.json").exists():
            return
        PROGRESS.info("having SkyPilot look whether its record of %s can go", session_id)
        close_tunnel(folder)
        shutil.rmtree(folder / "payload", ignore_errors=True)  # of a launch that was killed: the key, a token
        (folder / "ssh_config").unlink(missing_ok=True)
        self.place.tidy(session_id)
        try:
            forget_record(self.sdk(), session_id)
        except Exception as error:  # its record is not the truth, and costs nothing
            PROGRESS.warning("SkyPilot keeps a record of what is gone: %s", first_line(error))
        (folder / "session.json").unlink(missing_ok=True)

    def _launch(self, session_id: str) -> SkyLaunch:
        return SkyLaunch(self._folder(session_id), self.sdk)

    def _folder(self, session_id: str) -> Path:
        return self.home / session_id


@functools.cache
def skypilot_engine(infra: str, home: Path) -> SkyPilotEngine:
    """The engine of a place, one a process: what it has seen is not asked twice. Raises EngineMissing."""
    warn_of_untested()
    makers: dict[str, Callable[[], Place]] = {
        "slurm": lambda: SlurmPlace(home=home),
        "gcp": lambda: GcpPlace(home, sky_project=gcp_project),
        "kubernetes": lambda: SkyPlace("kubernetes"),
    }
    return SkyPilotEngine(infra, home, makers[infra]())
