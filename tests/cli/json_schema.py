"""The part of JSON Schema (draft 2020-12) that the published files use, read strictly: a keyword that is not here is an
error, and so is a key of an object that its schema does not name, although consumers must live with new keys."""

import re
from datetime import datetime
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_SAID_ONLY = {"$schema", "$id", "$defs", "title", "description", "default"}


def mistakes(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "$") -> list[str]:  # noqa: PLR0912
    """What of `value` the schema does not allow, each with its place; empty when it is valid."""
    found: list[str] = []
    for word, said in schema.items():
        if word in _SAID_ONLY or word in ("required", "additionalProperties", "prefixItems"):
            continue
        if word == "$ref":
            found += mistakes(value, root["$defs"][said.removeprefix("#/$defs/")], root, at)
        elif word in ("anyOf", "oneOf"):
            each = [mistakes(value, option, root, at) for option in said]
            fitting = sum(not wrong for wrong in each)
            if not fitting or (word == "oneOf" and fitting > 1):
                found += [f"{at}: fits {fitting} of {word}", *min(each, key=len)]
        elif word == "type":
            if not isinstance(value, _TYPES[said]) or (isinstance(value, bool) and said in ("integer", "number")):
                found.append(f"{at}: {value!r} is no {said}")
        elif word == "const":
            found += [] if value == said else [f"{at}: {value!r} is not {said!r}"]
        elif word == "enum":
            found += [] if value in said else [f"{at}: {value!r} is none of {said}"]
        elif word == "pattern":
            if isinstance(value, str) and not re.search(said, value):
                found.append(f"{at}: {value!r} does not match {said}")
        elif word == "format":
            assert said == "date-time", said
            if isinstance(value, str) and datetime.fromisoformat(value).tzinfo is None:
                found.append(f"{at}: {value!r} has no time zone")
        elif word in ("minItems", "maxItems"):
            if isinstance(value, list) and not (len(value) >= said if word == "minItems" else len(value) <= said):
                found.append(f"{at}: {len(value)} items, {word} {said}")
        elif word == "items":
            if isinstance(value, list) and isinstance(said, dict):
                found += [wrong for i, one in enumerate(value) for wrong in mistakes(one, said, root, f"{at}[{i}]")]
        elif word == "properties":
            if isinstance(value, dict):
                found += [f"{at}: lacks {key}" for key in schema.get("required", []) if key not in value]
                found += [f"{at}: {key} is not in the schema" for key in value if key not in said]
                for key in said.keys() & value.keys():
                    found += mistakes(value[key], said[key], root, f"{at}.{key}")
        else:
            raise AssertionError(f"{word} is not known here")
    inner, first = schema.get("additionalProperties"), schema.get("prefixItems")
    if isinstance(inner, dict) and isinstance(value, dict) and "properties" not in schema:
        found += [wrong for key, one in value.items() for wrong in mistakes(one, inner, root, f"{at}.{key}")]
    if first and isinstance(value, list):
        pairs = zip(value, first, strict=False)
        found += [wrong for i, (one, of) in enumerate(pairs) for wrong in mistakes(one, of, root, f"{at}[{i}]")]
    return found
