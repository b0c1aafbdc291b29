"""Requests become chats, and chats become responses that the official client's types accept."""

import openai.types.responses
import pytest

from jaxspec.server.translate import FieldError
from jaxspec.server.translate.responses import chat_request, response

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
SUMMARY = {"type": "compaction", "id": "cmp_1"}


def chat(finish="stop", **message):
    told = {"role": "assistant", "content": "Hi"} | message
    choices = [{"index": 0, "message": told, "finish_reason": finish}]
    return {"id": "chatcmpl-1", "model": "m", "choices": choices, "usage": USAGE}


def test_a_request():
    body = {
        "model": "m",
        "input": "Hi",
        "instructions": "Be brief.",
        "max_output_tokens": 5,
        "temperature": 0.5,
        "stream": True,
        "store": True,
        "metadata": {"a": "b"},
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
        "truncation": "disabled",
        "top_k": 3,
    }
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert chat_request(body) == {
        "model": "m",
        "stream": True,
        "temperature": 0.5,
        "top_k": 3,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        "max_completion_tokens": 5,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    }


def test_what_the_assistant_did_in_a_row_is_one_message():
    think = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm"}],
    }
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "See"}],
    }
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        *(think, said, CALL, CALL | {"call_id": "c2"}),
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"type": "function_call_output", "call_id": "c2", "output": []},
        *(said, said),
    ]
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    assert chat_request({"input": items})["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "See", "reasoning_content": "Hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "assistant", "content": "See"},
        {"role": "assistant", "content": "See"},
    ]


def test_a_choice_by_default_needs_no_tools():
    assert "tool_choice" not in chat_request({"input": "Hi", "tool_choice": "auto"})
    assert chat_request({"input": "Hi", "tool_choice": "required"})["tool_choice"] == "required"


def test_allowed_tools_are_those_of_chats():
    tools = [{"type": "function", "name": "f"}, {"type": "mcp", "server_label": "x"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools}
    found = chat_request({"input": "Hi", "tools": [TOOL], "tool_choice": choice})["tool_choice"]
    named = [{"type": "function", "function": {"name": "f"}}]
    assert found == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": named},
    }


WRONG = [
    ({}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["Hi"]}, "input.0"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
    ({"input": [{"type": "item"}]}, "input.0.type"),
    ({"input": [SUMMARY | {"encrypted_content": "jaxspec:?"}]}, "input.0.encrypted_content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
    ({"input": [CALL | {"arguments": 3}]}, "input.0.arguments"),
    ({"input": "Hi", "tools": [{"type": 3}]}, "tools.0.type"),
    ({"input": "Hi", "tools": [{"type": "namespace", "tools": []}]}, "tools.0.name"),
    ({"input": "Hi", "tools": [{"type": "namespace", "name": "a", "tools": 3}]}, "tools.0.tools"),
    ({"input": [{"type": ["a"]}]}, "input.0.type"),
    ({"input": "Hi", "tools": [TOOL, TOOL]}, "tools"),
    ({"input": [CALL | {"namespace": 3}]}, "input.0.namespace"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "a"}]}, "input.0.input"),
    ({"input": "Hi", "instructions": 3}, "instructions"),
    ({"input": "Hi", "text": "json"}, "text"),
]


@pytest.mark.parametrize(
    "body, place", WRONG, ids=[f"{n}-{place}" for n, (_, place) in enumerate(WRONG)]
)
def test_wrong_fields_are_named(body, place):
    with pytest.raises(FieldError) as told:
        chat_request(body)
    assert told.value.param == place and str(told.value).startswith(f"{place} ")
    assert "{}" not in str(told.value)


def validated(told):
    return openai.types.responses.Response.model_validate(told)


def test_a_response():
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    body = {"input": "Hi", "tools": [TOOL], "instructions": "Be brief.", "temperature": 0.5}
    told = validated(response(body, chat("tool_calls", reasoning_content="Hm", tool_calls=calls)))
    assert [item.type for item in told.output] == ["reasoning", "message", "function_call"]
    assert told.output[0].content[0].text == "Hm" and told.output_text == "Hi"
    assert (told.output[2].call_id, told.output[2].arguments) == ("call_1", '{"a": 1}')
    assert (told.status, told.instructions, told.temperature) == ("completed", "Be brief.", 0.5)
    assert (told.usage.input_tokens, told.usage.total_tokens) == (10, 15)
    assert told.usage.input_tokens_details.cached_tokens == 4
    assert told.usage.output_tokens_details.reasoning_tokens == 2
    assert told.tools[0].name == "f" and told.parallel_tool_calls


def test_a_response_at_its_length():
    told = validated(response({"input": "Hi"}, chat("length")))
    assert (told.status, told.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert told.output[-1].status == "incomplete"
    assert validated(response({"input": "Hi"}, chat(content=""))).output == []


def test_functions_are_offered_and_tools_of_other_servers_are_not():
    others = [{"type": kind} for kind in ("web_search", "custom", "local_shell", "tool_search")]
    spaced = {"type": "namespace", "name": "mcp__files", "tools": [TOOL, {"type": "custom"}]}
    body = {"input": "Hi", "tools": [*others, TOOL, spaced], "tool_choice": "auto"}
    request = chat_request(body)
    names = [tool["function"]["name"] for tool in request["tools"]]
    assert names == ["f", "mcp__files__f"] and request["tool_choice"] == "auto"
    assert not {"tools", "tool_choice"} & chat_request({**body, "tools": others}).keys()
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for n, name in enumerate(names)
    ]
    told = response(body, chat("tool_calls", content=None, tool_calls=calls))
    assert [(item["name"], item.get("namespace")) for item in told["output"]] == [
        ("f", None),
        ("f", "mcp__files"),
    ]
    assert [tool["type"] for tool in told["tools"]] == [tool["type"] for tool in body["tools"]]


def test_calls_of_all_kinds_may_be_in_the_history():
    items = [
        CALL | {"namespace": "mcp__a"},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"command": ["ls"]}},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ]
    message, answer = chat_request({"input": items})["messages"]
    called = [call["function"] for call in message["tool_calls"]]
    assert called == [
        {"name": "mcp__a__f", "arguments": '{"a": 1}'},
        {"name": "apply_patch", "arguments": '{"input": "*** Begin"}'},
        {"name": "local_shell", "arguments": '{"command": ["ls"]}'},
    ]
    assert answer == {"role": "tool", "tool_call_id": "c2", "content": "done"}
