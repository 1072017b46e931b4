"""Whole sessions on a machine with several GPUs: real vLLM, Kimi K2.5's full dimensions, dummy weights, no download.

    python benchmarks/eight_gpus.py predict                 # the planner's figures, on any machine, before the run
    python benchmarks/eight_gpus.py run tp dcp ...          # on the machine with the GPUs; vLLM 0.26.0 on torch 2.11
    python benchmarks/eight_gpus.py kill engine keeper      # kill -9 with all workers alive

Options: --gpus H200:8  --layers 61  --engine-python python3  --out FOLDER (a JSON file a run, and the engine's log)  --rest S
--rank-of N (one GPU holds and computes what each of N would: full depth, no all-reduces).
Each run is a session of the local engine, played with kimisession's own commands in a ledger of its own: start, bench at 1,
2, 16 and 64 at once, stop (`idle` instead: nobody asks, and it ends by itself), receipt. Reported beside it: what this
program's own clock, nvidia-smi and the server's own histograms saw (time to the first token from the server, because a
dummy's first tokens are often no text). `--rest` keeps a session that long before its stop, so that the keeper's load is
one of ten minutes. notes/eight-gpus.md holds the results.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from kimisession.core.plan.fit import predict
from kimisession.core.plan.gpus import gpu_named
from kimisession.core.plan.setup import Setup
from kimisession.model_file import card_from_folder
from kimisession.rehearsal.dummy_kimi import make_dummy_kimi

#: Each run changes one setting of the profile kimi-k2.5-dummy; N is the number of GPUs.
RUNS: dict[str, dict[str, str]] = {
    "tp": {},
    "dcp": {"decode-context-parallel-size": "N"},
    "fp8-kv": {"kv-cache-dtype": "fp8"},
    "ep": {"enable-expert-parallel": "true"},
    "h100-64k": {"gpu-memory-utilization": "0.538", "decode-context-parallel-size": "N"},
    "eager": {"enforce-eager": "true"},
    "dcp-eager": {"decode-context-parallel-size": "N", "enforce-eager": "true"},
    "idle": {},
}
AT_ONCE = (1, 2, 16, 64)

#: A GPU without a process that nvidia-smi counts less for is taken for free.
FREE_MIB = 2000

#: The server's own histograms, whose mean over a while is the difference of `_sum` over that of `_count`.
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds")


def main() -> int:
    """Dispatch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "run", "kill"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--gpus", default="H200:8")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--rank-of", type=int, default=1, help="one GPU's share of so many")
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--out", type=Path, default=Path("eight-gpus"))
    parser.add_argument("--port", default="")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds to leave a session alone before its stop")
    parser.add_argument("--set", action="append", default=[], help="an engine flag for every run")
    args = parser.parse_args()
    if args.what == "predict":
        return predictions(args.gpus, args.layers, args.rank_of)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in args.names:
        stage = Stage(args)
        try:
            report = stage.play(name) if args.what == "run" else stage.kill(name)
        finally:
            stage.clean(name)
        (args.out / f"{args.what}-{name}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        print(json.dumps(report), flush=True)
        failed += bool(report.get("failed") or report.get("left"))
    return 1 if failed else 0


def setup_of(run: dict[str, str], tp: int) -> Setup:
    """A run as the planner wants it told. The dummy has no vision tower, as `--language-model-only` has none."""
    return Setup(
        engine_version="0.26.0",
        tp=tp,
        dcp=tp if "decode-context-parallel-size" in run else 1,
        ep="enable-expert-parallel" in run,
        utilisation=float(run.get("gpu-memory-utilization", 0.90)),
        max_model_len=65536,
        max_num_seqs=64,
        kv_dtype=run.get("kv-cache-dtype", "auto"),
        eager="enforce-eager" in run,
        vision="text-only",
    )


def predictions(gpus: str, layers: int, rank_of: int) -> int:
    """Weights, KV cache and tokens that the planner expects, with intervals."""
    name, _, count = gpus.partition(":")
    gpu = gpu_named(name)
    if gpu is None:
        print(f"the planner does not know the GPU {name!r}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        make_dummy_kimi(Path(folder), layers, rank_of)
        card = card_from_folder(Path(folder))
    print(f"{'run':<10}{'weights GiB':>20}{'KV GiB':>24}{'KV tokens':>34}  verdict")
    for title, run in RUNS.items():
        fit = predict(card, gpu, setup_of(run, int(count)))
        weights, kv, tokens = fit.weights_gib_per_gpu, fit.kv_gib_per_gpu, fit.kv_tokens
        print(
            f"{title:<10}{weights.value:>8.2f} [{weights.low:.2f}-{weights.high:.2f}]"
            f"{kv.value:>9.2f} [{kv.low:.2f}-{kv.high:.2f}]"
            f"{tokens.value:>14,.0f} [{tokens.low:,.0f}-{tokens.high:,.0f}]  {fit.verdict}"
        )
    return 0


def gpu_use() -> dict[str, Any]:
    """What nvidia-smi says: MiB in use a GPU, and the processes that hold any."""

    def ask(query: str) -> list[str]:
        argv = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]

    return {"mib": [int(v) for v in ask("gpu=memory.used") if v.isdigit()], "processes": len(ask("compute-apps=pid"))}


class Stage:
    """One session in a ledger of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.url = ""
        self.home = Path(tempfile.mkdtemp(prefix="kimisession-eight-"))
        self.env = {**os.environ, "KIMISESSION_STATE_HOME": str(self.home), "KIMISESSION_DATA_HOME": str(self.home)}

    def command(self, *words: str) -> tuple[int, Any, str]:
        """Exit code, the data of its JSON, and what it said."""
        argv = [sys.executable, "-m", "kimisession", *words]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return done.returncode, json.loads(lines[-1])["data"] if lines else None, done.stderr[-2000:]

    @property
    def run_folder(self) -> Path:
        """The machine's run folder."""
        return next(self.home.glob("machines/*/run"))

    def journal(self) -> list[dict[str, Any]]:
        """What the machine wrote."""
        text = (self.run_folder / "journal.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def start(self, name: str) -> dict[str, Any]:
        """Seed, start, and what came of it."""
        args = self.args
        model = self.home / "model"
        argv = [
            sys.executable,
            "-m",
            "kimisession.rehearsal.dummy_kimi",
            str(model),
            str(args.layers),
            str(args.rank_of),
        ]
        subprocess.run(argv, env=self.env, check=True, stdout=subprocess.DEVNULL)
        code, _, said = self.command("seed", "kimi-k2.5-dummy", "--from", str(model), "--json")
        if code:
            return {"run": name, "failed": said}
        count = args.gpus.partition(":")[2]
        sets = [f"{k}={count if v == 'N' else v}" for k, v in RUNS.get(name, {}).items()] + args.set
        sets.append(f"tensor-parallel-size={count}")
        options = [part for text in sets for part in ("--set", text)]
        before = gpu_use()
        began = time.time()
        code, session, said = self.command(
            *(
                "start",
                "kimi-k2.5-dummy",
                "--name",
                "eight",
                "--gpus",
                args.gpus,
                "--engine-python",
                args.engine_python,
            ),
            *("--idle", "30s" if name == "idle" else "10m", "-y", "--json", *options),
            *(("--port", args.port) if args.port else ()),
        )
        journal = self.journal() if code != 2 else []
        return {
            "run": name,
            "flags": sets,
            "gpus": args.gpus,
            "layers": args.layers,
            "rank_of": args.rank_of,
            "began": began,
            "ready_after_s": round(time.time() - began, 1) if code == 0 else None,
            "phases_s": {x["phase"]: x["took_s"] for x in journal if x["kind"] == "phase" and "took_s" in x},
            "facts": {x["name"]: x["value"] for x in journal if x["kind"] == "fact"},
            "gpu_before": before,
            "gpu_ready": gpu_use(),
            "session": session,
            **({"failed": said} if code else {}),
        }

    def play(self, name: str) -> dict[str, Any]:
        """A whole session."""
        preflight = self.preflight()
        report = {"preflight": preflight, **self.start(name)}
        if "failed" in report:
            return report
        code, answer, said = self.command("test", "eight", "--json")
        report["test"] = answer if code in (0, 6) else said  # 6: it answered, and noise is no good answer
        self.url = str(self.command("connect", "eight", "--json")[1]["base_url"]).removesuffix("/v1")
        report["bench"] = {str(count): self.bench(count) for count in AT_ONCE}
        report["gpu_after_bench"] = gpu_use()
        report["scrape_ms"] = self.scrape_ms()
        time.sleep(self.args.rest)
        report["keeper"] = self.keeper()
        if name == "idle":
            self.command("status", "eight", "--watch", "--json")
        code, receipt, said = self.command("stop", "eight", "--json")
        return {**report, **self.ending(report["began"], receipt if code == 0 else said)}

    def bench(self, at_once: int) -> Any:
        """Bench at one concurrency, and the means of the server's own histograms over it."""
        before = self.metrics()
        code, bench, said = self.command("bench", "eight", "--rounds", "2", "--concurrent", str(at_once), "--json")
        after = self.metrics()
        means = {}
        for name in HISTOGRAMS:
            count = after.get(f"{name}_count", 0.0) - before.get(f"{name}_count", 0.0)
            total = after.get(f"{name}_sum", 0.0) - before.get(f"{name}_sum", 0.0)
            means[name] = {"mean_s": round(total / count, 5) if count else None, "of": int(count)}
        return {"bench": bench if code == 0 else said, "server": means}

    def scrape(self) -> bytes:
        """The server's metrics, as the keeper asks for them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return bytes(answer.read())

    def metrics(self) -> dict[str, float]:
        """Sums over all labels of the server's metrics, by name without `vllm:`."""
        found: dict[str, float] = {}
        for line in self.scrape().decode().splitlines():
            if line.startswith("vllm:"):
                name = line[5:].partition("{")[0].partition(" ")[0]
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return found

    def scrape_ms(self) -> dict[str, float]:
        """What one look at the metrics takes: milliseconds, the median and the longest of 20, and its size."""
        took, size = [], 0
        for _ in range(20):
            began = time.perf_counter()
            size = len(self.scrape())
            took.append(1000 * (time.perf_counter() - began))
        return {"median": round(sorted(took)[10], 2), "longest": round(max(took), 2), "bytes": size}

    def preflight(self) -> dict[str, Any]:
        """The check that a rented machine makes before its weights: driver, PTX, free memory, an all-gather over all GPUs."""
        count = self.args.gpus.partition(":")[2]
        argv = [sys.executable, "-m", "kimisession.node.preflight", "--gpus", count]
        began = time.time()
        done = subprocess.run(
            [*argv, "--engine-python", self.args.engine_python],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        return {"rc": done.returncode, "took_s": round(time.time() - began, 1), "said": done.stdout[-1500:]}

    def kill(self, victim: str) -> dict[str, Any]:
        """kill -9 of one process with all workers alive; how long until nothing is left."""
        report = self.start("eager")
        if "failed" in report:
            return report
        pid = int((self.run_folder / f"pid.{victim}").read_text().partition(":")[0])
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        while time.time() - killed < 120 and (gpu_use()["processes"] or max(gpu_use()["mib"], default=0) > FREE_MIB):
            time.sleep(0.2)
        report["victim"], report["gone_after_s"] = victim, round(time.time() - killed, 1)
        _, receipt, _ = self.command("cost", "eight", "--json")
        return {**report, **self.ending(report["began"], receipt)}

    def keeper(self) -> dict[str, Any]:
        """CPU share and resident memory of the keeper so far."""
        pid = int((self.run_folder / "pid.keeper").read_text().partition(":")[0])
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = os.sysconf("SC_CLK_TCK")
        up = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / ticks
        rss = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
        cpu = (int(fields[11]) + int(fields[12])) / ticks
        rss_mib = round(int(rss.split()[1]) / 1024, 1)
        return {"cpu_percent_of_a_core": round(100 * cpu / up, 3), "rss_mib": rss_mib, "over_s": round(up)}

    def ending(self, began: float, receipt: Any) -> dict[str, Any]:
        """The receipt beside this program's clock, and what is left."""
        mine = [p for p in Path("/proc").glob("[0-9]*/environ") if self.marked(p)]
        clock_s, at_once = round(time.time() - began, 1), gpu_use()
        ended = time.time()  # the driver gives memory back a moment after the last process is gone
        while time.time() - ended < 30 and max(gpu_use()["mib"], default=0) > FREE_MIB:
            time.sleep(0.2)
        return {
            "clock_s": clock_s,
            "receipt": receipt,
            "left": len(mine),
            "gpu_end": at_once,
            "gpu_free_after_s": round(time.time() - ended, 1),
            "gpu_free": gpu_use(),
        }

    def marked(self, environ: Path) -> bool:
        """Whether a process belongs to this stage's machine."""
        try:
            return b"KIMISESSION_MACHINE=eight-" in environ.read_bytes()
        except OSError:
            return False

    def clean(self, name: str) -> None:
        """Stop what is left, keep logs, remove the folder."""
        self.command("stop", "--all")
        for log in self.home.glob("machines/*/run/engine*.log"):
            text = log.read_bytes()[-3_000_000:]
            (self.args.out / f"{name}-{log.name}").write_bytes(text)
        shutil.rmtree(self.home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
