"""SkyPilot's SDK: the one module that imports `sky`, which takes seconds; what it prints, and what its errors mean."""

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import re
from typing import Any

from kimisession.errors import INSTALL_CLOUD, EngineFailed, EngineMissing, KimiError, NoCapacity, QuotaExceeded

#: SkyPilot releases that the rigs ran, from the first to below the second. Its SDK moves between minor versions.
TESTED = ("0.14.1", "0.15")

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
PROGRESS = logging.getLogger("kimisession.progress")


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


def warn_of_untested() -> None:
    """Say so when no rig ran the release that is installed. Raises EngineMissing."""
    version, (low, high) = installed(), TESTED
    if not _numbers(low) <= _numbers(version) < _numbers(high):
        PROGRESS.warning("SkyPilot %s was not tested; %s to below %s were", version, low, high)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def import_sky() -> Any:
    """SkyPilot's SDK, imported on first use. Raises EngineMissing, EngineFailed."""
    installed()
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    # Its log handlers keep the standard output that they find when they are made, and ours is for data.
    try:
        with contextlib.redirect_stdout(SkyOutput()):
            import sky.skylet.autostop_lib
    except Exception as error:  # it reads its configuration when it is imported
        raise EngineFailed(f"SkyPilot cannot be used: {first_line(error)}", "mend ~/.sky/config.yaml") from error
    return sky


def gcp_project() -> str:
    """The Google Cloud project that SkyPilot launches in, by its configuration and the credentials here; empty where it does
    not say. Raises EngineMissing, EngineFailed."""
    sky = import_sky()
    try:
        with contextlib.redirect_stdout(SkyOutput()):
            return str(sky.clouds.GCP.get_project_id())
    except Exception:  # no credentials, say: it will refuse the launch itself, in words of its own
        return ""


class SkyOutput(io.TextIOBase):
    """Text that SkyPilot prints, as whole plain lines to those who follow the progress."""

    def __init__(self) -> None:
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + _ANSI.sub("", text)).split("\n")
        for line in lines:
            if line.strip():
                PROGRESS.info("%s", line.strip())
        return len(text)


def translated(error: Exception, infra: str) -> KimiError:
    """SkyPilot's error as one of ours."""
    if isinstance(error, KimiError):
        return error
    name, text = type(error).__name__, first_line(error)
    if name == "ResourcesUnavailableError":
        tried = tuple(str(one).splitlines()[0] for one in getattr(error, "failover_history", ()) if str(one))
        places = f" ({len(tried)} places tried)" if tried else ""
        if "quota" in f"{error} {' '.join(tried)}".lower():
            return QuotaExceeded(f"{infra} does not let this account have such a machine{places}: {text}", "", tried)
        return NoCapacity(f"no such machine is to be had on {infra} now{places}: {text}", "try again later", tried)
    if name in ("NoCloudAccessError", "CloudUserIdentityError", "InvalidCloudCredentials", "PermissionDeniedError"):
        return EngineFailed(f"SkyPilot may not use {infra}: {text}", f"sky check {infra}")
    return EngineFailed(f"SkyPilot could not launch: {text}", "sky api logs -l tells more")


def first_line(error: BaseException) -> str:
    """What SkyPilot said, without colours, in one line of at most 300 characters."""
    lines = [line.strip() for line in _ANSI.sub("", str(error)).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
