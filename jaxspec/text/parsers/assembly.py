"""Assembly of a parser's pieces into one message, for responses that are not streamed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxspec.text.parsers.output_parser import Piece


class ToolCall(NamedTuple):
    """Complete tool call."""

    name: str
    arguments: str  # JSON


class Message(NamedTuple):
    """Complete message."""

    reasoning: str
    content: str
    tool_calls: list[ToolCall]


def assemble(pieces: Sequence[Piece], unfinished: Mapping[int, str]) -> Message:
    """Assemble all pieces of a text into a message.

    Calls in the parser's `unfinished` become content at their position, with their tags.
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
