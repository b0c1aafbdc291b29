"""Grammars of tool calls, as the chat templates of the model families write them.

A grammar is a text for `StructuredOutputsParams(grammar=...)`. `OutputParser` reads every text of
it into calls of the tools, with arguments of their schemas.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxspec.checks import shown
from jaxspec.grammar.raw_arguments import argument, refers_elsewhere, with_definitions
from jaxspec.grammar.rules import Rules, either, json_value, literal
from jaxspec.requests.structured_outputs import MAX_DEPTH, MAX_TEXT, parts_of
from jaxspec.text.parsers.output_parser import Dialect

Json = Mapping[str, Any]
IsToken = Callable[[str], bool]

_NAME = re.compile(r"[\w.:/-]{1,256}")
_KEY = re.compile(r"[^<>\n]{1,256}")
_PYTHON_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*", re.ASCII)
_PYTHON_KEY = re.compile(r"[\w-]+", re.ASCII)
_OWN_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"} | {
    *("title", "description", "$schema", "$id", "$comment", "strict")
}
"""Keywords of a tool's schema that list arguments one by one; others need the JSON form."""


class Tool(NamedTuple):
    """A tool that the model may call."""

    name: str
    schema: Json

    @property
    def keys(self) -> dict[str, bool] | None:
        """The arguments in their order, and whether each is required; None if it has no such list.

        Other arguments are not written, as far as the schema may allow them.
        """
        properties, required = self.schema.get("properties", {}), self.schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return None
        if any(key not in [*properties] for key in required):
            return None
        is_open = self.schema.get("additionalProperties", True)
        if self.schema.keys() - _OWN_KEYS or (not properties and is_open is not False):
            return None if self.schema.keys() - {"type", "title", "description"} else {}
        return {key: key in required for key in properties}


def tools_of(tools: Sequence[Json]) -> list[Tool]:
    """Return tools in OpenAI's format.

    Raises:
        ValueError: a name or schema is invalid; the message begins with its path.
    """
    found, size = list[Tool](), 0
    for number, tool in enumerate(tools):
        place, function = f"tools.{number}.function", tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise ValueError(f"{place} must be {{'name': ...}}, got {shown(function)}.")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{place}.name must be letters, digits and _.:/- to be called by force, got "
                f"{shown(name)}. Rename it, or let the model choose."
            )
        schema = _schema(function.get("parameters"), f"{place}.parameters")
        size += len(json.dumps(schema))
        if size > MAX_TEXT:
            raise ValueError(
                f"tools must have schemas of at most {MAX_TEXT:,} characters together to be "
                f"called by force, got {size:,} with tool {number}. Offer fewer."
            )
        found.append(Tool(name, schema))
    return found


def _schema(given: Any, place: str) -> Json:
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} must be a JSON schema, got {shown(given)}.")
    if given.get("type", "object") != "object":
        raise ValueError(
            f"{place}.type must be 'object', got {shown(given['type'])}. Arguments are named."
        )
    try:
        for _ in parts_of(given, MAX_DEPTH):
            pass
    except ValueError as error:
        raise ValueError(f"{place} is not a valid schema: {error}") from error
    schema = {"type": "object", **given}
    # Models invent arguments if they may.
    if schema.keys() <= _OWN_KEYS and isinstance(schema.get("properties"), Mapping):
        schema.setdefault("additionalProperties", False)
    return schema


def required(
    dialect: Dialect, tools: Sequence[Tool], is_token: IsToken, *, is_single: bool = False
) -> str:
    """Return the grammar of answers that are calls alone.

    Args:
        dialect: Output format of the model.
        tools: Tools that may be called; for a forced call it is the only one.
        is_token: Returns whether a text is an added token of the tokenizer.
        is_single: Exactly one call, instead of one or more.

    Raises:
        ValueError: the dialect has no calls.
    """
    rules = Rules()
    calls = _format(dialect, rules, tools, is_token)
    return rules.grammar(calls.all(is_single=is_single))


def automatic(
    dialect: Dialect,
    tools: Sequence[Tool],
    is_token: IsToken,
    *,
    is_single: bool = False,
    content: Json | None = None,
) -> str:
    """Return the grammar of answers that may have calls: text, calls, or text and calls.

    Args:
        dialect: Output format of the model.
        tools: Tools that may be called.
        is_token: Returns whether a text is an added token of the tokenizer.
        is_single: At most one call.
        content: JSON schema of answers without calls; None means any text.

    Raises:
        ValueError: the dialect has no calls.
    """
    rules = Rules()
    calls = _format(dialect, rules, tools, is_token)
    if content is not None:
        answer = rules.add(json_value(content))
        return rules.grammar(either([answer, calls.all(is_single=is_single)]))
    return rules.grammar(calls.after_text(is_single=is_single))


class _Format:
    """Calls in the format of a dialect."""

    between = "\n"
    """Text between two calls."""
    tags: tuple[str, str] = ("", "")
    """Markup around each call or, for lists, around all of them."""
    not_in_text: tuple[str, ...] = ()
    """Other markup that begins a call, and so is not in the text before."""

    def __init__(self, rules: Rules, tools: Sequence[Tool], is_token: IsToken) -> None:
        self.rules, self.is_token = rules, is_token
        self.call = rules.add(either([self.one(tool) for tool in tools]))

    def one(self, tool: Tool) -> str:
        """Return the body of a call between its tags."""
        raise NotImplementedError

    def rest(self, is_single: bool) -> str:
        """Return the body of all calls, without the opening tag of the first."""
        opening, closing = map(self.tag, self.tags)
        first = f"{self.call} {closing}"
        more = f"({literal(self.between)} {opening} {self.call} {closing})*"
        return first if is_single else f"{first} {more}"

    def all(self, *, is_single: bool) -> str:
        return f"{self.tag(self.tags[0])} {self.rest(is_single)}"

    def after_text(self, *, is_single: bool) -> str:
        opening, rest = self.tags[0], self.rules.add(self.rest(is_single))
        markup = "|".join(map(_escaped, (*self.not_in_text, opening)))
        text = f"/(?s:.*)/ & ~/(?s:.*)({markup})(?s:.*)/"
        last = self.rules.longest(text)
        if self.is_token(opening):
            return f"{last}? ({opening} {rest})?"
        # A text that has no tag before its end, and one that ends with the first tag.
        before = self.rules.shortest(f"({text}) {literal(opening)}")
        return either([last, f"{before} {rest}", '""'])

    def tag(self, text: str) -> str:
        return text if self.is_token(text) else literal(text)

    def object(self, tool: Tool, arguments: str) -> str:
        """Return the body of a call as a JSON object, with its key for `arguments`."""
        # Its parts are the lexemes of JSON, so that it may be an alternative to other JSON.
        words = ("{", '"name"', ": ", literal(tool.name), ", ", f'"{arguments}"', ": ")
        value = self.rules.add(json_value(tool.schema))
        return " ".join([*map(literal, words), value, literal("}")])


class _JsonCalls(_Format):
    """Hermes, Qwen3, Granite 4."""

    tags = ("<tool_call>", "</tool_call>")

    def one(self, tool: Tool) -> str:
        return rf'"\n" {self.object(tool, "arguments")} "\n"'


class _XmlCalls(_JsonCalls):
    """Qwen3.5, Qwen3-Coder, Nemotron 3; a schema without a plain form has its call in JSON."""

    not_in_text = ("<function=",)

    def one(self, tool: Tool) -> str:
        arguments = self._arguments(tool)
        if arguments is None:
            return super().one(tool)
        head, tail = literal(f"\n<function={tool.name}>\n"), literal("</function>\n")
        return " ".join([head, *arguments, tail])

    def _arguments(self, tool: Tool) -> list[str] | None:
        keys, found = tool.keys, list[str]()
        if keys is None:
            return None
        for key, is_required in keys.items():
            value = argument(self.rules, tool.schema, key, "\n</parameter>\n")
            if value is None or not _KEY.fullmatch(key):
                return None
            rule = self.rules.add(f"{literal(f'<parameter={key}>{chr(10)}')} {value}")
            found.append(rule if is_required else f"{rule}?")
        return found


class _LlamaCalls(_Format):
    """Llama 3.1 and 3.2: calls begin the answer, without tags."""

    between = "; "

    def one(self, tool: Tool) -> str:
        return self.object(tool, "parameters")

    def after_text(self, *, is_single: bool) -> str:
        text = r"/(?s:.*)/ & ~/[ \t\r\n]*\{(?s:.*)/ & ~/(?s:.*)<\|python_tag\|>(?s:.*)/"
        return either([self.rules.longest(text), self.rules.add(self.rest(is_single)), '""'])

    def tag(self, text: str) -> str:
        return literal(text)


class _ListCalls(_Format):
    """Nemotron Nano 2: a list of calls in JSON."""

    tags = ("<TOOLCALL>", "</TOOLCALL>")

    def one(self, tool: Tool) -> str:
        return self.object(tool, "arguments")

    def rest(self, is_single: bool) -> str:
        more = "" if is_single else f'(", " {self.call})*'
        return f'"[" {self.call} {more} "]" {self.tag(self.tags[1])}'


class _PythonCalls(_ListCalls):
    """LFM2: a list of Python calls, or in JSON if all are not expressions of Python."""

    tags = ("<|tool_call_start|>", "<|tool_call_end|>")

    def __init__(self, rules: Rules, tools: Sequence[Tool], is_token: IsToken) -> None:
        self._is_python = all(map(_is_python, tools))
        super().__init__(rules, tools, is_token)

    def one(self, tool: Tool) -> str:
        if not self._is_python:
            return super().one(tool)
        tail, head = literal(")"), literal(")")
        # `head` is what may follow if no argument was written yet, and `tail` otherwise.
        for key, is_required in reversed((tool.keys or {}).items()):
            schema = tool.schema["properties"][key]
            schema = schema if isinstance(schema, Mapping) else {}
            value = json_value(with_definitions(schema, tool.schema))
            written = self.rules.add(f"{literal(f'{key}=')} {value}")
            first, next_ = f"{written} {tail}", f'", " {written} {tail}'
            head = self.rules.add(first if is_required else either([first, head]))
            tail = self.rules.add(next_ if is_required else either([next_, tail]))
        return f"{literal(f'{tool.name}(')} {head}"


def _is_python(tool: Tool) -> bool:
    keys = tool.keys
    if keys is None or refers_elsewhere(tool.schema) or not _PYTHON_NAME.fullmatch(tool.name):
        return False
    return all(_PYTHON_KEY.fullmatch(key) for key in keys)


_FORMATS: dict[str, type[_Format]] = {
    "xml": _XmlCalls,
    "hermes": _JsonCalls,
    "llama": _LlamaCalls,
    "lfm2": _PythonCalls,
    "nemotron-nano-2": _ListCalls,
}


def _format(dialect: Dialect, rules: Rules, tools: Sequence[Tool], is_token: IsToken) -> _Format:
    if dialect.name not in _FORMATS:
        raise ValueError(
            "tool_choice can't force a call: the chat template of this model has no form of calls "
            "that jaxspec knows. Leave the tools out, or name a form by --tool-call-parser."
        )
    return _FORMATS[dialect.name](rules, tools, is_token)


def _escaped(text: str) -> str:
    """Return a text as part of a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")
