"""The filter language of Compute Engine's lists: AIP-160 comparisons, and the older `eq`/`ne` with regular expressions.

Known: fields with dots, `=`, `!=`, `<`, `<=`, `>`, `>=`, `:` (has; `:*` means set), `eq`, `ne`, AND, OR, NOT and
parentheses; expressions side by side are joined by AND. Everything else is refused, as a filter that is silently
misread would list too much or too little.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from .errors import Refused
from .state import Json

Matches = Callable[[Json], bool]

_TOKEN = re.compile(
    r"""\s*(?:(?P<sign>[()]|[!<>]?=|[<>:])|"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<word>[^\s()=!<>:"']+))"""
)
_WORDS = ("AND", "OR", "NOT")


def parse(text: str) -> Matches:
    """A predicate over resources. An empty filter takes everything. Raises Refused (400)."""
    tokens = list(_tokens(text))
    if not tokens:
        return lambda resource: True
    matches, rest = _either(tokens, text)
    if rest:
        raise _bad(text)
    return matches


def _bad(text: str) -> Refused:
    return Refused(400, "invalid", f"Invalid value for field 'filter': '{text}'. Invalid list filter expression.")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Pairs of (kind, text): sign, value (quoted) or word."""
    at, stripped = 0, text.rstrip()
    while at < len(stripped):
        found = _TOKEN.match(stripped, at)
        if found is None:
            raise _bad(text)
        at = found.end()
        kind = str(found.lastgroup)
        yield ("value" if kind in ("double", "single") else kind), found.group(kind)


_Tokens = list[tuple[str, str]]


def _either(tokens: _Tokens, text: str) -> tuple[Matches, _Tokens]:
    """Google binds OR tighter than AND (AIP-160): `a AND b OR c` is `a AND (b OR c)`; so AND is the outer level."""
    parts = []
    matches, tokens = _any_of(tokens, text)
    parts.append(matches)
    while tokens and tokens[0] != ("sign", ")"):
        if tokens[0] == ("word", "AND"):
            tokens = tokens[1:]
        matches, tokens = _any_of(tokens, text)
        parts.append(matches)
    return (lambda resource: all(one(resource) for one in parts)), tokens


def _any_of(tokens: _Tokens, text: str) -> tuple[Matches, _Tokens]:
    matches, tokens = _term(tokens, text)
    parts = [matches]
    while tokens and tokens[0] == ("word", "OR"):
        matches, tokens = _term(tokens[1:], text)
        parts.append(matches)
    return (lambda resource: any(one(resource) for one in parts)), tokens


def _term(tokens: _Tokens, text: str) -> tuple[Matches, _Tokens]:
    if not tokens:
        raise _bad(text)
    if tokens[0] == ("word", "NOT"):
        matches, rest = _term(tokens[1:], text)
        return (lambda resource: not matches(resource)), rest
    if tokens[0] == ("sign", "("):
        inner, rest = _either(tokens[1:], text)
        if not rest or rest[0] != ("sign", ")"):
            raise _bad(text)
        return inner, rest[1:]
    if len(tokens) < 3 or tokens[0][0] != "word" or tokens[0][1] in _WORDS or tokens[2][0] == "sign":
        raise _bad(text)
    field, sign, value = tokens[0][1], tokens[1][1], tokens[2][1]
    if tokens[1][0] != "sign" and sign not in ("eq", "ne"):
        raise _bad(text)
    return _comparison(field, sign, value, text), tokens[3:]


def _comparison(field: str, sign: str, value: str, text: str) -> Matches:
    def found(resource: Json) -> Any:
        at: Any = resource
        for part in field.split("."):
            at = at.get(part) if isinstance(at, dict) else None
        return at

    def shown(resource: Json) -> str | None:
        at = found(resource)
        return str(at).lower() if isinstance(at, bool) else None if at is None else str(at)

    if sign in ("eq", "ne"):
        pattern = re.compile(value)
        wanted = sign == "eq"
        return lambda resource: bool(pattern.fullmatch(shown(resource) or "")) is wanted
    if sign == "=":
        return lambda resource: shown(resource) == value
    if sign == "!=":
        return lambda resource: shown(resource) != value
    if sign == ":":
        if value == "*":
            return lambda resource: found(resource) is not None
        return lambda resource: value in (shown(resource) or "")
    order: dict[str, Callable[[Any, Any], bool]] = {
        "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
    }
    if sign not in order:
        raise _bad(text)
    compare = order[sign]

    def ordered(resource: Json) -> bool:
        at = shown(resource)
        if at is None:
            return False
        try:
            return compare(float(at), float(value))
        except ValueError:
            return compare(at, value)

    return ordered
