"""Neighbours of one kind and call are joined."""

from jaxspec.text.parsers import Piece, joined


def test_neighbours_are_joined():
    pieces = [Piece("content", "a"), Piece("content", ""), Piece("content", "b")]
    pieces += [
        Piece("tool_arguments", "1", 0),
        Piece("tool_arguments", "2", 1),
        Piece("content", ""),
    ]
    assert joined(pieces) == [Piece("content", "ab"), *pieces[3:5]]
