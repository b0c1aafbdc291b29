"""Protocol of tool-call readers, their events, and the tools of a request by name."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from jaxspec.text.parsers.json_reader import Status

_NAME = re.compile(r"[\w.:/-]{1,256}")


class Event(NamedTuple):
    """Event of a tool-call reader: a name begins a call, and "end" completes it."""

    kind: Literal["name", "arguments", "end"]
    text: str = ""


class Tools:
    """The tools of a request, by name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Read tools in OpenAI's format: `{"type": "function", "function": {...}}`.

        Tools without a name are ignored; the chat template still renders them.
        """
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
                schema = function.get("parameters")
                self._schemas[name] = schema if isinstance(schema, Mapping) else {}

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def has(self, name: str) -> bool:
        return name in self._schemas

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of a tool's arguments; {} for unknown tools."""
        return self._schemas.get(name, {})


class CallReader(Protocol):
    """Incremental reader of the text after a tag that may begin a tool call.

    Once it has found a name, the text it reads is markup. If it fails before, the text is not a
    call, and belongs to the surrounding content or reasoning.
    """

    @property
    def status(self) -> Status: ...

    def read(self, text: str, start: int, *, is_all: bool = False) -> int:
        """Consume the text of the call from index `start`, and return the index of the rest.

        While `status` is READING, pass the rest again with more text; its length is bounded.
        `is_all` means that the text is complete.
        """
        ...

    def take(self) -> list[Event]:
        """Return the events since the last call. "end" completes the call of the last name."""
        ...


MakeReader = Callable[[Tools, bool], CallReader]
"""Creates a call reader, given the tools and whether names must be those of tools."""


def may_name(name: str, tools: Tools, is_strict: bool) -> bool:
    """Return whether `name` is a valid function name; with `is_strict` it must be a tool's."""
    return tools.has(name) if is_strict else _NAME.fullmatch(name) is not None
