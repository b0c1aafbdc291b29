"""POST /v1/messages by Anthropic's client; with tools and reasoning: test_conversation.py."""

import anthropic
import pytest

from jaxspec import SamplingParams

MESSAGES = [{"role": "user", "content": "A function that adds two numbers"}]


@pytest.fixture(scope="module")
def claude(served):
    with anthropic.Anthropic(base_url=served.root, api_key="k", max_retries=0) as found:
        yield found


def test_a_message_is_the_library_s_chat(claude, reference):
    told = [{"role": "system", "content": "Write Python."}, *MESSAGES]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    (want,) = reference.chat(told, params, use_tqdm=False)
    ask = {"model": "short", "max_tokens": 12, "system": "Write Python.", "messages": MESSAGES}
    whole = claude.messages.create(**ask)
    with claude.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert whole.content[0].text == streamed.content[0].text == text == want.outputs[0].text
    for found in (whole, streamed):
        assert found.stop_reason == "max_tokens" and found.usage.output_tokens == 12
        assert found.usage.input_tokens + found.usage.cache_read_input_tokens == len(
            want.prompt_token_ids
        )
    counted = claude.messages.count_tokens(model="short", system="Write Python.", messages=MESSAGES)
    assert counted.input_tokens == len(want.prompt_token_ids)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
    ],
)
def test_errors_are_in_anthropic_s_form(claude, fields, said):
    ask = {"model": "short", "max_tokens": 3, "messages": MESSAGES}
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**{**ask, **fields})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert said in caught.value.body["error"]["message"]
