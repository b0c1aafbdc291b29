"""Reader of JSON tool calls: `{"name": ..., "arguments": {...}}`.

Hermes, Qwen3 and Granite 4 write each call between `<tool_call>` and `</tool_call>`. Llama 3.1
writes it without tags or after `<|python_tag|>`, with the key "parameters" in place of "arguments",
and separates calls by ";".
"""

import enum
import json
import re

from jaxspec.text.parsers.calls import Event, Tools, may_name
from jaxspec.text.parsers.json_reader import JsonReader, Status, is_json

_ARGUMENTS = ("arguments", "parameters")
_SPACE = re.compile(r"[ \t\n\r]*")


class _Next(enum.Enum):
    OBJECT = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    KEY_TEXT = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    VALUE_TEXT = enum.auto()
    COMMA = enum.auto()
    AFTER = enum.auto()


class JsonCall:
    """Reader of one call, which streams the arguments once the name is known.

    Arguments before the name are held back. Other keys are ignored. A string with JSON arguments,
    which some models write, is unpacked. The last brace may be missing before the closing tag.
    """

    def __init__(self, closing: str, tools: Tools, is_strict: bool) -> None:
        """Start before the opening brace.

        Args:
            closing: Tag after the call; "" for none, where a ";" may follow.
            tools: The tools of the request.
            is_strict: The name must be that of a tool, as always without a tag.
        """
        self.status = Status.READING
        self._tools, self._closing = tools, closing
        self._is_strict = is_strict or not closing
        self._events: list[Event] = []
        self._next = _Next.OBJECT
        self._name: str | None = None
        self._key = ""
        self._reader = JsonReader()
        self._is_begun = self._passes_on = False
        self._held: list[str] = []  # parts of the current key or value
        self._arguments: str | None = None  # complete arguments before the name

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def read(self, text: str, start: int, *, is_all: bool = False) -> int:
        while self.status is Status.READING:
            if self._next not in (_Next.KEY_TEXT, _Next.VALUE_TEXT):
                start = _SPACE.match(text, start).end()  # pyright: ignore[reportOptionalMemberAccess]
            if start == len(text):
                break
            before, step = start, self._next
            if step in (_Next.KEY_TEXT, _Next.VALUE_TEXT):
                start = self._read_value(text, start, is_all)
            else:
                start = self._read_mark(text, start, is_all)
            if (start, self._next) == (before, step):
                break
        if is_all and self.status is Status.READING and self._next is _Next.AFTER:
            self.status = Status.DONE
        return start

    def _read_mark(self, text: str, start: int, is_all: bool) -> int:
        """Read a punctuation mark between keys and values."""
        char, step = text[start], self._next
        if step is _Next.AFTER:
            return self._read_after(text, start, is_all)
        if step in (_Next.FIRST_KEY, _Next.KEY) and char == '"':
            self._next, self._reader, self._passes_on = _Next.KEY_TEXT, JsonReader(), False
            return start
        if step is _Next.VALUE:
            self._next, self._reader = _Next.VALUE_TEXT, JsonReader()
            self._passes_on = char == "{" and self._key in _ARGUMENTS
            self._passes_on &= self._name is not None and not self._is_begun
            if self._passes_on:
                self._begin_call()
            return start
        if step is _Next.OBJECT and char == "{":
            self._next = _Next.FIRST_KEY
        elif step is _Next.COLON and char == ":":
            self._next = _Next.VALUE
        elif step is _Next.COMMA and char == ",":
            self._next = _Next.KEY
        elif step is _Next.COMMA and char == "}":
            self._end_call()
        elif step is _Next.COMMA and char == "<" and self._is_begun and self._closing:
            return self._read_after(text, start, is_all)
        else:
            self.status = Status.FAILED
        return start if self.status is Status.FAILED else start + 1

    def _read_after(self, text: str, start: int, is_all: bool) -> int:
        """Read the closing tag if there is one, and end the call."""
        rest = text[start : start + len(self._closing)]
        if self._closing and rest == self._closing:
            if self._next is _Next.COMMA:
                self._end_call()
            self.status = Status.DONE
            return start + len(self._closing)
        if self._closing and self._closing.startswith(rest) and not is_all:
            return start
        if self._next is _Next.COMMA:
            self.status = Status.FAILED
            return start
        self.status = Status.DONE
        return start + (text[start] == ";" and not self._closing)

    def _read_value(self, text: str, start: int, is_all: bool) -> int:
        """Read the available part of a key or value."""
        start = self._reader.read(text, start, is_all=is_all)
        accepted = self._reader.take()
        if self._passes_on:
            if self._reader.status is Status.DONE:
                accepted = accepted[:-1]
            self._events.append(Event("arguments", accepted))
        else:
            self._held.append(accepted)
        if self._reader.status is Status.FAILED:
            self.status = Status.FAILED
        elif self._reader.status is Status.DONE:
            value, is_key = "".join(self._held), self._next is _Next.KEY_TEXT
            self._held.clear()
            self._next = _Next.COLON if is_key else _Next.COMMA
            if is_key:
                self._key = json.loads(value)
            elif not self._passes_on and not self._keep(value):
                self.status = Status.FAILED
        return start

    def _keep(self, value: str) -> bool:
        """Store a value that was not streamed, and return whether it is valid for its key."""
        if self._key == "name":
            name = json.loads(value)
            if self._name is not None or not isinstance(name, str):
                return False
            if not may_name(name, self._tools, self._is_strict):
                return False
            self._name = name
        elif self._key in _ARGUMENTS:
            self._arguments, is_first = _object(value), self._arguments is None
            if self._is_begun or not is_first or self._arguments is None:
                return False
        if self._name is not None and self._arguments is not None and not self._is_begun:
            self._begin_call(self._arguments[:-1])
        return True

    def _begin_call(self, arguments: str = "") -> None:
        """Emit the name and the first arguments; `_end_call` adds their last brace."""
        self._is_begun = True
        self._events += [Event("name", self._name or ""), Event("arguments", arguments)]

    def _end_call(self) -> None:
        """End the call; between tags it may have no arguments."""
        if not self._is_begun:
            if self._name is None or not self._closing:
                self.status = Status.FAILED
                return
            self._begin_call("{")
        self._events += [Event("arguments", "}"), Event("end")]
        self._next = _Next.AFTER


def _object(value: str) -> str | None:
    """Return the JSON object that a value is or contains as a string; {} for null, else None."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        value = json.loads(value)
        # Escapes may be half of a surrogate pair, which UTF-8 can't encode.
        if not is_json(value) or value != value.encode("utf-8", "replace").decode():
            return None
    value = value.strip()
    return value if value.startswith("{") else None
