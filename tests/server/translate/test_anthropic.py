"""Requests become chats, and chats become messages that the official client's types accept."""

import anthropic.types
import orjson
import pytest

from jaxspec.server.translate import FieldError
from jaxspec.server.translate.anthropic import chat_request, error, message

USER = {"role": "user", "content": "Hi"}
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def part(told):
    return {"type": "text", "text": told}


def chat(**told):
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Hi"} | told.pop("message", {}),
        "finish_reason": "stop",
        "stop_reason": None,
    }
    return {"id": "chatcmpl-1", "model": "m", "choices": [choice | told], "usage": USAGE}


def test_a_request():
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    body = {
        "model": "m",
        "max_tokens": 5,
        "messages": [USER],
        "system": [part("A") | {"cache_control": {"type": "ephemeral"}}, part("B")],
        "stop_sequences": ["x"],
        "temperature": 0,
        "top_k": 3,
        "stream": True,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "tools": [tool],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert chat_request(body) == {
        "model": "m",
        "max_completion_tokens": 5,
        "messages": [{"role": "system", "content": [part("A"), part("B")]}, USER],
        "stop": ["x"],
        "temperature": 0,
        "top_k": 3,
        "stream": True,
        "chat_template_kwargs": {"enable_thinking": True},
        "thinking_token_budget": 1024,
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    }


def test_a_conversation_with_tools():
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}
    think = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [part("42")]}
    secret = {"type": "redacted_thinking", "data": "x"}
    messages = [
        USER,
        {"role": "assistant", "content": [think, secret, part("Let me see."), use]},
        {"role": "user", "content": [result, part("Go on")]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2"}]},
    ]
    function = {"name": "f", "arguments": '{"a": "é"}'}
    assert chat_request({"messages": messages, "max_tokens": 1})["messages"] == [
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "42"},
        {"role": "user", "content": "Go on"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
    ]


def test_a_reference_to_a_tool_names_it():
    found = [{"type": "tool_reference", "tool_name": "weather"}, part("1 of 9")]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": found}
    request = chat_request({"messages": [USER, {"role": "user", "content": [result]}]})
    assert request["messages"][-1]["content"] == [part("weather"), part("1 of 9")]


def test_a_last_message_of_the_assistant_is_continued():
    request = chat_request({"messages": [USER, {"role": "assistant", "content": "I"}]})
    assert request["continue_final_message"] and not request["add_generation_prompt"]
    assert "continue_final_message" not in chat_request({"messages": [USER]})


@pytest.mark.parametrize("kind, choice", [("any", "required"), ("none", "none"), ("auto", "auto")])
def test_tool_choices(kind, choice):
    request = chat_request({"messages": [USER], "tool_choice": {"type": kind}})
    assert request["tool_choice"] == choice


@pytest.mark.parametrize("fields", ["output_config", "output_format"])
def test_a_schema_and_a_forced_tool_are_those_of_chats(fields):
    answer = {"type": "json_schema", "schema": {"type": "integer"}}
    one = {"type": "tool", "name": "f"}
    given = {"format": answer} if fields == "output_config" else answer
    request = chat_request({"messages": [USER], fields: given, "tool_choice": one})
    assert request["response_format"]["type"] == "json_schema"
    assert request["response_format"]["json_schema"]["schema"] == answer["schema"]
    assert request["response_format"]["json_schema"]["strict"] is True
    assert request["tool_choice"] == {"type": "function", "function": {"name": "f"}}


def test_a_strict_tool_stays_strict():
    tool = {"name": "f", "input_schema": {"type": "object"}, "strict": True}
    (found,) = chat_request({"messages": [USER], "tools": [tool]})["tools"]
    assert found["function"]["strict"] is True


IMAGE = {"type": "image", "source": {}}
WRONG = [
    ({}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [3]}, "messages.0"),
    ({"messages": [{"role": "tool"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages.0.content.0.type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages.0.content.0.tool_use_id",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "content": [{"type": "tool_reference"}]}],
                }
            ]
        },
        "messages.0.content.0.content.0.tool_name",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": "{}"}]}]},
        "messages.0.content.0.input",
    ),
    ({"messages": [USER], "system": 3}, "system"),
    ({"messages": [USER], "tools": [{"type": "web_search_20250305"}]}, "tools.0.type"),
    ({"messages": [USER], "tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"messages": [USER], "tool_choice": "auto"}, "tool_choice"),
    ({"messages": [USER], "tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"messages": [USER], "thinking": {"type": "much"}}, "thinking.type"),
    (
        {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": "9"}},
        "thinking.budget_tokens",
    ),
    ({"messages": [USER], "output_config": {"format": {"type": "x"}}}, "output_config.format.type"),
    (
        {"messages": [USER], "output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize(
    "body, place", WRONG, ids=[f"{n}-{place}" for n, (_, place) in enumerate(WRONG)]
)
def test_wrong_fields_are_named(body, place):
    with pytest.raises(FieldError) as told:
        chat_request(body)
    assert told.value.param == place and str(told.value).startswith(f"{place} must be")


def validated(told):
    return anthropic.types.Message.model_validate(orjson.loads(orjson.dumps(told)))


def test_a_message():
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    told = validated(
        message(
            chat(
                message={"reasoning_content": "Hm", "tool_calls": calls}, finish_reason="tool_calls"
            )
        )
    )
    assert [block.type for block in told.content] == ["thinking", "text", "tool_use"]
    assert told.content[0].thinking == "Hm" and told.content[1].text == "Hi"
    assert (told.content[2].id, told.content[2].input) == ("call_1", {"a": 1})
    assert told.stop_reason == "tool_use" and told.id.startswith("msg_")
    assert (told.usage.input_tokens, told.usage.cache_read_input_tokens) == (6, 4)
    assert told.usage.output_tokens == 5


def test_arguments_of_a_call_are_what_the_model_wrote():
    """Among them may be integers of more than 64 bits, which orjson writes for nobody."""
    arguments = f'{{"a": {10**30}, "b": [1.50]}}'
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    told = message(chat(message={"tool_calls": calls}, finish_reason="tool_calls"))
    assert arguments.encode() in orjson.dumps(told)


@pytest.mark.parametrize(
    "finish, stop, reason, sequence",
    [
        ("stop", None, "end_turn", None),
        ("stop", 7, "end_turn", None),
        ("stop", "x", "stop_sequence", "x"),
        ("length", None, "max_tokens", None),
    ],
)
def test_why_a_message_ended(finish, stop, reason, sequence):
    told = validated(message(chat(finish_reason=finish, stop_reason=stop)))
    assert (told.stop_reason, told.stop_sequence) == (reason, sequence)


def test_an_empty_message_has_no_blocks():
    assert validated(message(chat(message={"content": ""}))).content == []


@pytest.mark.parametrize(
    "status, kind",
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors(status, kind):
    assert error(status, "m") == {"type": "error", "error": {"type": kind, "message": "m"}}
