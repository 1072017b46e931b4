"""`kimisession help TOPIC`: what belongs to no single command, each on less than a screen."""

import difflib
import sys

from kimisession.cli import show
from kimisession.errors import UsageMistake

TOPICS: dict[str, tuple[str, str]] = {
    "exit-codes": (
        "what a command's exit code says",
        """\
  0    ok
  1    error
  2    usage: what was typed, a profile or a setting cannot be meant
  3    no capacity or quota where you asked
  4    the budget does not allow it
  5    it does not fit there: devices, port, weights
  6    the engine failed, or does not answer
  7    something may be running and billed: outranks all others
  124  it did not get ready in time, and was ended
  130  Ctrl-C

After 7 something may be billed that nobody wants: `kimisession stop NAME` tries
again to prove the end, `kimisession sweep` asks the cloud what is left over.""",
    ),
    "json": (
        "what --json prints",
        """\
Each document is one line on standard output:
  {"schema_version": 1, "kind": "sessions", "data": ...}
`status --watch --json` prints one a second, `stop --all --json` one a session,
all others print one.

Money is a decimal string of dollars, rounded half up to six places. Times are
ISO 8601 in UTC. What is not known is null. New keys may come within a schema
version; none goes, and none changes its meaning.

Errors are one line on standard error instead of the sentence:
  {"error": "...", "hint": "...", "exit_code": 2}
Progress stays text on standard error; --quiet leaves it out:
  kimisession --quiet status --json

`kimisession schema COMMAND` prints the JSON Schema of a command's documents.""",
    ),
    "money": (
        "how dollars are counted and rounded",
        """\
The price of an hour is agreed at the start. Budget and worst case go by it; on
Google Cloud without --price by the dearest zone that spot may be found in.
What a session took is seconds times price, exact, of each thing that it had,
from when that began to exist until its provider says that it is gone: on Google
Cloud a machine by the list for its zone unless you gave --price, its disk, its
address. What no list has is named on the receipt and never guessed.

People read every amount rounded half up to the cent, each on its own, so that
parts may differ from their total by a cent. The ledger keeps exact amounts;
--json has six places. (pretended) marks a price that nobody bills; such
sessions are in no total.

A budget is a moment: budget / price after the start. It never moves.""",
    ),
    "settings": (
        "what can be set once instead of typed",
        """\
flag > KIMISESSION_* > ./kimisession.toml > config.toml > default

`kimisession config show --origin` lists every setting and says which won.
A file says it like this:
  idle = "20m"
  budget = 60

Folders: KIMISESSION_STATE_HOME (ledger, logs), KIMISESSION_CONFIG_HOME,
KIMISESSION_DATA_HOME (buckets), KIMISESSION_CACHE_HOME (prices).
Keys and tokens are no settings: they come from files or the environment.""",
    ),
    "vscode": (
        "using a session from an editor",
        """\
Any editor that speaks to an OpenAI-compatible endpoint can use a session:
  base URL   first line of `kimisession connect`
  API key    second line; it is new for every session
  model      third line
In VS Code's terminal, for what reads OPENAI_BASE_URL and OPENAI_API_KEY:
  eval "$(kimisession connect --export)" && code .""",
    ),
}


def print_topic(topic: str | None) -> None:
    """One topic; without one which there are."""
    if topic is None:
        show.pairs([(name, about) for name, (about, _) in TOPICS.items()])
        show.next_step("kimisession help exit-codes", "kimisession COMMAND --help")
        return
    if topic not in TOPICS:
        close = difflib.get_close_matches(topic, TOPICS, 1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise UsageMistake(f"there is no topic {topic!r}", f"{guess}`kimisession help` lists them")
    show.out("\n".join(show.wrapped(TOPICS[topic][1], show.columns(sys.stdout))))
