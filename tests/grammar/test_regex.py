"""Regexes: parts that are refused, and characters as in Unicode's tables."""

import bisect
import re

import pytest
from automata import EOS, ll_matcher, token_bytes

from jaxspec.grammar.regex import MAX_LENGTH, Characters, parse

UNSUPPORTED = {
    "lookaround": [r"(?=a)b", r"a(?!b)", r"(?<=a)b", r"(?<!a)b"],
    "backreference": [r"(a)\1", r"[\1]"],
    "anchor": [r"a^b", r"a$b", r"(a$|b)c", r"(b$)*", r"x(^a)", r"a\b", r"\Ba", r"a\zb", r"\<a"],
    "flag": [r"(?m)^a$", r"(?x) a", r"(?-u:a)"],
    "operation": [r"[a&&b]", r"[a-z--b]", r"[a~~b]"],
    "set in a set": [r"[[a]b]", r"[[:alpha:]]"],
    "property": [r"\p{Greek}", r"\PL", r"[\p{Lu}]"],
    "beyond ASCII": [r"(?i)é", r"(?i)[a-ü]"],
}
INVALID = [
    *("(", ")", "a)", "(a", "[", "[a", "[]", "[^]", "*", "+a", "?", "a|*", "(?", "(?z)"),
    *("a{", "a{,2}", "a{2,1}", "a{1001}", "a{x}", "{2}", "\\", r"\e", r"\é", r"\xZZ", r"\u12"),
    *(r"\ud800", r"\x{110000}", "[b-a]", r"[a-\d]", r"[\d-z]", "(?P<>a)", "(?Pa)", "*^"),
]


@pytest.mark.parametrize(
    ("name", "regex"), [(name, each) for name, found in UNSUPPORTED.items() for each in found]
)
def test_unsupported_parts_are_named(name, regex):
    with pytest.raises(ValueError, match=name):
        parse(regex)


@pytest.mark.parametrize("regex", INVALID)
def test_invalid_regexes_are_refused(regex):
    with pytest.raises(ValueError):
        parse(regex)


@pytest.mark.parametrize("length", [MAX_LENGTH, MAX_LENGTH + 1])
def test_messages_are_short(length):
    with pytest.raises(ValueError) as caught:
        parse("(" * length)
    assert len(str(caught.value)) < 400


POINTS = [*range(0x3400), *range(0x3400, 0xD800, 61), *range(0xE000, 0x110000, 61)]
EVERY = [*map(chr, POINTS), "🙂"]


def characters_of(regex):
    found = parse(regex)
    assert isinstance(found, Characters)
    pairs = zip(found.ranges, found.ranges[1:], strict=False)
    assert all(one[1] + 1 < other[0] for one, other in pairs)
    return found.ranges


def within(ranges, chars):
    starts = [low for low, _ in ranges]
    places = [bisect.bisect(starts, ord(char)) - 1 for char in chars]
    return {
        char
        for char, place in zip(chars, places, strict=True)
        if place >= 0 and ord(char) <= ranges[place][1]
    }


def characters(regex):
    """The characters of a set, of those in EVERY."""
    return within(characters_of(regex), EVERY)


@pytest.mark.parametrize(
    "regex",
    [".", "(?s).", "[^a-z]", r"[\s\n]", "[a-]", "[]a]", "[^]a]", r"[\]\\-]", "[-a-c]"]
    + [r"\n", r"\x41", r"\u00e9", r"\U0001F642", r"[\x00-\U0010ffff]", r"\-", r"\ ", "}", "]"],
)
def test_sets_are_those_of_python(regex):
    python = re.compile(
        regex.replace(r"\s", r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000")
    )
    assert characters(regex) == set(filter(python.fullmatch, EVERY))


@pytest.mark.parametrize("name", "dws")
def test_classes_are_those_of_the_matcher(name):
    matcher = ll_matcher(rf"\{name}")
    single = {text: token for token, text in enumerate(token_bytes()) if text and len(text) == 1}
    ranges = characters_of(rf"\{name}")
    edges = {chr(point) for low, high in ranges for point in (low - 1, low, high, high + 1)}
    for char in edges | set(EVERY):
        tokens = [single[bytes([byte])] for byte in char.encode(errors="ignore")]
        is_read = bool(tokens) and matcher.validate_tokens([*tokens, EOS]) == len(tokens) + 1
        assert is_read == (char in within(ranges, [char])), hex(ord(char))
    assert characters(rf"\{name.upper()}") == set(EVERY) - characters(rf"\{name}")
    assert characters(rf"[\{name}\{name.upper()}]") == set(EVERY)


def test_case_is_ignored_within_a_group():
    assert characters("(?i)k") == set("kK\u212a")
    assert characters("(?i:[^s-t])") == set(EVERY) - set("sStT\u017f")
    assert characters("(?i)(?-i:k)") == {"k"}
    assert characters("(?i:(?-i)k)") == {"k"}


def test_an_empty_set_matches_nothing():
    assert characters_of(r"[^\s\S]") == () and parse(r"a[^\s\S]") != parse("a")
