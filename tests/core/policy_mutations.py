"""Which promise fails when a rule of the policy is taken out: `python tests/core/policy_mutations.py` prints the table.

Each mutation is the policy's own source text without one line of RULES, executed as a module of its own.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from policy_rows import ROWS

from kimisession.node import policy

SOURCE = Path(policy.__file__).read_text(encoding="utf-8")
_RULE = re.compile(r"    \(Reason\.(\w+), (\w+)\),\n")


def module_of(source: str, name: str) -> ModuleType:
    """A module out of source text."""
    module = ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def mutations() -> Iterator[tuple[str, ModuleType]]:
    """(the rule that is missing, the policy without it), one a rule."""
    for match in _RULE.finditer(SOURCE):
        without = SOURCE.replace(match[0], "", 1)
        yield match[2], module_of(without, f"policy_without_{match[2]}")


def caught_by(mutant: ModuleType) -> list[str]:
    """The names of the rows that do not hold on this copy of the policy."""
    return [row.name for row in ROWS if not row.holds(mutant)]


def main() -> int:
    """Print the table; 1 when a mutation survived."""
    survived = 0
    print(f"{'rule removed':<18}{'rows that fail':>15}  the first of them")
    for rule, mutant in mutations():
        rows = caught_by(mutant)
        survived += not rows
        print(f"{rule:<18}{len(rows):>15}  {rows[0] if rows else 'NONE: nothing guards this rule'}")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
