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

import enum
import json
import re

from jaxspec.text.parsers.arguments import ArgumentWriter, kinds_of
from jaxspec.text.parsers.calls import Event, Tools, may_name
from jaxspec.text.parsers.json_reader import Status
from jaxspec.text.parsers.markers import Markers

FUNCTION = "<function="
_PARAMETER, _VALUE_ENDS = "<parameter=", "</parameter>"
_FUNCTION_ENDS, _CALL_ENDS = "</function>", "</tool_call>"
_ENDS = Markers((_VALUE_ENDS, _FUNCTION_ENDS))
_SPACE = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"([^<>\n]{1,256})>")
_NAME_PART = re.compile(r"[^<>\n]{0,256}")
_MAX_TAG = len(_PARAMETER) + 257


class _Next(enum.Enum):
    FUNCTION = enum.auto()
    NAME = enum.auto()
    BODY = enum.auto()
    VALUE = enum.auto()
    VALUE_ENDED = enum.auto()  # a closing tag, which may be part of the value
    AFTER = enum.auto()


class XmlCall:
    """Reader of one call, which streams each argument.

    Arguments may contain any tags: an argument ends only at `</parameter>` followed by a tag of the
    call or, if `</parameter>` is missing, at `</function>` followed by `</tool_call>`.
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
        self._is_begun = False
        self._writer = ArgumentWriter(frozenset())
        self._ending: list[str] = []  # text that may end the value or belong to it

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def read(self, text: str, start: int, *, is_all: bool = False) -> int:
        while self.status is Status.READING and start < len(text):
            before, step = start, self._next
            if step is _Next.VALUE:
                start = self._read_value(text, start)
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
        place, tag = _ENDS.find(text, start)
        self._write(self._writer.push(text[start:place]))
        if tag:
            self._ending, self._next = [tag], _Next.VALUE_ENDED
        return place + len(tag)

    def _read_tag(self, text: str, start: int, is_all: bool) -> int:
        """Read the tag at `start`; returns `start` if it is incomplete."""
        if start == len(text):
            return start
        tag = _tag(text[start : start + _MAX_TAG], is_all)
        if tag == "":
            return start
        if self._next is _Next.FUNCTION and tag == FUNCTION:
            self._next = _Next.NAME
        elif self._next is _Next.BODY and tag:
            self._read_body(tag)
        elif self._next is _Next.VALUE_ENDED:
            return start + self._read_ended(tag)
        elif self._next is _Next.AFTER:
            self.status = Status.DONE
            return start + (len(_CALL_ENDS) if tag == _CALL_ENDS else 0)
        else:
            self.status = Status.FAILED
        return start if self.status is Status.FAILED else start + len(tag or "")

    def _read_body(self, tag: str) -> None:
        """Process a tag after the function's name or after an argument."""
        if tag.startswith(_PARAMETER):
            key = tag[len(_PARAMETER) : -1]
            self._write(", " if self._is_begun else self._begin_call())
            self._write(f"{json.dumps(key, ensure_ascii=False)}: ")
            self._writer = ArgumentWriter(kinds_of(self._tools.schema(self._name), key))
            self._next = _Next.VALUE
        elif tag == _FUNCTION_ENDS:
            self._end_call()
        elif tag == _CALL_ENDS and self._is_begun:
            self._end_call()
            self.status = Status.DONE
        else:
            self.status = Status.FAILED

    def _read_ended(self, tag: str | None) -> int:
        """Decide by the next tag if the value has ended; return the consumed length."""
        if self._ending[0] == _VALUE_ENDS and tag is not None and tag != FUNCTION:
            self._write(self._writer.flush())
            self._next = _Next.BODY
        elif tag == _CALL_ENDS:
            self._write(self._writer.flush())
            self._end_call()
            self.status = Status.DONE
            return len(tag)
        else:
            self._write(self._writer.push("".join(self._ending)))
            self._next = _Next.VALUE
        return 0

    def _write(self, arguments: str) -> None:
        self._events.append(Event("arguments", arguments))

    def _begin_call(self) -> str:
        self._is_begun = True
        self._events.append(Event("name", self._name))
        return "{"

    def _end_call(self) -> None:
        self._write("}" if self._is_begun else self._begin_call() + "}")
        self._events.append(Event("end"))
        self._next = _Next.AFTER


def _tag(text: str, is_all: bool) -> str | None:
    """Return the tag that `text` begins with, "" if it is incomplete, None if there is none."""
    for tag in (FUNCTION, _FUNCTION_ENDS, _CALL_ENDS):
        if text.startswith(tag):
            return tag
    if text.startswith(_PARAMETER):
        if match := _NAME.match(text, len(_PARAMETER)):
            return text[: match.end()]
        may_come = _NAME_PART.fullmatch(text, len(_PARAMETER))
    else:
        tags = (FUNCTION, _FUNCTION_ENDS, _CALL_ENDS, _PARAMETER)
        may_come = any(tag.startswith(text) for tag in tags)
    return "" if may_come and not is_all else None
