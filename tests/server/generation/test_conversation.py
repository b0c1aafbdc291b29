"""Reasoning and tool calls through the official client: a script stands for the model."""

import contextlib
import json

import anthropic
import openai
import pytest
from scripted_llm import ScriptedLLM
from served import serving

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.city }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if tools %}<function= <tool_call> {{ tools[0].function.name }}{% endif %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
TEXT = (
    'I must "look".\n</think>\n\nLet me see.\n<tool_call>\n<function=weather>\n<parameter=city>\n'
    "Paris é\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
ARGUMENTS = {"city": "Paris é", "days": 3}
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "Weather?"}]}


@contextlib.contextmanager
def scripted(pieces, **options):
    """The official client of a server whose model says `pieces`."""
    with serving(lambda: ScriptedLLM(pieces, TEMPLATE, **options)) as served:
        told = {"base_url": served.url, "api_key": "k", "max_retries": 0, "timeout": 60}
        with openai.OpenAI(**told, _strict_response_validation=True) as client:
            yield client, served


def pieces_of(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.fixture(scope="module", params=[1, 7, 10_000])
def speaking(request):
    with scripted(pieces_of(TEXT, request.param)) as found:
        yield found


def test_reasoning_content_and_calls_are_told_apart(speaking):
    client, served = speaking
    found = client.chat.completions.create(**ASK, tools=[TOOL])
    (choice,) = found.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.reasoning_content == message.reasoning == 'I must "look".'
    assert message.content.strip() == "Let me see."
    (call,) = message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == ARGUMENTS
    assert call.id.startswith("call_") and call.type == "function"
    assert served.llm.asked["tools"] == [TOOL]
    tokens = served.llm.tokenizer.encode('I must "look".', add_special_tokens=False)
    assert found.usage.completion_tokens_details.reasoning_tokens == len(tokens)


def test_a_stream_s_pieces_are_the_same_joined(speaking):
    client, _ = speaking
    with client.chat.completions.stream(**ASK, tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    (call,) = final.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == ARGUMENTS
    assert final.message.content.strip() == "Let me see."
    deltas = [e.chunk.choices[0].delta for e in events if e.type == "chunk" and e.chunk.choices]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == 'I must "look".'
    assert all(call.index == 0 for d in deltas for call in d.tool_calls or ())
    ids = {call.id for d in deltas for call in d.tool_calls or () if call.id}
    assert len(ids) == 1


def test_the_answer_goes_back_into_the_conversation(speaking):
    client, served = speaking
    message = client.chat.completions.create(**ASK, tools=[TOOL]).choices[0].message
    call = message.tool_calls[0]
    messages = [
        *ASK["messages"],
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    client.chat.completions.create(model="scripted", messages=messages, tools=[TOOL])
    told = served.llm.asked["messages"]
    assert told[1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert told[1]["reasoning_content"] == 'I must "look".'
    assert told[2] == {"role": "tool", "tool_call_id": call.id, "content": "sunny"}


def test_without_tools_nothing_is_a_call(speaking):
    client, _ = speaking
    for choice in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        found = client.chat.completions.create(**ASK, **choice).choices[0]
        assert found.finish_reason == "stop" and not found.message.tool_calls
        assert "<function=weather>" in found.message.content


def test_anthropic_s_client_gets_blocks(speaking):
    _, served = speaking
    tool = TOOL["function"]
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]}]
    ask = {**ASK, "max_tokens": 99, "tools": tools}
    with anthropic.Anthropic(base_url=served.root, api_key="k", max_retries=0) as client:
        message = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
        for found in (message, streamed):
            thinking, text, use = found.content
            assert thinking.type == "thinking" and thinking.thinking == 'I must "look".'
            assert text.text.strip() == "Let me see."
            assert (use.name, use.input) == ("weather", ARGUMENTS)
            assert found.stop_reason == "tool_use"
        counted = client.messages.count_tokens(model="scripted", messages=ASK["messages"])
        assert 0 < counted.input_tokens < message.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**{**ask, "messages": [{"role": "judge", "content": "x"}]})
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**ask, "model": "other"})


def test_responses_have_items(speaking):
    client, _ = speaking
    tools = [{"type": "function", **TOOL["function"], "strict": False}]
    ask = {"model": "scripted", "input": "Weather?", "tools": tools}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    for found in (whole, events[-1].response):
        reasoning, message, call = found.output
        assert reasoning.content[0].text == 'I must "look".'
        assert message.content[0].text.strip() == "Let me see."
        assert call.name == "weather" and json.loads(call.arguments) == ARGUMENTS
        assert found.status == "completed"


def test_reasoning_may_be_left_out_and_is_counted(speaking):
    client, _ = speaking
    hidden = {"extra_body": {"include_reasoning": False}}
    whole = client.chat.completions.create(**ASK, tools=[TOOL])
    found = client.chat.completions.create(**ASK, tools=[TOOL], **hidden)
    message = found.choices[0].message
    assert message.reasoning is None and message.content == whole.choices[0].message.content
    assert message.tool_calls[0].function.name == "weather"
    assert found.usage == whole.usage
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(**ASK, tools=[TOOL], stream=True, **hidden)
    ]
    assert not any(hasattr(delta, "reasoning") for delta in deltas)
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_the_prompt_s_text_is_returned_whole_or_with_the_first_chunk():
    with scripted(["</think>Sunny."]) as (client, served):
        ask = {**ASK, "extra_body": {"return_prompt_text": True, "return_token_ids": True}}
        found = client.chat.completions.create(**ask)
        assert found.prompt_text == served.llm.tokenizer.render_chat(ASK["messages"])
        first, *rest = client.chat.completions.create(**ask, stream=True)
        assert first.prompt_text == found.prompt_text
        assert first.prompt_token_ids == found.prompt_token_ids
        assert not any(hasattr(chunk, "prompt_text") for chunk in rest)
        plain = client.chat.completions.create(**ASK)
        assert not hasattr(plain, "prompt_text")


def test_parsers_chosen_by_name_decide_in_place_of_the_template():
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = 'Hm</think><tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    ask = {**ASK, "tools": [TOOL]}

    def served(template, **options):
        return serving(lambda: ScriptedLLM(["<think>", text], template), **options)

    with served(plain, tool_call_parser="hermes", reasoning_parser="qwen3") as found:
        (choice,) = found.post("/v1/chat/completions", **ask).json()["choices"]
        assert choice["message"]["reasoning"] == "Hm" and choice["finish_reason"] == "tool_calls"
    with served(TEMPLATE, enable_auto_tool_choice=False) as found:
        assert found.post("/v1/chat/completions", **ask).json()["error"]["param"] == "tools"


def test_thinking_may_be_turned_off_by_the_template():
    with scripted(["Sunny."]) as (client, _):
        plain = client.chat.completions.create(**ASK).choices[0].message
        assert plain.reasoning == "Sunny." and not plain.content
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        told = client.chat.completions.create(**ASK, extra_body=off).choices[0].message
        assert told.content == "Sunny." and told.reasoning is None
        assert told.reasoning_content is None


def test_a_call_that_is_not_whole_comes_back_as_content():
    text = "</think>\n<tool_call>\n<function=weather>\n<parameter=city>\nPar"
    with scripted([text], reason="length") as (client, _):
        (choice,) = client.chat.completions.create(**ASK, tools=[TOOL]).choices
        assert choice.finish_reason == "length" and not choice.message.tool_calls
        assert "<function=weather>" in choice.message.content


@pytest.mark.parametrize("reason, status", [("error", 500), ("abort", 503)])
def test_a_sample_that_failed_is_an_error_and_no_reason(reason, status):
    with scripted(["</think>a"], reason=reason) as (client, served):
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**ASK)
        assert caught.value.status_code == status
        if reason == "error":
            assert caught.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.APIError, match="request|ended"):
            list(client.chat.completions.create(**ASK, stream=True))
        streamed = served.post("/v1/chat/completions", **ASK, stream=True)
        *_, last, done = streamed.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == status
