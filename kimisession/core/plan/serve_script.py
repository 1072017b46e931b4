"""A shell script that serves a model, read as data: its command, variables, environment and what Slurm is told.

Nothing is run. Variables that the script sets are put in; others stay as they are written (`$SLURM_JOB_ACCOUNT`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kimisession.core.plan.flags import FlagTable, KnownFlag, find
from kimisession.core.profile import FlagValue

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_OPERATORS = frozenset({"&&", "||", ";", "|", "&", ";;", "(", ")", ">", ">>", "<", "2>", "2>&1", "&>", ">&"})
_MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.launchers.api_server.entry": "vllm",
    "sglang.launch_server": "sglang",
}
_SBATCH = re.compile(r"#SBATCH\s+(?:--?)([A-Za-z-]+)(?:[=\s]+(\S+))?")
_SHORT = {"p": "partition", "A": "account", "q": "qos", "t": "time", "c": "cpus-per-task", "J": "job-name"}
_ALIASES = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-q": "quantization",
    "-sc": "speculative-config",
}
#: Ours to decide: where the endpoint listens, with which key, under which name.
OURS = frozenset({"host", "port", "api-key", "served-model-name", "model", "model-path"})
_SECRET = re.compile(r"(?i)(?:^|[-_])(?:key|token|password|secret)$")


class NoServeCommand(ValueError):
    """The script starts no server that is known here; the message says what was looked for."""


@dataclass(frozen=True, slots=True)
class ServeScript:
    """What the script says. `version` is the engine's where the script installs one; flags are without dashes."""

    kind: Literal["vllm", "sglang"]
    version: str
    model: str
    served_name: str
    flags: Mapping[str, FlagValue]
    env: Mapping[str, str] = field(default_factory=dict)
    sbatch: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Names of flags and variables that hold a secret; their values are in none of the other fields but `variables`."""


def parse_script(text: str, table: FlagTable | None = None) -> ServeScript:
    """Read a script. With the engine's `table` it is known which flags take values; without, a word that does not
    begin with a dash belongs to the flag before it. Raises NoServeCommand."""
    variables: dict[str, str] = {}
    exported: set[str] = set()
    modules: list[str] = []
    version = ""
    command: tuple[str, list[str]] | None = None
    for written in _commands(text):
        words = _assign(written, variables, exported)
        if not words:
            continue
        version = _installed(words) or version
        if words[:2] == ["module", "load"]:
            modules += words[2:]
        command = command or _serving(words)
    if command is None:
        raise NoServeCommand(
            "no `vllm serve`, `python -m vllm.entrypoints.openai.api_server` or `sglang.launch_server`"
        )
    kind, rest = command
    model, flags = _flags(rest, table)
    served = flags.get("served-model-name")
    told = [name for name in sorted(exported) if re.match(r"(VLLM|SGLANG|NCCL|HF)_", name)]
    secrets = (*(f"--{name}" for name in flags if is_secret(name, table)), *(name for name in told if is_secret(name)))
    env = {name: variables[name] for name in told if name not in secrets}
    return ServeScript(
        kind="vllm" if kind == "vllm" else "sglang",
        version=version,
        model=model or str(flags.get("model", flags.get("model-path", ""))),
        served_name=str(served) if served else "",
        flags={name: value for name, value in flags.items() if name not in OURS and f"--{name}" not in secrets},
        env=env,
        sbatch=_sbatch(text),
        modules=tuple(modules),
        variables=variables,
        secrets=secrets,
    )


def is_secret(name: str, table: FlagTable | None = None) -> bool:
    """Whether a flag (by any spelling that `table` knows) or a variable holds what nobody may print, by its name."""
    known = find(table, name) if table else None
    return any(_SECRET.search(one) for one in (name, known.name if known else ""))


def _commands(text: str) -> Iterator[list[str]]:
    """The script's simple commands as words, with quotes taken away. A continued line, or a quote over several, is one;
    what cannot be read as shell words (a here-document's inside) is passed over."""
    # A backslash before a blank continues as well: guides are often pasted with their line ends lost.
    joined = re.sub(r"\\(?:[ \t]*\n[ \t]*|[ \t]+)", " ", text)
    buffer = ""
    for line in joined.splitlines():
        if not buffer and line.lstrip().startswith("#"):
            continue
        buffer = f"{buffer}\n{line}" if buffer else line
        try:
            lexer = shlex.shlex(buffer, posix=True, punctuation_chars=";&|()<>")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:
            if buffer.count("\n") > 40:
                buffer = ""
            continue
        buffer = ""
        yield from _split(words)


def _split(words: Sequence[str]) -> Iterator[list[str]]:
    one: list[str] = []
    for word in words:
        if word in _OPERATORS:
            if one:
                yield one
            one = []
        else:
            one.append(word)
    if one:
        yield one


def _assign(words: list[str], variables: dict[str, str], exported: set[str]) -> list[str]:
    """Take assignments off the front (with `export` too) and put known variables into the rest."""
    rest = [word for word in words if word not in ("{", "}", "then", "else", "do", "fi", "done")]
    exporting = rest[:1] == ["export"]
    rest = rest[1:] if exporting else rest
    while rest and (found := _ASSIGNED.fullmatch(rest[0])):
        variables[found[1]] = _filled(found[2], variables)
        if exporting or len(rest) > 1:
            exported.add(found[1])
        rest = rest[1:]
    return [] if exporting else [_filled(word, variables) for word in rest]


def _filled(word: str, variables: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return variables.get(name, found[2] if found[2] is not None else found[0])

    return _VARIABLE.sub(value, word)


def _installed(words: Sequence[str]) -> str:
    """The version in `pip install vllm==0.19.1`, or nothing."""
    if "install" not in words:
        return ""
    found = [m for m in (re.fullmatch(r"(?:vllm|sglang)(?:\[[^\]]*\])?==([\w.]+)", word) for word in words) if m]
    return found[0][1] if found else ""


def _serving(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """(engine, the words after the command) if these words start a server, whatever wraps it (srun, nohup, exec)."""
    for i, word in enumerate(words):
        after = list(words[i + 1 :])
        if word.rpartition("/")[2] == "vllm" and after[:1] == ["serve"]:
            return "vllm", after[1:]
        if word == "-m" and after and after[0] in _MODULES:
            return _MODULES[after[0]], after[1:]
    return None


def _flags(words: Sequence[str], table: FlagTable | None) -> tuple[str, dict[str, FlagValue]]:
    """(the model that stands alone, the flags)."""
    model = ""
    flags: dict[str, FlagValue] = {}
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not word.startswith("-"):
            model = model or word
            continue
        name, equals, inline = word.partition("=")
        name = _ALIASES.get(name, name.lstrip("-").replace("_", "-"))
        known = find(table, name) if table else None
        if equals:
            flags[name] = _typed(inline, known)
        elif (known is None or known.takes != "switch") and i < len(words) and _is_value(words[i]):
            flags[name] = _typed(words[i], known)
            i += 1
            while known is not None and known.takes == "many" and i < len(words) and _is_value(words[i]):
                flags[name] = f"{flags[name]} {words[i]}"  # a list of words; the check of flags will say so
                i += 1
        else:
            flags[name] = True
    return model, flags


def _is_value(word: str) -> bool:
    return not word.startswith("-") or re.fullmatch(r"-\d+(\.\d+)?", word) is not None


def _typed(text: str, known: KnownFlag | None) -> FlagValue:
    """Text as a profile would have it: numbers as numbers, JSON objects as tables."""
    if text.startswith("{"):
        try:
            loaded = json.loads(text)
        except ValueError:
            return text
        flat = all(isinstance(value, int | float | str | bool) for value in loaded.values())
        return loaded if flat else text
    if known is not None and known.type == "str":
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _sbatch(text: str) -> dict[str, str]:
    """`#SBATCH --name=value` lines, long names."""
    found: dict[str, str] = {}
    for name, value in _SBATCH.findall(text):
        found[_SHORT.get(name, name)] = value
    return found
