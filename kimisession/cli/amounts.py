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
        raise UsageMistake(
            f"--{flag}: {mistake}" if flag else str(mistake),
            f"for example --{flag} 20m" if flag else "for example kimisession extend 20m",
        ) from None


def dollars(flag: str, text: str | None) -> Decimal | None:
    """A decimal amount of dollars. Raises UsageMistake."""
    return _decimal(flag, text, "an amount of dollars", "60")


def rate(flag: str, text: str | None) -> Decimal | None:
    """How often an hour something happens. Raises UsageMistake."""
    return _decimal(flag, text, "a rate", "0.1")


def _decimal(flag: str, text: str | None, what: str, example: str) -> Decimal | None:
    if text is None:
        return None
    try:
        amount = Decimal(text.removeprefix("$"))
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or (amount and not Decimal("1e-6") <= amount <= Decimal("1e9")):
        raise UsageMistake(f"--{flag}: {text!r} is not {what}", f"for example --{flag} {example}")
    return amount
