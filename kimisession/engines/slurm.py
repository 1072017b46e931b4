"""Slurm as its own commands tell it, over ssh to the login node: the truth about a session's job, without SkyPilot.

A session's job carries its labels in the job's comment, from `sbatch` on, and its id in the job's name, should a site or a
person write the comment anew. Which clusters there are is SkyPilot's own list, `~/.slurm/config`, in the form of ssh's
configuration.
"""

import contextlib
import json
import re
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
_COLUMNS = "%i|%T|%V|%S|%e|%L|%N|%j|%k"  # the comment last: anything may be in it
_LINE = re.compile(r"\d[^|]*\|")  # what comes before it are the further lines of a comment
_NAME = re.compile(r"(.+-[0-9a-f]{8})-[0-9a-z]{8}")  # SkyPilot adds the hash of its user to a session's id
_HOST = re.compile(r"\s*host(?:\s*=\s*|\s+)(.*)", re.IGNORECASE)
_MARK = "@@kimisession@@"

#: For a shell on a job's node: ask SkyPilot's batch script to end, which then removes the node's folders and its own in the user's
#: home. One TERM, and to the batch shell before the `sleep` that it waits for: one that comes while it cleans up breaks that
#: off, for bash runs its `trap 'exit 0' TERM` inside of its EXIT trap as well (bash 5.2). A `scancel` that is repeated when it
#: fails is no such one TERM: said by the job itself, it may die of the signal that it asks for, and has failed. Fails when Slurm
#: does not list the processes.
IN_ORDER = """\
told=$(scontrol listpids {job} 2> /dev/null | awk '
    $3 == "batch" && $4 == 0 {{ first = $1; next }}
    $3 == "batch" {{ second = second " " $1; next }}
    $3 != "extern" && $1 ~ /^[0-9]+$/ {{ third = third " " $1 }}
    END {{ if (first) print first second third }}') && [ -n "$told" ] && {{ kill -TERM $told 2> /dev/null; true; }}"""

#: As the job's own script does at its end. SkyPilot's folder is where it is if no other was configured; it has a hash of eight.
_TIDY = """\
cd {machine} 2> /dev/null && rm -f api_key webhook hf_token && {{
  scratch=$(readlink disk)
  case $scratch in */kimisession-{id}) ;; *) scratch= ;; esac
  rm -rf lib disk "$scratch" > /dev/null 2>&1 < /dev/null &
}}
rm -rf ~/.sky_clusters/{id}-???????? > /dev/null 2>&1 < /dev/null &
"""


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
    name: str
    labels: Mapping[str, str]

    @property
    def session_id(self) -> str:
        """By its labels, else by its name; empty when it is not one of ours."""
        named = _NAME.fullmatch(self.name)
        return self.labels.get(LABEL_SESSION) or (named.group(1) if named else "")

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
    hosts = [found.group(1).replace('"', " ").split() for line in lines if (found := _HOST.match(line))]
    return tuple(host for words in hosts for host in words if not set(host) & set("*?!"))


class SlurmPlace:
    """The clusters of one `~/.slurm/config`; the users' homes are shared by login and compute nodes, as SkyPilot wants.
    `home/ID/cluster` says where a session's job was seen: a cluster that is no longer in the list cannot prove anything."""

    def __init__(self, config: Path | None = None, home: Path | None = None) -> None:
        self.config = (config or CONFIG).expanduser()
        self.home = home

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

    def launching(self, session_id: str) -> None:
        """No list of before is remembered here."""

    def after_launch(self, session_id: str) -> None:
        """Everything was said to sbatch."""

    def look(self, session_id: str, commands: tuple[str, ...] = ()) -> Sight:
        """By squeue on every cluster. Raises Unconfirmed when one of them cannot be asked, or is no longer known, and no other
        has the job."""
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
            jobs = [job for job in look.jobs if job.session_id == session_id]
            if any(job.live for job in jobs):
                self._seen_on(session_id, cluster)
                return _sight(jobs, look.files[:-1])
            ended += jobs or _remembered(cluster, look.files[-1])
            files = files if any(files) else look.files[:-1]
        last, known = self._last_on(session_id), clusters(self.config)
        if not known or (last and last not in known):
            raise Unconfirmed(
                f"{self.config} no longer names {last or 'any cluster'}, where its job may be",
                "write the entry there again, then: kimisession status",
            )
        if silent is not None:
            raise silent
        return _sight(ended, files)

    def _seen_on(self, session_id: str, cluster: str) -> None:
        if self.home is not None and self._last_on(session_id) != cluster:
            with contextlib.suppress(OSError):
                (self.home / session_id).mkdir(parents=True, exist_ok=True, mode=0o700)
                (self.home / session_id / "cluster").write_text(cluster, encoding="utf-8")

    def _last_on(self, session_id: str) -> str:
        try:
            return (self.home / session_id / "cluster").read_text(encoding="utf-8") if self.home else ""
        except OSError:
            return ""

    def find(self) -> tuple[Found, ...]:
        """Every job with our labels that has not ended."""
        jobs = [job for cluster in clusters(self.config) for job in self.ask(cluster).jobs]
        return tuple(
            Found(job.session_id, job.labels, job.submitted) for job in jobs if job.live and LABEL_SESSION in job.labels
        )

    def _live(self, session_id: str) -> list[SlurmJob]:
        """Its jobs that have not ended. Raises Unconfirmed when none is found and a cluster cannot be asked: one that is away
        must not keep what runs on another."""
        silent: Unconfirmed | None = None
        found: list[SlurmJob] = []
        for cluster in clusters(self.config):
            try:
                found += [job for job in self.ask(cluster).jobs if job.live and job.session_id == session_id]
            except Unconfirmed as error:
                silent = error
        if silent is not None and not found:
            raise silent
        return found

    def _job(self, session_id: str) -> SlurmJob | None:
        return next(iter(self._live(session_id)), None)

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
        """By scancel: in order first, which lets SkyPilot's batch script clean up after itself; then by Slurm's force. In order
        is said once, here or by the job itself: a second TERM would break that clean-up off."""
        said = f"{FOLDER}/{session_id}/run/ending"
        for job in self._live(session_id):
            there = shlex.quote(f"trap '' TERM; {IN_ORDER.format(job=job.id)}")
            step = f"timeout 15 srun --quiet --overlap --jobid={job.id} --nodes=1 --ntasks=1 sh -c {there} < /dev/null"
            told = f"{step} || scancel --signal=TERM --full {job.id}"
            gentle = f"[ -d {said} ] || {{ mkdir -p {said}; {told}; }} || "
            waiting = job.began is None
            self.login(job.cluster).run(f"{'' if force or waiting else gentle}scancel {job.id}")

    def tidy(self, session_id: str) -> None:
        """What a job that was killed, or whose time was up, has left in the user's home: secrets, a copy of the weights where
        the homes or the scratch space are shared, SkyPilot's folder; and of one that ended in order the lock with which
        SkyPilot's driver wrote that down, after its folder had gone. The story stays. In the background: it is thousands of
        files."""
        for cluster in clusters(self.config):
            with contextlib.suppress(Unconfirmed):
                self.login(cluster).run(_TIDY.format(machine=f"{FOLDER}/{session_id}", id=session_id))

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
        jobs = [_job(cluster, line) for line in queue.splitlines() if _LINE.match(line)]
        if queue.strip() and not jobs:
            raise Unconfirmed(f"squeue on {cluster} printed {queue.strip()!r}, which is not understood")
        return Look(tuple(job for job in jobs if job.session_id), tuple(files))

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
        return [SlurmJob(cluster, str(int(told["id"])), "COMPLETED", "", began, began, ended, "", "", {})]
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
    most = _COLUMNS.count("|")
    fields = line.split("|", most)
    if len(fields) != most + 1:
        raise Unconfirmed(f"squeue on {cluster} printed {line!r}, which is not understood")
    number, state, submitted, began, ended, left, node, name, comment = fields
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
        name,
        labels_of(comment),
    )


def _moment(text: str) -> datetime | None:
    return datetime.fromtimestamp(int(text), UTC) if text.isdigit() else None
