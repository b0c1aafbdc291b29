"""One JSON value in streamed text: checked and passed on as it comes.

The grammar is RFC 8259's. A control character inside a string, which the grammar forbids and models
write, is passed on as its escape.
"""

import enum
import json
import re

MAX_DEPTH = 200
"""Arrays and objects in each other; Python's own reader stops at some thousand."""
_MAX_SCALAR = 1024  # characters of a number
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PART = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CLOSES = {"{": "}", "[": "]"}


class Status(enum.Enum):
    """How far a reader has come."""

    READING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class _Next(enum.Enum):
    VALUE = enum.auto()
    FIRST_VALUE = enum.auto()  # of an array, or its end
    KEY = enum.auto()
    FIRST_KEY = enum.auto()  # of an object, or its end
    COLON = enum.auto()
    COMMA = enum.auto()  # or the end of the array or object
    STRING = enum.auto()  # the rest of one


class JsonReader:
    """Reads one value. What it has accepted is always the beginning of a valid value."""

    def __init__(self) -> None:
        """A reader before the first character of its value."""
        self.status = Status.READING
        self.depth = 0
        self._open: list[str] = []
        self._next = _Next.VALUE
        self._after_string = _Next.COMMA
        self._accepted: list[str] = []

    def read(self, text: str, start: int, *, is_all: bool = False) -> int:
        """Take from `text` what belongs to the value, and return where the rest begins.

        The rest is to come again with more text, unless the value is done or has failed; then it
        begins behind the value, or at what does not fit. `is_all`: no more text will come.
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
        """What was accepted since the last call."""
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
        """Read one mark, scalar or piece of a string; `start` itself when none is whole."""
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
    """Whether `text` is one JSON value as it is, maybe with space around it."""
    reader = JsonReader()
    end = reader.read(text, 0, is_all=True)
    if reader.status is not Status.DONE or reader.take().strip() != text.strip():
        return False
    return not text[end:].strip(" \t\n\r")
