"""Incremental, validating reader of one JSON value in streamed text.

The grammar is that of RFC 8259. Control characters inside strings, which the grammar forbids but
models write, are replaced by their escapes.
"""

import enum
import json
import re

MAX_DEPTH = 200
"""Deepest nesting of arrays and objects, far below the recursion limit of Python's reader."""
_MAX_SCALAR = 1024  # most characters of a number
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PART = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CLOSES = {"{": "}", "[": "]"}


class Status(enum.Enum):
    READING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class _Next(enum.Enum):
    VALUE = enum.auto()
    FIRST_VALUE = enum.auto()  # first value of an array, or its end
    KEY = enum.auto()
    FIRST_KEY = enum.auto()  # first key of an object, or its end
    COLON = enum.auto()
    COMMA = enum.auto()  # comma, or the end of the array or object
    STRING = enum.auto()  # rest of a string


class JsonReader:
    """Reader of one value; the accepted text is always a prefix of a valid value."""

    def __init__(self) -> None:
        self.status = Status.READING
        self.depth = 0
        self._open: list[str] = []
        self._next = _Next.VALUE
        self._after_string = _Next.COMMA
        self._accepted: list[str] = []

    def read(self, text: str, start: int, *, is_all: bool = False) -> int:
        """Consume the text of the value from index `start`, and return the index of the rest.

        While `status` is READING, pass the rest again with more text. Otherwise the rest begins
        after the value (DONE), or at the first invalid text (FAILED). `is_all` means that the text
        is complete.
        """
        while self.status is Status.READING:
            if self._next is not _Next.STRING:
                start = self._accept(text, start, _SPACE)
            if start == len(text):
                break
            before = start
            start = self._read_one(text, start, is_all)
            if start == before:
                break
        return start

    def take(self) -> str:
        """Return the text accepted since the last call."""
        text = "".join(self._accepted)
        self._accepted.clear()
        return text

    def _accept(self, text: str, start: int, pattern: re.Pattern[str]) -> int:
        match = pattern.match(text, start)
        if match is None or match.end() == start:
            return start
        self._accepted.append(match.group())
        return match.end()

    def _read_one(self, text: str, start: int, is_all: bool) -> int:
        """Read a mark, a scalar or a part of a string; returns `start` if it is incomplete."""
        char, step = text[start], self._next
        if step is _Next.STRING:
            return self._read_string(text, start)
        if step is _Next.COLON and char == ":":
            self._next = _Next.VALUE
        elif step is _Next.COMMA and char == ",":
            self._next = _Next.KEY if self._open[-1] == "{" else _Next.VALUE
        elif step in (_Next.COMMA, _Next.FIRST_KEY, _Next.FIRST_VALUE) and (
            char == _CLOSES[self._open[-1]]
        ):
            self._close()
        elif step in (_Next.KEY, _Next.FIRST_KEY) and char == '"':
            self._next, self._after_string = _Next.STRING, _Next.COLON
        elif step in (_Next.VALUE, _Next.FIRST_VALUE):
            return self._read_value(text, start, is_all)
        else:
            self.status = Status.FAILED
            return start
        self._accepted.append(char)
        return start + 1

    def _read_value(self, text: str, start: int, is_all: bool) -> int:
        char = text[start]
        if char == '"':
            self._next, self._after_string = _Next.STRING, _Next.COMMA
        elif char in _CLOSES:
            if self.depth == MAX_DEPTH:
                self.status = Status.FAILED
                return start
            self._open.append(char)
            self.depth += 1
            self._next = _Next.FIRST_KEY if char == "{" else _Next.FIRST_VALUE
        else:
            return self._read_scalar(text, start, is_all)
        self._accepted.append(char)
        return start + 1

    def _read_scalar(self, text: str, start: int, is_all: bool) -> int:
        match = _SCALAR.match(text, start)
        scalar = match.group() if match else ""
        is_short = len(scalar) <= _MAX_SCALAR
        if is_short and start + len(scalar) == len(text) and not is_all:
            return start
        is_known = scalar in ("true", "false", "null") or _NUMBER.fullmatch(scalar)
        if not is_short or not is_known:
            self.status = Status.FAILED
            return start
        self._accepted.append(scalar)
        self._value_ends()
        return start + len(scalar)

    def _read_string(self, text: str, start: int) -> int:
        start = self._accept(text, start, _PLAIN)
        if start == len(text):
            return start
        char = text[start]
        if char == '"':
            self._accepted.append(char)
            if self._after_string is _Next.COLON:
                self._next = _Next.COLON
            else:
                self._value_ends()
            return start + 1
        if char != "\\":
            self._accepted.append(json.dumps(char)[1:-1])
            return start + 1
        after = self._accept(text, start, _ESCAPE)
        if after == start and not _ESCAPE_PART.fullmatch(text, start):
            self.status = Status.FAILED
        return after

    def _close(self) -> None:
        self._open.pop()
        self.depth -= 1
        self._value_ends()

    def _value_ends(self) -> None:
        if self._open:
            self._next = _Next.COMMA
        else:
            self.status = Status.DONE


def is_json(text: str) -> bool:
    """Return whether `text` is one valid JSON value, with optional whitespace around it."""
    reader = JsonReader()
    end = reader.read(text, 0, is_all=True)
    if reader.status is not Status.DONE or reader.take().strip() != text.strip():
        return False
    return not text[end:].strip(" \t\n\r")
