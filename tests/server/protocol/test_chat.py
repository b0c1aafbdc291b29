"""The body of /v1/chat/completions: what its template is told, and what is refused."""

import pytest

from jaxspec.server.http.errors import ApiError
from jaxspec.server.protocol import ChatCompletionRequest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def chat(**fields):
    return ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], **fields)


def test_a_template_s_switches():
    plain = chat().template_options
    assert plain["add_generation_prompt"] and not plain["continue_final_message"]
    assert plain["tools"] is None and plain["chat_template_kwargs"] == {}
    assert not chat(continue_final_message=True).template_options["add_generation_prompt"]
    effort = chat(reasoning_effort="none").template_options["chat_template_kwargs"]
    assert effort == {"reasoning_effort": "none", "enable_thinking": False}
    own = chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert own.template_options["chat_template_kwargs"]["enable_thinking"] is False


def test_tools_are_offered_unless_none_shall_be_called():
    assert chat(tools=[TOOL]).offered_tools == [TOOL]
    assert chat(tools=[TOOL], tool_choice="auto").offered_tools == [TOOL]
    assert chat(tools=[TOOL], tool_choice="none").template_options["tools"] is None


def test_logprobs_are_a_number():
    assert (
        chat().num_logprobs is None and chat(top_logprobs=None, logprobs=False).num_logprobs is None
    )
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).num_logprobs == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "some", "tools": [TOOL]},
        {"tool_choice": {"type": "custom", "custom": {"name": "f"}}, "tools": [TOOL]},
        {"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [TOOL]},
        {"tool_choice": "required", "tools": [TOOL], "guided_regex": "a+"},
        {"tool_choice": "auto"},
        {"chat_template": "x"},
        {"functions": [{}]},
        {"audio": {"voice": "x"}},
        {"modalities": ["text", "audio"]},
        {"top_logprobs": 1},
    ],
)
def test_what_can_t_be_done_is_refused_by_name(fields):
    with pytest.raises(ApiError) as caught:
        chat(**fields).refuse_absent()
    assert str(caught.value.param).partition(".")[0] in fields


def test_a_template_may_come_where_it_is_trusted():
    chat(chat_template="x").refuse_absent(trusts_template=True)


def test_tokens_are_told_in_streams_alone():
    chat(return_tokens=True, stream=True).refuse_absent()
    chat(return_tokens=False).refuse_absent()
    with pytest.raises(ApiError, match="return_tokens can't be True: it goes with stream=true"):
        chat(return_tokens=True).refuse_absent()


def test_documents_reach_the_template():
    documents = [{"title": "t", "text": "x"}]
    body = ChatCompletionRequest(messages=[], documents=documents)
    assert body.template_options["chat_template_kwargs"] == {"documents": documents}
