"""Slurm as its own commands tell it, over ssh to the login node: the truth about a session's job, without SkyPilot.

A session's job carries its labels in the job's comment, from `sbatch` on. Which clusters there are is SkyPilot's own list,
`~/.slurm/config`, in the form of ssh's configuration.
"""

import json
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kimisession.core.launch import LABEL_DEADLINE, LABEL_SESSION, LaunchSpec, deadline_label
from kimisession.core.lifecycle import Layer, SeenResource
from kimisession.engines.base import Found
from kimisession.engines.place import Sight
from kimisession.engines.remote import OPTIONS, Remote
from kimisession.errors import DoesNotFit, EngineFailed, Unconfirmed, UsageMistake
from kimisession.node.manifest import SEAL

#: SkyPilot's list of clusters.
CONFIG = Path("~/.slurm/config")

#: Where a machine's folder is, as a shell sees it. On Slurm it is not in the job's home, which SkyPilot deletes with the job,
#: but in the user's: the journal, and with it the reason of the end, stays readable.
FOLDER = "~/.kimisession"

#: States in which a job has ended (squeue(1), job state codes). Any other still holds, or may yet hold, its nodes.
ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split()  # noqa: SIM905
)
_COLUMNS = "%i|%T|%V|%S|%e|%L|%N|%k"
_MARK = "@@kimisession@@"


def comment_of(labels: Mapping[str, str]) -> str:
    """Labels as a job's comment."""
    return ",".join(f"{key}={value}" for key, value in labels.items())


def labels_of(comment: str) -> dict[str, str]:
    """The labels in a job's comment; empty when it is not one of ours."""
    return dict(pair.split("=", 1) for pair in comment.split(",") if pair.startswith("kimisession-") and "=" in pair)


@dataclass(frozen=True)
class SlurmJob:
    """One of our jobs. `began` is when it got its nodes, None before; `ended` None while it has them."""

    cluster: str
    id: str
    state: str
    node: str
    submitted: datetime
    began: datetime | None
    ended: datetime | None
    left: str  # of its time limit, as Slurm writes it
    labels: Mapping[str, str]

    @property
    def live(self) -> bool:
        """Whether it is in the queue, or has nodes."""
        return self.state not in ENDED


@dataclass(frozen=True)
class Look:
    """What one question to a login node brought: our jobs, and files of one machine's folder."""

    jobs: tuple[SlurmJob, ...]
    files: tuple[str, ...]


def clusters(config: Path) -> tuple[str, ...]:
    """The clusters in SkyPilot's list; empty when there is no list."""
    try:
        lines = config.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    hosts = [line.split()[1:] for line in lines if line.strip().lower().startswith("host ")]
    return tuple(host for words in hosts for host in words if "*" not in host and "?" not in host)


class SlurmPlace:
    """The clusters of one `~/.slurm/config`; the users' homes are shared by login and compute nodes, as SkyPilot wants."""

    def __init__(self, config: Path | None = None) -> None:
        self.config = (config or CONFIG).expanduser()

    def check(self, spec: LaunchSpec) -> None:
        """There is a cluster, the one that the profile names, and its login node answers. Raises DoesNotFit."""
        known = clusters(self.config)
        if not known:
            raise DoesNotFit(
                f"SkyPilot knows no Slurm cluster: {self.config} names none",
                "write Host, HostName, User and IdentityFile of the login node there, then: sky check slurm",
            )
        wanted = spec.placement.slurm.cluster
        if wanted and wanted not in known:
            raise DoesNotFit(
                f"{self.config} has no cluster {wanted!r}; it has {', '.join(known)}", "mend slurm.cluster"
            )
        cluster = wanted or known[0]
        wanted_file = _weights_file(spec)
        script = f"[ -z {wanted_file} ] || [ -e {wanted_file} ] || echo missing"
        try:
            missing = "missing" in self.login(cluster).run(script)
        except Unconfirmed as error:
            raise DoesNotFit(error.message, f"try: ssh -F {self.config} {cluster} true") from None
        if missing:
            raise DoesNotFit(
                f"{cluster} has no {wanted_file}: the weights are not there",
                "say with --bucket file:///FOLDER where the cluster's machines find them",
            )

    def after_launch(self, session_id: str) -> None:
        """Everything was said to sbatch."""

    def look(self, session_id: str, commands: tuple[str, ...] = ()) -> Sight:
        """By squeue on every cluster. Raises Unconfirmed when one of them cannot be asked and no other has the job."""
        silent: Unconfirmed | None = None
        own = f"cat {FOLDER}/{session_id}/run/job.json 2>/dev/null"
        files: tuple[str, ...] = ()
        ended: list[SlurmJob] = []
        for cluster in clusters(self.config):
            try:
                look = self.ask(cluster, (*commands, own))
            except Unconfirmed as error:
                silent = error
                continue
            jobs = [job for job in look.jobs if job.labels[LABEL_SESSION] == session_id]
            if any(job.live for job in jobs):
                return _sight(jobs, look.files[:-1])
            ended += jobs or _remembered(cluster, look.files[-1])
            files = files if any(files) else look.files[:-1]
        if silent is not None:
            raise silent
        return _sight(ended, files)

    def find(self) -> tuple[Found, ...]:
        """Every job of ours that has not ended."""
        return tuple(Found(job.labels[LABEL_SESSION], job.labels, job.submitted) for job in self._live())

    def _live(self) -> list[SlurmJob]:
        return [job for cluster in clusters(self.config) for job in self.ask(cluster).jobs if job.live]

    def _job(self, session_id: str) -> SlurmJob | None:
        return next((job for job in self._live() if job.labels[LABEL_SESSION] == session_id), None)

    def desk(self, session_id: str) -> Remote | None:
        """The login node: homes are shared, so what is written there is read on the node, before the job and after."""
        job = self._job(session_id) if len(clusters(self.config)) > 1 else None
        known = clusters(self.config)
        return self.login(job.cluster if job else known[0]) if known else None

    def ssh_config(self, session_id: str, names: tuple[str, ...]) -> str:
        """Through a job step that runs sshd for this one connection, with the host key that SkyPilot made."""
        job = self._job(session_id)
        if job is None or not job.node:
            raise EngineFailed(f"session {session_id} has no node", "kimisession status")
        step = (
            f"exec srun --quiet --unbuffered --overlap --jobid={job.id} -w {job.node} /usr/sbin/sshd -i -e -f /dev/null"
            ' -h "$HOME/.ssh/skypilot_host_key" -o AuthorizedKeysFile="$HOME/.ssh/authorized_keys"'
            " -o PasswordAuthentication=no -o UsePAM=no"
        )
        login = ["ssh", *(word for option in OPTIONS for word in ("-o", option)), "-F", str(self.config), job.cluster]
        known = self.effective(job.cluster)
        return "\n".join(
            [
                f"Host {' '.join(names)}",
                f"    User {known['user'][0]}",
                *(f"    IdentityFile {path}" for path in known.get("identityfile", ())),
                # The key is the user's own, the same on every node; the login node's key was checked on the way.
                f"    HostKeyAlias kimisession-{job.cluster}",
                "    StrictHostKeyChecking accept-new",
                f"    ProxyCommand {shlex.join(login)} {shlex.quote(step)}",
                "",
            ]
        )

    def effective(self, cluster: str) -> dict[str, list[str]]:
        """What ssh makes of a cluster's entry. Raises Unconfirmed."""
        argv = ["ssh", "-G", "-F", str(self.config), cluster]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise Unconfirmed(f"ssh does not understand {self.config}: {done.stderr.strip()}")
        found: dict[str, list[str]] = {}
        for line in done.stdout.splitlines():
            key, _, value = line.partition(" ")
            found.setdefault(key, []).append(value)
        return found

    def prolong(self, session_id: str, deadline: datetime, labels: Mapping[str, str]) -> None:
        """The job's time limit, which only an operator of the cluster may lengthen, then its comment."""
        job = self._job(session_id)
        if job is None or job.began is None:
            raise UsageMistake(f"session {session_id} has no running job", "kimisession status")
        minutes = -(-int((deadline - job.began).total_seconds() + 120) // 60)
        refused = self._update(job, "TimeLimit", str(minutes))
        if refused:
            raise UsageMistake(
                f"Slurm does not lengthen job {job.id}: {refused}",
                "most sites let only an operator do that; start the next session with a longer --duration",
            )
        self._update(job, "Comment", comment_of({**job.labels, LABEL_DEADLINE: deadline_label(deadline)}))

    def end(self, session_id: str, force: bool) -> None:
        """By scancel: in order first, which lets SkyPilot's batch script clean up after itself; then by Slurm's force."""
        for job in self._live():
            if job.labels[LABEL_SESSION] == session_id:
                gentle = f"scancel --signal=TERM --full {job.id} || "
                waiting = job.began is None
                self.login(job.cluster).run(f"{'' if force or waiting else gentle}scancel {job.id}")

    def login(self, cluster: str) -> Remote:
        """The login node of a cluster."""
        return Remote(("-F", str(self.config), cluster))

    def ask(self, cluster: str, commands: tuple[str, ...] = ()) -> Look:
        """Our jobs on a cluster and what each of `commands` (shell, may fail) prints there, in one round trip. Raises
        Unconfirmed when the cluster cannot be asked."""
        # `-t all`: with those that ended so recently that Slurm still knows them, and when.
        script = f"SLURM_TIME_FORMAT=%s squeue -h --me -t all -o {shlex.quote(_COLUMNS)} || exit 9\n"
        script += "".join(f"echo {_MARK}; {command}\n" for command in commands) + "exit 0"
        queue, *files = self.login(cluster).run(script).split(f"{_MARK}\n")
        jobs = (_job(cluster, line) for line in queue.splitlines() if line.strip())
        return Look(tuple(job for job in jobs if LABEL_SESSION in job.labels), tuple(files))

    def _update(self, job: SlurmJob, field: str, value: str) -> str:
        """Change a job. Returns why Slurm refuses, empty when it did it; raises Unconfirmed when it could not be asked."""
        change = f"scontrol update JobId={job.id} {field}={shlex.quote(value)}"
        told, mark, _ = self.login(job.cluster).run(f"{change} 2>&1 || echo {_MARK}").partition(_MARK)
        return " ".join(told.split()) or "it does not say why" if mark else ""


def _weights_file(spec: LaunchSpec) -> str:
    """A file, as a shell word, that says that the weights are where the job will look for them: the seal of a folder that is
    copied, the configuration of a model that is read in place."""
    pulled = [arg for step in spec.steps for arg in step.argv if arg.startswith("file://")]
    if pulled:
        return shlex.quote(f"{pulled[0].removeprefix('file://')}/{SEAL}")
    argv = spec.engine.argv if spec.engine else ()
    model = argv[argv.index("--model") + 1] if "--model" in argv else ""
    return shlex.quote(f"{model}/config.json" if model.startswith("/") else "")


def _remembered(cluster: str, text: str) -> list[SlurmJob]:
    """The job as it wrote itself down at its end; Slurm forgets it minutes later. It had its node some seconds longer."""
    try:
        told = json.loads(text)
        began, ended = (datetime.fromtimestamp(int(told[key]), UTC) for key in ("began", "ended"))
        return [SlurmJob(cluster, str(int(told["id"])), "COMPLETED", "", began, began, ended, "", {})]
    except (KeyError, TypeError, ValueError):
        return []


def _sight(jobs: list[SlurmJob], files: tuple[str, ...]) -> Sight:
    live = [job for job in jobs if job.live]
    resources = tuple(
        SeenResource(f"slurm/{job.cluster}/{job.id}", "machine", job.began, job.ended, f"Slurm: {job.state}")
        for job in jobs
        if job.began
    )
    if not live:
        return Sight(False, "squeue lists no job of it", resources, (), None, files)
    job = live[-1]
    layer = Layer(
        "time limit", job.left not in ("", "UNLIMITED", "INVALID"), f"squeue: {job.left} left of the job's limit"
    )
    return Sight(True, f"job {job.id} on {job.cluster} is {job.state}", resources, (layer,), job.began, files)


def _job(cluster: str, line: str) -> SlurmJob:
    fields = line.split("|")
    if len(fields) != len(_COLUMNS.split("|")):
        raise Unconfirmed(f"squeue on {cluster} printed {line!r}, which is not understood")
    number, state, submitted, began, ended, left, node, comment = fields
    ran = bool(node) and state != "PENDING"  # a job that was cancelled while it waited has no node
    return SlurmJob(
        cluster,
        number,
        state,
        node,
        _moment(submitted) or datetime.now(UTC),
        _moment(began) if ran else None,
        _moment(ended) if ran and state in ENDED else None,
        left,
        labels_of(comment),
    )


def _moment(text: str) -> datetime | None:
    return datetime.fromtimestamp(int(text), UTC) if text.isdigit() else None
