"""Pieces become one message; calls that are not whole are content in their place."""

from jaxspec.text.parsers import Message, Piece, ToolCall, assemble


def test_a_message():
    pieces = [
        Piece("reasoning", "Hm"),
        Piece("content", "a "),
        Piece("tool_name", "f", 0),
        Piece("tool_arguments", "{}", 0),
        Piece("tool_name", "g", 1),
        Piece("tool_arguments", '{"a": ', 1),
        Piece("content", " b"),
    ]
    expected = Message("Hm", "a <call> b", [ToolCall("f", "{}")])
    assert assemble(pieces, {1: "<call>"}) == expected
    assert assemble([], {}) == Message("", "", [])
