"""Conversion of plain-text tool arguments to JSON of the types in the tool's schema."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxspec.text.parsers.json_reader import is_json
from jaxspec.text.parsers.literals import as_json

_KINDS = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAX_PARTS = 100  # most schemas visited per argument, because references may be circular
_PYTHON = {"true": "true", "false": "false", "none": "null", "null": "null"}
_BITS = {"0": "false", "1": "true"}
_NUMBER = frozenset("-0123456789")
_LONGEST_WORD = 6  # characters of "null" or "None" with a newline at each end


def kinds_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types allowed for the argument `name`; {"string"} if the schema has none."""
    properties = schema.get("properties")
    parts: list[Any] = [properties.get(name)] if isinstance(properties, Mapping) else []
    kinds: set[str] = set()
    for _ in range(_MAX_PARTS):
        if not parts:
            break
        part = parts.pop()
        if isinstance(part, Mapping):
            found, more = _kinds_and_parts(part, schema)
            kinds |= found
            parts += more
    return frozenset(kinds & _KINDS) or frozenset({"string"})


def _kinds_and_parts(part: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[set, list[Any]]:
    """Return the types that a schema specifies directly, and its subschemas to visit."""
    kinds = part.get("type")
    if isinstance(kinds, str | list):
        return {
            kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(kind, str)
        }, []
    if isinstance(reference := part.get("$ref"), str):
        return set(), [_at(root, reference)]
    for choice in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := part.get(choice), list):
            return set(), parts
    values = [part["const"]] if "const" in part else part.get("enum")
    return (set(map(_kind, values)) if isinstance(values, list) else set()), []


def _at(root: Mapping[str, Any], reference: str) -> Any:
    """Resolve a reference such as `#/$defs/Place` inside the schema; None if it is absent."""
    place: Any = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    for kind, types in (("number", int | float), ("array", list), ("object", Mapping)):
        if isinstance(value, types):
            return kind
    return "string"


class ArgumentWriter:
    """Converts the streamed text of one argument to JSON: strings incrementally, others at the end.

    One newline at each end of the text is markup. Text of none of the types `kinds` becomes a
    string, so that nothing is lost.
    """

    def __init__(self, kinds: frozenset[str]) -> None:
        self._kinds = kinds
        self._is_string = kinds == {"string"}
        self._may_be_null = kinds == {"string", "null"}
        self._held: list[str] = []  # text held back until it is known to be a string
        self._num_held = 0
        self._is_begun = False  # the string's quote and first character are written
        self._newline = ""  # last character, if it is a newline

    def push(self, text: str) -> str:
        """Append text and return the JSON that is known by now."""
        if not text:
            return ""
        if not self._is_string:
            self._held.append(text)
            self._num_held += len(text)
            if not self._may_be_null or self._num_held <= _LONGEST_WORD:
                return ""
            self._is_string = True
            text = "".join(self._held)
        quote = "" if self._is_begun else '"'
        if not self._is_begun:
            text, self._is_begun = text.removeprefix("\n"), True
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        return quote + _escaped(text.removesuffix("\n"))

    def flush(self) -> str:
        """Return the rest of the JSON at the end of the argument."""
        if self._is_string:
            return '"' if self._is_begun else '""'
        text = "".join(self._held).removeprefix("\n").removesuffix("\n")
        return _converted(text, self._kinds)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _converted(text: str, kinds: frozenset[str]) -> str:
    """Convert a whole text to JSON of one of the types, or to a string if it has none of them."""
    value = text.strip()
    # Templates and models may write Python's True, False and None, and lists and dicts.
    value = _PYTHON.get(value.lower(), value)
    if "boolean" in kinds and not kinds & {"string", "number", "integer"}:
        value = _BITS.get(value, value)
    if value[:1] in ("{", "[") and "string" not in kinds and not is_json(value):
        value = as_json(value) or value
    if is_json(value) and ("string" not in kinds or _kinds_of_json(value) & kinds):
        return value
    return f'"{_escaped(text)}"'


def _kinds_of_json(value: str) -> set[str]:
    first = value[0]
    if first in _NUMBER:
        is_whole = re.fullmatch(r"-?[0-9]+", value) is not None
        return {"number", "integer"} if is_whole else {"number"}
    return {{"{": "object", "[": "array", "n": "null", '"': ""}.get(first, "boolean")}
