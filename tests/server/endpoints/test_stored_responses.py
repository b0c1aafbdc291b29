"""/v1/responses over several turns by the official client: stored responses, counts, compaction."""

import contextlib

import openai
import pytest
from scripted_llm import ScriptedLLM
from served import serving

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}{% endfor %}"
)
ASK = {"model": "scripted"}


@contextlib.contextmanager
def answering(text="Rome.", **options):
    with serving(lambda: ScriptedLLM([text], TEMPLATE), **options) as served:
        told = {"base_url": served.url, "api_key": "k", "max_retries": 0, "timeout": 60}
        with openai.OpenAI(**told) as client:
            yield client, served


def prompt(served):
    return served.llm.tokenizer.render_chat(served.llm.asked["messages"])


@pytest.mark.parametrize("streams", [False, True])
def test_a_turn_goes_on_from_the_one_before(streams):
    def create(**fields):
        found = client.responses.create(**ASK, **fields, stream=streams)
        return list(found)[-1].response if streams else found

    with answering() as (client, served):
        first = create(input="Capital of Italy?", instructions="Be brief.")
        assert first.store and client.responses.retrieve(first.id).output == first.output
        second = create(input="Why?", previous_response_id=first.id)
        assert prompt(served) == "<|user|>Capital of Italy?<|assistant|>Rome.<|user|>Why?"
        assert second.previous_response_id == first.id
        reference = {"type": "item_reference", "id": second.output[0].id}
        create(input=[{"role": "user", "content": "A?"}, reference], store=False)
        assert prompt(served) == "<|user|>A?<|assistant|>Rome."
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        create(input="And?", previous_response_id=second.id)  # it has all items itself
        assert prompt(served).count("<|user|>") == 3


def test_calls_and_their_outputs_are_kept():
    text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    with answering(text, tool_call_parser="hermes") as (client, served):
        first = client.responses.create(**ASK, input="Weather?", tools=tools)
        output = {"type": "function_call_output", "call_id": first.output[0].call_id}
        client.responses.create(
            **ASK, input=[{**output, "output": "Sunny"}], previous_response_id=first.id, tools=tools
        )
        assert prompt(served) == "<|user|>Weather?<|assistant|>[weather]<|tool|>Sunny"


def test_what_is_not_stored_is_not_found():
    with answering() as (client, served):
        unstored = client.responses.create(**ASK, input="Hi", store=False)
        assert unstored.store is False and len(served.service.responses) == 0
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**ASK, input="Hi", previous_response_id=unstored.id)
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**ASK, input=[{"type": "item_reference", "id": "msg_1"}])
        assert caught.value.param == "input.0.id"
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(unstored.id)


def test_several_processes_store_nothing_and_say_so():
    with answering(api_processes=2) as (client, _):
        first = client.responses.create(**ASK, input="Hi")
        assert first.store is False
        with pytest.raises(openai.BadRequestError, match="--api-processes"):
            client.responses.create(**ASK, input="Hi", previous_response_id=first.id)


def test_input_tokens_are_those_of_the_prompt():
    with answering() as (client, _):
        first = client.responses.create(**ASK, input="Capital of Italy?")
        ask = {**ASK, "input": "Why?", "previous_response_id": first.id}
        counted = client.responses.input_tokens.count(**ask)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == client.responses.create(**ask).usage.input_tokens
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_tokens.count(**ASK)
        assert caught.value.param == "input"


def test_a_compaction_stands_for_the_turns_before_it():
    with answering("It was about Rome.") as (client, served):
        first = client.responses.create(**ASK, input="Capital of Italy?")
        found = client.responses.compact(**ASK, previous_response_id=first.id)
        user, compaction = found.output
        assert found.object == "response.compaction" and found.usage.output_tokens == 1
        assert user.content[0].text == "Capital of Italy?"
        items = [item.to_dict(warnings=False) for item in (user, compaction)]
        client.responses.create(**ASK, input=[*items, {"role": "user", "content": "Why?"}])
        said = prompt(served)
        assert said.startswith("<|user|>Capital of Italy?<|user|>")
        assert "It was about Rome." in said and said.endswith("<|user|>Why?")
        foreign = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"}
        client.responses.create(**ASK, input=[foreign, {"role": "user", "content": "Why?"}])
        assert prompt(served) == "<|user|>Why?"


def test_a_compaction_without_a_summary_is_refused():
    with (
        answering("") as (client, _),
        pytest.raises(openai.UnprocessableEntityError, match="no summary"),
    ):
        client.responses.compact(**ASK, input="Hi")
