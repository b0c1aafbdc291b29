"""POST /v1/chat/completions by the official client; tools: generation/test_conversation.py."""

import math

import openai
import pytest

from jaxspec import SamplingParams

MODEL = "short"
MESSAGES = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": "A function that adds two numbers"},
]


def want(reference, **params):
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params})
    return reference.chat(MESSAGES, params, use_tqdm=False)[0]


def test_a_chat_is_the_library_s(client, reference):
    found = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24)
    expected = want(reference)
    (choice,) = found.choices
    assert choice.message.content == expected.outputs[0].text
    assert choice.message.role == "assistant" and choice.message.tool_calls is None
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert found.object == "chat.completion" and found.id.startswith("chatcmpl-")
    assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert found.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert found.usage.completion_tokens_details.reasoning_tokens == 0


def test_streamed_text_is_the_same_in_the_order_of_openai(client, reference):
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_completion_tokens=24,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *told, last = chunks
    assert [c.choices[0].delta.role for c in told[:2]] == ["assistant"] * 2
    assert [c.choices[0].index for c in told[:2]] == [0, 1]
    texts, ends = ["", ""], [None, None]
    for chunk in told:
        (choice,) = chunk.choices
        assert ends[choice.index] is None, "nothing comes behind the end"
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason
    assert texts == [output.text for output in want(reference, n=2).outputs]
    assert ends == ["length"] * 2
    assert last.choices == [] and last.usage.completion_tokens == 48


def test_the_client_s_helper_of_streams_follows(client, reference):
    text = want(reference).outputs[0].text
    stop = text[8:11]
    ask = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "stop": stop}
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(stop)]


def test_tokens_joined_are_the_text_and_say_who_gave_each(client, reference):
    expected = want(reference, max_tokens=48).outputs[0]
    ask = {"model": MODEL, "messages": MESSAGES, "max_tokens": 48, "stream": True}
    positions = list[int]()
    for chunk in client.chat.completions.create(**ask, extra_body={"return_tokens": True}):
        (choice,) = chunk.choices
        tokens = getattr(choice, "tokens", [])
        assert "".join(text for text, _ in tokens) == (choice.delta.content or "")
        positions += [position for _, position in tokens]
    assert positions == expected.draft_positions and max(positions) > 0
    plain = client.chat.completions.create(**ask)
    assert not any(hasattr(chunk.choices[0], "tokens") for chunk in plain)


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_name_every_token_with_its_bytes(client, reference, streams):
    expected = want(reference, logprobs=3, max_tokens=12).outputs[0]
    found = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=3, stream=streams
    )
    if streams:
        entries = [
            entry
            for chunk in found
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
    else:
        entries = found.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == expected.text
    assert [e.logprob for e in entries] == pytest.approx(
        [p[t].logprob for t, p in zip(expected.token_ids, expected.logprobs, strict=True)], abs=1e-4
    )
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) < 1.001


def test_contents_in_parts_and_the_role_developer_are_understood(client, reference):
    found = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Write Python."}]},
            {"role": "user", "content": [{"type": "text", "text": MESSAGES[1]["content"]}]},
        ],
        max_tokens=8,
    )
    assert found.choices[0].message.content == want(reference, max_tokens=8).outputs[0].text


def test_a_last_message_can_be_gone_on_with(client, reference):
    messages = [*MESSAGES, {"role": "assistant", "content": "def add("}]
    found = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, extra_body={"continue_final_message": True}
    )
    params = SamplingParams(temperature=0.0, max_tokens=8)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    (expected,) = reference.chat(messages, params, use_tqdm=False, **options)
    assert found.choices[0].message.content == expected.outputs[0].text


def test_fields_that_change_nothing_here_are_taken(client):
    client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=2,
        user="me",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        reasoning_effort="low",
        prompt_cache_key="k",
        safety_identifier="s",
        verbosity="low",
    )


def schema_of(**keywords):
    """A format of answers with these keywords at one of its properties."""
    schema = {"type": "object", "properties": {"a": keywords}}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [{"content": "x"}]}, "messages.0.role must be a text such as 'user'"),
        ({"messages": ["x"]}, "messages.0 must be a valid dictionary, got 'x'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text alone"),
        ({"response_format": {"type": "xml"}}, "response_format.type must be"),
        ({"response_format": schema_of(uniqueItems=True)}, "uniqueItems"),
        ({"response_format": schema_of(pattern="(?=a)")}, "look-around"),
        ({"tool_choice": "required"}, "tool_choice can't be 'required'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools can't be offered"),
        ({"top_logprobs": 2}, "it goes with logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "must be at most 20"),
        ({"modalities": ["audio"]}, "answers are text alone"),
        ({"functions": [{"name": "f"}]}, "functions can't be"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template can't be"),
        ({"extra_body": {"echo": True}}, "echo can't be True"),
        ({"extra_body": {"chat_template_kwargs": {"messages": 1}}}, "chat_template_kwargs must"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(client, fields, said):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields})
    assert said in caught.value.body["message"], caught.value.body
    assert caught.value.body["code"] == 400


def test_chats_of_different_salts_share_nothing(served):
    messages = [{"role": "user", "content": "Adds two numbers, whatever their kind. " * 8}]

    def cached(path="/v1/chat/completions", **fields):
        found = served.post(path, messages=messages, max_tokens=1, **fields)
        assert found.status_code == 200, found.text
        used = found.json()["usage"]
        details = used.get("prompt_tokens_details") or {}
        return used.get("cache_read_input_tokens") or details.get("cached_tokens", 0)

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="b") == 0 < cached(cache_salt="a")
    assert cached("/v1/messages", cache_salt="c") == 0 < cached("/v1/messages", cache_salt="b")
    found = served.post("/v1/chat/completions", messages=messages, cache_salt="")
    assert found.status_code == 400 and found.json()["error"]["param"] == "cache_salt"
