"""StructuredOutputsParams: the form that a request's text must have."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxspec.checks import boolean, integer, shown

KINDS = "json", "regex", "choice", "grammar", "json_object", "structural_tag"
"""Fields of `StructuredOutputsParams` of which a request has exactly one."""
MAX_TEXT = 2**18
"""Most characters of a schema, regex, grammar, structural tag or list of choices."""
MAX_DEPTH = 64
"""Most levels of nesting of a schema."""
MAX_PROPERTIES = 2000
"""Most properties of a schema, over all of its objects."""
MAX_CHOICES = 10_000
"""Most strings in `choice`."""
MAX_WHITESPACE = 1024
"""Largest `max_whitespace`."""
WHITESPACE = 32
"""Default of `max_whitespace`: a newline and the indentation of 15 levels of two spaces."""


@dataclasses.dataclass(slots=True)
class StructuredOutputsParams:
    """Form of a request's text, under vLLM's names. Exactly one of the first six is given.

    Attributes:
        json: JSON schema of the text, as an object or as text.
        regex: Regular expression that the whole text matches, without look-around.
        choice: Strings of which the text is one.
        grammar: Context-free grammar of the text: Lark's syntax, with a rule `start`, or the EBNF
            of llama.cpp and XGrammar, with a rule `root`.
        json_object: True for any JSON object.
        structural_tag: Free text in which a trigger begins a part with a schema, as an object or
            as text.
        disable_any_whitespace: Allow no blanks between JSON tokens.
        disable_additional_properties: Objects have no properties besides those of the schema,
            unless it sets `additionalProperties`.
        whitespace_pattern: Regular expression of the blanks between two JSON tokens.
        max_whitespace: Most blanks between two JSON tokens: one or two, or a newline and an
            indentation.

    Raises:
        ValueError: none or several of the first six are given, or a value is invalid.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    max_whitespace: int = WHITESPACE

    def __post_init__(self) -> None:
        """Validate every value."""
        if self.json_object is not None:
            self.json_object = boolean("json_object", self.json_object) or None
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, got "
                f"{' and '.join(given) or 'none'}. Keep one."
            )
        if self.json is not None:
            self.json = _json_value("json", self.json, (dict, bool))
        if self.structural_tag is not None:
            self.structural_tag = _json_value("structural_tag", self.structural_tag, (dict,))
        if self.choice is not None:
            self.choice = _choice(self.choice)
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            setattr(self, name, boolean(name, getattr(self, name)))
        hint = "; disable_any_whitespace=True allows none"
        self.max_whitespace = integer(
            "max_whitespace", self.max_whitespace, 1, MAX_WHITESPACE, hint
        )
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError(
                "disable_any_whitespace=True allows no blanks, so that whitespace_pattern has no "
                f"effect, got {shown(self.whitespace_pattern)}. Leave out one of them."
            )

    @property
    def kind(self) -> str:
        """The name in `KINDS` that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @staticmethod
    def of(value: Any) -> "StructuredOutputsParams":
        """Return `value` as validated parameters.

        Args:
            value: Parameters, a mapping with their fields, or an object with attributes of their
                names, such as vLLM's own parameters.

        Raises:
            ValueError: a field is unknown, or as in `StructuredOutputsParams`.
        """
        if isinstance(value, StructuredOutputsParams):
            return dataclasses.replace(value)
        known = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
        if isinstance(value, Mapping):
            fields = dict(value)
        elif hasattr(value, "json") and hasattr(value, "regex"):
            fields = {name: getattr(value, name) for name in known if hasattr(value, name)}
        else:
            raise ValueError(
                "structured_outputs must be a StructuredOutputsParams or a dict of its fields, got "
                f"{shown(value)}. Write it as in {{'json': schema}}."
            )
        if unknown := [name for name in fields if name not in known]:
            raise ValueError(
                f"structured_outputs has the fields {', '.join(known)}, got {shown(unknown[0])}. "
                "Leave it out."
            )
        return StructuredOutputsParams(**fields)


def parts_of(value: Any, most: int) -> Iterator[tuple[Any, int]]:
    """Yield a JSON value and all values in it with their depths, parents first.

    Raises:
        ValueError: the nesting is deeper than `most`.
    """
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > most:
            raise ValueError(f"JSON must be nested at most {most} deep. Flatten it.")
        yield part, depth
        if isinstance(part, dict):
            waiting += [(each, depth + 1) for each in part.values()]
        elif isinstance(part, list | tuple):
            waiting += [(each, depth + 1) for each in part]


def _json_value(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """Return a JSON value given as text or as Python objects, after checking its size."""
    if isinstance(value, str):
        _check_text(name, value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} must be JSON, got {shown(value)}: {error}.") from error
    if not isinstance(value, kinds):
        raise ValueError(f"{name} must be a JSON object, got {shown(value)}.")
    try:
        _check_schema(value)
        written = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not a valid value: {error}") from error
    _check_text(name, written)
    return json.loads(written)  # a copy, which later changes of the caller's object do not reach


def _check_schema(value: Any) -> None:
    num_properties = 0
    for part, _ in parts_of(value, MAX_DEPTH):
        properties = part.get("properties") if isinstance(part, dict) else None
        if isinstance(properties, dict):
            num_properties += len(properties)
        if num_properties > MAX_PROPERTIES:
            raise ValueError(
                f"A schema may have at most {MAX_PROPERTIES:,} properties, got "
                f"{num_properties:,} or more. Ask for fewer, or for several texts."
            )


def _choice(value: Any) -> list[str]:
    is_list = isinstance(value, list | tuple) and 0 < len(value) <= MAX_CHOICES
    if not is_list or any(not isinstance(each, str) or not each for each in value):
        raise ValueError(
            f"choice must be a list of 1 to {MAX_CHOICES:,} texts that are not empty, got "
            f"{shown(value)}."
        )
    if (total := sum(map(len, value))) > MAX_TEXT:
        raise ValueError(f"choice must have at most {MAX_TEXT:,} characters, got {total:,}.")
    _check_unicode("choice", "".join(value))
    return list(value)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text that is not empty, got {shown(value)}.")
    if len(value) > MAX_TEXT:
        raise ValueError(
            f"{name} must have at most {MAX_TEXT:,} characters, got {len(value):,}. Shorten it."
        )
    _check_unicode(name, value)


def _check_unicode(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be Unicode, and character {error.start} is half of a surrogate pair."
        ) from error
