"""The question before something that costs or cannot be undone."""

import sys


def agreed(question: str) -> bool:
    """Whether the person at the terminal says yes; anything else, and no answer, is a no."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        print(file=sys.stderr)  # what is said of it begins on a line of its own
        raise
