"""Regexes of numbers between bounds: of valid texts alone, and of all usual ones."""

import json
import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.grammar import json_numbers
from jaxspec.grammar.json_numbers import Bounds

NAMES = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
integers = st.integers(-130, 130) | st.integers(-(10**12), 10**12)
decimals = st.floats(-200, 200) | st.floats(-1, 1) | st.decimals(-20, 20, places=2).map(float)
bounds = st.dictionaries(st.sampled_from(NAMES), integers | decimals | st.just(-0.0), min_size=1)
kinds = st.sampled_from([("integer", json_numbers.integer), ("number", json_numbers.number)])


def regex_of(schema, translate):
    try:
        return translate(Bounds.of(schema))
    except ValueError:
        return None  # a bound is too small


def is_matched(regex, text):
    return regex is not None and re.fullmatch(regex, text) is not None


@settings(max_examples=400, deadline=None)
@given(bounds, kinds, st.data())
def test_a_matched_text_is_within_the_bounds(schema, kind, data):
    regex = regex_of(schema, kind[1])
    if regex is not None:
        text = data.draw(
            st.from_regex(regex, fullmatch=True, alphabet=st.characters(max_codepoint=127))
        )
        jsonschema.validate(json.loads(text), {"type": kind[0]} | schema)


@settings(max_examples=400, deadline=None)
@given(bounds, kinds, st.data())
def test_exactly_the_usual_spellings_within_the_bounds_match(schema, kind, data):
    regex = regex_of(schema, kind[1])
    near = [value for value in schema.values() if "e" not in repr(value)]
    spread = st.decimals(-200, 200, places=3).map(lambda value: float(f"{value}"))
    usual = integers if kind[0] == "integer" else integers | spread
    value = data.draw(st.one_of(usual, st.sampled_from(near)) if near else usual)
    text = json.dumps(value)
    if kind[0] == "integer" and "." in text or "e" in text or value == 0 and text != "0":
        return
    is_valid = jsonschema.Draft202012Validator({"type": kind[0]} | schema).is_valid(value)
    if regex is not None or not any(0 < abs(bound) < 1e-15 for bound in schema.values()):
        assert is_matched(regex, text) == is_valid


@pytest.mark.parametrize("text", ["0.99999999999999999999", "1", "1.0", "1.5"])
def test_an_exclusive_bound_is_not_reached_by_rounding(text):
    regex = json_numbers.number(Bounds.of({"exclusiveMaximum": 1}))
    assert not is_matched(regex, text) and is_matched(regex, "0.99999999999999")


def test_bounds_of_draft_4():
    schema = {"minimum": 3, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False}
    regex = json_numbers.integer(Bounds.of(schema))
    assert [number for number in range(10) if is_matched(regex, str(number))] == [4, 5]


@pytest.mark.parametrize("zeros", [1, 2])
def test_multiples_of_powers_of_ten(zeros):
    regex = json_numbers.integer(Bounds.of({"minimum": -250, "exclusiveMaximum": 1200}), zeros)
    found = [number for number in range(-2000, 2000) if is_matched(regex, str(number))]
    assert found == [n for n in range(-250, 1200) if n % 10**zeros == 0]


@pytest.mark.parametrize("value", [True, "1", [1], float("nan"), float("inf"), 1e300, 10**25])
@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_other_bounds_are_refused(name, value):
    with pytest.raises(ValueError):
        Bounds.of({name: value})
