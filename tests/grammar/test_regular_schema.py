"""Regexes of JSON schemas: every text that they match is valid, and every usual text matches."""

import json
import re

import jsonschema
import numpy as np
import pytest
from automata import EOS, compiler, text_of, walk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxspec.grammar.regular_schema import regex_of

PATTERNS = {  # and lengths
    "^[a-z]+$": (2, 5),
    "^[A-Z]{2}-\\d*$": (3, 6),
    "b|^a": (0, None),
    "^(red|green|blue)$": (4, 5),
    "[^0-9a]": (0, None),
    '^"\\\\\\n?$': (1, 3),
    "^$": (0, 1),
}
BLANK = r"(?:[ \t]{1,2}|\n[ \t]{0,7})?"
names = st.sampled_from(["a", "b", "name", 'x "y"', "é", "a.b", "日本"])
bounds = st.integers(-30, 120) | st.decimals(-9, 9, places=2).map(float)
numbers = st.tuples(
    st.sampled_from(["integer", "number"]),
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
    bounds,
    st.integers(2, 200),
).map(lambda n: {"type": n[0], n[1]: n[3], n[2]: n[3] + n[4]})
strings = st.sampled_from(sorted(PATTERNS.items())).map(
    lambda each: (
        {"type": "string", "pattern": each[0], "minLength": each[1][0]}
        | ({} if each[1][1] is None else {"maxLength": each[1][1]})
    )
)
scalars = st.one_of(
    numbers,
    numbers.map(lambda n: {key: value for key, value in n.items() if "aximum" not in key}),
    strings,
    st.sampled_from(["date", "time", "uuid", "ipv4"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.sampled_from([1, 10, 100]).map(lambda n: {"type": "integer", "multipleOf": n}),
    st.just({"type": ["integer", "string"], "minimum": 3, "maxLength": 2}),
    st.fixed_dictionaries({"type": st.just("string")}, optional={"maxLength": st.integers(3, 6)}),
    st.fixed_dictionaries({"type": st.just("string"), "minLength": st.integers(0, 3)}),
    st.sampled_from(["integer", "number", "boolean", "null"]).map(lambda kind: {"type": kind}),
    st.fixed_dictionaries(
        {"enum": st.lists(st.one_of(st.integers(), names), min_size=1, unique_by=str)}
    ),
    st.builds(lambda value: {"const": value}, st.one_of(st.none(), st.booleans(), names)),
    st.just({"type": ["string", "null"]}),
)


def objects(inner):
    def build(properties, required):
        return {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if required.get(name, False)],
            "additionalProperties": False,
        }

    flags = st.dictionaries(names, st.booleans())
    return st.builds(build, st.dictionaries(names, inner, max_size=4), flags)


def arrays(inner):
    sizes = st.tuples(st.integers(0, 2), st.integers(0, 2), inner)
    bounded = sizes.map(
        lambda s: {"type": "array", "items": s[2], "minItems": s[0], "maxItems": s[0] + s[1]}
    )
    return bounded | inner.map(lambda each: {"type": "array", "items": each})


def unions(inner):
    return st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each})


schemas = st.recursive(
    scalars, lambda inner: objects(inner) | arrays(inner) | unions(inner), max_leaves=6
)
bounded = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@settings(bounded, max_examples=60)
@given(st.data(), schemas)
def test_a_matched_text_is_valid(data, schema):
    regex = regex_of(schema, BLANK)
    assert regex is not None
    text = data.draw(st.from_regex(regex, fullmatch=True))
    jsonschema.validate(json.loads(text), schema)


@bounded
@given(st.data(), schemas, st.sampled_from([None, 2]))
def test_a_valid_value_matches_in_the_schema_s_order(data, schema, indent):
    value = data.draw(values(schema))
    jsonschema.validate(value, schema)
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    regex = regex_of(schema, BLANK if indent is None else r"(?:[ \t]{1,2}|\n[ \t]{0,40})?")
    assert re.fullmatch(regex, text), text


@bounded
@given(schemas, st.integers(0, 99))
def test_a_walk_of_tokens_is_valid(schema, seed):
    tokens = walk(compiler().compile(regex_of(schema, BLANK)), np.random.default_rng(seed), most=99)
    if tokens[-1] == EOS:
        jsonschema.validate(json.loads(text_of(tokens)), schema)


FORMATS = {
    "date": st.dates().map(str),
    "time": st.times().map(lambda time: f"{time}Z"),
    "uuid": st.uuids().map(str),
    "ipv4": st.ip_addresses(v=4).map(str),
}


def is_usual(schema):
    """Whether a value is valid, and of a spelling without exponent and beyond no digits."""
    validator = jsonschema.Draft202012Validator(schema)
    return lambda value: validator.is_valid(value) and json.dumps(value) not in ("-0.0", "-0")


def values(schema):
    """Values of a schema, with properties in its order."""
    match schema:
        case {"type": ["integer", "string"]}:
            return st.integers(3) | st.text(max_size=2)
        case {"type": "integer", "multipleOf": step}:
            return st.integers().map(lambda value: value * step)
        case {"type": "integer", **rest} if rest:
            return st.integers(-30, 330).filter(is_usual(schema))
        case {"type": "number", **rest} if rest:
            found = st.integers(-30, 330) | st.decimals(-9, 60, places=2).map(float)
            return found.filter(is_usual(schema))
        case {"pattern": pattern}:
            found = st.from_regex(pattern, alphabet=st.characters(max_codepoint=126))
            return found.filter(lambda text: is_usual(schema)(text) and text[-1:] != "\n")
        case {"format": name}:
            return FORMATS[name]
        case {"anyOf": each}:
            return st.one_of(*map(values, each))
        case {"enum": each}:
            return st.sampled_from(each)
        case {"const": value}:
            return st.just(value)
        case {"type": "object", "properties": properties, "required": required}:
            optional = {
                name: values(properties[name]) for name in properties if name not in required
            }
            needed = {name: values(properties[name]) for name in required}
            found = st.fixed_dictionaries(needed, optional=optional)
            return found.map(lambda value: {n: value[n] for n in properties if n in value})
        case {"type": "array", "items": items}:
            most = schema.get("maxItems", 3)
            return st.lists(values(items), min_size=schema.get("minItems", 0), max_size=most)
        case {"type": "string"}:
            return st.text(min_size=schema.get("minLength", 0), max_size=schema.get("maxLength"))
        case {"type": ["string", "null"]}:
            return st.none() | st.text()
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    scalars = {"integer": st.integers(), "number": numbers, "boolean": st.booleans()}
    return scalars.get(schema["type"], st.none())


def test_references_are_followed():
    schema = {
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from"],
        "additionalProperties": False,
    }
    regex = regex_of(schema, "")
    assert re.fullmatch(regex, '{"from":[1,2],"to":[]}') and re.fullmatch(regex, '{"from":[]}')
    assert not re.fullmatch(regex, '{"to":[]}') and not re.fullmatch(regex, '{"from":[1,2,3]}')


NODE = {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "null"}}},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "integer", "multipleOf": 7},
        {"type": "number", "multipleOf": 1},
        {"type": "number", "minimum": "0"},
        {"type": "number", "maximum": 1e300},
        {"type": "string", "pattern": "(?=a)"},
        {"type": "string", "pattern": "a+", "maxLength": 3},
        {"type": "string", "pattern": "^[a-z]+$", "format": "date"},
        {"type": "string", "pattern": "^a$", "minLength": 2},
        {"type": "string", "format": "uri"},
        {"type": "array"},
        {"type": "array", "items": {"type": "null"}, "uniqueItems": True},
        {"enum": [[1]]},
        {"allOf": [{"type": "null"}]},
        {"type": "string", "maxLength": 1, "minLength": 2},
        NODE | {"$ref": "#/$defs/node"},
        {"$ref": "https://example.com/schema"},
        {"enum": [f"{i:0100d}" for i in range(1000)]},
    ],
)
def test_what_has_no_short_regex_has_none(schema):
    assert regex_of(schema, BLANK) is None
