"""Rules of a llguidance grammar in Lark, built one by one."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_NOTES = frozenset({"title", "description", "examples", "default", "$comment"})
_FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uuid", "uri"),
)
"""Formats that llguidance checks; others restrict nothing, as JSON Schema has it by default."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def literal(text: str) -> str:
    """Return a text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def either(bodies: Sequence[str]) -> str:
    """Return the choice between some bodies."""
    return f"({' | '.join(bodies)})"


def json_value(schema: Mapping[str, Any]) -> str:
    """Return the body for JSON of a schema, with the blanks that chat templates write."""
    short = {**_without_notes(schema), "x-guidance": _SEPARATORS}
    return f"%json {json.dumps(short, ensure_ascii=False)}"


def _without_notes(schema: Any) -> Any:
    """Return a schema without the keywords that restrict nothing."""
    if isinstance(schema, list):
        return [_without_notes(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _without_notes(each) for name, each in value.items()}
        elif key in ("const", "enum"):
            found[key] = value
        elif key not in _NOTES and (key != "format" or value in _FORMATS):
            found[key] = _without_notes(value)
    return found


class Rules:
    """A grammar under construction; each method adds a rule and returns its name.

    Equal rules are added once.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by the rule without its name

    def add(self, body: str) -> str:
        return self._named("rule", f": {body}")

    def shortest(self, body: str) -> str:
        """Add a terminal that ends at its first match."""
        return self._named("rule", f"[lazy]: {self.longest(body)}")

    def longest(self, body: str) -> str:
        """Add a terminal that ends where no longer text matches."""
        return self._named("TEXT", f": {body}")

    def grammar(self, start: str) -> str:
        """Return the grammar that begins with the body `start`."""
        rules = [name + rule for rule, name in self._names.items()]
        return "\n".join([f"start: {start}", *rules, ""])

    def _named(self, kind: str, rule: str) -> str:
        return self._names.setdefault(rule, f"{kind}_{len(self._names)}")
