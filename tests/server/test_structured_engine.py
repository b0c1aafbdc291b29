"""Structured answers and forced calls of an engine with drafts, whole, streamed and with logprobs.

The model is half of the embedded one, in a folder with a template of tool calls.
"""

import json
import shutil

import jsonschema
import openai
import pydantic
import pytest
from masked_llm import HERMES
from served import serving

from jaxspec.api.async_llm import AsyncLLM

pytestmark = pytest.mark.soak

OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "decode_buckets": [8],
    "prefill_buckets": [64],
    "max_model_len": 512,
    "speculative_config": {"num_speculative_tokens": 3, "method": "ngram"},
}
ASK = {"model": "calls", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 120}
SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["size", "count", "flags"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]


class Thing(pydantic.BaseModel):
    """A thing."""

    is_large: bool
    is_near: bool


@pytest.fixture(scope="module")
def calls(short_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "calls"
    shutil.copytree(short_model, folder)
    (folder / "chat_template.jinja").write_text(HERMES)
    with serving(lambda: AsyncLLM(folder, **OPTIONS)) as found:
        yield found


@pytest.fixture(scope="module")
def client(calls):
    told = {"base_url": calls.url, "api_key": "k", "max_retries": 0, "timeout": 120}
    with openai.OpenAI(**told, _strict_response_validation=True) as found:
        yield found


def streamed(client, **ask):
    """The texts and finish reasons of the choices of a streamed chat, and its logprobs."""
    texts, ends, logprobs = {}, {}, {}
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            number = choice.index
            texts[number] = texts.get(number, "") + (choice.delta.content or "")
            ends[number] = choice.finish_reason or ends.get(number)
            logprobs.setdefault(number, []).extend(
                (choice.logprobs and choice.logprobs.content) or []
            )
    return texts, ends, logprobs


@pytest.mark.parametrize("temperature", [0, 1])
def test_samples_of_a_schema_are_the_same_streamed_and_whole(client, temperature):
    ask = {**ASK, "response_format": FORM, "n": 3, "seed": 5, "temperature": temperature}
    ask |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask)
    texts, ends, logprobs = streamed(client, **ask)
    for choice in whole.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert choice.finish_reason == ends[choice.index] == "stop"
        assert texts[choice.index] == choice.message.content
        tokens = [each.token for each in choice.logprobs.content]
        assert tokens == [each.token for each in logprobs[choice.index]]
        assert "".join(tokens).startswith(choice.message.content)


def test_drafts_change_no_text(client):
    ask = {**ASK, "response_format": FORM, "seed": 1, "temperature": 1}
    texts = {
        client.chat.completions.create(**ask, extra_body={"num_speculative_tokens": number})
        .choices[0]
        .message.content
        for number in (0, 3)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_forced_calls_are_of_their_schemas(client, choice):
    ask = {**ASK, "tools": TOOLS, "tool_choice": choice, "n": 2, "seed": 3}
    ask |= {"parallel_tool_calls": False, "temperature": 1}
    whole = client.chat.completions.create(**ask)
    for each in whole.choices:
        assert each.finish_reason == "tool_calls"
        (call,) = each.message.tool_calls
        assert choice == "required" or call.function.name == "g"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    with client.chat.completions.stream(**ask) as events:
        final = events.get_final_completion()
    for each, other in zip(whole.choices, final.choices, strict=True):
        (call,), (same,) = each.message.tool_calls, other.message.tool_calls
        assert call.function.arguments == same.function.arguments


def test_helpers_parse_what_the_engine_writes(client):
    chat = client.chat.completions.parse(**ASK, response_format=Thing)
    assert isinstance(chat.choices[0].message.parsed, Thing)
    told = {"model": "calls", "input": "Where?", "max_output_tokens": 100}
    assert isinstance(client.responses.parse(**told, text_format=Thing).output_parsed, Thing)


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["left", "right"]}},
        {"structured_outputs": {"regex": "left|right"}},
        {"structured_outputs": {"grammar": 'start: "left" | "right"'}},
        {"guided_json": {"enum": ["left", "right"]}},
    ],
)
def test_completions_and_their_neighbours(client, fields):
    ask = {"model": "calls", "prompt": ["Where?"] * 2, "max_tokens": 20, "temperature": 1}
    plain = client.completions.create(**ask, seed=2)
    found = client.completions.create(**ask, seed=2, extra_body=fields)
    for choice in found.choices:
        assert choice.text.strip('"') in ("left", "right") and choice.finish_reason == "stop"
    again = client.completions.create(**ask, seed=2)
    assert [each.text for each in plain.choices] == [each.text for each in again.choices]


def test_a_text_that_is_cut_off_ends_with_length(client):
    found = client.chat.completions.create(**{**ASK, "max_tokens": 3}, response_format=FORM)
    (choice,) = found.choices
    assert choice.finish_reason == "length" and choice.message.content.startswith("{")
    forced = {"tools": TOOLS, "tool_choice": "required"}
    (choice,) = client.chat.completions.create(**{**ASK, "max_tokens": 5}, **forced).choices
    assert choice.finish_reason == "length" and not choice.message.tool_calls


def test_unsupported_schemas_are_refused_before_they_are_queued(client, calls):
    for fields, name in (
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, ""),
        ({"tool_choice": "required", "tools": [wrong_tool()]}, "tools"),
        ({"tools": [wrong_tool(strict=True)]}, "tools"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**ASK, **fields})
        assert caught.value.param == (name or "response_format")
        assert '"not"' in caught.value.body["message"]
    assert calls.llm.num_running == calls.llm.num_waiting == 0


def wrong_tool(**fields):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}}
    return {"type": "function", "function": {"name": "f", "parameters": schema, **fields}}
