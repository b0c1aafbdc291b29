"""A model's text, told apart into reasoning, content and tool calls while it comes."""

import enum
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxspec.server.parsers.calls import CallReader, MakeReader, Tools
from jaxspec.server.parsers.json_reader import Status
from jaxspec.server.parsers.markers import Markers
from jaxspec.server.parsers.piece import Event, Kind, Piece, joined

THINK, THINK_ENDS = "<think>", "</think>"
_BLANK = re.compile(r"[ \t\r\n]*")


class Dialect(NamedTuple):
    """How a family of models writes: a parser of its text, when called as `OutputParser` is."""

    name: str
    readers: Mapping[str, MakeReader] = {}
    """Who reads the call behind each tag that may begin one; "": a brace may, at the beginning."""
    thinks: bool = False
    tags: tuple[str, ...] = ()
    """All tags that the text must show, special tokens or not."""

    def __call__(
        self, *, starts_in_reasoning: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> "OutputParser":
        """A parser of one text."""
        return OutputParser(starts_in_reasoning=starts_in_reasoning, tools=tools, dialect=self)


PLAIN = Dialect("plain")
"""All text is content."""


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
    """Takes one text in pieces of any length, and tells its parts apart.

    However the text is cut, the joined pieces are the same, and it takes time linear in the text's
    length. Every character comes back but tags, the newlines that touch them, and space before a
    first tag. No text raises.

    Without tools no call is looked for: nobody would answer it. What begins like a call and turns
    out to be none is content, or reasoning where it stands in it. A call whose name has been given
    away and which then ends early, or goes wrong, keeps arguments that are no whole JSON: so no
    client can run it by mistake. `unfinished` has its text.
    A call inside the reasoning must name one of the tools, and ends the reasoning.

    `num_tool_calls` counts whole calls. `unfinished` has the text, tags included, of each call that
    is not whole, by its index.
    """

    def __init__(
        self,
        *,
        starts_in_reasoning: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        dialect: Dialect = PLAIN,
    ) -> None:
        """`starts_in_reasoning`: the prompt has opened it. `tools` in the form of OpenAI's chat."""
        self._tools = Tools(tools)
        self._readers = dialect.readers if self._tools else {}
        self._thinks = dialect.thinks or starts_in_reasoning
        self._in = _In.REASONING_BEGINS if starts_in_reasoning else _In.CONTENT_BEGINS
        self._kind: Kind = "reasoning" if starts_in_reasoning else "content"
        self._may_open = self._thinks  # its own tag may still begin the reasoning
        self._drops_end = False  # a call ended the reasoning, and its own tag may still come
        self._text = ""  # what was not taken yet: at most a tag that is not whole
        self._blank: list[str] = []  # before the first other character of a part
        self._trims = starts_in_reasoning  # newlines at the beginning of a part
        self._num_newlines = 0  # held back, for a tag may follow them
        self._pieces: list[Piece] = []
        self._reader: CallReader | None = None
        self._raw: list[str] = []  # of the call that is read
        self._has_name = False  # the call that is read
        self._num_names = 0
        self.num_tool_calls = 0
        self.unfinished: dict[int, str] = {}

    def push(self, text: str) -> list[Piece]:
        """The pieces that are known by now."""
        if not self._readers and not self._thinks:
            return [Piece("content", text)] if text else []
        if not self._text and "<" not in text and self._in in (_In.CONTENT, _In.REASONING):
            self._emit(text)  # most pieces are no more than that
            pieces, self._pieces = self._pieces, []
            return pieces
        self._text += text
        return self._advance(is_all=False)

    def flush(self) -> list[Piece]:
        """The rest of the pieces, at the end of the text."""
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
        """Read up to the first character of the reasoning or content that is no space."""
        if space := _BLANK.match(text, start):
            self._blank.append(space.group())
            start = space.end()
        is_tag_part = THINK.startswith(text[start : start + len(THINK)]) and (
            len(text) - start < len(THINK)
        )
        if not is_all and (start == len(text) or (self._may_open and is_tag_part)):
            return start
        opens, self._may_open = self._may_open and text.startswith(THINK, start), False
        blank = "".join(self._blank)
        self._blank.clear()
        if opens:
            self._begin(_In.REASONING)
            return start + len(THINK)
        if self._in is _In.CONTENT_BEGINS and "" in self._readers and text.startswith("{", start):
            self._begin_call("", blank)
            return start
        self._in = _In.REASONING if self._in is _In.REASONING_BEGINS else _In.CONTENT
        self._emit(blank)
        return start

    def _begin(self, part: _In) -> None:
        """Begin another part behind a tag; newlines before and behind the tag are markup."""
        self._in, self._trims, self._num_newlines = part, True, 0
        self._kind = "reasoning" if part is _In.REASONING else "content"

    def _pass(self, text: str, start: int, is_all: bool) -> int:
        """Pass on what comes before the next tag."""
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

    def _begin_call(self, tag: str, raw: str) -> None:
        is_strict = self._kind == "reasoning"
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
        """Leave a call that went wrong or ended early: what was not given away is text."""
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
        """Pass text on; newlines at its end wait for what follows."""
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        body = text.rstrip("\n")
        if body:
            self._pieces.append(Piece(self._kind, "\n" * self._num_newlines + body))
            self._num_newlines = 0
        self._num_newlines += len(text) - len(body)
