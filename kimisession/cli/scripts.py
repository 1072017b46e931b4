"""`kimisession plan --from serve.sh`: a script that serves a model becomes a profile; its refused flags are named."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from kimisession.cli import show
from kimisession.cli.planning import PlanOptions, as_data, card_of, checked, make_plan, refuse_idle_ram
from kimisession.core.catalog import parse_accelerators
from kimisession.core.launch import check_name
from kimisession.core.plan.flags import FlagTable, Refused, check_flags
from kimisession.core.plan.from_flags import setup_of
from kimisession.core.plan.models import ModelCard
from kimisession.core.plan.resident import disk_figure
from kimisession.core.plan.serve_script import NoServeCommand, ServeScript, parse_script
from kimisession.core.plan.setup import GIB
from kimisession.core.profile import FlagValue
from kimisession.errors import UsageMistake
from kimisession.flag_file import known_flags
from kimisession.model_file import all_cards
from kimisession.profile_file import profile_from_text

#: What a script is checked against when neither it nor the user says which version it is for.
NEWEST_VLLM, NEWEST_SGLANG = "0.33.0", "kt-0.7.2"
_DAY_HOURS = 24


def run_script(path: Path, version: str | None, options: PlanOptions) -> None:
    """Print the script's command as a profile (standard output), and on standard error what of it the engine refuses,
    what to write instead, and whether the rest fits."""
    script, table, guessed = _read(path, version)
    refused = check_flags(table, script.flags) if table else ()
    kept = {name: value for name, value in script.flags.items() if not _is_refused(name, refused)}
    text = profile_text(_name(path), script, table.version if table else "", kept, refused, options.gpus)
    plan = make_plan(profile_from_text(text, str(path)), options)
    refuse_idle_ram([plan], options)
    engine = f"{script.kind} {table.version if table else script.version}"
    if options.json:
        found = [{"flag": r.flag, "why": r.why, "replacement": r.replacement} for r in refused]
        show.as_json("script", {"engine": engine, "refused_flags": found, "profile_toml": text, "plan": as_data(plan)})
        return
    if guessed:
        show.say(f"the script pins no version: read as {engine}; --engine-version says otherwise")
    for refusal in refused:
        show.say(f"{show.paint('refused', 'bad', sys.stderr)} by {engine}: {refusal}")
    if script.secrets:
        show.say(f"left out: {', '.join(script.secrets)}: no profile may hold a secret")
    show.say(f"the rest: {plan.answer}: {plan.reason}")
    show.out(text.rstrip("\n"))
    show.next_step(
        f"kimisession plan --from {shlex.quote(str(path))} > {_name(path)}.toml, and kimisession plan {_name(path)}.toml"
    )


def _read(path: Path, version: str | None) -> tuple[ServeScript, FlagTable | None, bool]:
    """The script, read with its engine's table, and whether the version had to be guessed."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageMistake(f"--from: {path}: {error.strerror}", "name a shell script") from None
    except UnicodeDecodeError:
        raise UsageMistake(f"--from: {path} is no text", "name a shell script") from None
    try:
        first = parse_script(text)
        newest = NEWEST_VLLM if first.kind == "vllm" else NEWEST_SGLANG
        table = known_flags(first.kind, version or first.version or newest)
        return parse_script(text, table), table, not (version or first.version)
    except NoServeCommand as error:
        raise UsageMistake(f"--from: {path} has {error}", "name a script that serves a model") from None


def _is_refused(name: str, refused: tuple[Refused, ...]) -> bool:
    return any(refusal.flag.split()[0] == f"--{name}" for refusal in refused)


def _name(path: Path) -> str:
    """A profile's name out of the script's."""
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:31].strip("-")
    try:
        return check_name(name)
    except ValueError:
        return "from-script"


def profile_text(
    name: str,
    script: ServeScript,
    version: str,
    flags: dict[str, FlagValue],
    refused: tuple[Refused, ...],
    gpus: str | None,
) -> str:
    """The profile as TOML. What the script does not say is a comment or a value that says so."""
    card = _card(script.model)
    count = checked(lambda: setup_of(version, flags, script.env).n_gpus, "--from") if script.kind == "vllm" else 1
    count = int(script.sbatch.get("gpus-per-node", "0").rpartition(":")[2] or 0) or count
    accelerators = gpus or f"H100:{count}"
    architecture = checked(lambda: parse_accelerators(accelerators), "--gpus")[0].architecture
    size = int(disk_figure(card).value * GIB) if card else 0
    context = flags.get("max-model-len", flags.get("context-length", card.max_context if card else 0))
    command = {
        "vllm": ["@{engine_python}", "-m", "vllm.entrypoints.openai.api_server"],
        "sglang": ["@{engine_python}", "-m", "sglang.launch_server"],
    }[script.kind]
    hours = _hours(script.sbatch.get("time", ""))
    lines = [
        f"# Read out of a script by `kimisession plan --from`. The script says {_shown(script.model)} for the model.",
        *([] if gpus else ["# The script does not say which GPUs: H100 is a guess, --gpus H200:8 says otherwise."]),
        *(f"# refused by {script.kind} {version}: {refusal}" for refusal in refused),
        *([f"# left out, for no profile may hold a secret: {', '.join(script.secrets)}"] if script.secrets else []),
        f"name = {toml_value(name)}",
        f"summary = {toml_value(f'{script.served_name or name}, read out of a script')}",
        'status = "rendered, never run"',
        f"load = {toml_value('in-place' if script.model.startswith('/') else 'copy')}",
        "",
        "[model]",
        f"served_name = {toml_value(script.served_name or (card.name.rpartition('/')[2].lower() if card else name))}",
        "",
        "[engine]",
        f"kind = {toml_value(script.kind)}",
        f"version = {toml_value(version or script.version or 'not stated')}",
        f"command = {toml_value(command)}",
        "",
        "[engine.flags]",
        *(f"{toml_key(flag)} = {toml_value(value)}" for flag, value in flags.items()),
        *(
            ["", "[engine.env]", *(f"{key} = {toml_value(value)}" for key, value in script.env.items())]
            if script.env
            else []
        ),
        "",
        "[hardware]",
        f"accelerators = {toml_value([accelerators])}",
        f"infra = {toml_value('slurm' if script.sbatch else 'gcp')}",
        *(_slurm(script) if script.sbatch else ["", "[stack]", 'gib = "remove"']),
        "",
        "[[checkpoints]]",
        'name = "native"',
        f"repo = {toml_value(card.name if card else script.model)}",
        f"bytes = {size}" + ("" if card else "  # not known: there is no card of this model"),
        f"architectures = {toml_value([architecture])}",
        f"context = {context if str(context).isdigit() else 0}",
        "",
        "[price]",
        "usd_per_hour = 0",
        'ground = "the script states no price; write what your site bills"',
        *(["", "[limits]", f'duration = "{hours}h"', f'longest = "{hours}h"'] if hours else []),
    ]
    return "\n".join(lines) + "\n"


def _card(model: str) -> ModelCard | None:
    """The card of a repository, or of a folder that is named like one."""
    stem = Path(model).name.lower()
    for card in all_cards():
        names = [card.name, *card.aliases]
        if model in names or stem in [name.rpartition("/")[2].lower() for name in names]:
            return card
    return card_of(model)


def _hours(text: str) -> int:
    """Whole hours of Slurm's --time (`24:00:00`, `1-12:00:00`, minutes alone), at least 1; 0 where there is none."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not text or not all(part.isdigit() for part in [*parts, *([days] if days else [])]):
        return 0
    hours = int(parts[0]) if len(parts) == 3 or days else -(-int(parts[0]) // 60)
    return max(1, hours + _DAY_HOURS * int(days or 0))


def _slurm(script: ServeScript) -> list[str]:
    told = script.sbatch
    if not told:
        return []
    rows: dict[str, Any] = {
        "partition": told.get("partition", ""),
        "account": told.get("account", ""),
        "qos": told.get("qos", ""),
        "modules": list(script.modules),
        "conda": script.variables.get("VIRTUAL_ENV", ""),
        "cpus": int(told["cpus-per-task"]) if told.get("cpus-per-task", "").isdigit() else 0,
        "memory_gib": int(told["mem"][:-1]) if re.fullmatch(r"\d+G", told.get("mem", "")) else 0,
    }
    kept = {key: value for key, value in rows.items() if value}
    return ["", "[slurm]", *(f"{key} = {toml_value(value)}" for key, value in kept.items())] if kept else []


def _shown(text: str) -> str:
    return text or "nothing"


def toml_key(text: str) -> str:
    """A TOML key; `--a.b` of the command line is one key, not two."""
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else json.dumps(text)


def toml_value(value: Any) -> str:
    """A TOML value: strings, numbers, switches, lists, and tables in one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml_value(of)}" for key, of in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return json.dumps(value)
