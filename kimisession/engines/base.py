"""What every place to run a session has to do, and the one table of those that exist.

Rules that the contract suite (tests/contract) holds every engine to:
- every call may be repeated; names and labels are deterministic; `launch` of what exists returns it, `down` of what is
  gone is fine;
- labels carry session, owner and absolute deadline from the very first call;
- `find` needs no local state;
- `observe(...).present` is False only when the provider said that nothing is left.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from kimisession.core.launch import LaunchSpec
from kimisession.core.lifecycle import Observation
from kimisession.core.profile import FlagValue
from kimisession.errors import UsageMistake


@dataclass(frozen=True)
class Found:
    """Something that carries our labels, found without any local state."""

    session_id: str
    labels: Mapping[str, str]
    began: datetime


class Engine(Protocol):
    """A place to run. Raises `NoCapacity`, `QuotaExceeded`, `EngineMissing`, `DoesNotFit` from `launch`, `NotYetGone`
    from `down` while deletion is under way, `Unconfirmed` where the provider cannot be asked."""

    name: str

    @property
    def confirm_within_s(self) -> float:
        """How long a proof of the end may take here when all goes well, with room to spare."""

    def check(self, spec: LaunchSpec) -> None:
        """Refuse what cannot run here before anything exists. Raises DoesNotFit."""

    def launch(self, spec: LaunchSpec, secrets: Mapping[str, str]) -> None:
        """Bring the session's machine up, or find it up. Returns when its layers are armed, not when it is ready.
        `secrets` become files in the machine's folder, readable by its user alone: `api_key`, perhaps `webhook`."""

    def observe(self, session_id: str) -> Observation:
        """What there is of this session, by what the provider says."""

    def find(self) -> tuple[Found, ...]:
        """Everything of ours that exists here, whoever started it."""

    def logs(self, session_id: str, follow: bool, run: int | None = None) -> Iterator[str]:
        """The log lines of the engine's start number `run` (None: the last); with `follow` until the session has ended.
        Kept after the end where it can be."""

    def base_url(self, session_id: str, port: int) -> str:
        """Where the endpoint can be reached from here, without a trailing slash."""

    def extend(self, session_id: str, deadline: datetime, added_s: float) -> None:
        """Move every layer's deadline, the last to die first; never back. `added_s` is what all extensions added since the
        start: with it a machine whose wall clock is wrong keeps its bound. Raises UsageMistake when the place refuses or
        there is no machine; then the keeper still ends it at the old cap."""

    def restart(self, session_id: str, sets: Mapping[str, FlagValue] | None) -> None:
        """Ask for the engine to be started again with these flags changed; None: with the flags of before. Raises
        UsageMistake when there is no before. Returns at once: `observe` shows what comes of it."""

    def down(self, session_id: str, by: str, reason: str) -> None:
        """End and delete. Returns only when nothing is left; raises NotYetGone while it is being deleted."""


def open_engine(infra: str) -> Engine:
    """The engine of this name. A new place to run is one line here."""
    makers: dict[str, Callable[[], Engine]] = {
        "local": _local,
        "gcp": lambda: _skypilot("gcp"),
        "slurm": lambda: _skypilot("slurm"),
        "kubernetes": lambda: _skypilot("kubernetes"),
    }
    if infra not in makers:
        raise UsageMistake(
            f"{infra!r} is not a place where this version can run a session",
            f"use --infra {' or '.join(sorted(makers))}",
        )
    return makers[infra]()


def _skypilot(infra: str) -> Engine:
    from kimisession.engines.skypilot import skypilot_engine
    from kimisession.paths import rented_home

    return skypilot_engine(infra, rented_home())


def _local() -> Engine:
    from kimisession.engines.local import LocalEngine
    from kimisession.paths import machines_home

    return LocalEngine(machines_home())
