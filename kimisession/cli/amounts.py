"""Durations and dollars as people type them, where a mistake names the flag."""

from decimal import Decimal, InvalidOperation

from kimisession.core.durations import parse_duration
from kimisession.errors import UsageMistake


def duration(flag: str, text: str | None) -> int | None:
    """Seconds of a duration option; `flag` is empty for the argument of `extend`. Raises UsageMistake."""
    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as mistake:
        word = f"--{flag}" if flag else "ADDED"
        raise UsageMistake(
            f"{word}: {mistake}", f"for example {word} 20m" if flag else "for example kimisession extend 20m"
        ) from None


def dollars(flag: str, text: str | None) -> Decimal | None:
    """A decimal amount of dollars. Raises UsageMistake."""
    if text is None:
        return None
    try:
        amount = Decimal(text.removeprefix("$"))
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or (amount and not Decimal("1e-6") <= amount <= Decimal("1e9")):
        raise UsageMistake(f"--{flag}: {text!r} is not an amount of dollars", f"for example --{flag} 60")
    return amount
