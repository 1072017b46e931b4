"""This machine's clock beside that of the place that a session is in. Pure.

Deadlines are absolute moments. A laptop that wakes up hours ahead would find everybody's passed, and one that is minutes ahead
a keeper silent that beats. So what was heard from a place is judged by that place's clock, which comes with its answer, and
where two clocks cannot both be right nothing is deleted by a deadline and nothing is started under one.
"""

from datetime import datetime, timedelta

#: No more than this is the wire and rounding, for HTTP tells whole seconds: then this machine's own, finer clock is kept.
SAME = timedelta(seconds=5)

#: Further apart than this one of the two is wrong. Less than the grace after a deadline (core/audit.py GRACE): what is judged
#: by a clock that passes is never deleted before its deadline.
CLOCKS_APART = timedelta(minutes=5)


def ahead_of(here: datetime, there: datetime) -> timedelta:
    """How far the clock that says `there` is ahead of the one that says `here`; nothing where they may well agree."""
    apart = there - here
    return apart if abs(apart) > SAME else timedelta(0)


def by_the_other(here: datetime, there: datetime | None) -> datetime:
    """This moment by the other clock, where that one was heard."""
    return here if there is None else here + ahead_of(here, there)


def quarrel(here: datetime, there: datetime) -> str:
    """One sentence when the clocks are too far apart to judge a deadline by; else empty. `there` is the cloud's."""
    apart = here - there
    if abs(apart) <= CLOCKS_APART:
        return ""
    minutes = round(abs(apart).total_seconds() / 60)
    span = f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
    return f"the clock of this machine is {span} {'ahead of' if apart > timedelta(0) else 'behind'} the cloud's"
