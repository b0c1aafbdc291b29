"""Forms of texts: exactly one, of bounded size, and copies of what the caller has."""

import dataclasses
import pickle

import pytest

from jaxspec.requests.structured_outputs import (
    KINDS,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_PROPERTIES,
    MAX_TEXT,
    StructuredOutputsParams,
)

GOOD = {
    "json": {"type": "object"},
    "regex": "a+",
    "choice": ["a"],
    "grammar": 'start: "a"',
    "json_object": True,
    "structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_one_kind_is_given(kind):
    made = StructuredOutputsParams(**{kind: GOOD[kind]})
    assert made.kind == kind and getattr(made, kind) == GOOD[kind]
    assert pickle.loads(pickle.dumps(made)) == made == dataclasses.replace(made)
    assert StructuredOutputsParams.of(dataclasses.asdict(made)) == made
    other = next(each for each in KINDS if each != kind)
    with pytest.raises(ValueError, match=f"{kind} and {other}|{other} and {kind}"):
        StructuredOutputsParams(**{kind: GOOD[kind], other: GOOD[other]})


@pytest.mark.parametrize("fields", [{}, {"json_object": False}, {"max_whitespace": 3}])
def test_none_is_refused(fields):
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputsParams(**fields)


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"json": "{"}, "json"),
        ({"json": "3"}, "json"),
        ({"json": 3}, "json"),
        ({"json": {"const": float("nan")}}, "json"),
        ({"json": {"const": object()}}, "json"),
        ({"json": {"const": "\ud800"}}, "json"),
        ({"json": {"const": "x" * MAX_TEXT}}, "json"),
        ({"json": nested(MAX_DEPTH + 1)}, "deep"),
        ({"json": nested(100_000)}, "deep"),
        ({"json": {"properties": {f"a{i}": {} for i in range(MAX_PROPERTIES + 1)}}}, "properties"),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"regex": "a" * (MAX_TEXT + 1)}, "regex"),
        ({"regex": "\udfff"}, "surrogate"),
        ({"choice": []}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["a", 3]}, "choice"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice"),
        ({"choice": ["a" * MAX_TEXT, "b"]}, "choice"),
        ({"grammar": b"start"}, "grammar"),
        ({"json_object": 1}, "json_object"),
        ({"structural_tag": "[]"}, "structural_tag"),
        ({"regex": "a", "max_whitespace": 0}, "max_whitespace"),
        ({"regex": "a", "max_whitespace": 10**6}, "max_whitespace"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace"),
        (
            {"regex": "a", "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(fields, name):
    with pytest.raises(ValueError, match=name):
        StructuredOutputsParams(**fields)


def test_a_schema_that_contains_itself_is_refused():
    schema = {"type": "object"}
    schema["properties"] = {"a": schema}
    with pytest.raises(ValueError, match="deep"):
        StructuredOutputsParams(json=schema)


def test_later_changes_of_a_schema_have_no_effect():
    schema = {"type": "object"}
    made = StructuredOutputsParams(json=schema)
    schema["type"] = "array"
    assert made.json == {"type": "object"}
