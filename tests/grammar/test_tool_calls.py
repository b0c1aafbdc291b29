"""Every text of a grammar of calls is read by our parser into calls that the schemas allow."""

import json
import random

import jsonschema
import pytest
from grammar_walks import accepts, tokenizer_with, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.grammar.tool_calls import automatic, required, tools_of
from jaxspec.text.parsers import PLAIN, TOOL_PARSERS, assemble

DIALECTS = ("xml", "hermes", "llama", "lfm2", "nemotron-nano-2")
TAGS = {
    "xml": ("<tool_call>", "</tool_call>"),
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama": (),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "nemotron-nano-2": ("<TOOLCALL>", "</TOOLCALL>"),
}
ENDINGS = ('"', "}", "]", ")", '"}', "}}", "\n</parameter>\n", "</function>\n", ", ")
ARGUMENTS = {
    "text": {"type": "string"},
    "short": {"type": "string", "minLength": 1, "maxLength": 3},
    "anything": {},
    "name": {"type": "string", "pattern": "^[a-c]{1,4}$"},
    "day": {"type": "string", "format": "date"},
    "color": {"enum": ["red", "light blue", "a\nb"]},
    "fixed": {"const": "one"},
    "level": {"enum": [1, 2, None]},
    "mixed": {"enum": ["a", 1, True, None, "-"]},
    "count": {"type": "integer", "minimum": -5, "maximum": 70},
    "ratio": {"type": "number", "minimum": 0, "maximum": 1},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "maybe_count": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    "either": {"type": ["string", "boolean"]},
    "bounded_or_text": {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "string"}]},
    "texts": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    "text_or_texts": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"const": "x"}}]},
    "place": {"$ref": "#/$defs/Place"},
    "kind": {"$ref": "#/$defs/Kind"},
    "places": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "maxItems": 2},
    "odd key": {"type": "string"},
    "from": {"type": "integer", "minimum": 0, "maximum": 9},
}
DEFINITIONS = {
    "Place": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "zip": {"enum": [1, 2]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "Kind": {"type": "string", "enum": ["near", "far"]},
}


def tool(name, properties, required=(), **more):
    schema = {"type": "object", "properties": properties, "required": [*required], **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def random_tools(seed):
    """Tools with some arguments each, some of them required."""
    rng, found = random.Random(seed), []
    for number in range(rng.randint(1, 3)):
        keys = rng.sample([*ARGUMENTS], rng.randint(0, 3))
        needed = [key for key in keys if rng.random() < 0.5]
        properties = {key: ARGUMENTS[key] for key in keys}
        found.append(tool(f"tool_{number}", properties, needed, **{"$defs": DEFINITIONS}))
    return found


def read(dialect, tools, text):
    """The content and calls of a text; the calls are checked with the schemas of their tools."""
    parser = TOOL_PARSERS[dialect](starts_in_reasoning=False, tools=tools)
    pieces = parser.push(text) + parser.flush()
    assert not parser.unfinished, text
    answer = assemble(pieces, parser.unfinished)
    schemas = {each["function"]["name"]: each["function"].get("parameters", {}) for each in tools}
    for call in answer.tool_calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    return answer.content, answer.tool_calls


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "texts"])
def tags_of(request):
    """The tags of a dialect that are added tokens: all or none."""
    return lambda dialect: TAGS[dialect] if request.param else ()


@pytest.fixture(scope="module")
def tokenizers():
    found = {}

    def tokenizer(tags):
        if tags not in found:
            found[tags] = tokenizer_with(tags)
        return found[tags]

    return tokenizer


@pytest.mark.few(3)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_required_calls_are_calls_alone_of_the_tools(dialect, tags_of, tokenizers):
    tags = tags_of(dialect)
    for seed in range(30):
        tools = random_tools(seed)
        grammar = required(TOOL_PARSERS[dialect], tools_of(tools), tags.__contains__)
        text = walk(grammar, tokenizers(tags), seed, (*ENDINGS, *tags))
        content, calls = read(dialect, tools, text)
        assert calls and not content.strip(), text


@pytest.mark.few(3)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_single_call_is_one_of_the_named_tool(dialect, tags_of, tokenizers):
    tags = tags_of(dialect)
    for key, schema in ARGUMENTS.items():
        tools = [tool("f", {key: schema}, [key], **{"$defs": DEFINITIONS}), tool("g", {})]
        (named, _) = tools_of(tools)
        grammar = required(TOOL_PARSERS[dialect], [named], tags.__contains__, is_single=True)
        for seed in range(4):
            text = walk(grammar, tokenizers(tags), seed, (*ENDINGS, *tags))
            content, calls = read(dialect, tools, text)
            (call,) = calls
            assert call.name == "f" and [*json.loads(call.arguments)] == [key]
            assert not content.strip()


@pytest.mark.few(3)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_that_the_model_begins_is_valid(dialect, tags_of, tokenizers):
    tags = tags_of(dialect)
    opening = (TAGS[dialect] or ('{"name": "',))[0]
    for seed in range(20):
        tools = random_tools(seed)
        grammar = automatic(TOOL_PARSERS[dialect], tools_of(tools), tags.__contains__)
        before = "" if dialect == "llama" else "I shall.\n"
        text = walk(grammar, tokenizers(tags), seed, (*ENDINGS, *tags), before + opening)
        content, calls = read(dialect, tools, text)
        assert calls and content.strip() == before.strip(), text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_text_without_calls_stays_free(dialect, tags_of, tokenizers):
    tags, tools = tags_of(dialect), [tool("f", {"a": {"type": "integer"}}, ["a"])]
    grammar = automatic(TOOL_PARSERS[dialect], tools_of(tools), tags.__contains__)
    for text in ("", "No call.", "1 < 2\n\n<b>x</b> é", "see <tool", "x {}"):
        assert accepts(grammar, tokenizers(tags), text), text
        assert read(dialect, tools, text) == (text.rstrip("\n"), [])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answer_is_of_its_schema_or_a_call(dialect, tags_of, tokenizers):
    tags, tools = tags_of(dialect), [tool("f", {"a": {"type": "integer"}}, ["a"])]
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    is_token = tags.__contains__
    grammar = automatic(TOOL_PARSERS[dialect], tools_of(tools), is_token, content=schema)
    found = set()
    for seed in range(20):
        text = walk(grammar, tokenizers(tags), seed, (*ENDINGS, *tags))
        content, calls = read(dialect, tools, text)
        found.add(bool(calls))
        if not calls:
            jsonschema.validate(json.loads(content), schema)
    assert found == {True, False}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_arguments_that_the_schema_does_not_allow_are_refused(dialect, tokenizers):
    tools = [tool("f", {"a": {"type": "integer"}, "b": {"enum": ["x"]}}, ["a"])]
    grammar = required(TOOL_PARSERS[dialect], tools_of(tools), str.isdigit)
    valid = {
        "xml": "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n"
        "</tool_call>",
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>',
        "llama": '{"name": "f", "parameters": {"a": 5}}',
        "lfm2": "<|tool_call_start|>[f(a=5)]<|tool_call_end|>",
        "nemotron-nano-2": '<TOOLCALL>[{"name": "f", "arguments": {"a": 5}}]</TOOLCALL>',
    }[dialect]
    assert accepts(grammar, tokenizers(()), valid)
    assert len(read(dialect, tools, valid)[1]) == 1
    for before, after in (("5", "true"), ("f", "g"), ("a", "c"), ("5", "")):
        place = valid.rindex(before) if before == "5" else valid.index(before)
        wrong = valid[:place] + after + valid[place + 1 :]
        assert not accepts(grammar, tokenizers(()), wrong), wrong


def test_texts_between_tags_hold_all_but_their_own_markup(tokenizers):
    tools = [tool("write", {"text": {"type": "string"}}, ["text"])]
    grammar = required(TOOL_PARSERS["xml"], tools_of(tools), str.isdigit)
    call = "<tool_call>\n<function=write>\n<parameter=text>\n{}\n</parameter>\n</function>\n"
    for text in ("", "\n", " a ", "<p>\n</paragraph>", "</p", '{"a": 1}', "null", "x\n\n", "é\r\t"):
        written = call.replace("{}", text) + "</tool_call>"
        assert accepts(grammar, tokenizers(()), written), text
        ((_, arguments),) = read("xml", tools, written)[1]
        assert json.loads(arguments) == {"text": text}
    for text in ("a</parameter>b", "</function>", "<parameter=x>"):
        assert not accepts(grammar, tokenizers(()), call.replace("{}", text) + "</tool_call>")


def test_tools_without_a_form_are_refused_by_their_path():
    good = tool("f", {})
    for wrong, place in (
        ({"type": "function"}, "tools.1.function"),
        (tool("a b", {}), "tools.1.function.name"),
        ({"function": {"name": "f", "parameters": 5}}, "tools.1.function.parameters"),
        (
            {"function": {"name": "f", "parameters": {"type": "array"}}},
            "tools.1.function.parameters.type",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            tools_of([good, wrong])
        assert str(caught.value).startswith(f"{place} must be ")
    with pytest.raises(ValueError):
        required(PLAIN, tools_of([good]), str.isdigit)


WORDS = st.sampled_from(
    ["type", "properties", "required", "anyOf", "enum", "const", "$ref", "$defs", "a", "string"]
    + ["object", "#/$defs/a", "minLength", "format", "additionalProperties", "null", "description"]
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(ANY_JSON, ANY_JSON, st.sampled_from(DIALECTS))
def test_any_schema_has_a_grammar_or_is_refused(properties, definitions, dialect):
    for parameters in (
        properties,
        {"properties": {"a": properties}, "required": ["a"], "$defs": definitions},
        {"properties": properties, "required": definitions, "$defs": {"a": definitions}},
    ):
        try:
            tools = tools_of([{"function": {"name": "f", "parameters": parameters}}])
        except ValueError as error:
            assert str(error).startswith("tools")
            continue
        for grammar in (
            required(TOOL_PARSERS[dialect], tools, str.isdigit),
            automatic(TOOL_PARSERS[dialect], tools, str.isdigit),
        ):
            assert grammar.startswith("start: ")


def test_schemas_too_deep_or_large_are_refused():
    deep = {}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    large = {"properties": {"a": {"enum": ["x" * 1000] * 300}}}
    for parameters in (deep, large):
        with pytest.raises(ValueError, match="^tools"):
            tools_of([{"function": {"name": "f", "parameters": parameters}}])
