"""Each field of a published request schema is done, refused by name, or listed as harmless.

OpenAI's and Anthropic's names are those of their installed packages, so a new field fails here
until `protocol.py` or `known_fields.py` has it. vLLM's are of its main branch on 2026-11-28
(`vllm/entrypoints/openai/*/protocol.py`, `vllm/entrypoints/serve/tokenize/protocol.py`).
"""

import typing

import anthropic.types
import openai.types
import openai.types.chat
import openai.types.responses
import pytest
from openai.types.chat import completion_create_params as of_chats
from openai.types.responses import (
    input_token_count_params,
    response_compact_params,
    response_create_params,
)
from scripted_llm import ScriptedLLM
from served import serving

from jaxspec.server import protocol
from jaxspec.server.translate.fields import SAMPLING

_OF_VLLM = """add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params
frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias
logprob_token_ids logprobs max_tokens min_p min_tokens model n presence_penalty priority
prompt_logprobs repetition_detection repetition_penalty request_id response_format
return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
stop_token_ids stream stream_interval stream_options structured_outputs temperature
thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user
vllm_xargs watermarking echo """
_OF_TEMPLATES = """add_generation_prompt add_special_tokens chat_template chat_template_kwargs
continue_final_message media_io_kwargs messages mm_processor_kwargs model tools """
VLLM = {
    "/v1/completions": f"{_OF_VLLM} prompt prompt_embeds suffix",
    "/v1/chat/completions": f"""{_OF_VLLM} {_OF_TEMPLATES} documents include_reasoning
    max_completion_tokens parallel_tool_calls reasoning_effort return_prompt_text tool_choice
    top_logprobs guided_json guided_regex guided_choice guided_grammar""",
    "/v1/responses": """background cache_salt enable_response_messages ignore_eos include
    include_stop_str_in_output input instructions logit_bias max_output_tokens max_tool_calls
    metadata mm_processor_kwargs model parallel_tool_calls previous_input_messages
    previous_response previous_response_id priority prompt prompt_cache_key reasoning
    repetition_penalty request_id seed service_tier skip_special_tokens stop store stream
    structured_outputs temperature text tool_choice tools top_k top_logprobs top_p truncation user
    vllm_xargs""",
    "/v1/messages": "max_tokens messages metadata model stop_sequences stream system temperature "
    "tool_choice tools top_k top_p chat_template_kwargs",
    "/tokenize": f"{_OF_TEMPLATES} prompt return_token_strs",
    "/detokenize": "model tokens",
}
PACKAGES = {
    "/v1/completions": openai.types.completion_create_params.CompletionCreateParams,
    "/v1/chat/completions": of_chats.CompletionCreateParams,
    "/v1/responses": response_create_params.ResponseCreateParams,
    "/v1/responses/input_tokens": input_token_count_params.InputTokenCountParams,
    "/v1/responses/compact": response_compact_params.ResponseCompactParams,
    "/v1/messages": anthropic.types.message_create_params.MessageCreateParams,
    "/v1/messages/count_tokens": anthropic.types.MessageCountTokensParams,
}
_MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES = {
    "/v1/completions": (protocol.CompletionRequest, {"prompt": "Hi"}),
    "/v1/chat/completions": (protocol.ChatCompletionRequest, _MESSAGES),
    "/v1/responses": (protocol.ResponsesRequest, {"input": "Hi"}),
    "/v1/responses/input_tokens": (protocol.ResponseInput, {"input": "Hi"}),
    "/v1/responses/compact": (protocol.ResponseInput, {"input": "Hi"}),
    "/v1/messages": (protocol.MessagesRequest, {**_MESSAGES, "max_tokens": 9}),
    "/v1/messages/count_tokens": (protocol.CountTokensRequest, _MESSAGES),
    "/tokenize": (protocol.TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (protocol.DetokenizeRequest, {"tokens": [1]}),
}
TRIED = ({"wrong": 1}, 3.5, "wrong", [["wrong"]], True)
CHANGING = {"id", "created", "created_at", "usage", "output"}  # of each answer


def published(path):
    """The names of a route's fields in the published schemas."""
    schemas = PACKAGES.get(path)
    members = typing.get_args(schemas) or (schemas,) if schemas else ()
    names = {name for each in members for name in typing.get_type_hints(each)}
    return names | set(VLLM.get(path, "").split())


def treatments(path):
    """The names of a route's fields by treatment."""
    model, _ = BODIES[path]
    passed_on = set(SAMPLING) if path.startswith(("/v1/responses", "/v1/messages")) else set()
    return {
        "done": set(model.model_fields) | passed_on,
        "refused": set(model.refusals),
        "harmless": set(model.harmless),
    }


@pytest.fixture(scope="module")
def served():
    template = "<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    with serving(lambda: ScriptedLLM(["Hello"], template)) as found:
        yield found


@pytest.fixture(scope="module")
def post(served):
    """Sends a route's smallest body with further fields."""
    with served.client() as client:
        yield lambda path, **fields: client.post(path, json={**BODIES[path][1], **fields})


@pytest.mark.parametrize("path", BODIES)
def test_every_published_field_has_one_treatment(path):
    found = treatments(path)
    assert published(path) - set().union(*found.values()) == set()
    for one, other in (("done", "refused"), ("done", "harmless"), ("refused", "harmless")):
        assert not found[one] & found[other] & published(path)


def names(path, treatment):
    return sorted(published(path) & treatments(path)[treatment])


def is_named(name, answer):
    if answer.status_code != 400:
        return False
    error = answer.json()["error"]
    place = error["param"] if "param" in error else error["message"].partition(" ")[0]
    return place.partition(".")[0] == name


@pytest.mark.few(3)
@pytest.mark.parametrize("path", BODIES)
def test_values_of_a_wrong_type_are_refused_by_name(post, path):
    for name in names(path, "done"):
        assert any(is_named(name, post(path, **{name: value})) for value in TRIED), name


@pytest.mark.few(3)
@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_supported_is_refused_by_name(post, path):
    for name in names(path, "refused"):
        assert all(is_named(name, post(path, **{name: value})) for value in TRIED), name
        assert post(path, **{name: None}).status_code == 200, name


@pytest.mark.few(3)
@pytest.mark.parametrize("path", BODIES)
def test_what_is_harmless_changes_neither_prompt_nor_parameters_nor_answer(served, post, path):
    def outcome(**fields):
        answer = post(path, **fields)
        assert answer.status_code == 200, answer.text
        kept = {name: each for name, each in answer.json().items() if name not in CHANGING}
        return kept, served.llm.asked, served.llm.params

    want = outcome()
    for name in names(path, "harmless"):
        for value in TRIED:
            assert outcome(**{name: value}) == want, name


@pytest.mark.parametrize(
    "name, neutral, asking",
    [
        ("thinking_token_budget", -1, -2),
        ("stream_interval", 1, 0),
        ("routed_experts_prompt_start", 0, 1),
        ("use_beam_search", False, True),
        ("logprob_token_ids", [], [0]),
        ("repetition_detection", {}, {"max_pattern_size": 4}),
        ("guided_json", None, []),
        ("structured_outputs", None, {}),
        ("truncation_side", "left", "right"),
        ("include_reasoning", True, "no"),
        ("top_logprobs", 0, 1),
        ("stream_options", None, {"include_usage": True}),
        ("response_format", {"type": "text"}, {"type": "xml"}),
        ("add_special_tokens", False, True),
    ],
)
def test_a_value_that_asks_for_nothing_is_taken(post, name, neutral, asking):
    path = "/v1/chat/completions"
    assert post(path, **{name: neutral}).status_code == 200
    assert is_named(name, post(path, **{name: asking}))
