"""Parsers of what models write: reasoning, content and tool calls, told apart while text comes."""

from jaxspec.server.parsers.assembly import Message, ToolCall, assemble
from jaxspec.server.parsers.dialects import parser_for, starts_in_reasoning
from jaxspec.server.parsers.output_parser import PLAIN, Dialect, OutputParser
from jaxspec.server.parsers.piece import Piece, joined

__all__ = [
    "PLAIN",
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
