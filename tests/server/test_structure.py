"""Fields about the form of an answer become one form, and choices of tools a grammar."""

import json

import pytest
from grammar_walks import accepts, tokenizer_with

from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.requests.structured_outputs import StructuredOutputsParams
from jaxspec.server.http.errors import ApiError
from jaxspec.server.protocol import ChatCompletionRequest, CompletionRequest, Sampling
from jaxspec.server.structure import ToolChoice, named_error
from jaxspec.server.translate.fields import FieldError
from jaxspec.text.parsers import TOOL_PARSERS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}
HERMES = TOOL_PARSERS["hermes"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WRONG = CALL.replace("5", "true")


def form(kind=Sampling, **fields):
    return kind(**fields).sampling_params(SamplingParams(), None, None).structured_outputs


@pytest.mark.parametrize(
    "fields, want",
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            {"json": SCHEMA, "disable_additional_properties": True},
        ),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["<a>"], "structures": []}},
            {"structural_tag": {"triggers": ["<a>"], "structures": []}},
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": None, "max_whitespace": 4}},
            {"json": SCHEMA, "max_whitespace": 4},
        ),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_regex": "a+", "guided_decoding_backend": "auto"}, {"regex": "a+"}),
        ({"guided_choice": ["x"]}, {"choice": ["x"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            {"json": SCHEMA, "whitespace_pattern": " ?"},
        ),
    ],
)
def test_each_field_is_a_form(fields, want):
    for kind, least in ((Sampling, {}), (CompletionRequest, {"prompt": "Hi"})):
        found = form(kind, **fields, **least)
        assert found == (None if want is None else StructuredOutputsParams(**want))


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_what_is_no_form_is_refused_by_its_field(fields, named):
    with pytest.raises(ValueError) as caught:
        form(**fields)
    error = ApiError.of_value(caught.value, Sampling.model_fields)
    assert error.status == 400 and error.param == named


def test_a_budget_of_thinking_is_a_number_or_unlimited():
    for given, want in ((None, None), (-1, None), (0, 0), (9, 9)):
        found = Sampling(thinking_token_budget=given).sampling_params(SamplingParams(), 20, None)
        assert found.thinking_token_budget == want


def test_an_error_of_the_grammar_s_library_names_the_client_s_field():
    told = ValueError("structured_outputs={'json': ...} must be one that llguidance supports.")
    error = named_error(told, "response_format", None)
    assert error is not None and error.param == "response_format"
    assert error.message == "response_format must be one that llguidance supports."
    assert named_error(ValueError("n must be 1"), "response_format", None) is None


@pytest.mark.parametrize("field", ["vllm_xargs", "extra_args"])
def test_an_error_of_a_processor_s_arguments_names_the_client_s_field(field):
    error = named_error(ValueError("extra_args['a'] must be 1"), None, field)
    assert error is not None and (error.param, error.message) == (field, f"{field}['a'] must be 1")


def chat(tools=(ADD, NOW), **fields):
    body = ChatCompletionRequest(messages=[], tools=[*tools], **fields)
    body.refuse_absent()
    return body


def grammar(tools=(ADD, NOW), dialect=HERMES, **fields):
    body = chat(tools, **fields)
    params = body.sampling_params(SamplingParams(), None, None)
    form = params.structured_outputs
    assert form is None or isinstance(form, StructuredOutputsParams)
    return body.choice.grammar(dialect, tools, str.isdigit, form)


NAMED = {"type": "function", "function": {"name": "add"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ADD]}}
JSON = {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}


@pytest.mark.parametrize(
    "fields, accepted, refused",
    [
        ({"tool_choice": "required"}, [CALL, OTHER, f"{CALL}\n{OTHER}"], ["Hi", WRONG, ""]),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            [CALL, OTHER],
            [f"{CALL}\n{OTHER}"],
        ),
        ({"tool_choice": NAMED}, [CALL], [OTHER, f"{CALL}\n{CALL}", "Hi"]),
        ({"tool_choice": ALLOWED}, [CALL, f"{CALL}\n{CALL}"], [OTHER]),
        ({"tools": (STRICT, NOW)}, [CALL, "Hi", "", f"Hi\n{CALL}\n{OTHER}"], [WRONG]),
        (
            {"tools": (STRICT, NOW), "parallel_tool_calls": False},
            [CALL, "Hi"],
            [f"{CALL}\n{OTHER}"],
        ),
        ({"response_format": JSON}, ["7", CALL], ["Hi", WRONG, "8"]),
        ({"response_format": JSON, "tools": (STRICT,)}, ["7", CALL], ["Hi", WRONG]),
        ({"response_format": JSON, "tool_choice": "required"}, [CALL], ["7", "Hi"]),
        ({"response_format": {"type": "json_object"}}, ['{"x": [1]}', "{}", CALL], ["[]", WRONG]),
    ],
)
def test_a_choice_is_a_grammar(fields, accepted, refused):
    found, tokenizer = grammar(**fields), tokenizer_with()
    assert found is not None
    for text in accepted:
        assert accepts(found, tokenizer, text), text
    for text in refused:
        assert not accepts(found, tokenizer, text), text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tool_choice": "auto"},
        {"tool_choice": "none", "tools": (STRICT,)},
        {"guided_regex": "a+"},
        {"guided_regex": "a+", "tools": (STRICT,)},
        {"tools": ()},
        {"tools": (), "response_format": JSON},
    ],
)
def test_a_free_choice_needs_no_grammar_of_calls(fields):
    assert grammar(**fields) is None


def test_a_tool_s_fault_is_named_by_its_path():
    unnamed = {"type": "function", "function": {"name": "a b"}}
    with pytest.raises(ValueError) as caught:
        grammar((unnamed,), tool_choice="required")
    error = ApiError.of_value(caught.value, ChatCompletionRequest.model_fields)
    assert error.param == "tools.0.function.name"


@pytest.mark.parametrize(
    "choice, place",
    [
        ("all", "tool_choice"),
        (3, "tool_choice"),
        ({"type": "custom"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "x"}}, "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": {}}, "tool_choice.allowed_tools.tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [ADD]}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": []}},
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
def test_a_wrong_choice_is_refused_by_its_path(choice, place):
    with pytest.raises(FieldError) as caught:
        ToolChoice.of(choice, [ADD], is_parallel=True)
    assert caught.value.param == place
