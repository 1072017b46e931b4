"""One session's launch by SkyPilot: begun, on its way, cancelled. Any other command can tell which, since FOLDER/launch.json
has its request from the moment that there is one, and FOLDER/launch.lock is held by the command that waits for it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from kimisession.core.launch import LaunchSpec
from kimisession.engines.local_machine import lock_is_held, read_json, write_json
from kimisession.engines.sky_sdk import PROGRESS, SkyOutput, first_line, translated
from kimisession.engines.task import AUTODOWN_MINUTES, AUTODOWN_MINUTES_GCP, task_config
from kimisession.errors import BudgetRefused, Unconfirmed
from kimisession.node import job


class SkyLaunch:
    """`folder` is what this machine remembers of the session; `sdk` gives SkyPilot's."""

    def __init__(self, folder: Path, sdk: Callable[[], Any]) -> None:
        self.folder = folder
        self.sdk = sdk
        self._record = folder / "launch.json"
        self._lock = folder / "launch.lock"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While this command launches. The kernel lets go of it for a command that dies."""
        lock = job.hold_lock(self._lock)
        try:
            yield
        finally:
            os.close(lock)

    def run(self, spec: LaunchSpec, infra: str, payload: Path, now: datetime, spot: bool) -> None:
        """Launch with SkyPilot's autodown in the same call, and wait until the job is handed in. Raises NoCapacity,
        QuotaExceeded, EngineFailed; BudgetRefused for a machine on demand that costs more than was agreed to."""
        sky = self.sdk()
        told = SkyOutput()
        try:
            task = sky.Task.from_yaml_config(task_config(spec, infra, str(payload), now, spot))
            # SkyPilot prints on standard output, where our data goes.
            with contextlib.redirect_stdout(told):
                request = sky.launch(
                    task,
                    cluster_name=spec.session_id,
                    idle_minutes_to_autostop=AUTODOWN_MINUTES_GCP if infra == "gcp" else AUTODOWN_MINUTES,
                    wait_for=sky.skylet.autostop_lib.AutostopWaitFor.JOBS,
                    down=True,
                )
                write_json(self._record, {"request": str(request), "over": False})
                _, handle = sky.stream_and_get(request, output_stream=told)
                usd_per_hour = Decimal(str(handle.launched_resources.get_cost(3600)))
        except Exception as error:
            raise translated(error, infra) from error
        write_json(self._record, {"request": str(request), "over": True})
        if not spot and usd_per_hour > spec.usd_per_hour:
            raise BudgetRefused(
                f"the machine on demand costs ${usd_per_hour:.2f} an hour, and --price allows ${spec.usd_per_hour:.2f}",
                f"it is being deleted; give --price {usd_per_hour:.2f} or leave --on-demand-fallback out",
            )
        if infra != "slurm":
            # Its command, not its SDK, writes the entry with which ssh reaches the machine.
            argv = [sys.executable, "-m", "sky.client.cli.command", "status", spec.session_id]
            subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )

    def unfinished(self) -> dict[str, Any] | None:
        """Its record when it was never seen to come to its end: `request`, and `cancelled` once that was tried."""
        record: dict[str, Any] | None = read_json(self._record)
        return None if record is None or record["over"] else record

    def on_its_way(self, began: bool) -> bool:
        """By a command that lives, or by SkyPilot after that command died. `began`: the machine was heard, so it is no
        longer launching. Raises Unconfirmed when SkyPilot cannot be asked."""
        if lock_is_held(self._lock):
            return True
        record = self.unfinished()
        if record is None or began:
            return False
        try:
            found = self.sdk().api_status([str(record["request"])])
        except Exception as error:
            said = first_line(error)
            raise Unconfirmed(f"SkyPilot's API server does not say what became of a launch: {said}") from None
        return any(str(row.status).upper().rsplit(".", 1)[-1] in ("PENDING", "RUNNING", "WAITING") for row in found)

    def cancel(self) -> bool:
        """Break off what is unfinished, once; whether there was something to break off."""
        record = self.unfinished()
        if record is None or "cancelled" in record:
            return False
        request, sky, cancelled = str(record["request"]), self.sdk(), True
        try:
            with contextlib.redirect_stdout(SkyOutput()):
                try:
                    sky.get(sky.api_cancel([request], silent=True))
                except Exception:
                    # A server that died in this very process is taken for alive by its client: start it by name.
                    sky.api_start()
                    sky.get(sky.api_cancel([request], silent=True))
        except Exception as error:
            # The job is ended all the same. Should a worker of the dead server still create one, it finds the request to
            # stop where it begins, and the next command finds the job.
            PROGRESS.warning("SkyPilot's launch could not be cancelled: %s", first_line(error))
            cancelled = False
        write_json(self._record, {**record, "cancelled": cancelled})
        return True


def forget_record(sky: Any, cluster: str) -> None:
    """Have SkyPilot look whether a cluster is there, which removes the record of one that is not; end it if it is."""
    with contextlib.redirect_stdout(SkyOutput()):
        records = sky.get(sky.status([cluster], refresh=sky.StatusRefreshMode.FORCE))
        if records:
            sky.get(sky.down(cluster))
