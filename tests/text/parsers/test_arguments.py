"""Kinds of an argument by its schema, and texts written as JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.text.parsers.arguments import ArgumentWriter, kinds_of


@pytest.mark.parametrize(
    "schema, kinds",
    [
        ({}, "string"),
        (None, "string"),
        ({"type": "integer"}, "integer"),
        ({"type": ["number", "null"]}, "number null"),
        ({"type": 5}, "string"),
        ({"type": "odd"}, "string"),
        ({"anyOf": [{"type": "array"}, {"type": "null"}, 3]}, "array null"),
        ({"const": 1}, "number"),
        ({"enum": ["a", None, True, {}]}, "string null boolean object"),
        ({"$ref": "#/$defs/Place"}, "object"),
        ({"$ref": "#/$defs/Loop"}, "string"),
        ({"allOf": [{"$ref": "#/$defs/Place"}]}, "object"),
        ({"$ref": "#/nowhere/at/all"}, "string"),
    ],
)
def test_kinds_of_a_schema(schema, kinds):
    circle = {"anyOf": [{"$ref": "#/$defs/Loop"}] * 50}
    root = {"properties": {"a": schema}, "$defs": {"Place": {"type": "object"}, "Loop": circle}}
    assert kinds_of(root, "a") == set(kinds.split())


@pytest.mark.parametrize(
    "root", [{}, {"properties": 3}, {"properties": {}}, {"properties": {"b": {"type": "null"}}}]
)
def test_an_unknown_argument_is_a_string(root):
    assert kinds_of(root, "a") == {"string"}


def written(text, kinds, *cuts):
    writer = ArgumentWriter(frozenset(kinds))
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [writer.push(text[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return "".join(parts) + writer.flush()


@given(
    st.text(),
    st.lists(st.integers(0, 20)),
    st.sets(st.sampled_from(["string", "null", "integer", "object"]), min_size=1),
)
def test_any_text_becomes_json_however_it_is_cut(text, cuts, kinds):
    assert written(text, kinds, *cuts) == written(text, kinds)
    value = json.loads(written(text, kinds))
    if kinds == {"string"}:
        assert value == text.removeprefix("\n").removesuffix("\n")


@pytest.mark.parametrize(
    "text, kinds, value",
    [
        ("\n5\n", ["integer"], 5),
        ("5", ["string", "integer"], 5),
        ("5.0", ["string", "integer"], "5.0"),
        ("True", ["boolean"], True),
        ("True", ["string", "null"], "True"),
        ("none", ["object", "null"], None),
        ("1e400", ["number"], float("inf")),
        ("NaN", ["number"], "NaN"),
        (" [1]", ["array"], [1]),
        ('"x"', ["object"], "x"),
        ('"x"', ["object", "string"], '"x"'),
        ("[" * 5000, ["array"], "[" * 5000),
    ],
)
def test_texts_are_converted(text, kinds, value):
    assert json.loads(written(text, kinds)) == value
