"""Reader of tool calls as tags, with arguments as plain text.

Qwen3.5, Qwen3-Coder and Nemotron 3 write

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>
"""

import difflib
import enum
import json
import re

from jaxspec.text.parsers.arguments import ArgumentWriter, kinds_of
from jaxspec.text.parsers.calls import CallReader, Event, Tools, may_name
from jaxspec.text.parsers.json_calls import JsonCall
from jaxspec.text.parsers.json_reader import Status
from jaxspec.text.parsers.list_calls import ListCalls
from jaxspec.text.parsers.markers import Markers

FUNCTION = "<function="
CALL, CALL_ENDS = "<tool_call>", "</tool_call>"
_PARAMETER, _VALUE_ENDS, _FUNCTION_ENDS = "<parameter=", "</parameter>", "</function>"
_IN_VALUE = Markers(("</par", _FUNCTION_ENDS, _PARAMETER))
_SPACE = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"([^<>\n]{1,256})>")
_NAME_PART = re.compile(r"[^<>\n]{0,256}")
_CLOSING = re.compile(r"</([\w.:=-]{0,64})(>?)")
_SPELLINGS = {"parameter": (_VALUE_ENDS, 0.7), "function": (_FUNCTION_ENDS, 0.6)}
_SPELLINGS["tool_call"] = CALL_ENDS, 0.6  # and how alike a misspelling must be
_MAX_TAG = len(_PARAMETER) + 257
_INCOMPLETE = ""


class _Next(enum.Enum):
    FUNCTION = enum.auto()
    NAME = enum.auto()
    BODY = enum.auto()
    VALUE = enum.auto()
    MARK = enum.auto()  # a tag in a value
    VALUE_ENDED = enum.auto()  # a closing tag, which may be part of the value
    AFTER = enum.auto()


class XmlCall:
    """Reader of one call, which streams each argument.

    Arguments may contain any tags: an argument ends only at `</parameter>` followed by a tag of the
    call or, if `</parameter>` is missing, at `</function>` followed by `</tool_call>`. Closing tags
    may be doubled or misspelt. Where `</parameter>` seems to be missing before the next argument,
    text is held back until the text after that one's `</parameter>` decides:

        <parameter=a>     <parameter=a>
        1                 see
        <parameter=b>     <parameter=b>
        2                 2
        </parameter>      </parameter>
        </function>       in the manual
                          </parameter>

    are two arguments, and one whose text has tags.
    """

    def __init__(self, opening: str, tools: Tools, is_strict: bool) -> None:
        """Start after the opening tag.

        Args:
            opening: `<tool_call>`, or `<function=` from models that omit it.
            tools: The tools of the request.
            is_strict: The name must be that of a tool, as always after `<function=`.
        """
        self.status = Status.READING
        self._tools, self._is_strict = tools, is_strict or opening == FUNCTION
        self._next = _Next.NAME if opening == FUNCTION else _Next.FUNCTION
        self._events: list[Event] = []
        self._name = ""
        self._keys: set[str] = set()
        self._writer = ArgumentWriter(frozenset())
        self._is_line_start = False  # the value ends with a newline
        self._num_open = 0  # `<parameter=` in the value, less `</parameter>`
        self._maybe: list[tuple[str, list[str]]] = []  # arguments that may be text of the value
        self._ending: list[str] = []  # text that may end the value or belong to it

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def read(self, text: str, start: int, *, is_all: bool = False) -> int:
        while self.status is Status.READING and start < len(text):
            before, step = start, self._next
            if step is _Next.VALUE:
                start = self._read_value(text, start)
            elif step is _Next.MARK:
                start = self._read_mark(text, start, is_all)
            elif step is _Next.NAME:
                start = self._read_name(text, start, is_all)
            else:
                start = self._read_tag(text, self._skip_space(text, start), is_all)
            if (start, self._next) == (before, step):
                break
        if is_all and self._next is _Next.AFTER:
            self.status = Status.DONE
        return start

    def _skip_space(self, text: str, start: int) -> int:
        space = _SPACE.match(text, start)
        if space is None:
            return start
        if self._next is _Next.VALUE_ENDED:
            self._ending.append(space.group())
        return space.end()

    def _read_name(self, text: str, start: int, is_all: bool) -> int:
        if match := _NAME.match(text, start):
            self._name = match.group(1)
            if may_name(self._name, self._tools, self._is_strict):
                self._next = _Next.BODY
                return match.end()
        elif _NAME_PART.fullmatch(text, start) and not is_all:
            return start
        self.status = Status.FAILED
        return start

    def _read_value(self, text: str, start: int) -> int:
        place, mark = _IN_VALUE.find(text, start)
        self._append(text[start:place])
        if mark:
            self._next = _Next.MARK
        return place

    def _read_mark(self, text: str, start: int, is_all: bool) -> int:
        """Read the tag at `start`, which is in the value or ends it."""
        tag, length = _tag(text, start, is_all)
        if tag == _INCOMPLETE:
            return start
        found = text[start : start + length]
        is_exact = found == tag
        if tag == _FUNCTION_ENDS or (tag == _VALUE_ENDS and (is_exact or self._is_line_start)):
            self._ending, self._next = [found], _Next.VALUE_ENDED
            return start + length
        self._next = _Next.VALUE
        if tag is None or not tag.startswith(_PARAMETER):
            length = 1  # its "<" is text
        elif self._may_begin(key := tag[len(_PARAMETER) : -1]):
            self._maybe.append((key, []))
            return start + length
        else:
            self._num_open += 1
        self._append(text[start : start + length])
        return start + length

    def _may_begin(self, key: str) -> bool:
        """Return whether an argument of the tool that has no value yet may begin here."""
        if not self._is_line_start or self._num_open or key in self._keys:
            return False
        properties = self._tools.schema(self._name).get("properties")
        is_known = isinstance(properties, dict) and key in properties
        return is_known and all(key != other for other, _ in self._maybe)

    def _append(self, text: str) -> None:
        if not text:
            return
        self._is_line_start = text.endswith("\n")
        if self._maybe:
            self._maybe[-1][1].append(text)
        else:
            self._write(self._writer.push(text))

    def _read_tag(self, text: str, start: int, is_all: bool) -> int:
        """Read the tag at `start`; returns `start` if it is incomplete."""
        if start == len(text):
            return start
        tag, length = _tag(text, start, is_all)
        if tag == _INCOMPLETE:
            return start
        if self._next is _Next.FUNCTION and tag == FUNCTION:
            self._next = _Next.NAME
        elif self._next is _Next.BODY and tag:
            self._read_body(tag)
        elif self._next is _Next.VALUE_ENDED:
            return start + self._read_ended(tag, text[start : start + length])
        elif self._next is _Next.AFTER and tag != _FUNCTION_ENDS:
            self.status = Status.DONE
            return start + (length if tag == CALL_ENDS else 0)
        elif self._next is not _Next.AFTER:
            self.status = Status.FAILED
        return start if self.status is Status.FAILED else start + length

    def _read_body(self, tag: str) -> None:
        """Process a tag after the function's name or after an argument."""
        if tag.startswith(_PARAMETER):
            self._begin_argument(tag[len(_PARAMETER) : -1])
            self._next = _Next.VALUE
        elif tag == _FUNCTION_ENDS:
            self._end_call()
        elif tag == CALL_ENDS and self._keys:
            self._end_call()
            self.status = Status.DONE
        else:
            self.status = Status.FAILED

    def _read_ended(self, tag: str | None, found: str) -> int:
        """Decide by the next tag if the value has ended; return the consumed length."""
        is_value_end = self._ending[0] != _FUNCTION_ENDS
        if is_value_end and tag == _VALUE_ENDS:
            if self._num_open or self._maybe or self._ending[0] != _VALUE_ENDS:
                self._continue()
                self._ending, self._next = [found], _Next.VALUE_ENDED
            else:
                self._ending.append(found)
            return len(found)
        if is_value_end and tag is not None and tag != FUNCTION:
            self._end_value()
            self._next = _Next.BODY
        elif not is_value_end and tag == CALL_ENDS:
            self._end_value()
            self._end_call()
            self.status = Status.DONE
            return len(found)
        else:
            self._continue()
        return 0

    def _continue(self) -> None:
        """Take the closing tag, and arguments that seemed to have begun before it, as text."""
        maybe, self._maybe = self._maybe, []
        self._num_open = max(0, self._num_open + len(maybe) - 1)
        for key, parts in maybe:
            self._write(self._writer.push(f"{_PARAMETER}{key}>{''.join(parts)}"))
        self._append("".join(self._ending))
        self._next = _Next.VALUE

    def _end_value(self) -> None:
        self._write(self._writer.flush())
        maybe, self._maybe = self._maybe, []
        for key, parts in maybe:
            self._begin_argument(key)
            self._write(self._writer.push("".join(parts)) + self._writer.flush())

    def _begin_argument(self, key: str) -> None:
        self._write(", " if self._keys else self._begin_call())
        self._write(f"{json.dumps(key, ensure_ascii=False)}: ")
        self._writer = ArgumentWriter(kinds_of(self._tools.schema(self._name), key))
        self._keys.add(key)
        self._num_open, self._is_line_start = 0, False

    def _write(self, arguments: str) -> None:
        self._events.append(Event("arguments", arguments))

    def _begin_call(self) -> str:
        self._events.append(Event("name", self._name))
        return "{"

    def _end_call(self) -> None:
        self._write("}" if self._keys else self._begin_call() + "}")
        self._events.append(Event("end"))
        self._next = _Next.AFTER


class TaggedCall:
    """Reader of the text after `<tool_call>`: JSON if it begins with `{` or `[{`, else tags.

    Models write either form, whatever their chat template shows.
    """

    def __init__(self, tools: Tools, is_strict: bool) -> None:
        self._make = tools, is_strict
        self._reader: CallReader | None = None

    @property
    def status(self) -> Status:
        return self._reader.status if self._reader else Status.READING

    def take(self) -> list[Event]:
        return self._reader.take() if self._reader else []

    def read(self, text: str, start: int, *, is_all: bool = False) -> int:
        if self._reader is None:
            start = _after_space(text, start)
            first = _after_space(text, start + 1)
            may_be_list = text[start : start + 1] == "["
            if start == len(text) or (may_be_list and first == len(text) and not is_all):
                return start
            if text[start] == "{":
                self._reader = JsonCall(CALL_ENDS, *self._make)
            elif may_be_list and text[first : first + 1] == "{":
                self._reader = ListCalls(CALL_ENDS, *self._make)
            else:
                self._reader = XmlCall(CALL, *self._make)
        return self._reader.read(text, start, is_all=is_all)


def _after_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    return space.end() if space else start


def _tag(text: str, start: int, is_all: bool) -> tuple[str | None, int]:
    """Return the tag at `start`, correctly spelt, and the length of its text.

    The tag is `_INCOMPLETE` if it may go on in later text, and None if there is none.
    """
    if match := _CLOSING.match(text, start):
        word, ends = match.groups()
        if not ends and match.end() == len(text) and not is_all:
            return _INCOMPLETE, 0
        return _closing(word), match.end() - start
    if text.startswith(FUNCTION, start):
        return FUNCTION, len(FUNCTION)
    rest = text[start : start + _MAX_TAG]
    if rest.startswith(_PARAMETER):
        if match := _NAME.match(rest, len(_PARAMETER)):
            return rest[: match.end()], match.end()
        may_come = _NAME_PART.fullmatch(rest, len(_PARAMETER))
    else:
        may_come = any(tag.startswith(rest) for tag in (FUNCTION, _PARAMETER, "</"))
    return (_INCOMPLETE if may_come and not is_all else None), 0


def _closing(word: str) -> str | None:
    """Return the closing tag that `word` is the name of, perhaps misspelt."""
    for name, (tag, least) in _SPELLINGS.items():
        if difflib.SequenceMatcher(None, word, name).ratio() >= least:
            return tag
    return None
