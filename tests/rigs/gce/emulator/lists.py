"""Lists of resources: filters, pages, and all zones at once."""

import base64
from collections.abc import Mapping
from typing import Any

from . import filters
from .catalog import REGIONS, ZONES
from .errors import invalid
from .state import Json
from .validate import Method

_MOST = 500


def page(method: Method, query: Mapping[str, str], resources: Mapping[str, Json]) -> tuple[dict[str, Json], Json]:
    """The resources of one page by their keys, and the head of the answer (kind, id, nextPageToken).

    Sorted by key, or newest first where `orderBy` says so; a page token names the last key that was given.
    """
    matches = filters.parse(query.get("filter", ""))
    found = sorted((key, one) for key, one in resources.items() if matches(one))
    order = query.get("orderBy", "name")
    if order == "creationTimestamp desc":
        found.sort(key=lambda pair: str(pair[1].get("creationTimestamp", pair[1].get("insertTime"))), reverse=True)
    elif order != "name":
        raise invalid("orderBy", order, "Only name and creationTimestamp desc are known.")
    most = int(query.get("maxResults", _MOST))
    if not 0 <= most <= _MOST:
        raise invalid("maxResults", most, f"Must be between 0 and {_MOST}")
    if token := query.get("pageToken"):
        try:
            after = base64.urlsafe_b64decode(token).decode()
            found = found[[key for key, _ in found].index(after) + 1 :]
        except ValueError as error:
            raise invalid("pageToken", token, "The page token is not valid.") from error
    schema = method.document.schemas[method.described["response"]["$ref"]]
    head: Json = {"kind": schema["properties"]["kind"]["default"], "id": method.id}
    if most and len(found) > most:
        head["nextPageToken"] = base64.urlsafe_b64encode(found[most - 1][0].encode()).decode()
        found = found[:most]
    return dict(found), head


def plain(method: Method, query: Mapping[str, str], resources: Mapping[str, Json]) -> Json:
    """A list of one place. `items` is left out when there are none, as Google does."""
    found, head = page(method, query, resources)
    return {**head, "items": list(found.values())} if found else head


def aggregated(
    method: Method, query: Mapping[str, str], resources: Mapping[str, Json], field: str, unreachable: list[str]
) -> Json:
    """A list of all places: `zones/z` to `{field: [...]}`, or to a warning where nothing is or nobody answered.

    Google's document of November 2026 has no parameter `returnPartialSuccess` any more, though its text names it.
    """
    found, head = page(method, query, resources)
    items: dict[str, Json] = {}
    for scope in _scopes(field):
        if scope.partition("/")[2] in unreachable:
            items[scope] = _warning("UNREACHABLE", f"The scope '{scope}' is not reachable.", scope)
            continue
        here = [one for one in found.values() if _scope_of(one) == scope]
        nothing = f"There are no results for scope '{scope}' on this page."
        items[scope] = {field: here} if here else _warning("NO_RESULTS_ON_PAGE", nothing, scope)
    head["items"] = items
    if unreachable:
        head["unreachables"] = [f"zones/{zone}" for zone in unreachable]
    return head


def _scopes(field: str) -> list[str]:
    zones, regions = [f"zones/{zone}" for zone in ZONES], [f"regions/{region}" for region in REGIONS]
    if field == "addresses":
        return ["global", *regions]
    return ["global", *regions, *zones] if field == "operations" else zones


def _scope_of(resource: Json) -> str:
    for place in ("zone", "region"):
        if place in resource:
            return f"{place}s/{resource[place].rpartition('/')[2]}"
    return "global"


def _warning(code: str, message: str, scope: str) -> dict[str, Any]:
    return {"warning": {"code": code, "message": message, "data": [{"key": "scope", "value": scope}]}}
