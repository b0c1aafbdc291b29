"""What a reader of tool calls is, and what it needs to know of the tools."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxspec.server.parsers.json_reader import Status
from jaxspec.server.parsers.piece import Event

_NAME = re.compile(r"[\w.:/-]{1,256}")


class Tools:
    """The tools of a request, by name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools` in the form of OpenAI's chat: `{"type": "function", "function": {...}}`.

        What has no name is passed over: the chat template has seen it already.
        """
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
                schema = function.get("parameters")
                self._schemas[name] = schema if isinstance(schema, Mapping) else {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._schemas)

    def has(self, name: str) -> bool:
        """Whether a tool has this name."""
        return name in self._schemas

    def schema(self, name: str) -> Mapping[str, Any]:
        """The JSON schema of a tool's arguments; {} for a tool that is not known."""
        return self._schemas.get(name, {})


class CallReader(Protocol):
    """Reads what follows a tag that may begin a tool call.

    The text it reads is markup once it has found a name. As long as it has found none and fails,
    the text is no call and belongs to what surrounds it.
    """

    status: Status

    def read(self, text: str, start: int, *, is_all: bool = False) -> int:
        """Take what belongs to the call, and return where the rest begins.

        The rest, of bounded length, is to come again with more text, as long as `status` is
        READING. `is_all`: no more text will come.
        """
        ...

    def take(self) -> list[Event]:
        """What was found since the last call. "end" completes the call of the last name."""
        ...


MakeReader = Callable[[Tools, bool], CallReader]
"""Makes the reader of a call, of the tools and of whether a name must be one of theirs."""


def may_name(name: str, tools: Tools, is_strict: bool) -> bool:
    """Whether `name` may be a function's; `is_strict`: that of a tool."""
    return tools.has(name) if is_strict else _NAME.fullmatch(name) is not None
