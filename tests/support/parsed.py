"""Texts of models through a parser, cut in any way, and what must come of them."""

import json

from jaxspec.text.parsers import assemble, joined

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "celsius": {"type": "boolean"},
                    "places": {"type": "array"},
                    "options": {"type": "object"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]


def parse(dialect, *parts, reasoning=False, tools=TOOLS):
    """The joined pieces of a text in parts, and the parser."""
    parser = dialect(starts_in_reasoning=reasoning, tools=tools)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return joined(pieces + parser.flush()), parser


def told(dialect, text, **options):
    """Reasoning, content, and (name, arguments) of each call of a text."""
    pieces, parser = parse(dialect, text, **options)
    message = assemble(pieces, parser.unfinished)
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    assert len(calls) == parser.num_tool_calls
    return message.reasoning, message.content, calls
