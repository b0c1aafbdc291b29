"""POST /v1/responses by the official client; with tools and reasoning: test_conversation.py."""

import openai
import pytest

from jaxspec import SamplingParams

ASK = {"model": "short", "input": "A function that adds two numbers", "max_output_tokens": 12}


def test_a_response_is_the_library_s_chat(client, reference):
    told = [{"role": "user", "content": ASK["input"]}]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    (want,) = reference.chat(told, params, use_tqdm=False)
    whole = client.responses.create(**ASK)
    *_, last = events = list(client.responses.create(**ASK, stream=True))
    assert whole.output_text == last.response.output_text == want.outputs[0].text
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == want.outputs[0].text
    assert whole.status == last.response.status == "incomplete"  # of max_output_tokens
    assert whole.usage.output_tokens == 12


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input.0.role"),
        ({"text": {"format": {"type": "xml"}}}, "response_format"),
        ({"tools": [{"type": 3}]}, "tools.0.type"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"extra_body": {"stop": 3}}, "stop"),
    ],
)
def test_what_can_t_be_done_is_a_400_that_names_the_field(client, fields, said):
    with pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(**{**ASK, **fields})
