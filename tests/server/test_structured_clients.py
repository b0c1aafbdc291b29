"""Structured answers and forced calls by the clients' own helpers.

The model is random but for the masks of its grammar, so that only a right translation gives values
that the clients accept.
"""

import contextlib
import enum
import json
from typing import Literal

import anthropic
import jsonschema
import openai
import pydantic
import pytest
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI
from masked_llm import HERMES, THINKING, MaskedLLM
from obedient_llm import TEMPLATE
from served import serving

ASK = {"model": "scripted", "messages": [{"role": "user", "content": "Where?"}]}


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Place(pydantic.BaseModel):
    """A place."""

    name: Literal["Paris", "Rome"]
    size: Size
    people: int = pydantic.Field(ge=0, le=99)
    parts: list[Literal["a", "b"]] = pydantic.Field(max_length=2)


class Visit(pydantic.BaseModel):
    """Visit a place."""

    place: Place
    note: str = pydantic.Field(max_length=4)


class Plan(pydantic.BaseModel):
    """A schema without bounds, which Anthropic's client does not send."""

    name: Literal["Paris", "Rome"]
    size: Size
    is_far: bool | None


def function(model, **more):
    schema = model.model_json_schema()
    return {"name": model.__name__, "description": model.__doc__, "parameters": schema, **more}


def tools(**more):
    return [{"type": "function", "function": function(each, **more)} for each in (Place, Visit)]


CLAUDE = [
    {"name": each.__name__, "input_schema": each.model_json_schema()} for each in (Place, Visit)
]
MODELS = {"Place": Place, "Visit": Visit}


@contextlib.contextmanager
def serving_masked(template):
    with serving(lambda: MaskedLLM(template)) as served:
        yield served


@pytest.fixture(scope="module", params=["hermes", "xml", "thinking"])
def served(request):
    template = {"hermes": HERMES, "xml": TEMPLATE, "thinking": THINKING}[request.param]
    with serving_masked(template) as found:
        yield found


@pytest.fixture(scope="module")
def client(served):
    told = {"base_url": served.url, "api_key": "k", "max_retries": 0, "timeout": 60}
    with openai.OpenAI(**told, _strict_response_validation=True) as found:
        yield found


@pytest.fixture(scope="module")
def claude(served):
    with anthropic.Anthropic(base_url=served.root, api_key="k", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def langchain(served):
    return ChatOpenAI(model="scripted", base_url=served.url, api_key="k", max_retries=0)


def answer_of(text):
    """The text without its reasoning, which completions include."""
    return text.partition("</think>")[2].strip("\n") if text.startswith("<think>") else text


def checked(name, arguments):
    """Arguments of a call as an object, of the schema of their tool."""
    return MODELS[name].model_validate_json(arguments)


def test_openai_parses_answers(client):
    for _ in range(3):
        found = client.chat.completions.parse(**ASK, response_format=Place)
        (choice,) = found.choices
        assert isinstance(choice.message.parsed, Place) and choice.finish_reason == "stop"
        whole = client.responses.parse(model="scripted", input="Where?", text_format=Place)
        assert isinstance(whole.output_parsed, Place) and whole.text.format.name == "Place"


def test_openai_s_stream_parses_answers(client):
    with client.chat.completions.stream(**ASK, response_format=Place) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Place)
    ask = {"model": "scripted", "input": "Where?", "text_format": Place}
    with client.responses.stream(**ask) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Place)


def test_openai_s_json_mode_gives_an_object(client):
    found = client.chat.completions.create(**ASK, response_format={"type": "json_object"})
    assert isinstance(json.loads(found.choices[0].message.content), dict)
    found = client.responses.create(
        model="scripted", input="Where?", text={"format": {"type": "json_object"}}
    )
    assert isinstance(json.loads(found.output_text), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "Visit", "allowed", "single"])
def test_forced_calls_are_calls_of_the_tools(client, choice, stream):
    ask = {**ASK, "tools": tools()}
    if choice == "Visit":
        ask["tool_choice"] = {"type": "function", "function": {"name": "Visit"}}
    elif choice == "allowed":
        only = {"mode": "required", "tools": tools()[1:]}
        ask["tool_choice"] = {"type": "allowed_tools", "allowed_tools": only}
    else:
        ask |= {"tool_choice": "required", "parallel_tool_calls": choice != "single"}
    if stream:
        with client.chat.completions.stream(**ask) as events:
            found = events.get_final_completion()
    else:
        found = client.chat.completions.create(**ask)
    (one,) = found.choices
    calls = one.message.tool_calls
    assert calls and one.finish_reason == "tool_calls" and not (one.message.content or "").strip()
    names = {call.function.name for call in calls}
    assert names <= ({"Visit"} if choice in ("Visit", "allowed") else {*MODELS})
    assert len(calls) == 1 or choice in ("required", "allowed")
    for call in calls:
        checked(call.function.name, call.function.arguments)


def test_openai_parses_strict_tools(client):
    strict = [openai.pydantic_function_tool(each) for each in (Place, Visit)]
    found = client.chat.completions.parse(**ASK, tools=strict, tool_choice="required")
    for call in found.choices[0].message.tool_calls:
        assert type(call.function.parsed_arguments) is MODELS[call.function.name]


def test_responses_have_forced_calls(client):
    offered = [{"type": "function", **each["function"]} for each in tools(strict=True)]
    ask = {"model": "scripted", "input": "Where?", "tools": offered}
    for choice in ("required", {"type": "function", "name": "Place"}):
        found = client.responses.create(**ask, tool_choice=choice)
        calls = [item for item in found.output if item.type == "function_call"]
        assert calls and found.status == "completed"
        for call in calls:
            checked(call.name, call.arguments)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "any"},
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "Place"},
    ],
)
def test_anthropic_s_choices_force_calls(claude, choice):
    ask = {**ASK, "max_tokens": 500, "tools": CLAUDE, "tool_choice": choice}
    whole = claude.messages.create(**ask)
    with claude.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for found in (whole, streamed):
        calls = [block for block in found.content if block.type == "tool_use"]
        assert calls and found.stop_reason == "tool_use"
        assert len(calls) == 1 or choice == {"type": "any"}
        for call in calls:
            MODELS[call.name].model_validate(call.input)
            assert choice.get("name", call.name) == call.name


def test_anthropic_s_free_choices_force_none(claude):
    for kind in ("auto", "none"):
        ask = {**ASK, "max_tokens": 500, "tools": CLAUDE, "tool_choice": {"type": kind}}
        assert claude.messages.create(**ask).stop_reason == "end_turn"


def test_anthropic_parses_answers(claude):
    found = claude.messages.parse(**ASK, max_tokens=500, output_format=Plan)
    assert isinstance(found.parsed_output, Plan)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_gives_objects(langchain, method):
    if method == "json_mode":
        schema = {"title": "Thing", "type": "object"}
        model = langchain.with_structured_output(schema, method=method)
        assert isinstance(model.invoke("Where?"), dict)
        return
    for strict in (None, True):
        model = langchain.with_structured_output(Place, method=method, strict=strict)
        assert isinstance(model.invoke("Where?"), Place)


def test_langchain_forces_a_tool(langchain):
    @as_tool
    def travel(city: Literal["Paris", "Rome"], days: int | None = None) -> str:
        """Travel to a city."""
        return city

    for choice in ("any", "travel"):
        found = langchain.bind_tools([travel], tool_choice=choice).invoke("Go.")
        assert found.tool_calls and not found.invalid_tool_calls
        for call in found.tool_calls:
            travel.invoke(call["args"])


def test_an_answer_may_be_of_a_schema_beside_tools(client):
    schema = Place.model_json_schema()
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    for _ in range(6):
        found = client.chat.completions.create(**ASK, tools=tools(), response_format=form)
        message = found.choices[0].message
        for call in message.tool_calls or ():
            checked(call.function.name, call.function.arguments)
        if not message.tool_calls:
            Place.model_validate_json(message.content)


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["left", "right"]}},
        {"structured_outputs": {"regex": "left|right"}},
        {"guided_choice": ["left", "right"]},
        {"guided_regex": "left|right"},
        {"guided_grammar": 'root ::= "left" | "right"'},
        {"guided_json": {"enum": ["left", "right"]}},
    ],
)
def test_fields_of_vllm_give_the_form(client, fields):
    chat = client.chat.completions.create(**ASK, extra_body=fields)
    text = client.completions.create(model="scripted", prompt="Where?", extra_body=fields)
    for found in (chat.choices[0].message.content, text.choices[0].text):
        assert answer_of(found).strip('"') in ("left", "right")


def test_a_completion_s_format_is_of_its_schema(client):
    schema = Visit.model_json_schema()
    form = {"type": "json_schema", "json_schema": {"name": "visit", "schema": schema}}
    extra = {"response_format": form}
    found = client.completions.create(model="scripted", prompt="Where?", extra_body=extra)
    jsonschema.validate(json.loads(answer_of(found.choices[0].text)), schema)


def test_a_rendered_chat_keeps_its_form(served):
    body = {**ASK, "tools": tools(), "tool_choice": "required"}
    rendered = served.post("/v1/chat/completions/render", **body).json()
    sent = {"token_ids": rendered["token_ids"], "sampling_params": rendered["sampling_params"]}
    assert served.post("/inference/v1/generate", **sent).status_code == 200
    found = served.llm.params.structured_outputs
    assert served.post("/v1/chat/completions", **body).status_code == 200
    assert found == served.llm.params.structured_outputs and found.grammar is not None


def test_budgets_of_thinking_reach_the_model_that_thinks(served, claude, client):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    claude.messages.create(**ASK, max_tokens=2000, thinking=thinking)
    thinks = served.service.dialect.thinks
    assert served.llm.params.thinking_token_budget == (1024 if thinks else None)
    client.chat.completions.create(**ASK, extra_body={"thinking_token_budget": 7})
    assert served.llm.params.thinking_token_budget == (7 if thinks else None)
