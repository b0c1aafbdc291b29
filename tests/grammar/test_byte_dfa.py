"""DFAs of bytes: the texts they accept, and minimal numbers of states."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.grammar.byte_dfa import ByteDfa
from jaxspec.grammar.regex import parse


def dfa_of(regex):
    return ByteDfa.of(parse(regex))


def accepts(dfa, text):
    state = 0
    for byte in text:
        state = dfa.next[state, dfa.byte_classes[byte]]
        if state < 0:
            return False
    return bool(dfa.is_final[state])


LETTERS = st.sampled_from(["a", "b", "é", "日", "🙂", ".", "[ab]", "[^a]", "[à-ÿ]", "[߿-ࠀ]", r"\n"])
REGEXES = st.recursive(
    LETTERS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from("*+?")).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda part: f"(?:{part[0]}){{{part[1]},{part[1] + part[2]}}}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(REGEXES, st.lists(st.text("abéÿ日🙂߿ࠀ\n", max_size=5), max_size=30))
def test_texts_are_accepted_as_by_python(regex, texts):
    dfa, python = dfa_of(regex), re.compile(regex)
    for text in ["", "a", "b", "ab", *texts]:
        assert accepts(dfa, text.encode()) == (python.fullmatch(text) is not None)


@pytest.mark.parametrize("regex", ["(?s).", "[^a]", r"\w", r"[\x{7ff}-\x{801}]", r"[𐀀-\x{10ffff}]"])
def test_every_character_is_read_by_its_bytes(regex):
    dfa, (ranges,) = dfa_of(regex), parse(regex)
    points = {point for low, high in ranges for point in range(low, high + 1)}
    for point in range(0, 0x110000, 7):
        if not 0xD800 <= point <= 0xDFFF:
            assert accepts(dfa, chr(point).encode()) == (point in points)


@pytest.mark.parametrize(
    "text", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc3"]
)
def test_bytes_that_are_not_utf8_are_refused(text):
    assert not accepts(dfa_of("(?s).*"), text)


@pytest.mark.parametrize(
    ("regex", "num_states"),
    [
        ("", 1), ("a*", 1), ("abc", 4), ("(a|b)*a(a|b){3}", 16), ("[a-z]+@[a-z]+x", 5),
        ("a|ab|abc", 4), ("(a*)*|a*", 1), ("xay|xby|xcy", 4), ("a{0,50}", 51), ("(?s).", 9),
    ],
)  # fmt: skip
def test_numbers_of_states_are_minimal(regex, num_states):
    dfa = dfa_of(regex)
    assert len(dfa.next) == len(dfa.is_final) == num_states
    assert np.unique(np.column_stack([dfa.next, dfa.is_final]), axis=0).shape[0] == num_states
