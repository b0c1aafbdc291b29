"""Patterns: the texts in which Python's and ECMAScript's regexes find a match."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.grammar.byte_dfa import ByteDfa
from jaxspec.grammar.pattern import parse_pattern

PATTERNS = [
    "a",
    "^a",
    "a$",
    "^a|b$|cc",
    "^(?:a|b)+?c{2,3}$",
    "(a|b)(c|)d?",
    r"\d\.\w",
    r"^[\w.+-]+@x",
    r"[^\dab]$",
    r"^\s\S?$",
    r"\W\D",
    r"^.{2,3}$",
    r"\x61\u0062|\/|\$",
    "",
    "^$",
    "a||b",
]
ALPHABET = "abcd@x1.+$/ \t-_é"


def is_accepted(dfa, text):
    state = 0
    for byte in text.encode():
        state = int(dfa.next[state, dfa.byte_classes[byte]])
        if state < 0:
            return False
    return bool(dfa.is_final[state])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_accepts_the_texts_that_it_is_found_in(pattern):
    dfa = ByteDfa.of(parse_pattern(pattern))
    random = np.random.default_rng(0)
    for _ in range(400):
        text = "".join(random.choice(list(ALPHABET), random.integers(0, 6)))
        found = re.search(pattern, text), re.search(pattern, text, re.ASCII)
        if bool(found[0]) == bool(found[1]):  # beyond ASCII, dialects differ
            assert is_accepted(dfa, text) == bool(found[0]), text
        else:
            assert not is_accepted(dfa, text), text


CLASSES = r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "."
ODD = "\x1c\x85\xa0\u2028\ufeff\r\n٣¼ⅷé\u200c1a_ "


@settings(max_examples=300)
@given(st.sampled_from(CLASSES), st.sampled_from(ODD), st.booleans())
def test_a_character_of_a_class_is_in_it_in_both_dialects(name, char, is_in_set):
    pattern = f"^[{name}]$" if is_in_set and name != "." else f"^{name}$"
    ecma = {
        "d": "0-9",
        "w": "0-9A-Za-z_",
        "s": "\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
        ".": "\n\r\u2028\u2029",
    }[name[-1].lower()]
    is_ecma = re.fullmatch(f"[{'^' if name in '.' or name[-1].isupper() else ''}{ecma}]", char)
    is_python = re.fullmatch(name, char)
    if is_accepted(ByteDfa.of(parse_pattern(pattern)), char):
        assert is_ecma and is_python
    elif char.isascii() and char.isprintable():
        assert not is_ecma


@pytest.mark.parametrize(
    "pattern",
    [
        *("a(?=b)", "(?!a)", "(?<=a)b", r"(a)\1", r"\bfoo", r"\p{L}", "(?i)a", "(?P<x>a)"),
        *("a++", "a{2}{3}", r"\x{41}", r"\u{41}", r"\Aa", r"a\z", "[]a]", "[^]", "(^a)", "a^b"),
        *("a$b", r"\cA", r"\q", "a{", "(", ")", "[a", "a**", r"\0", "[z-a]"),
    ],
)
def test_what_dialects_read_differently_is_refused(pattern):
    with pytest.raises(ValueError):
        parse_pattern(pattern)
