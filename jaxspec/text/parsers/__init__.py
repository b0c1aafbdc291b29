"""Streaming parsers that split a model's text into reasoning, content and tool calls."""

from jaxspec.text.parsers.assembly import Message, ToolCall, assemble
from jaxspec.text.parsers.dialects import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    parser_for,
    starts_in_reasoning,
)
from jaxspec.text.parsers.output_parser import PLAIN, Dialect, OutputParser, Piece, joined

__all__ = [
    "PLAIN",
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Dialect",
    "Message",
    "OutputParser",
    "Piece",
    "ToolCall",
    "assemble",
    "joined",
    "parser_for",
    "starts_in_reasoning",
]
