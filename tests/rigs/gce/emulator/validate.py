"""Holds every request and every response against Google's own discovery documents.

The documents come with the package google-api-python-client (googleapiclient/discovery_cache/documents); nothing of
them is copied here. What they do not know is refused: paths, query parameters, fields, enum values, types.
"""

import importlib.util
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .state import Json

#: host -> document. www.googleapis.com is Compute Engine's old address, which clients still use.
SERVICES = {
    "compute.googleapis.com": "compute.v1",
    "www.googleapis.com": "compute.v1",
    "cloudresourcemanager.googleapis.com": "cloudresourcemanager.v1",
    "iam.googleapis.com": "iam.v1",
    "serviceusage.googleapis.com": "serviceusage.v1",
}
#: Parameters that every method takes and that change nothing here. `fields` would, so it is not among them.
_COMMON = frozenset({"alt", "prettyPrint", "quotaUser", "$.xgafv", "uploadType", "key", "$alt"})
_INT_RANGE = {"int32": (-(2**31), 2**31 - 1), "uint32": (0, 2**32 - 1), "int64": (-(2**63), 2**63 - 1)}
_RANGES = {**_INT_RANGE, "uint64": (0, 2**64 - 1)}


def documents_folder() -> Path:
    """Where the installed google-api-python-client keeps the documents. Raises ModuleNotFoundError without it."""
    spec = importlib.util.find_spec("googleapiclient")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the emulator reads Google's discovery documents: install google-api-python-client")
    return Path(spec.origin).parent / "discovery_cache" / "documents"


@dataclass(frozen=True)
class Method:
    """One method of one service, as its document describes it."""

    id: str
    document: "Document"
    described: Json

    @property
    def scopes(self) -> tuple[str, ...]:
        """OAuth scopes of which a token needs one."""
        return tuple(self.described.get("scopes", ()))


class Document:
    """One service: its methods by path, its schemas by name."""

    def __init__(self, described: Json) -> None:
        self.schemas: Json = described["schemas"]
        self.prefix = str(described["servicePath"])
        self._methods: dict[tuple[str, int], list[tuple[tuple[str, ...], Method]]] = {}
        self._collect(described["resources"])

    def _collect(self, resources: Json) -> None:
        for resource in resources.values():
            for described in resource.get("methods", {}).values():
                parts = tuple(described.get("flatPath", described["path"]).split("/"))
                method = Method(described["id"], self, described)
                self._methods.setdefault((described["httpMethod"], len(parts)), []).append((parts, method))
            self._collect(resource.get("resources", {}))

    def find(self, verb: str, path: str) -> tuple[Method, dict[str, str]] | None:
        """The method of a path (without leading slash), and its path parameters; the most literal one wins."""
        if not path.startswith(self.prefix):
            return None
        parts = path[len(self.prefix) :].split("/")
        found: list[tuple[int, Method, dict[str, str]]] = []
        for template, method in self._methods.get((verb, len(parts)), []):
            values = _match(template, parts)
            if values is not None:
                found.append((sum("{" not in part for part in template), method, values))
        if not found:
            return None
        _, method, values = max(found, key=lambda one: one[0])
        return method, values


def _match(template: tuple[str, ...], parts: list[str]) -> dict[str, str] | None:
    """Values of `{name}` and `{name}:verb` segments; None where a literal differs."""
    values: dict[str, str] = {}
    for expected, part in zip(template, parts, strict=True):
        if not expected.startswith("{"):
            if expected != part:
                return None
            continue
        name, _, verb = expected[1:].partition("}")
        if not part or not part.endswith(verb) or (":" in part and not verb):
            return None
        values[name] = part[: len(part) - len(verb)]
    return values


@cache
def document(folder: Path, name: str) -> Document:
    """A document by name (`compute.v1`), read once per process: Compute Engine's has five megabytes."""
    return Document(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))


def check_request(method: Method, path: dict[str, str], query: dict[str, str], body: Any) -> list[str]:
    """What is wrong with a request, as sentences; empty when nothing is."""
    wrong = []
    parameters = method.described.get("parameters", {})
    for name, value in path.items():
        pattern = parameters.get(name, {}).get("pattern")
        if pattern and not re.fullmatch(pattern, value):
            wrong.append(f"Invalid value for field '{name}': '{value}'. Must be a match of regex '{pattern}'")
    for name, value in query.items():
        described = parameters.get(name)
        if described is None or described["location"] != "query":
            if name not in _COMMON:
                wrong.append(f'Invalid JSON payload received. Unknown name "{name}": Cannot bind query parameter.')
        elif described["type"] == "boolean" and value not in ("true", "false"):
            wrong.append(f"Invalid value for boolean parameter '{name}': '{value}'")
        elif described["type"] == "integer" and not value.isdigit():
            wrong.append(f"Invalid value for integer parameter '{name}': '{value}'")
    wrong += [
        f"Required parameter '{name}' was not given"
        for name, described in parameters.items()
        if described.get("required") and described["location"] == "query" and name not in query
    ]
    expected = method.described.get("request")
    if expected is None:
        return wrong + (["A body was sent where none is expected"] if body else [])
    return wrong + _check(method.document.schemas, expected, {} if body is None else body, "", method.id)


def check_response(method: Method, body: Any) -> list[str]:
    """What of our own answer does not fit the document. Stricter than requests: no numbers for text, no nulls."""
    expected = method.described.get("response")
    if expected is None:
        return ["A body where none is expected"] if body else []
    return _check(method.document.schemas, expected, body, "response", None)


def _check(schemas: Json, schema: Json, value: Any, where: str, request: str | None) -> list[str]:
    """`request` is the method's id when a client's body is checked, None for our own answers."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"]]
    kind = schema.get("type", "any")
    if kind == "any":
        return []
    if value is None:
        return [] if request else [f"{where} is null"]
    if kind == "object":
        return _check_object(schemas, schema, value, where, request)
    if kind == "array":
        if not isinstance(value, list):
            return [f"Invalid value at '{where}': a list is expected"]
        return [
            sentence
            for index, one in enumerate(value)
            for sentence in _check(schemas, schema["items"], one, f"{where}[{index}]", request)
        ]
    return [] if _fits(schema, kind, value, bool(request)) else [f"Invalid value at '{where}' ({kind}): {value!r:.80}"]


def _check_object(schemas: Json, schema: Json, value: Any, where: str, request: str | None) -> list[str]:
    if not isinstance(value, dict):
        return [f"Invalid value at '{where}': an object is expected"]
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    wrong = []
    for name, one in value.items():
        inner = properties.get(name, others)
        here = f"{where}.{name}".lstrip(".")
        if inner is None:
            wrong.append(f"Invalid JSON payload received. Unknown name \"{name}\" at '{where}': Cannot find field.")
        else:
            wrong += _check(schemas, inner, one, here, request)
    for name, inner in properties.items():
        if request and request in inner.get("annotations", {}).get("required", ()) and not value.get(name):
            wrong.append(f"Required field '{where}.{name}' not specified")
    return wrong


def _fits(schema: Json, kind: str, value: Any, lenient: bool) -> bool:
    """Google takes numbers for text of a 64-bit format, and text for numbers, in requests."""
    form = schema.get("format", "")
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "integer" or form in ("int64", "uint64"):
        expected: type | tuple[type, ...] = (int, str) if lenient else int if kind == "integer" else str
        if isinstance(value, bool) or not isinstance(value, expected) or not re.fullmatch(r"-?\d+", str(value)):
            return False
        low, high = _RANGES[form or "int64"]
        return bool(low <= int(str(value)) <= high)
    if not isinstance(value, str) or ("enum" in schema and value not in schema["enum"]):
        return False
    pattern = schema.get("pattern")
    return not pattern or re.fullmatch(pattern, value) is not None
