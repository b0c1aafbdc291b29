"""Plain texts of arguments: which schemas have them, and that the parser reads the same values."""

import json

import jsonschema
import pytest
from grammar_walks import accepts, tokenizer_with, walk

from jaxspec.grammar.raw_arguments import argument
from jaxspec.grammar.rules import Rules
from jaxspec.text.parsers.arguments import ArgumentWriter, kinds_of

END = "\n</parameter>\n"


def grammar_of(schema, **root):
    rules = Rules()
    body = argument(rules, {"properties": {"a": schema}, **root}, "a", END)
    return None if body is None else rules.grammar(body)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 2, "maxLength": 5},
        {"type": "string", "format": "date"},
        {"enum": ["x", "y"]},
        {"const": "only"},
        {"enum": ["x", None]},
        {"type": ["string", "integer"]},
        {"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]},
        {"anyOf": [{"enum": ["x", "y"]}, {"type": ["integer", "boolean"]}]},
        {"type": "integer", "minimum": 0, "maximum": 20},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        {"$ref": "#/$defs/Level"},
    ],
)
def test_the_parser_reads_a_value_of_the_schema(schema):
    definitions = {"Level": {"anyOf": [{"enum": ["high"]}, {"enum": ["low"]}]}}
    root = {"properties": {"a": schema}, "$defs": definitions}
    grammar, tokenizer = grammar_of(schema, **{"$defs": definitions}), tokenizer_with()
    for seed in range(12):
        text = walk(grammar, tokenizer, seed, ('"', "]", END))
        assert text.endswith(END)
        writer = ArgumentWriter(kinds_of(root, "a"))
        value = json.loads(writer.push("\n" + text[: -len(END) + 1]) + writer.flush())
        jsonschema.validate(value, schema | {"$defs": definitions})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^a"},
        {"enum": ["</function>"]},
        {"enum": ["1", 1]},
        {"anyOf": [{"type": "string"}, {"type": "array"}]},
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]},
        {"allOf": [{"type": "string"}, {"minLength": 3}]},
        {"$ref": "#/$defs/Loop"},
        {"$ref": "#/properties/b"},
        {"type": "array", "items": {"$ref": "#/properties/b"}},
    ],
)
def test_what_the_parser_could_read_otherwise_has_no_plain_form(schema):
    assert grammar_of(schema, **{"$defs": {"Loop": {"$ref": "#/$defs/Loop"}}}) is None


def test_a_text_ends_at_its_first_tag():
    grammar, tokenizer = grammar_of({"type": "string"}), tokenizer_with()
    assert accepts(grammar, tokenizer, "a\nb" + END)
    assert not accepts(grammar, tokenizer, "a" + END + END)
