"""A cloud as SkyPilot tells it, which is Kubernetes: what SkyPilot lost track of is not seen here."""

import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kimisession.core.launch import LABEL_SESSION, LaunchSpec
from kimisession.core.lifecycle import SeenResource
from kimisession.engines.base import Found
from kimisession.engines.place import Sight
from kimisession.engines.remote import Remote
from kimisession.engines.sky_sdk import SkyOutput, first_line, import_sky
from kimisession.engines.sky_ssh import ask, sky_desk, sky_ssh_config
from kimisession.engines.slurm import FOLDER
from kimisession.engines.task import GRACE_S
from kimisession.errors import Unconfirmed, UsageMistake


class SkyPlace:
    """Its status, refreshed from the cloud, and its ssh entry of the machine."""

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
        sky = import_sky()
        try:
            with contextlib.redirect_stdout(SkyOutput()):
                names = [session_id] if session_id else None
                return list(sky.get(sky.status(names, refresh=sky.StatusRefreshMode.FORCE)))
        except Exception as error:
            raise Unconfirmed(f"SkyPilot could not ask {self.infra}: {first_line(error)}", "sky status -r") from None

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
        sky = import_sky()
        try:
            with contextlib.redirect_stdout(SkyOutput()):
                sky.get(sky.down(session_id))
        except Exception as error:
            raise Unconfirmed(f"SkyPilot could not delete it: {first_line(error)}", f"sky down {session_id}") from None

    def tidy(self, session_id: str) -> None:
        """Its disk goes with the machine."""
