"""Regexes of JSON schemas whose language is regular: no recursion, no free objects.

Such a schema needs no masks from the host (`automaton.py`). The texts are those that the other form
of the grammar allows (`json_schema.py`): properties in the order of the schema, blanks between
tokens bounded.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxspec.grammar import json_numbers, json_strings
from jaxspec.grammar.json_numbers import Bounds
from jaxspec.grammar.json_strings import MAX_CHARACTERS

_IGNORED = {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$defs"}
_IGNORED |= {"definitions", "$comment", "readOnly", "writeOnly"}
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_NUMBER = rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_OF_KINDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _BOUNDS | {"multipleOf"},
    "number": _BOUNDS | {"multipleOf"},
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_KEYWORDS = set().union(*_OF_KINDS.values())


class _IrregularError(Exception):
    """The language is not regular, or a keyword has no translation."""


def regex_of(schema: Any, blank: str) -> str | None:
    """Return a regex of the texts of a schema; None if there is none of moderate length.

    Args:
        schema: The schema.
        blank: Regex of the blanks that may be between two JSON tokens, the empty string included.
    """
    try:
        return _Translation(schema, blank).of(schema, ())
    except _IrregularError:
        return None


class _Translation:
    def __init__(self, root: Any, blank: str):
        self._root, self._blank, self._num_characters = root, blank, 0

    def of(self, schema: Any, names: tuple[str, ...]) -> str:
        """Return the regex of a schema inside of the references `names`."""
        if not isinstance(schema, Mapping):
            raise _IrregularError
        found = self._of(schema, names)
        self._num_characters += len(found)
        if self._num_characters > MAX_CHARACTERS:
            raise _IrregularError
        return found

    def _of(self, schema: Mapping[str, Any], names: tuple[str, ...]) -> str:
        keywords = schema.keys() - _IGNORED
        if "$ref" in schema and keywords == {"$ref"}:
            return self.of(self._resolved(schema["$ref"], names), (*names, schema["$ref"]))
        if "const" in schema and keywords <= {"const", "type"}:
            return self._one_of([schema["const"]], schema)
        if "enum" in schema and keywords <= {"enum", "type"}:
            return self._one_of(schema["enum"], schema)
        if "anyOf" in schema and keywords == {"anyOf"}:
            return _any(self.of(each, names) for each in schema["anyOf"])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return _any(self.of({**schema, "type": kind}, names) for kind in kinds)
        if not isinstance(kinds, str) or kinds not in self._kinds:
            raise _IrregularError
        own = {key: schema[key] for key in keywords - (_KEYWORDS - _OF_KINDS[kinds])}
        return self._kinds[kinds](self, own, names)

    def _resolved(self, reference: Any, names: tuple[str, ...]) -> Any:
        if not isinstance(reference, str) or reference in names or reference[:2] != "#/":
            raise _IrregularError  # it is recursive, or another document
        found = self._root
        for part in reference[2:].split("/"):
            if not isinstance(found, Mapping) or part not in found or "%" in part or "~" in part:
                raise _IrregularError
            found = found[part]
        return found

    def _one_of(self, values: Any, schema: Mapping[str, Any]) -> str:
        if not values or not all(_is_scalar(value, schema.get("type")) for value in values):
            raise _IrregularError
        return _any(re.escape(_text(value)) for value in values)

    def _string(self, schema: Mapping[str, Any], names: tuple[str, ...]) -> str:
        _only(schema, "type", "minLength", "maxLength", "pattern", "format")
        return _if_regular(lambda: json_strings.string(schema))

    def _integer(self, schema: Mapping[str, Any], names: tuple[str, ...]) -> str:
        _only(schema, "type", "multipleOf", *_BOUNDS)
        if schema.keys() == {"type"}:
            return _INTEGER
        zeros = _zeros(schema.get("multipleOf", 1))
        return _if_regular(lambda: json_numbers.integer(Bounds.of(schema), zeros))

    def _number(self, schema: Mapping[str, Any], names: tuple[str, ...]) -> str:
        _only(schema, "type", *_BOUNDS)
        if schema.keys() == {"type"}:
            return _NUMBER
        return _if_regular(lambda: json_numbers.number(Bounds.of(schema)))

    def _boolean(self, schema: Mapping[str, Any], names: tuple[str, ...]) -> str:
        _only(schema, "type")
        return "(?:true|false)"

    def _null(self, schema: Mapping[str, Any], names: tuple[str, ...]) -> str:
        _only(schema, "type")
        return "null"

    def _array(self, schema: Mapping[str, Any], names: tuple[str, ...]) -> str:
        _only(schema, "type", "items", "minItems", "maxItems")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        blank, empty = self._blank, rf"\[{self._blank}\]"
        if most == 0 and least == 0:
            return empty
        item = self.of(schema.get("items"), names)
        rest = None if most is None else most - 1
        more = f"(?:{blank},{blank}{item}){_count(max(least - 1, 0), rest)}"
        full = rf"\[{blank}{item}{more}{blank}\]"
        return full if least else _any([empty, full])

    def _object(self, schema: Mapping[str, Any], names: tuple[str, ...]) -> str:
        _only(schema, "type", "properties", "required", "additionalProperties")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("additionalProperties") is not False or not isinstance(properties, Mapping):
            raise _IrregularError
        if not isinstance(required, list) or not set(required) <= set(properties):
            raise _IrregularError
        blank = self._blank
        members = [
            _Member(
                f"{re.escape(_text(name))}{blank}:{blank}{self.of(each, names)}", name in required
            )
            for name, each in properties.items()
        ]
        inside = _some(members, f"{blank},{blank}") + blank if members else ""
        return rf"\{{{blank}{inside if required or not members else f'(?:{inside})?'}\}}"

    _kinds = {
        "string": _string,
        "integer": _integer,
        "number": _number,
        "boolean": _boolean,
        "null": _null,
        "array": _array,
        "object": _object,
    }


class _Member(NamedTuple):
    regex: str
    is_required: bool


def _some(members: Sequence[_Member], comma: str) -> str:
    """Return the regex of one or more of the members, all required ones included, in order."""
    after, first = "", ""  # of the members from here on: after another one, and as the first
    for member in reversed(members):
        chosen = member.regex + after
        first = chosen if member.is_required or not first else _any([chosen, first])
        following = f"{comma}{member.regex}"
        after = (following if member.is_required else f"(?:{following})?") + after
    return first


def _any(regexes: Iterable[str]) -> str:
    return f"(?:{'|'.join(regexes)})"


def _count(least: Any, most: Any) -> str:
    is_least, is_most = _is_count(least), most is None or _is_count(most)
    if not is_least or not is_most or (most is not None and most < least):
        raise _IrregularError
    return f"{{{least},{'' if most is None else most}}}"


def _if_regular(translate: Callable[[], str | None]) -> str:
    """Return the regex of `translate`; raise `_IrregularError` if it has none or is too large."""
    try:
        found = translate()
    except ValueError as error:
        raise _IrregularError from error
    if found is None:
        raise _IrregularError
    return found


def _zeros(step: Any) -> int:
    """Return the zeros at the end of the multiples of a power of ten."""
    digits = str(step)
    if not isinstance(step, int) or isinstance(step, bool) or digits.rstrip("0") != "1":
        raise _IrregularError
    return len(digits) - 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _only(schema: Mapping[str, Any], *names: str) -> None:
    if schema.keys() - set(names):
        raise _IrregularError


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_scalar(value: Any, kind: Any) -> bool:
    """Return whether a value is no array or object, and of the type `kind` if that is given."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    name = kinds.get(type(value))
    return name is not None and kind in (None, name)
