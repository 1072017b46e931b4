"""What documents of several commands share, and those of no command in particular."""

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict


def said(text: str) -> Any:
    """What the schema says of a key beside its type."""
    return Field(description=text)


class Armed(TypedDict):
    """Whether something would end a session by itself, and how that is known."""

    armed: bool
    evidence: str


class OfSession(TypedDict):
    """Which session a document is about."""

    session: str
    name: str


class Together(TypedDict):
    """So many sessions, and what they took."""

    sessions: int
    usd: Decimal


class ErrorDocument(TypedDict):
    """What every command prints on standard error under --json when it fails."""

    error: Annotated[str, said("one sentence")]
    hint: Annotated[str, said("what to type next; may be empty")]
    exit_code: Literal[1, 2, 3, 4, 5, 6, 7, 124, 130]


class DryRunDocument(TypedDict):
    """What a command with --dry-run would do."""

    would: str


class SettingDocument(TypedDict):
    """A setting and who said it; both empty when nobody did."""

    value: str | None
    origin: str
    mistake: Annotated[str | None, said("why no command could use it")]


class ConfigDocument(TypedDict):
    """Every setting, and the folders in use."""

    settings: dict[str, SettingDocument]
    places: dict[str, str]
