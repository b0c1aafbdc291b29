"""The whole of what a parser found in a text, for answers that are not streamed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxspec.server.parsers.piece import Piece


class ToolCall(NamedTuple):
    """A whole call."""

    name: str
    arguments: str  # JSON


class Message(NamedTuple):
    """What a text was, as a whole."""

    reasoning: str
    content: str
    tool_calls: list[ToolCall]


def assemble(pieces: Sequence[Piece], unfinished: Mapping[int, str]) -> Message:
    """The message of all pieces of a text.

    `unfinished`: that of the parser. Calls in it are content, tags included, in their place.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, tuple[list[str], list[str]]] = {}
    for kind, text, index in pieces:
        if kind == "reasoning":
            reasoning.append(text)
        elif kind == "content":
            content.append(text)
        elif index not in unfinished:
            calls.setdefault(index, ([], []))[kind == "tool_arguments"].append(text)
        elif kind == "tool_name":
            content.append(unfinished[index])
    told = [ToolCall("".join(name), "".join(arguments)) for name, arguments in calls.values()]
    return Message("".join(reasoning), "".join(content), told)
