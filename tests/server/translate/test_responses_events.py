"""Events are numbered, come in the documented order, and end with the whole response."""

import openai.types.responses
import pydantic

from jaxspec.server.translate.responses_events import ResponseEvents
from jaxspec.text.parsers import Piece

USAGE = {"prompt_tokens": 10, "completion_tokens": 5}
CHECK = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)


def events_of(*batches, finish="stop"):
    made = ResponseEvents({"input": "Hi"}, "m")
    events = made.begin(USAGE)
    for pieces in batches:
        events += made.add(pieces)
    events += made.end(finish, None, USAGE)
    return checked(events)


def checked(events):
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        CHECK.validate_python(event)
    return events


def test_the_order_of_events():
    events = events_of(
        [Piece("reasoning", "H"), Piece("reasoning", "m")],
        [Piece("content", "So")],
        [Piece("tool_name", "f", 0), Piece("tool_arguments", "{}", 0), Piece("tool_name", "g", 1)],
        [Piece("tool_arguments", "{", 1), Piece("tool_arguments", "}", 1)],
        finish="tool_calls",
    )
    added, done = (
        ["output_item.added", "content_part.added"],
        ["content_part.done", "output_item.done"],
    )
    call = ["output_item.added", *["function_call_arguments.delta"]]
    call_done = ["function_call_arguments.done", "output_item.done"]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *(*added, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *done),
        *(*added, "output_text.delta", "output_text.done", *done),
        *(*call, *call_done),
        *(*call, "function_call_arguments.delta", *call_done),
        "completed",
    ]
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}


def test_the_last_event_has_the_whole():
    pieces = [Piece("content", "Hel"), Piece("content", "lo")]
    whole = events_of(pieces)[-1]["response"]
    told = openai.types.responses.Response.model_validate(whole)
    assert (told.output_text, told.status, told.output[0].status) == (
        "Hello",
        "completed",
        "completed",
    )
    assert told.usage.output_tokens == 5


def test_every_event_of_an_item_has_its_id():
    events = events_of([Piece("content", "a")])
    ids = {event["item_id"] for event in events if "item_id" in event}
    ids |= {event["item"]["id"] for event in events if "item" in event}
    assert len(ids) == 1


def test_what_is_cut_off_is_incomplete():
    last = events_of([Piece("content", "a")], finish="length")[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["status"] == "incomplete"
    call = [Piece("tool_name", "f", 0), Piece("tool_arguments", "{", 0)]
    last = events_of(call)[-1]
    assert last["type"] == "response.completed"
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_a_failure_is_the_last_event():
    made = ResponseEvents({}, "m")
    events = made.begin(USAGE) + made.add([Piece("content", "a")])
    (*_, last) = checked([*events, made.fail(500, "It broke.")])
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"] == "It broke."
