"""Regexes of JSON strings: their texts spell strings of the schema, with escapes."""

import contextlib
import json
import re
import time

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.grammar.json_strings import MAX_CHARACTERS, string

PATTERNS = [
    "^[a-c]*$",
    "^(ab|c){1,4}$",
    "^x[^x]{0,3}$",
    "^(|a|bc|[d-f]{3,})$",
    "^(?:ab)+c$",
    "^(a|bbbb)$",
]
lengths = st.tuples(st.integers(0, 5), st.none() | st.integers(0, 6))
texts = st.text('abcdx"\\/\n\té日\U0001f642', max_size=7)


def schema_of(pattern, least, most):
    schema = {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})
    return schema if pattern is None else schema | {"pattern": pattern}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*PATTERNS, None]), lengths, texts)
def test_strings_of_a_pattern_and_lengths_match(pattern, sizes, text):
    schema = schema_of(pattern, *sizes)
    try:
        regex = string(schema)
    except ValueError:
        return  # no text is of the lengths, or the host masks it
    is_valid = jsonschema.Draft202012Validator(schema).is_valid(text) and not text.endswith("\n")
    is_matched = re.fullmatch(regex, json.dumps(text, ensure_ascii=False)) is not None
    assert is_matched == is_valid or (pattern is None and is_matched)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*PATTERNS, None, '["\\\\]', "[^ -~]"]), st.data())
def test_a_matched_text_is_a_string_of_the_pattern(pattern, data):
    schema = schema_of(pattern, 0, None)
    text = data.draw(st.from_regex(string(schema), fullmatch=True))
    jsonschema.validate(json.loads(text), schema)
    json.loads(text).encode()  # without lone surrogates


@pytest.mark.parametrize("least", [1, 2])
def test_an_escaped_pair_of_surrogates_is_not_two_characters(least):
    assert re.fullmatch(string({}), r'"\ud83d\ude00"')
    assert not re.fullmatch(string({"minLength": least}), r'"\ud83d\ude00"')
    assert not re.fullmatch(string({}), r'"\ud83d"')


ESCAPES = {
    "\n": [r"\n", r"\u000a", r"\u000A"],
    "\x7f": [r"\u007f"],
    "\x01": [r"\u0001"],
    '"': [r"\""],
    "\\": [r"\\"],
}


@pytest.mark.parametrize("char, escapes", ESCAPES.items())
def test_characters_that_must_be_escaped_have_their_escapes(char, escapes):
    regex = string({"pattern": f"^{re.escape(char)}$"})
    assert all(re.fullmatch(regex, f'"{each}"') for each in escapes)
    assert not re.fullmatch(regex, f'"{char}"')


@pytest.mark.parametrize(
    "schema",
    [
        {"minLength": 2, "maxLength": 1},
        {"minLength": -1},
        {"maxLength": True},
        {"pattern": "a", "format": "date"},
        {"pattern": "a+b+", "maxLength": 5},
        {"pattern": "^ab$", "maxLength": 1},
        {"pattern": "^ab$", "minLength": 3},
        {"pattern": "^(?:ab)*$", "minLength": 3, "maxLength": 3},
        {"pattern": "^[^\\w\\W]$"},
        {"format": "unknown"},
    ],
)
def test_what_has_no_regex_is_refused(schema):
    with pytest.raises(ValueError):
        string(schema)


@pytest.mark.parametrize(
    "pattern", [r"\W" * 500, "[^a]" * 20000, "a" * 20000, r"(?:\W|b){400}" * 9]
)
def test_a_pattern_takes_little_time(pattern):
    """Large ones are left to the host."""
    start = time.perf_counter()
    with contextlib.suppress(ValueError):
        assert len(string({"type": "string", "pattern": pattern})) < 2 * MAX_CHARACTERS
    assert time.perf_counter() - start < 2
