"""Events come in the documented order, and join to the message that is not streamed."""

import json

import anthropic.types
import pydantic
from parsed import TOOLS

from jaxspec.server.translate.anthropic_events import PING, MessageEvents
from jaxspec.text.parsers import Piece
from jaxspec.text.parsers.dialects import XML

USAGE = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
CHECK = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)


def events_of(*batches, finish="stop", stop=None):
    made = MessageEvents("m")
    events = made.begin(USAGE)
    for pieces in batches:
        events += made.add(pieces)
    events += made.end(finish, stop, USAGE | {"completion_tokens": 5})
    for event in events:
        if event != PING:
            CHECK.validate_python(event)
    return events


def test_the_order_of_events():
    calls = [
        Piece("tool_name", "f", 0),
        Piece("tool_arguments", "{}", 0),
        Piece("tool_name", "g", 1),
    ]
    events = events_of(
        [Piece("reasoning", "H"), Piece("reasoning", "m")],
        [Piece("content", "So")],
        [*calls, Piece("tool_arguments", '{"a"', 1)],
        [Piece("tool_arguments", ": 1}", 1)],
        finish="tool_calls",
    )
    start, delta, stop = (f"content_block_{step}" for step in ("start", "delta", "stop"))
    blocks = [start, delta, delta, stop, start, delta, stop, start, delta, stop]
    blocks += [start, delta, delta, stop]
    names = [event["type"] for event in events]
    assert names == ["message_start", "ping", *blocks, "message_delta", "message_stop"]
    indices = [event["index"] for event in events if "index" in event]
    assert indices == sorted(indices) and set(indices) == {0, 1, 2, 3}
    used = events[0]["message"]["usage"]
    assert (used["input_tokens"], used["cache_read_input_tokens"], used["output_tokens"]) == (
        6,
        4,
        0,
    )
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 5


def test_deltas_join_to_the_whole():
    text = "Look\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n"
    parser = XML(starts_in_reasoning=False, tools=TOOLS)
    batches = [parser.push(char) for char in text + "</function>\n</tool_call>"]
    events = events_of(*batches, parser.flush(), finish="tool_calls")
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "Look"
    arguments = "".join(delta.get("partial_json", "") for delta in deltas)
    assert json.loads(arguments) == {"city": "Bern"}


def test_a_message_without_text():
    assert [event["type"] for event in events_of()] == [
        *("message_start", "ping", "message_delta", "message_stop")
    ]


def test_a_stop_sequence():
    events = events_of([Piece("content", "a")], stop="x")
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "x"}


def test_errors_and_pings():
    failed = {"type": "error", "error": {"type": "api_error", "message": "m"}}
    assert MessageEvents("m").fail(500, "m") == failed and PING == {"type": "ping"}
