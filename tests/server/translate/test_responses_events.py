"""Events are numbered, come in the documented order, and end with the whole response."""

import openai.types.responses
import pydantic

from jaxspec.server.translate.responses_events import ResponseEvents
from jaxspec.text.parsers import Piece

USAGE = {"prompt_tokens": 10, "completion_tokens": 5}
CHECK = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)


def events_of(*batches, finish="stop"):
    made = ResponseEvents({"input": "Hi"}, "m")
    events = made.begin()
    for pieces in batches:
        events += made.add(pieces)
    events += made.end(finish, USAGE)
    return checked(events)


def checked(events):
    for number, (name, told) in enumerate(events):
        assert told["type"] == name and told["sequence_number"] == number
        CHECK.validate_python(told)
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
    assert [name.removeprefix("response.") for name, _ in events] == [
        *("created", "in_progress"),
        *(*added, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *done),
        *(*added, "output_text.delta", "output_text.done", *done),
        *(*call, *call_done),
        *(*call, "function_call_arguments.delta", *call_done),
        "completed",
    ]
    places = [told["output_index"] for _, told in events if "output_index" in told]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}


def test_the_last_event_has_the_whole():
    pieces = [Piece("content", "Hel"), Piece("content", "lo")]
    whole = events_of(pieces)[-1][1]["response"]
    told = openai.types.responses.Response.model_validate(whole)
    assert (told.output_text, told.status, told.output[0].status) == (
        "Hello",
        "completed",
        "completed",
    )
    assert told.usage.output_tokens == 5


def test_every_event_of_an_item_has_its_id():
    events = events_of([Piece("content", "a")])
    ids = {told["item_id"] for _, told in events if "item_id" in told}
    ids |= {told["item"]["id"] for _, told in events if "item" in told}
    assert len(ids) == 1


def test_what_is_cut_off_is_incomplete():
    name, told = events_of([Piece("content", "a")], finish="length")[-1]
    assert name == "response.incomplete" and told["response"]["output"][0]["status"] == "incomplete"
    call = [Piece("tool_name", "f", 0), Piece("tool_arguments", "{", 0)]
    name, told = events_of(call)[-1]
    assert name == "response.completed" and told["response"]["output"][0]["status"] == "incomplete"


def test_a_failure_is_the_last_event():
    made = ResponseEvents({}, "m")
    events = checked(made.begin() + made.add([Piece("content", "a")]) + made.fail("It broke."))
    assert events[-1][0] == "response.failed"
    assert events[-1][1]["response"]["error"]["message"] == "It broke."
