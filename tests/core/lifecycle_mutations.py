"""Which promise is broken when a rule, a layer or a confirmation is taken out: `python tests/core/lifecycle_mutations.py`.

Each mutation is a `World` without one thing, played with schedules of steps that are drawn from a fixed seed, until one of
its promises breaks. Steps are drawn from a few kinds at a time, or rare ones would never meet.
"""

import random
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[n]) for n in (0, 1, 2)]

from lifecycle_world import STEPS, Leak, Mutation, World

MUTATIONS = (
    Mutation("keeper without its hard cap", no_rule="hard_cap"),
    Mutation("keeper without idle", no_rule="idle"),
    Mutation("keeper without never-used", no_rule="never_used"),
    Mutation("no wrapper", no_layer="wrapper"),
    Mutation("no autodown", no_layer="autodown"),
    Mutation("no timer in the machine", no_layer="timer"),
    Mutation("no reaper", no_layer="reaper"),
    Mutation("start that asks for no reaper", unchecked=True),
    Mutation("timer without its deadline", no_due="deadline"),
    Mutation("timer without its uptime", no_due="uptime"),
    Mutation("timer that minds no keeper", no_due="keeper"),
    Mutation("reaper that leaves what is stopped", no_verdict="stopped"),
    Mutation("extension that leaves the label", label_stays=True),
    Mutation("one empty list is proof", no_proof="apart"),
    Mutation("pending requests are overlooked", no_proof="pending"),
    Mutation("silent zones are overlooked", no_proof="silent"),
    Mutation("stopped is gone", no_proof="stopped"),
    Mutation("nobody ends what is unguarded", no_teardown="unguarded"),
    Mutation("nobody ends what is past its deadline", no_teardown="past-deadline"),
    Mutation("nobody ends what was asked to end", no_teardown="asked"),
    Mutation("never loud", never_loud=True),
)

#: Schedules that a mutation may survive before it counts as not caught.
TRIES = 400


#: Faults that have to meet within minutes, told by hand.
STORIES = (
    ["start", "keeper beats and ends nothing", "until the deadline", "reboot", "an hour"],
    ["start", "keeper beats and ends nothing", "clock an hour back", "an hour"],
    ["reaper killed", "start whose reply is lost", "an hour"],
)


def schedule(seed: int) -> list[str]:
    """A story, or steps after a start, of a few kinds."""
    if seed < len(STORIES):
        return STORIES[seed]
    dice = random.Random(seed)
    kinds = [*dice.sample(sorted(STEPS), 5), "a minute", "five minutes", "look"]
    first = "start whose reply is lost" if dice.random() < 0.25 else "start"
    return [first, *dice.choices(kinds, k=25)]


def play(world: World, steps: list[str]) -> str:
    """The promise that broke; empty when all were kept."""
    try:
        for step in steps:
            STEPS[step](world)
        world.settle()
    except Leak as leak:
        return str(leak)
    finally:
        world.close()
    return ""


def caught_by(mutation: Mutation, tries: int = TRIES) -> tuple[int, str]:
    """(how many schedules it took, the promise that broke); (0, "") when it was not caught."""
    for seed in range(tries):
        if broken := play(World(mutation), schedule(seed)):
            return seed + 1, broken
    return 0, ""


def main() -> int:
    """Print the table; 1 when a mutation survived, or nothing at all broke a promise."""
    sound = caught_by(Mutation(), TRIES)
    survived = bool(sound[0])
    print(f"{'taken out':<40}{'schedules':>10}  the promise that broke")
    print(f"{'nothing':<40}{sound[0] or '-':>10}  {sound[1] or 'none, as it must be'}")
    for mutation in MUTATIONS:
        number, broken = caught_by(mutation)
        survived |= not number
        print(f"{mutation.name:<40}{number or '-':>10}  {broken or 'NONE: nothing guards this'}")
    return int(survived)


if __name__ == "__main__":
    sys.exit(main())
