"""Structural tags: free text, triggers, and the parts that follow them."""

import json

import jsonschema
import pytest
from constrained import (
    MARKS,
    Decoder,
    allowed,
    grammar_of,
    masks_of,
    matchers,
    thinking_tokenizer,
)

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CLOSED = NUMBER | {"additionalProperties": False}


def tag(name, schema=CLOSED):
    content = {"type": "json_schema", "json_schema": schema}
    return {"begin": f"<fn={name}>", "content": content, "end": "</fn>"}


OLD = {
    "structures": [
        {"begin": f"<fn={name}>", "schema": CLOSED, "end": "</fn>"} for name in ("add", "sub")
    ],
    "triggers": ["<fn="],
}
TAGS = {"type": "triggered_tags", "triggers": ["<fn="], "tags": [tag("add"), tag("sub")]}


def new(form):
    return {"type": "structural_tag", "format": form}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return thinking_tokenizer(tmp_path_factory.mktemp("tags"), marks=MARKS)


def accepts(form, text, tokenizer):
    """Whether a text has a form, and may end."""
    grammar = grammar_of({"structural_tag": form}, prompt="</think>", tokenizer=tokenizer)
    matcher = matchers(tokenizer).matcher(grammar)
    matcher.advance(tokenizer.encode(text, add_special_tokens=False))
    return not matcher.is_error and matcher.is_accepting


@pytest.mark.parametrize("form", [OLD, new(TAGS)], ids=["old", "new"])
@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("", True),
        ("text alone", True),
        ('<fn=add>{"n": 1}</fn>', True),
        ('first <fn=add>{"n": 1}</fn> then <fn=sub>{"n":2}</fn>.', True),
        ('<fn=mul>{"n": 1}</fn>', False),
        ('<fn=add>{"m": 1}</fn>', False),
        ('<fn=add>{"n": 1}', False),
    ],
)
def test_triggers_begin_tags(form, text, is_right, tokenizer):
    assert accepts(form, text, tokenizer) == is_right


CALL = {
    "type": "triggered_tags",
    "triggers": ["<tool_call>"],
    "tags": [
        {
            "begin": '<tool_call>\n{"name": "add", "arguments": ',
            "content": {"type": "json_schema", "json_schema": CLOSED},
            "end": "}\n</tool_call>",
        }
    ],
}


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('a <tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call> b', True),
        ('<tool_call>\n{"name": "sub", "arguments": {"n": 1}}\n</tool_call>', False),
        ("no call", True),
        ("<tool_call>", False),
    ],
)
def test_triggers_that_are_special_tokens(text, is_right, tokenizer):
    assert accepts(new(CALL), text, tokenizer) == is_right


DIGITS, ANY = {"type": "regex", "pattern": "[0-9]{2}"}, {"type": "any_text"}
SEQUENCE = {
    "type": "sequence",
    "elements": [
        {"type": "const_string", "value": "A "},
        {
            "type": "or",
            "elements": [{"type": "regex", "pattern": "[0-9]{2}"}, tag("x") | {"type": "tag"}],
        },
        {"type": "grammar", "grammar": 'start: "!"+\n'},
    ],
}
SEPARATED = {"type": "tags_with_separator", "tags": [tag("a"), tag("b")], "separator": ", "}
THOUGHT = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
A, B = '<fn=a>{"n":1}</fn>', '<fn=b>{"n":2}</fn>'


@pytest.mark.parametrize(
    ("form", "text", "is_right"),
    [
        (SEQUENCE, "A 12!", True),
        (SEQUENCE, 'A <fn=x>{"n":3}</fn>!!', True),
        (SEQUENCE, "A 1!", False),
        (SEQUENCE, "A 12", False),
        (SEPARATED, f"{A}, {B}, {A}", True),
        (SEPARATED, "", True),
        (SEPARATED, f"{A}{B}", False),
        (SEPARATED | {"at_least_one": True}, "", False),
        (SEPARATED | {"stop_after_first": True}, f"{A}, {B}", False),
        (THOUGHT, "<t>any <b> text</t>", True),
        (THOUGHT, "<t>open", False),
        (THOUGHT, "<t>a</t>b", False),
        (TAGS | {"at_least_one": True}, "text", False),
        (TAGS | {"at_least_one": True}, 'text <fn=add>{"n":1}</fn>', True),
        (TAGS | {"stop_after_first": True}, '<fn=add>{"n":1}</fn> more', False),
        ({"type": "json_schema", "json_schema": CLOSED}, '{"n": 1}', True),
        (ANY, "anything", True),
    ],
)
def test_formats(form, text, is_right, tokenizer):
    assert accepts(new(form), text, tokenizer) == is_right


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({}, "format"),
        (new({"type": "qwen_xml_parameter", "json_schema": {}}), "qwen_xml_parameter"),
        (new({"type": "tag", "begin": "<a>", "end": ""}), "content"),
        (new({"type": "json_schema", "json_schema": {"not": {}}}), "not"),
        (
            new({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}),
            "last",
        ),
        (new(TAGS | {"triggers": ["<fn=", "<other"]}), "<other"),
        (new(TAGS | {"triggers": ["<other"]}), "<fn="),
        (new(TAGS | {"tags": []}), "tags"),
        ({"structures": [{"begin": 3}], "triggers": ["a"]}, "begin"),
    ],
)
def test_wrong_tags_are_refused_by_name(form, name, tokenizer):
    with pytest.raises(ValueError, match=name):
        grammar_of({"structural_tag": form}, tokenizer=tokenizer)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_calls_in_random_texts_have_their_schemas(num_drafts, tokenizer):
    form = {"structural_tag": new(TAGS | {"at_least_one": True, "stop_after_first": True})}
    grammar = grammar_of(form, prompt="</think>", tokenizer=tokenizer)
    start = tokenizer.encode("so <fn=", add_special_tokens=False)
    finished = 0
    for seed in range(8):
        run = Decoder(grammar, seed=seed, num_drafts=num_drafts, tokenizer=tokenizer)
        run.matcher.advance(start)
        run.tokens += start
        run.run(200)
        if run.is_finished:
            call = run.text.partition(">")[2].removesuffix("</fn>")
            jsonschema.validate(json.loads(call), CLOSED)
            finished += 1
    assert finished


def test_special_tokens_are_no_text(tokenizer):
    grammar = grammar_of({"structural_tag": OLD}, prompt="</think>", tokenizer=tokenizer)
    ids = {*allowed(masks_of(matchers(tokenizer).matcher(grammar))[0])}
    assert not ids & {tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
