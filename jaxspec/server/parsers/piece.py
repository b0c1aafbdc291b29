"""What a parser makes of a model's text: pieces of reasoning, content and tool calls."""

from typing import Literal, NamedTuple

Kind = Literal["reasoning", "content", "tool_name", "tool_arguments"]


class Piece(NamedTuple):
    """Some text, and what it is part of."""

    kind: Kind
    text: str
    index: int = 0  # of the tool call, from 0; 0 for reasoning and content


class Event(NamedTuple):
    """What a reader of tool calls has found: a name begins a call, and "end" completes it."""

    kind: Literal["name", "arguments", "end"]
    text: str = ""


def joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces with neighbours of one kind and call made one; empty ones are left out."""
    if len(pieces) < 2:
        return [piece for piece in pieces if piece.text]
    runs: list[tuple[Kind, int, list[str]]] = []
    for kind, text, index in pieces:
        if runs and runs[-1][:2] == (kind, index):
            runs[-1][2].append(text)
        elif text:
            runs.append((kind, index, [text]))
    return [Piece(kind, "".join(texts), index) for kind, index, texts in runs]
