"""The reader accepts what Python's own accepts, at every cut, and nothing else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.text.parsers.json_reader import MAX_DEPTH, JsonReader, Status, is_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def read(*parts):
    """What the reader accepts of a text in parts, its status, and the rest."""
    reader, rest, accepted = JsonReader(), "", ""
    for n, part in enumerate(parts):
        rest += part
        rest = rest[reader.read(rest, 0, is_all=n == len(parts) - 1) :]
        accepted += reader.take()
    return accepted, reader.status, rest


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_values_pass_as_they_are(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert read(text) == read(*text) == (text, Status.DONE, "")
    assert is_json(text)


@given(st.text(alphabet='{}[]",:\\ 0e-+.truefalsn1u"', max_size=12))
def test_it_agrees_with_python_about_any_text(text):
    def refuse(name):
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
        is_valid = True
    except ValueError:
        is_valid = False
    assert is_json(text) == is_valid
    assert read(text) == read(*text) if text else True


@pytest.mark.parametrize(
    "text, place",
    [
        ('{"a": 1,}', 8),
        ("[1 2]", 3),
        ("{'a': 1}", 1),
        ('{"a" 1}', 5),
        ("[NaN]", 1),
        ("[01]", 1),
        ('"\\x"', 1),
        ("]", 0),
        ("[1}", 2),
    ],
)
def test_it_fails_at_what_does_not_fit(text, place):
    accepted, status, rest = read(text)
    assert status is Status.FAILED and (accepted, rest) == (text[:place], text[place:])


def test_what_follows_the_value_is_left():
    assert read('{"a": [1]} x') == ('{"a": [1]}', Status.DONE, " x")


def test_control_characters_become_escapes():
    accepted, status, _ = read('"a\nb\x01"')
    assert status is Status.DONE and json.loads(accepted) == "a\nb\x01"
    assert not is_json('"a\nb"')


def test_depth_and_numbers_are_bounded():
    assert is_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not is_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    assert not is_json("1" * 5000)
    assert read(*"1" * 5000)[1:2] == read("1" * 5000)[1:2] == (Status.FAILED,)
