"""Regexes: parts that are refused, and characters as in Unicode's tables."""

import bisect
import re
import unicodedata

import pytest

from jaxspec.grammar.regex import MAX_LENGTH, Characters, parse

UNSUPPORTED = {
    "lookaround": [r"(?=a)b", r"a(?!b)", r"(?<=a)b", r"(?<!a)b"],
    "backreference": [r"(a)\1", r"[\1]"],
    "anchor": [r"a^b", r"a$b", r"(a$|b)c", r"(b$)*", r"x(^a)", r"a\b", r"\Ba", r"a\zb", r"\<a"],
    "flag": [r"(?m)^a$", r"(?x) a", r"(?-u:a)"],
    "operation": [r"[a&&b]", r"[a-z--b]", r"[a~~b]"],
    "set in a set": [r"[[a]b]", r"[[:alpha:]]"],
    "property": [r"\p{Greek}", r"\p{Script=Latin}", r"\pX", r"\p{C}"],
    "beyond ASCII": [r"(?i)é", r"(?i)[a-ü]"],
}
INVALID = [
    *("(", ")", "a)", "(a", "[", "[a", "[]", "[^]", "*", "+a", "?", "a|*", "(?", "(?z)"),
    *("a{", "a{,2}", "a{2,1}", "a{1001}", "a{x}", "{2}", "\\", r"\e", r"\é", r"\xZZ", r"\u12"),
    *(r"\ud800", r"\x{110000}", "[b-a]", r"[a-\d]", r"[\d-z]", "(?P<>a)", "(?Pa)", r"\p{", "*^"),
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


def characters(regex):
    """The characters of a set, of those in EVERY."""
    found = parse(regex)
    assert isinstance(found, Characters)
    pairs = zip(found.ranges, found.ranges[1:], strict=False)
    assert all(one[1] + 1 < other[0] for one, other in pairs)
    starts = [low for low, _ in found.ranges]
    found_in = (bisect.bisect(starts, ord(char)) - 1 for char in EVERY)
    return {
        char
        for char, place in zip(EVERY, found_in, strict=True)
        if place >= 0 and ord(char) <= found.ranges[place][1]
    }


@pytest.mark.parametrize(
    "regex",
    [".", "(?s).", r"\d", r"\D", "[^a-z]", r"[\s\d]", "[a-]", "[]a]", "[^]a]", r"[\]\\-]", "[-a-c]"]
    + [r"\n", r"\x41", r"\u00e9", r"\U0001F642", r"[\x00-\U0010ffff]", r"\-", r"\ ", "}", "]"],
)
def test_sets_are_those_of_python(regex):
    python = re.compile(
        regex.replace(r"\s", r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000")
    )
    assert characters(regex) == set(filter(python.fullmatch, EVERY))


def test_words_are_letters_marks_digits_and_connectors():
    words = characters(r"\w")
    for char in EVERY:
        category = unicodedata.category(char)
        if category[0] in "LM" or category in ("Nd", "Nl", "Pc"):
            assert char in words
        elif category != "So":  # of which circled letters are in
            assert char not in words or char in "\u200c\u200d"
    assert characters(r"\W") == set(EVERY) - words
    assert characters(r"[\W\w]") == set(EVERY)


def test_categories():
    for name in ("Lu", "Nd", "Zs", "P"):
        expected = {char for char in EVERY if unicodedata.category(char).startswith(name)}
        assert characters(rf"\p{{{name}}}") == expected
        assert characters(rf"\P{{{name}}}") == set(EVERY) - expected
    assert characters(r"\pL") == characters(r"\p{L}")


def test_case_is_ignored_within_a_group():
    assert characters("(?i)k") == set("kK\u212a")
    assert characters("(?i:[^s-t])") == set(EVERY) - set("sStT\u017f")
    assert characters("(?i)(?-i:k)") == {"k"}
    assert characters("(?i:(?-i)k)") == {"k"}
