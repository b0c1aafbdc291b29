"""Grammars from parameters: what is refused, by which name, and how long hostile ones take."""

import pickle
import time

import pytest
from constrained import Decoder, embedded, grammar_of, masks_of, matchers

from jaxspec.grammar import Grammar
from jaxspec.requests.sampling_params import SamplingParams

SECONDS = 20  # on a busy machine; alone the slowest takes about one


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"json": {"not": {"type": "integer"}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "array", "contains": {}}}, "contains"),
        ({"json": {"if": {"type": "integer"}, "then": {"minimum": 3}}}, "if"),
        ({"json": {"type": "object", "propertyNames": {"pattern": "^a"}}}, "propertyNames"),
        ({"json": {"type": "string", "format": "klingon"}}, "klingon"),
        ({"json": {"type": "strange"}}, "strange"),
        ({"json": {"$ref": "#/$defs/none"}}, "none"),
        ({"json": {"$ref": "https://example.com/schema"}}, "example.com"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json": False}, "False"),
        ({"json": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "(a"}, "unclosed"),
        ({"grammar": "start: nothing\n"}, "nothing"),
        ({"grammar": 'start: "a\n'}, "grammar"),
        ({"grammar": "root ::= nothing\n"}, "nothing"),
        ({"json": {"type": "object"}, "whitespace_pattern": "("}, "json"),
    ],
    ids=str,
)
def test_unsupported_forms_are_refused_by_name(form, name):
    with pytest.raises(ValueError, match=name):
        grammar_of(form)


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def branching(depth):
    """A schema whose references double at each level."""
    names = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(depth)}
    return {"$defs": names | {f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


HOSTILE = {
    "deep": {"json": deep(10_000)},
    "deep text": {"json": "[" * 10_000 + "]" * 10_000},
    "wide": {"json": {"properties": {f"p{i}": {} for i in range(1000)}}},
    "wider": {"json": {"properties": {f"p{i}": {} for i in range(100_000)}}},
    "enum": {"json": {"enum": [f"value {i}" * 5 for i in range(5000)]}},
    "long": {"json": {"const": "x" * 10**6}},
    "branching": {"json": branching(40)},
    "self": {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "all of": {"json": {"allOf": [{"anyOf": [deep(2), deep(3), deep(4)]} for _ in range(12)]}},
    "patterns": {"json": {"patternProperties": {f"^a{i}.*b$": {} for i in range(200)}}},
    "items": {"json": {"type": "array", "minItems": 10**6, "maxItems": 10**7}},
    "length": {"json": {"type": "string", "minLength": 10**6}},
    "multiple": {"json": {"type": "number", "multipleOf": 1e-9}},
    "nested counts": {"regex": "((a{1,100}){1,100}){1,100}"},
    "count": {"regex": "a{1000000}"},
    "ambiguous regex": {"regex": "(a|aa|a*)*b"},
    "states": {"regex": "(a|b)*a(a|b){60}"},
    "unicode": {"regex": r"[\p{L}\p{N}]{1,5000}x"},
    "groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "alternatives": {"regex": "|".join(f"{i}.*{i}" for i in range(2000))},
    "ambiguous grammar": {"grammar": 'start: start start | "a" | ""\n'},
    "rules": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60))},
    "ebnf": {"grammar": "root ::= " + "(" * 2000 + '"a"' + ")" * 2000},
    "choices": {"choice": [f"choice {i}" for i in range(10_000)]},
}


@pytest.mark.parametrize("form", HOSTILE.values(), ids=HOSTILE)
def test_hostile_forms_end_within_bounds(form):
    """They are refused, or cost little in each of many steps."""
    start = time.perf_counter()
    try:
        run = Decoder(grammar_of(form), seed=0, num_drafts=3)
    except ValueError:
        assert time.perf_counter() - start < SECONDS
        return
    for _ in range(20):
        masks = masks_of(run.matcher)
        if run.matcher.is_error or run.is_finished:
            assert run.is_finished or not masks.any()
            break
        token = run.draw(masks[0])
        run.matcher.advance([token])
        run.is_finished = token in (0, 2047)
    assert time.perf_counter() - start < SECONDS


def test_equal_parameters_have_equal_grammars_in_any_process():
    one, two = (grammar_of({"json": {"type": "object"}}) for _ in range(2))
    assert one == two and hash(one) == hash(two) and pickle.loads(pickle.dumps(one)) == one
    assert grammar_of({"json": '{"type": "object"}'}) == one
    assert grammar_of({"json": {"type": "array"}}) != one


def test_no_grammar_without_a_form_or_limit():
    assert Grammar.of(SamplingParams(), embedded(), "") is None


def test_the_schema_of_an_open_object_can_be_closed():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tokens = embedded().encode('{"b', add_special_tokens=False)
    for is_closed in (False, True):
        form = {"json": schema, "disable_additional_properties": is_closed}
        matcher = matchers(embedded()).matcher(grammar_of(form), tokens)
        assert matcher.is_error == is_closed


def test_without_the_library_a_form_is_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"jaxspec\[structured\]"):
        grammar_of({"regex": "never seen before"})
