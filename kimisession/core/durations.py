"""Durations as people write them: 90s, 15m, 2h, 1h30m."""

import re

_PARTS = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")

#: Longer than this is a typing mistake, not a session.
LONGEST_S = 7 * 24 * 3600


def parse_duration(text: str) -> int:
    """Seconds in `text`. Raises ValueError with one sentence that says what is accepted."""
    match = _PARTS.fullmatch(text.strip().lower())
    if match is None or not any(match.groups()):
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 15m or 2h")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        raise ValueError(f"{text!r} is no time at all; write it like 90s, 15m or 2h")
    if total > LONGEST_S:
        raise ValueError(f"{text!r} is longer than a week, which no session here may be; write it like 90s, 15m or 2h")
    return total
