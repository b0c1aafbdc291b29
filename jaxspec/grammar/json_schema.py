"""JSON schemas of answers, with bounded blanks between JSON tokens."""

from collections.abc import Mapping
from typing import Any

from jaxspec.requests.structured_outputs import StructuredOutputsParams


def blanks(most: int) -> str:
    """Return the regex of one or two blanks, or of a newline and the rest of `most` blanks."""
    return rf"[ \t]{{1,{min(most, 2)}}}|\n[ \t]{{0,{most - 1}}}"


def schema_of(params: StructuredOutputsParams, schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """Return a schema with llguidance's options for `params`."""
    if schema is False:
        raise ValueError("A schema must allow some value, and False allows none. Give another.")
    closed = {} if schema is True else closed_if_asked(params, schema)
    options: dict[str, Any] = {"lenient": False, "whitespace_flexible": True}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or blanks(params.max_whitespace)
    return closed | {"x-guidance": options}


def closed_if_asked(params: StructuredOutputsParams, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without additional properties if `params` exclude them."""
    return _closed(dict(schema)) if params.disable_additional_properties else dict(schema)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties besides those it names."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value if key in ("const", "enum", "default", "examples") else _closed(value)
        for key, value in schema.items()
    }
    if isinstance(found.get("properties"), dict) and "additionalProperties" not in found:
        found["additionalProperties"] = False
    return found
