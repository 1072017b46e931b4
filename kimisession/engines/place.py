"""What differs between the clouds under SkyPilot: who is asked what exists, and how the machine is reached."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from kimisession.core.launch import LaunchSpec
from kimisession.core.lifecycle import Layer, SeenResource
from kimisession.engines.base import Found
from kimisession.engines.remote import Remote


@dataclass(frozen=True)
class Sight:
    """What a place tells of one session. `files` are what the commands printed that were asked for with it, empty where
    the machine cannot be reached. `since` is when it got its machine.

    `present` is False only when the place has proven that nothing is left and nothing can come; None when nothing is seen
    and that is not proven yet. `stopped`: it is there, billed, and nothing of it will ever end it. `lines` are what the place
    itself knows of the session's story, as lines of a journal: attempts that failed, an end that it saw. `at` is when it was
    seen, by the place's own clock; None where that was not told."""

    present: bool | None
    why: str
    resources: tuple[SeenResource, ...] = ()
    layers: tuple[Layer, ...] = ()
    since: datetime | None = None
    files: tuple[str, ...] = ()
    stopped: bool = False
    lines: tuple[Mapping[str, Any], ...] = ()
    at: datetime | None = None


class Place(Protocol):
    """Every method may raise Unconfirmed when the place cannot be asked."""

    def check(self, spec: LaunchSpec) -> None:
        """Refuse before anything exists. Raises DoesNotFit."""

    def launching(self, session_id: str) -> None:
        """A machine may be made from now on: what was seen before proves nothing about it."""

    def after_launch(self, session_id: str) -> None:
        """Set what SkyPilot cannot set, once its launch has succeeded."""

    def look(self, session_id: str, commands: tuple[str, ...] = ()) -> Sight:
        """What exists of a session, and what shell commands print where its folder is."""

    def find(self) -> tuple[Found, ...]:
        """Everything that carries our labels."""

    def desk(self, session_id: str) -> Remote | None:
        """Where the session's folder can be read and written; None while there is no such place."""

    def ssh_config(self, session_id: str, names: tuple[str, ...]) -> str:
        """A block of ssh's configuration with which any of `names` is the machine itself."""

    def prolong(self, session_id: str, deadline: datetime, labels: Mapping[str, str]) -> None:
        """Move the deadline of the layer that dies last, and of the labels. Raises UsageMistake when it is refused."""

    def end(self, session_id: str, force: bool) -> None:
        """Have it deleted; returns before it is gone."""

    def tidy(self, session_id: str) -> None:
        """Remove what lies there and costs nothing, once it is gone. Best effort."""
