"""Grammar of tool arguments that are written as plain text between tags, by their JSON schema.

`jaxspec.text.parsers.arguments` converts such a text to JSON of the argument's types. A schema has
a plain form only if every text of that form is converted to a value that the schema allows.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxspec.grammar.rules import Rules, either, json_value, literal
from jaxspec.text.parsers.arguments import kinds_of

Schema = Mapping[str, Any]

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "format"}
)
"""Keywords that restrict no plain text."""
_LENGTHS = {"minLength", "maxLength"}
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE = re.compile(r"#/(?:\$defs|definitions)/([^/~%]+)")
_SCALARS = ("string", "number", "integer", "boolean", "null")
_MOST_STEPS = 32  # references and choices inside each other
# Markup that would end an argument, or begin another one, inside of its text.
_MARKUP = r"(<\/parameter|\n<\/param|<parameter=|<\/function>)"
_IS_MARKUP = re.compile(_MARKUP)
_FREE = rf"~/(?s:.*){_MARKUP}(?s:.*)/"


def with_definitions(schema: Schema, root: Schema) -> dict[str, Any]:
    """Return a part of the schema `root` with the definitions that its references name."""
    if not any(True for _ in _references(schema)):
        return {**schema}
    return {**{name: root[name] for name in _DEFINITIONS if name in root}, **schema}


def refers_elsewhere(schema: Any) -> bool:
    """Return whether a schema has references that `with_definitions` does not resolve."""
    return any(not re.match(r"#/(\$defs|definitions)/", each) for each in _references(schema))


def _references(schema: Any) -> Iterator[str]:
    """Yield the references in a schema."""
    if isinstance(schema, Mapping):
        if isinstance(target := schema.get("$ref"), str):
            yield target
        for each in schema.values():
            yield from _references(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def argument(rules: Rules, root: Schema, key: str, end: str) -> str | None:
    """Return the body for the text of an argument and the tag after it.

    Args:
        rules: The grammar, to which rules may be added.
        root: Schema of all arguments of the tool.
        key: Name of the argument.
        end: Markup after the text.

    Returns:
        The body, or None if the schema has no plain form.
    """
    schema = root.get("properties", {}).get(key)
    schema = schema if isinstance(schema, Mapping) else {}
    kinds = kinds_of(root, key)
    if "string" not in kinds:
        if refers_elsewhere(schema):
            return None
        return f"{json_value(with_definitions(schema, root))} {literal(end)}"
    branches = _branches(schema, root)
    if branches is None:
        return None
    bodies = [_text(rules, branch, kinds, end) for branch in branches]
    found = dict.fromkeys(body for body in bodies if body is not None)
    return either([*found]) if None not in bodies and found else None


def _branches(schema: Schema, root: Schema, steps: int = 0) -> list[Schema] | None:
    """Return the choices of a schema, without references; None for other combinations."""
    given = schema.keys() - ANNOTATIONS
    if steps > _MOST_STEPS:
        return None
    if given == {"$ref"}:
        match = _REFERENCE.fullmatch(str(schema["$ref"]))
        target = _defined(match.group(1), root) if match else None
        return None if target is None else _branches(target, root, steps + 1)
    if given in ({"anyOf"}, {"oneOf"}):
        found, parts = list[Schema](), schema[given.pop()]
        for part in parts if isinstance(parts, list) else ():
            more = _branches(part, root, steps + 1) if isinstance(part, Mapping) else None
            if more is None:
                return None
            found += more
        return found
    return [schema]


def _defined(name: str, root: Schema) -> Schema | None:
    """Return a definition of the schema `root`."""
    for place in map(root.get, _DEFINITIONS):
        found = place.get(name) if isinstance(place, Mapping) else None
        if isinstance(found, Mapping):
            return found
    return None


def _text(rules: Rules, schema: Schema, kinds: frozenset[str], end: str) -> str | None:
    """Return the body for one choice of a schema, as text of an argument with these `kinds`."""
    given = schema.keys() - ANNOTATIONS
    if "const" in given or "enum" in given:
        values = [schema["const"]] if "const" in given else schema["enum"]
        is_plain = given <= {"const", "enum", "type"}
        return _words(values, kinds, end) if is_plain and isinstance(values, list) else None
    types = schema.get("type")
    if types is None and not given:
        return _free(rules, schema, end)
    if types == "string" and given <= {"type", *_LENGTHS}:
        if kinds == {"string"} or not given & _LENGTHS:
            return _free(rules, schema, end)
        return None
    names = [types] if isinstance(types, str) else types
    if given != {"type"} or not isinstance(names, list):
        return None
    if any(name not in _SCALARS for name in names):
        return None
    if "string" in names:
        return _free(rules, {}, end)  # the parser gives a text the type that it looks like
    return f"{json_value({'type': names})} {literal(end)}"


def _free(rules: Rules, schema: Schema, end: str) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    length = f"{{{least},{most}}}" if least or most != "" else "*"
    return rules.shortest(f"(/(?s:.{length})/ & {_FREE}) {literal(end)}")


def _words(values: list[Any], kinds: frozenset[str], end: str) -> str | None:
    """Return the body for one of some values; None if the parser would read another value."""
    if not values or any(isinstance(value, Mapping | list) for value in values):
        return None
    words = [value if isinstance(value, str) else json.dumps(value) for value in values]
    for value, word in zip(values, words, strict=True):
        if isinstance(value, str) and (_IS_MARKUP.search(word) or _looks_typed(word, kinds)):
            return None
    return either([literal(word + end) for word in words])


def _looks_typed(word: str, kinds: frozenset[str]) -> bool:
    """Return whether the parser may read a text as another type than a string."""
    return kinds != {"string"} and re.match(r"\s*([-0-9\[{\"]|(?i:true|false|n))", word) is not None
