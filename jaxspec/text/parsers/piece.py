"""Pieces of parsed text, and events of tool-call readers."""

from typing import Literal, NamedTuple

Kind = Literal["reasoning", "content", "tool_name", "tool_arguments"]


class Piece(NamedTuple):
    """A part of the text with its kind."""

    kind: Kind
    text: str
    index: int = 0  # index of the tool call, from 0; 0 for reasoning and content


class Event(NamedTuple):
    """Event of a tool-call reader: a name begins a call, and "end" completes it."""

    kind: Literal["name", "arguments", "end"]
    text: str = ""


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
