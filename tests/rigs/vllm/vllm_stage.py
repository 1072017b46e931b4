"""A stage of the rehearsal whose engine is real vLLM on mini-kimi: the shipped profile with limits of seconds."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from processes import Process, Watch, argv, children, environment, look, wait_until
from stage import Stage, environment_for
from vllm_rig import PYTHON

from kimisession.rehearsal.mini_kimi import make_mini_kimi

API = "vllm.entrypoints.openai.api_server"
PROFILES = Path(__file__).resolve().parents[3] / "kimisession" / "profiles"

#: Limits of every session here, where a cell or a story says nothing else. `silent` and `ready_within` leave room for two
#: cores that three starts of vLLM share.
LIMITS: Mapping[str, str | float] = {
    "idle": "60s",
    "unused": "60s",
    "duration": "5m",
    "longest": "10m",
    "ready_within": "3m",
    "coldstart_stall": "90s",
    "stall": "5s",
    "unknown": "5s",
    "warn": "1s",
    "silent": "8s",
    "stop_grace": "3s",
    "tick": 0.1,
    "scrape": 0.25,
}

#: Long enough for a stream that outlives every hit: some 8,000 tokens at 200 to 300 a second.
CONTEXT = 8192


def profile(limits: Mapping[str, str | float], flags: Mapping[str, str | int]) -> str:
    """The shipped profile of the rehearsal on real vLLM, called `cell`, with these limits and flags."""
    text = (PROFILES / "rehearsal-vllm.toml").read_text(encoding="utf-8").partition("[limits]")[0]
    text = text.replace('name = "rehearsal-vllm"', 'name = "cell"')
    for name, value in flags.items():
        lines = [f"{name} = {json.dumps(value)}" if line.startswith(f"{name} =") else line for line in text.split("\n")]
        text = "\n".join(lines)
    return text + "[limits]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in limits.items()) + "\n"


def seeded_mini_kimi(root: Path) -> str:
    """Seed mini-kimi once; every stage pulls from it. Returns the bucket's URL."""
    make_mini_kimi(root / "model")
    profiles = root / "config" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "cell.toml").write_text(profile(LIMITS, {}), encoding="utf-8")
    url = f"file://{root}/bucket"
    words = ["seed", "cell", "--from", str(root / "model"), "--bucket", url]
    command = [sys.executable, "-m", "kimisession", *words]
    subprocess.run(command, env=environment_for(root), check=True, capture_output=True, cwd=root)
    return url


class VllmStage(Stage):
    """A session of its own on real vLLM. `fresh_cache` gives vLLM an empty cache, as a machine has that was just rented;
    the others share the user's."""

    def __init__(
        self,
        watch: Watch,
        bucket: str,
        *,
        limits: Mapping[str, str | float] | None = None,
        flags: Mapping[str, str | int] | None = None,
        fresh_cache: bool = False,
    ) -> None:
        super().__init__(watch, bucket)
        text = profile({**LIMITS, **(limits or {})}, {"max-model-len": CONTEXT, **(flags or {})})
        (self.root / "config" / "profiles" / "cell.toml").write_text(text, encoding="utf-8")
        self.tmp = self.root / "tmp"
        self.tmp.mkdir()
        self.env |= {"KIMISESSION_ENGINE_PYTHON": str(PYTHON), "TMPDIR": str(self.tmp)}
        if fresh_cache:
            self.env["VLLM_CACHE_ROOT"] = str(self.root / "cache")

    # -- processes -----------------------------------------------------------------------------------------------------

    def process(self, role: str) -> Process | None:
        """`api` is vLLM's API server, `core` its EngineCore; the others as on every stage."""
        if role not in ("api", "core"):
            return super().process(role)
        api = look(self.engine_pid())
        if (
            api is None
            or API not in argv(api.pid)
            or f"REHEARSAL_STAGE={self.mark}".encode() not in environment(api.pid)
        ):
            return None
        if role == "api":
            return api
        return next((p for pid in children(api.pid) if _is_core(argv(pid)) and (p := look(pid))), None)

    def engine_pid(self) -> int:
        """What the keeper wrote down as the engine's pid; 0 while there is none."""
        try:
            return int((self.machine / "run" / "pid.engine").read_text().partition(":")[0])
        except (OSError, ValueError, AssertionError):
            return 0

    def litter(self) -> list[str]:
        """What is left in TMPDIR, which is empty but for the lock of the port's promise."""
        return sorted(path.name for path in self.tmp.iterdir() if not path.name.startswith("kimisession-port-"))

    # -- what is seen --------------------------------------------------------------------------------------------------

    def engine_log(self) -> str:
        """The engine's log so far."""
        try:
            return (self.machine / "run" / "engine.log").read_text(errors="replace")
        except (OSError, AssertionError):
            return ""

    def beats(self, since: float = 0.0) -> list[dict[str, Any]]:
        """The keeper's heartbeats since a moment of the wall clock, oldest first."""
        return [line for line in self.journal() if line["kind"] == "beat" and moment(line) >= since]

    def reason(self) -> str:
        """Why it ended, as a fresh `status --all` says; `live` while it has not."""
        row = self.ask("status", "--all")[0]
        return str(row["reason"] or "live") if row["state"] == "gone" else "live"

    def start_ready(self, *more: str) -> None:
        """`kimisession start`, until it is ready and the keeper has seen that nobody asks."""
        started = self.start(*more)
        assert started.wait(180) == 0, self.told(started)
        assert self.wait_ready(10), "ready, but never quiet"

    # -- a client ------------------------------------------------------------------------------------------------------

    def post(self, **options: Any) -> http.client.HTTPConnection:
        """A chat completion, sent; nothing is read yet."""
        key = (self.root / "state" / "keys" / self.machine.name).read_text()
        body = {"model": "mini-kimi", "messages": [{"role": "user", "content": "Go on."}], **options}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection

    def stream(self, max_tokens: int) -> http.client.HTTPConnection:
        """A stream of exactly so many tokens, sent; nothing is read yet."""
        usage = {"include_usage": True}
        return self.post(stream=True, stream_options=usage, max_tokens=max_tokens, ignore_eos=True)

    def keep_asking(self) -> None:
        """One stream that lasts until everything is over; held until `hang_up`."""
        self.request = self.stream(CONTEXT - 200)


def _is_core(words: tuple[str, ...]) -> bool:
    # Its title once it runs; before that, while it imports, what multiprocessing's spawn calls it.
    return bool(words) and (words[0].startswith("VLLM::EngineCor") or "--multiprocessing-fork" in words)


def moment(line: Mapping[str, Any]) -> float:
    """A journal line's moment, in seconds of the wall clock."""
    return datetime.fromisoformat(line["at"]).timestamp()


@contextmanager
def staged(stage: VllmStage) -> Iterator[VllmStage]:
    """The stage, closed afterwards whatever happened."""
    try:
        yield stage
    finally:
        stage.close()


def nothing_left(stage: VllmStage, within_s: float = 10) -> None:
    """No process of the session runs any more, and TMPDIR is empty."""
    gone = wait_until(lambda: stage.nothing_runs(time.time() - 1) is not None, within_s)
    assert gone, [" ".join(sighting.argv)[:80] for sighting in stage.watch.living(stage.mark)]
    assert not stage.litter()
