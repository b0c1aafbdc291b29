"""Arguments that a model wrote as plain text, as the JSON that a tool's schema asks for."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxspec.server.parsers.json_reader import is_json

_KINDS = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAX_PARTS = 100  # schemas of one argument that are looked at; they may refer in circles
_PYTHON = {"true": "true", "false": "false", "none": "null", "null": "null"}
_NUMBER = frozenset("-0123456789")
_LONGEST_WORD = 6  # characters of "null" or "None", with a line's ends


def kinds_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON's types that the argument `name` may have; {"string"} where the schema says nothing."""
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
    """What a schema says of its types by itself, and the schemas in it that say more."""
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
    """What a reference such as `#/$defs/Place` points at inside the schema; None for nothing."""
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
    """Writes one argument as JSON while its text comes: strings piecewise, others at their end.

    A newline at each end of the text is markup. Text that is not of the kinds asked for becomes a
    string, so that nothing is lost.
    """

    def __init__(self, kinds: frozenset[str]) -> None:
        """`kinds`: JSON's types that the argument may have."""
        self._kinds = kinds
        self._is_string = kinds == {"string"}
        self._may_be_null = kinds == {"string", "null"}
        self._held: list[str] = []  # until it is known to be a string
        self._num_held = 0
        self._is_begun = False  # the string: its quote and first character were written
        self._newline = ""  # the last character, if it is one

    def push(self, text: str) -> str:
        """The JSON that is known by now."""
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
        """The rest of the JSON, at the end of the argument."""
        if self._is_string:
            return '"' if self._is_begun else '""'
        text = "".join(self._held).removeprefix("\n").removesuffix("\n")
        return _converted(text, self._kinds)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _converted(text: str, kinds: frozenset[str]) -> str:
    """A whole text as JSON of one of the kinds; a string if it is of none."""
    value = text.strip()
    # Templates write Python's words for them, and so do models.
    value = _PYTHON.get(value.lower(), value)
    if is_json(value) and ("string" not in kinds or _kinds_of_json(value) & kinds):
        return value
    return f'"{_escaped(text)}"'


def _kinds_of_json(value: str) -> set[str]:
    first = value[0]
    if first in _NUMBER:
        is_whole = re.fullmatch(r"-?[0-9]+", value) is not None
        return {"number", "integer"} if is_whole else {"number"}
    return {{"{": "object", "[": "array", "n": "null", '"': ""}.get(first, "boolean")}
