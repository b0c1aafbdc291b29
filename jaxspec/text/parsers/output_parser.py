"""OutputParser: splits a model's streamed text into reasoning, content and tool calls."""

import enum
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxspec.text.parsers.calls import CallReader, Event, MakeReader, Tools
from jaxspec.text.parsers.json_reader import Status
from jaxspec.text.parsers.markers import Markers

THINK, THINK_ENDS = "<think>", "</think>"
_BLANK = re.compile(r"[ \t\r\n]*")
Kind = Literal["reasoning", "content", "tool_name", "tool_arguments"]


class Piece(NamedTuple):
    """A part of the text with its kind."""

    kind: Kind
    text: str
    index: int = 0  # index of the tool call, from 0; 0 for reasoning and content


def joined(pieces: list[Piece]) -> list[Piece]:
    """Join adjacent pieces of the same kind and call, and drop empty ones."""
    if len(pieces) < 2:
        return [piece for piece in pieces if piece.text]
    runs: list[tuple[Kind, int, list[str]]] = []
    for kind, text, index in pieces:
        if runs and runs[-1][:2] == (kind, index):
            runs[-1][2].append(text)
        elif text:
            runs.append((kind, index, [text]))
    return [Piece(kind, "".join(texts), index) for kind, index, texts in runs]


class Dialect(NamedTuple):
    """Output format of a family of models; call it like `OutputParser` to create a parser."""

    name: str
    readers: Mapping[str, MakeReader] = {}
    """Call readers by the tag that begins a call; "" is a brace at the beginning of the content."""
    thinks: bool = False
    tags: tuple[str, ...] = ()
    """Tags that the decoded text must include, even if they are special tokens."""
    call: tuple[str, str] | None = None
    """Tags around a call, if another JSON call may follow it and a closing tag may be doubled."""

    def __call__(
        self, *, starts_in_reasoning: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> "OutputParser":
        """Create the parser of one text."""
        return OutputParser(starts_in_reasoning=starts_in_reasoning, tools=tools, dialect=self)


PLAIN = Dialect("plain")
"""Dialect in which all text is content."""


class _In(enum.Enum):
    REASONING_BEGINS = enum.auto()
    REASONING = enum.auto()
    CONTENT_BEGINS = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()


@functools.cache
def _markers(tags: tuple[str, ...]) -> Markers:
    return Markers(tags)


class OutputParser:
    """Incremental parser of one text, given in parts of any length.

    The joined pieces do not depend on how the text is split, and parsing takes linear time. All
    characters are returned except tags, the newlines next to them, and whitespace before a first
    tag; a call between two words leaves a newline. No text raises an error.

    Calls are parsed only if the request has tools. After a call a JSON call of one of the tools may
    follow without a tag, and a second closing tag is dropped. Text that begins like a call but is
    not one is content, or reasoning inside the reasoning. If a call fails or ends after its name
    was returned, its arguments stay incomplete JSON, so that no client runs it by mistake. A call
    inside the reasoning must name one of the tools, and ends the reasoning.

    Attributes:
        num_tool_calls: Number of complete calls.
        unfinished: Text of each incomplete call, including tags, by the index of the call.
    """

    def __init__(
        self,
        *,
        starts_in_reasoning: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        dialect: Dialect = PLAIN,
    ) -> None:
        """Start before the text.

        Args:
            starts_in_reasoning: The prompt ends inside the reasoning.
            tools: Tools of the request, in OpenAI's format.
            dialect: Output format of the model.
        """
        self._tools = Tools(tools)
        self._readers = dialect.readers if self._tools else {}
        self._call_tags = dialect.call
        self._is_after_call = False  # a call has ended, and no text followed
        self._last = ""  # last character of the content
        self._is_joint = False  # a call followed that character
        self._thinks = dialect.thinks or starts_in_reasoning
        self._in = _In.REASONING_BEGINS if starts_in_reasoning else _In.CONTENT_BEGINS
        self._kind: Kind = "reasoning" if starts_in_reasoning else "content"
        self._may_open = self._thinks  # `<think>` may still begin the reasoning
        self._drops_end = False  # a call ended the reasoning: drop a later `</think>`
        self._text = ""  # unconsumed text, at most an incomplete tag
        self._blank: list[str] = []  # whitespace at the beginning of a part
        self._trims = starts_in_reasoning  # drop newlines at the beginning of a part
        self._num_newlines = 0  # newlines held back, because a tag may follow them
        self._pieces: list[Piece] = []
        self._reader: CallReader | None = None
        self._raw: list[str] = []  # text of the current call
        self._has_name = False  # the name of the current call was returned
        self._num_names = 0
        self.num_tool_calls = 0
        self.unfinished: dict[int, str] = {}

    def push(self, text: str) -> list[Piece]:
        """Append text and return the pieces that are known by now."""
        if not self._readers and not self._thinks:
            return [Piece("content", text)] if text else []
        if not self._text and "<" not in text and self._in in (_In.CONTENT, _In.REASONING):
            self._emit(text)  # fast path: most parts have no tag
            pieces, self._pieces = self._pieces, []
            return pieces
        self._text += text
        return self._advance(is_all=False)

    def flush(self) -> list[Piece]:
        """Return the remaining pieces at the end of the text."""
        return self._advance(is_all=True)

    def _advance(self, *, is_all: bool) -> list[Piece]:
        text, start = self._text, 0
        while True:
            before, part = start, self._in
            if part is _In.CALL:
                start = self._read_call(text, start, is_all)
            elif part is _In.CONTENT or part is _In.REASONING:
                start = self._pass(text, start, is_all)
            else:
                start = self._begin_part(text, start, is_all)
            if start == before and self._in is part:
                break
        self._text = text[start:]
        if is_all:
            self._pieces.append(Piece(self._kind, "\n" * self._num_newlines))
            self._num_newlines = 0
        pieces, self._pieces = joined(self._pieces), []
        return pieces

    def _begin_part(self, text: str, start: int, is_all: bool) -> int:
        """Read up to the first non-whitespace character of the reasoning or content."""
        if space := _BLANK.match(text, start):
            self._blank.append(space.group())
            start = space.end()
        closing = self._call_tags[1] if self._call_tags and self._is_after_call else ""
        tags = [tag for tag in (THINK if self._may_open else "", closing) if tag]
        rest = text[start : start + max(map(len, tags), default=0)]
        is_tag_part = any(rest != tag and tag.startswith(rest) for tag in tags)
        if not is_all and (start == len(text) or is_tag_part):
            return start
        if closing and text.startswith(closing, start):
            return start + len(closing)
        opens, self._may_open = self._may_open and text.startswith(THINK, start), False
        blank = "".join(self._blank)
        self._blank.clear()
        if opens:
            self._begin(_In.REASONING)
            return start + len(THINK)
        tag = self._call_tags[0] if closing and self._call_tags else ""
        if self._in is _In.CONTENT_BEGINS and tag in self._readers and text.startswith("{", start):
            self._begin_call(tag, blank, is_strict=bool(tag))
            return start
        self._is_after_call = False
        self._in = _In.REASONING if self._in is _In.REASONING_BEGINS else _In.CONTENT
        self._emit(blank)
        return start

    def _begin(self, part: _In) -> None:
        """Begin another part after a tag; newlines before and after the tag are markup."""
        self._in, self._trims, self._num_newlines = part, True, 0
        self._kind = "reasoning" if part is _In.REASONING else "content"

    def _pass(self, text: str, start: int, is_all: bool) -> int:
        """Emit the text before the next tag."""
        tags = tuple(tag for tag in self._readers if tag)
        if self._in is _In.REASONING or self._drops_end:
            tags += (THINK_ENDS,)
        place, tag = _markers(tags).find(text, start)
        if is_all and not tag:
            place = len(text)
        self._emit(text[start:place])
        if tag == THINK_ENDS:
            self._drops_end = False
            self._begin(_In.CONTENT_BEGINS)
        elif tag:
            self._begin_call(tag, tag)
        return place + len(tag)

    def _begin_call(self, tag: str, raw: str, is_strict: bool = False) -> None:
        is_strict |= self._kind == "reasoning"
        self._reader = self._readers[tag](self._tools, is_strict)
        self._in, self._raw = _In.CALL, ["\n" * self._num_newlines + raw]
        self._num_newlines = 0

    def _read_call(self, text: str, start: int, is_all: bool) -> int:
        assert self._reader is not None
        end = self._reader.read(text, start, is_all=is_all)
        self._raw.append(text[start:end])
        for event in self._reader.take():
            self._hear(event)
        if self._reader.status is Status.DONE:
            self._leave_call(_In.CONTENT_BEGINS)
            self._is_after_call = self._is_joint = True
        elif self._reader.status is Status.FAILED:
            self._give_back()
        elif is_all:
            self._raw.append(text[end:])
            self._give_back()
            return len(text)
        return end

    def _hear(self, event: Event) -> None:
        if event.kind == "end":
            self.num_tool_calls += 1
            self._has_name = False
            return
        if event.kind == "name":
            self._num_names += 1
            self._has_name = True
        kind: Kind = "tool_name" if event.kind == "name" else "tool_arguments"
        self._pieces.append(Piece(kind, event.text, self._num_names - 1))

    def _leave_call(self, part: _In) -> None:
        self._drops_end |= self._kind == "reasoning"
        self._begin(part)

    def _give_back(self) -> None:
        """Leave a call that failed or ended early.

        If its name was returned, its text is kept in `unfinished`, else it is emitted as text.
        """
        raw = "".join(self._raw)
        if self._has_name:
            self.unfinished[self._num_names - 1] = raw
            self._has_name = False
            self._leave_call(_In.CONTENT)
            self._trims = False
        else:
            self._in = _In.REASONING if self._kind == "reasoning" else _In.CONTENT
            self._emit(raw)

    def _emit(self, text: str) -> None:
        """Emit text; newlines at its end wait for the text that follows."""
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        body = text.rstrip("\n")
        if body:
            between = "\n" * self._num_newlines
            if self._kind == "content":
                is_joint = self._is_joint and not between and not (self._last + body[0]).count(" ")
                between = "\n" if is_joint and self._last else between
                self._last, self._is_joint = body[-1], False
            self._pieces.append(Piece(self._kind, between + body))
            self._num_newlines = 0
        self._num_newlines += len(text) - len(body)
