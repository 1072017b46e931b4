"""What squeue prints, and what it means. The lines are those of Slurm 22.05."""

import os
import shlex
import subprocess
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from good_values import PROFILE, choices

from kimisession.core.launch import LaunchSpec, session_labels
from kimisession.core.quote import launch_spec, make_quote
from kimisession.engines.remote import Remote
from kimisession.engines.slurm import Look, SlurmPlace, _job, clusters, comment_of, labels_of
from kimisession.errors import DoesNotFit, Unconfirmed, UsageMistake
from kimisession.node.manifest import SEAL

LABELS = session_labels("demo-0123abcd", "demo", "me", datetime(2026, 11, 21, 3, tzinfo=UTC))
COMMENT = comment_of(LABELS)
RUNNING = f"7|RUNNING|1795223500|1795223507|1795230707|1:59:30|rig|demo-0123abcd-5f6e7d8c|{COMMENT}"
PENDING = f"7|PENDING|1795223500|N/A|N/A|2:02:00||demo-0123abcd-5f6e7d8c|{COMMENT}"
COMPLETED = f"7|COMPLETED|1795223500|1795223507|1795223600|1:58:27|rig|demo-0123abcd-5f6e7d8c|{COMMENT}"
CANCELLED_WAITING = f"7|CANCELLED|1795223500|1795223507|1795223507|2:02:00||demo-0123abcd-5f6e7d8c|{COMMENT}"


class Told(SlurmPlace):
    """A place whose clusters answer with these lines; None does not answer."""

    def __init__(self, tmp_path: Path, **told: "list[str] | None") -> None:
        config = tmp_path / "config"
        config.write_text("".join(f"Host {name}\n    User me\n" for name in told))
        super().__init__(config)
        self.told = told

    def ask(self, cluster: str, commands: tuple[str, ...] = ()) -> Look:
        lines = self.told[cluster]
        if lines is None:
            raise Unconfirmed(f"{cluster} cannot be reached")
        return Look(tuple(_job(cluster, line) for line in lines), tuple("" for _ in commands))


class Login(Remote):
    """A login node whose `scontrol` is this shell; None: it cannot be reached."""

    def __init__(self, scontrol: "str | None", asked: "list[str]") -> None:
        super().__init__(("a",))
        object.__setattr__(self, "scontrol", scontrol)
        object.__setattr__(self, "asked", asked)

    scontrol: "str | None"
    asked: "list[str]"

    def run(self, script: str, text: str = "", within_s: float = 30.0) -> str:
        if self.scontrol is None:
            raise Unconfirmed("a cannot be reached")
        self.asked.append(script)
        whole = f"scontrol() {{ {self.scontrol}; }}\n{script}"
        return subprocess.run(["sh", "-c", whole], capture_output=True, text=True, check=True).stdout


class Shell(Told):
    """A place whose login nodes are this machine, with the commands in `home`'s folder."""

    def login(self, cluster: str) -> Remote:
        return Login("true", [])


class Lengthening(Told):
    """A place with one running job, whose login node answers `scontrol` so."""

    def __init__(self, tmp_path: Path, scontrol: "str | None") -> None:
        super().__init__(tmp_path, a=[RUNNING])
        self.scontrol = scontrol
        self.asked: list[str] = []

    def login(self, cluster: str) -> Remote:
        return Login(self.scontrol, self.asked)


class Reached(SlurmPlace):
    """A place with one cluster, whose login node is this machine, or is away."""

    def __init__(self, tmp_path: Path, away: bool = False) -> None:
        config = tmp_path / "config"
        config.write_text("Host a\n    User me\n")
        super().__init__(config)
        self.away = away

    def login(self, cluster: str) -> Remote:
        return Login(None if self.away else "true", [])


def asking_for(folder: Path, load: str) -> LaunchSpec:
    profile = replace(PROFILE, load=load)
    quote = make_quote(profile, choices(infra="slurm", bucket_url=f"file://{folder}"), datetime.now(UTC))
    return launch_spec(quote, "demo-0123abcd", "someone")


@pytest.mark.parametrize(("load", "file"), [("in-place", "config.json"), ("copy", SEAL)])
def test_weights_that_the_cluster_does_not_have_are_refused_before_anything_exists(
    tmp_path: Path, load: str, file: str
) -> None:
    spec = asking_for(tmp_path / "the weights", load)
    with pytest.raises(DoesNotFit, match="the weights are not there") as refused:
        Reached(tmp_path).check(spec)
    assert "--bucket file:///FOLDER" in refused.value.hint
    (tmp_path / "the weights" / file).parent.mkdir(parents=True)
    (tmp_path / "the weights" / file).touch()
    Reached(tmp_path).check(spec)


def test_a_login_node_that_is_away_is_said_before_anything_exists(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="cannot be reached") as refused:
        Reached(tmp_path, away=True).check(asking_for(tmp_path, "in-place"))
    assert refused.value.hint.startswith("try: ssh -F ")


LATER = datetime(2026, 11, 21, 4, tzinfo=UTC)


def test_a_site_that_does_not_lengthen_jobs_is_quoted_and_the_labels_stay(tmp_path: Path) -> None:
    place = Lengthening(tmp_path, "echo 'slurm_update error: Access/permission denied' >&2; return 1")
    with pytest.raises(UsageMistake, match="job 7: slurm_update error: Access/permission denied") as refused:
        place.prolong("demo-0123abcd", LATER, {})
    assert "--duration" in refused.value.hint
    assert len(place.asked) == 1, "the comment was not touched"


def test_a_site_that_lengthens_jobs_moves_the_limit_first_and_then_the_labels(tmp_path: Path) -> None:
    place = Lengthening(tmp_path, "true")
    place.prolong("demo-0123abcd", LATER, {})
    limit, comment = place.asked
    minutes = -(-(LATER.timestamp() - 1795223507 + 120) // 60)
    assert f"TimeLimit={minutes:.0f}" in limit
    assert "kimisession-deadline=20261121t040000z" in comment


def test_a_login_node_that_is_away_has_refused_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unconfirmed, match="cannot be reached"):
        Lengthening(tmp_path, None).prolong("demo-0123abcd", LATER, {})


def test_a_comment_brings_the_labels_back() -> None:
    assert labels_of(COMMENT) == LABELS
    assert labels_of("somebody else's, comment=1") == {}


def test_a_running_job_is_there_since_it_got_its_node(tmp_path: Path) -> None:
    sight = Told(tmp_path, a=[RUNNING]).look("demo-0123abcd")
    assert sight.present
    assert [r.id for r in sight.resources] == ["slurm/a/7"]
    assert sight.since == datetime.fromtimestamp(1795223507, UTC)
    assert sight.layers[0].armed


def test_a_job_that_waits_is_there_and_costs_nothing(tmp_path: Path) -> None:
    sight = Told(tmp_path, a=[PENDING]).look("demo-0123abcd")
    assert sight.present
    assert sight.resources == ()


def test_the_end_is_slurms_own_second(tmp_path: Path) -> None:
    sight = Told(tmp_path, a=[COMPLETED]).look("demo-0123abcd")
    assert not sight.present
    assert sight.resources[0].ended == datetime.fromtimestamp(1795223600, UTC)


def test_a_job_that_was_cancelled_while_it_waited_never_cost_anything(tmp_path: Path) -> None:
    sight = Told(tmp_path, a=[CANCELLED_WAITING]).look("demo-0123abcd")
    assert (sight.present, sight.resources) == (False, ())


def test_gone_is_not_said_while_one_cluster_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(Unconfirmed, match="cannot be reached"):
        Told(tmp_path, a=[], b=None).look("demo-0123abcd")
    assert Told(tmp_path, a=[RUNNING], b=None).look("demo-0123abcd").present


def test_gone_is_not_said_by_a_list_that_no_longer_names_where_the_job_was(tmp_path: Path) -> None:
    place = Told(tmp_path, a=[RUNNING], b=[])
    place.home = tmp_path / "rented"
    assert place.look("demo-0123abcd").present
    place = Told(tmp_path, b=[])
    place.home = tmp_path / "rented"
    with pytest.raises(Unconfirmed, match="no longer names a") as unclear:
        place.look("demo-0123abcd")
    assert "entry there again" in unclear.value.hint
    place.config.unlink()
    with pytest.raises(Unconfirmed, match="no longer names"):
        place.look("other-0123abcd")


def test_another_sessions_job_is_not_this_ones(tmp_path: Path) -> None:
    place = Told(tmp_path, a=[RUNNING])
    assert not place.look("other-0123abcd").present
    assert [found.session_id for found in place.find()] == ["demo-0123abcd"]


def test_a_line_that_is_not_understood_is_never_taken_for_an_empty_list(tmp_path: Path) -> None:
    with pytest.raises(Unconfirmed, match="not understood"):
        Told(tmp_path, a=["7|RUNNING"]).look("demo-0123abcd")


def test_the_clusters_are_those_that_skypilot_lists(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text('Host *\n  User me\nHost alpha beta !no\n  HostName 10.0.0.1\nhost\tgamma\nHost="delta"\n')
    assert clusters(config) == ("alpha", "beta", "gamma", "delta")
    assert clusters(tmp_path / "missing") == ()


def test_without_a_cluster_the_start_is_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="knows no Slurm cluster"):
        SlurmPlace(tmp_path / "missing").check(None)  # type: ignore[arg-type]


# -- ending, and what must not keep a job from being ended -------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, and commands of Slurm's that write down what they were told: `srun` runs nothing."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for folder in ("home", "bin"):
        (tmp_path / folder).mkdir()
    for name in ("srun", "scancel"):
        command = tmp_path / "bin" / name
        command.write_text(
            f'#!/bin/sh\necho "{name} $*" | head -n 1 >> "{tmp_path}/said"\n[ ! -e "{tmp_path}/{name}.fails" ]\n'
        )
        command.chmod(0o755)
    (tmp_path / "said").touch()
    return tmp_path / "home"


def said(tmp_path: Path) -> list[str]:
    return (tmp_path / "said").read_text().splitlines()


def test_a_job_is_told_in_order_once_by_however_many_commands_and_by_force_each_time(
    tmp_path: Path, home: Path
) -> None:
    place = Shell(tmp_path, a=[RUNNING])
    place.end("demo-0123abcd", force=False)
    Shell(tmp_path, a=[RUNNING]).end("demo-0123abcd", force=False)
    (told,) = said(tmp_path)
    assert told.startswith("srun --quiet --overlap --jobid=7 "), (
        "on its node, where the order of its processes is known"
    )
    place.end("demo-0123abcd", force=True)
    assert said(tmp_path)[1:] == ["scancel 7"]


def test_a_job_whose_node_runs_no_step_is_told_by_slurm(tmp_path: Path, home: Path) -> None:
    (tmp_path / "srun.fails").touch()
    place = Shell(tmp_path, a=[RUNNING])
    place.end("demo-0123abcd", force=False)
    assert said(tmp_path)[1:] == ["scancel --signal=TERM --full 7"]


def test_a_job_that_slurm_does_not_tell_is_cancelled(tmp_path: Path, home: Path) -> None:
    for name in ("srun", "scancel"):
        (tmp_path / f"{name}.fails").touch()
    with pytest.raises(subprocess.CalledProcessError):
        Shell(tmp_path, a=[RUNNING]).end("demo-0123abcd", force=False)
    assert said(tmp_path)[1:] == ["scancel --signal=TERM --full 7", "scancel 7"]


def test_a_job_that_is_ending_itself_is_not_told_again(tmp_path: Path, home: Path) -> None:
    (home / ".kimisession" / "demo-0123abcd" / "run" / "ending").mkdir(parents=True)
    Shell(tmp_path, a=[RUNNING]).end("demo-0123abcd", force=False)
    assert said(tmp_path) == []


def test_a_job_that_waits_is_cancelled_at_once(tmp_path: Path, home: Path) -> None:
    Shell(tmp_path, a=[PENDING]).end("demo-0123abcd", force=False)
    assert said(tmp_path) == ["scancel 7"]


def test_a_cluster_that_is_away_does_not_keep_what_runs_on_another(tmp_path: Path, home: Path) -> None:
    for order in (("a", "b"), ("b", "a")):
        place = Shell(tmp_path, **{name: [RUNNING] if name == "a" else None for name in order})
        assert place.desk("demo-0123abcd") is not None
        place.end("demo-0123abcd", force=True)
    assert said(tmp_path) == ["scancel 7", "scancel 7"]
    with pytest.raises(Unconfirmed, match="cannot be reached"):
        Shell(tmp_path, a=[], b=None).end("demo-0123abcd", force=True)
    with pytest.raises(Unconfirmed, match="cannot be reached"):
        Shell(tmp_path, a=[RUNNING], b=None).find()


@pytest.mark.parametrize("comment", ["(null)", "", "charged to a|b", f"{COMMENT},a|b"])
def test_a_job_whose_comment_was_written_anew_is_still_the_sessions(tmp_path: Path, home: Path, comment: str) -> None:
    place = Shell(tmp_path, a=[RUNNING.replace(COMMENT, comment)])
    assert place.look("demo-0123abcd").present
    place.end("demo-0123abcd", force=True)
    assert said(tmp_path) == ["scancel 7"]


class Printing(SlurmPlace):
    """A place with one cluster whose squeue prints this."""

    def __init__(self, tmp_path: Path, queue: str) -> None:
        config = tmp_path / "config"
        config.write_text("Host a\n    User me\n")
        super().__init__(config)
        self.queue = queue

    def login(self, cluster: str) -> Remote:
        return Login(f"true; }}; squeue() {{ printf '%s\\n' {shlex.quote(self.queue)}", [])


def test_the_users_other_jobs_do_not_hide_a_session_whatever_their_comments_are(tmp_path: Path) -> None:
    other = RUNNING.replace(COMMENT, "two | words\nand a second line").replace("demo-0123abcd-5f6e7d8c", "other")
    place = Printing(tmp_path, f"{other}\n{RUNNING.replace('7|', '8|', 1)}")
    assert [resource.id for resource in place.look("demo-0123abcd").resources] == ["slurm/a/8"]
    assert not place.look("other-0123abcd").present


@pytest.mark.parametrize("queue", ["7|RUNNING", "slurm_load_jobs error: Unable to contact slurm controller"])
def test_a_queue_that_is_not_understood_is_no_empty_queue(tmp_path: Path, queue: str) -> None:
    with pytest.raises(Unconfirmed, match="not understood"):
        Printing(tmp_path, queue).look("demo-0123abcd")


def test_what_skypilot_left_of_a_session_goes_and_nothing_of_another(tmp_path: Path, home: Path) -> None:
    kept = ["demo-0123abcd-89abcdef-5f6e7d8c", "demo-0123abcd", "other-0123abcd-5f6e7d8c"]
    for name in (*kept, "demo-0123abcd-5f6e7d8c"):
        (home / ".sky_clusters" / name / "sky_logs").mkdir(parents=True)
    Shell(tmp_path, a=[]).tidy("demo-0123abcd")
    until = time.monotonic() + 10
    while sorted(kept) != sorted(path.name for path in (home / ".sky_clusters").iterdir()):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("target", ["kimisession-demo-0123abcd", "somebody"])
def test_a_job_that_was_killed_leaves_its_story_and_no_secret_and_no_weights(
    tmp_path: Path, home: Path, target: str
) -> None:
    machine = home / ".kimisession" / "demo-0123abcd"
    scratch = tmp_path / "scratch" / target
    for folder in (machine / "lib" / "kimisession", machine / "run", scratch / "model"):
        folder.mkdir(parents=True)
    (machine / "disk").symlink_to(scratch)
    for name in ("api_key", "webhook", "hf_token", "run/journal.jsonl"):
        (machine / name).write_text("told")
    Shell(tmp_path, a=[]).tidy("demo-0123abcd")
    until = time.monotonic() + 10
    while sorted(path.name for path in machine.iterdir()) != ["run"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    while scratch.exists() != (target == "somebody"):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert (machine / "run" / "journal.jsonl").exists()
