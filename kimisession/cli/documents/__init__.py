"""The documents that --json prints, as types. Nothing loads this at run time: it is for type checkers, and
`python -m kimisession.cli.documents kimisession/schemas` makes the published JSON Schemas from it.

Money is `Decimal` here and a decimal string with at most six places in the document; a moment is a `datetime` here and ISO
8601 in UTC there. None is null: not known, or not so.
"""

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from kimisession.cli.documents.benches import BenchDocument, ComparedDocument
from kimisession.cli.documents.common import ConfigDocument, DryRunDocument, ErrorDocument
from kimisession.cli.documents.costs import CostsDocument, ReceiptDocument
from kimisession.cli.documents.plans import PlanDocument, ProfileRow, ScriptDocument
from kimisession.cli.documents.projects import GuardDocument, PermissionsDocument, QuotaDocument, SweepDocument
from kimisession.cli.documents.sessions import (
    AnswerDocument,
    EndpointDocument,
    ExtendedDocument,
    QuoteDocument,
    SessionDocument,
)
from kimisession.cli.documents.weights import DeletedDocument, ManifestDocument
from kimisession.core.profile import Profile

DRAFT = "https://json-schema.org/draft/2020-12/schema"

#: The kinds of documents that each command may print.
DOCUMENTS: dict[str, dict[str, Any]] = {
    "profiles": {"profiles": list[ProfileRow], "profile": Profile},
    "plan": {"plan": PlanDocument, "plans": list[PlanDocument], "script": ScriptDocument},
    "seed": {
        "manifest": ManifestDocument,
        "deleted": DeletedDocument,
        "receipt": ReceiptDocument,
        "dry-run": DryRunDocument,
    },
    "start": {
        "session": SessionDocument,
        "quote": QuoteDocument,
        "receipt": ReceiptDocument,
        "dry-run": DryRunDocument,
    },
    "status": {"sessions": list[SessionDocument], "session": SessionDocument},
    "connect": {"endpoint": EndpointDocument},
    "test": {"test": list[AnswerDocument]},
    "bench": {"bench": BenchDocument, "benches": list[BenchDocument], "bench-compare": ComparedDocument},
    "extend": {"extended": ExtendedDocument, "dry-run": DryRunDocument},
    "restart": {"session": SessionDocument, "receipt": ReceiptDocument, "dry-run": DryRunDocument},
    "stop": {"receipt": ReceiptDocument, "dry-run": DryRunDocument},
    "cost": {"costs": CostsDocument, "receipt": ReceiptDocument},
    "config-show": {"config": ConfigDocument},
    "sweep": {"sweep": SweepDocument},
    "guard-status": {"guard": GuardDocument},
    "guard-permissions": {"permissions": PermissionsDocument},
    "quota": {"quota": QuotaDocument},
}


class _Plain(GenerateJsonSchema):
    """Decimals as the strings that they are printed as."""

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        return {"type": "string", "pattern": r"^-?[0-9]+\.[0-9]{2,6}$"}

    def datetime_schema(self, schema: Any) -> JsonSchemaValue:
        return {"type": "string", "format": "date-time", "pattern": "Z$"}


def schemas() -> dict[str, dict[str, Any]]:
    """Every published schema, by its file's stem."""
    made = {command: _of_command(command, kinds) for command, kinds in DOCUMENTS.items()}
    error = TypeAdapter(ErrorDocument).json_schema(schema_generator=_Plain)
    return {**made, "error": {"$schema": DRAFT, "$id": "urn:kimisession:schema:1:error", **error}}


def _of_command(command: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """Any line that the command may print: schema_version, kind, data."""
    definitions: dict[str, Any] = {}
    variants = []
    for kind, type_ in kinds.items():
        content = TypeAdapter(type_).json_schema(mode="serialization", schema_generator=_Plain)
        definitions |= content.pop("$defs", {})
        variants.append(
            {
                "type": "object",
                "properties": {"schema_version": {"const": 1}, "kind": {"const": kind}, "data": content},
                "required": ["schema_version", "kind", "data"],
            }
        )
    return {
        "$schema": DRAFT,
        "$id": f"urn:kimisession:schema:1:{command}",
        "title": f"kimisession {command.replace('-', ' ')} --json",
        "description": "One line on standard output.",
        "oneOf": variants,
        "$defs": dict(sorted(definitions.items())),
    }
