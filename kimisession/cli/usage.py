"""What the option parser complains of, as one sentence and a next step."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kimisession.errors import UsageMistake

#: The parser's words and ours. What is not listed is said as the parser says it.
_WORDS: tuple[tuple[str, str], ...] = (
    (r"^Invalid value for '?(?:-\w, )?(--?[\w-]+)[^:]*: ", r"\1: "),
    (r"^Invalid value for '(\w+)': ", r"\1: "),
    (r"^Invalid value: ", ""),
    (r"Value error, ", ""),
    (r"[Ii]nput should be a valid integer.*", "that is not a whole number"),
    (r"[Ii]nput should be (greater|less) than or equal to (\d+)", r"it must be \2 or \1"),
    (r"\bor greater$", "or more"),
    (r"^No such option: (\S+)", r"there is no option \1"),
    (r"^No such command ", "there is no command "),
    (r" \(Possible options: ([^)]*)\)", r", did you mean \1?"),
    (r"\. Did you mean (.*)\?$", r", did you mean \1?"),
    (r"^Missing (argument|option) '(\w+)'", r"the \1 \2 is missing"),
    (r"^Option '([^']*)' requires an argument", r"\1 needs a value"),
    (r"^Option '([^']*)' requires (\d+) arguments", r"\1 needs \2 values"),
    (r"^Got unexpected extra arguments?(?:\(s\))? \((.*)\)", r"one word too many: \1"),
)


def usage_sentence(error: Any, words: Sequence[str]) -> tuple[str, str]:
    """(sentence, hint) of a usage error of the parser about these words."""
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    for pattern, ours in _WORDS:
        text = re.sub(pattern, ours, text)
    command = next((word for word in words if word.isalpha()), "")
    path = error.ctx.command_path if getattr(error, "ctx", None) else f"kimisession {command}".rstrip()
    if path.endswith(" extend") and re.match(r"there is no option -\d", text):
        return "a hard cap is only ever moved on", "for example kimisession extend 20m"
    misplaced = re.search(r"^there is no option (-q|--quiet|--no-color|--debug|--version)$", text.partition(",")[0])
    if misplaced:
        return f"{misplaced[1]} goes before the command", f"kimisession {misplaced[1]} {command}".rstrip()
    return text, f"{path} --help"


def only_one(words: Mapping[str, object]) -> None:
    """Refuse options of which one would silently win: at most one of `words` may have a value. Raises UsageMistake."""
    typed = [word for word, value in words.items() if value]
    if len(typed) > 1:
        raise UsageMistake(f"{typed[0]} and {typed[1]} do not go together", "leave one of the two out")
