"""Patterns of JSON schemas: ECMAScript's regexes, as far as Python's have the same language.

A set such as `\\w` has the characters that both have in it, so that every matched text is valid
by either.
"""

import functools

from jaxspec.grammar.regex import (
    Characters,
    Node,
    Parser,
    Ranges,
    Repeat,
    Sequence,
    joined,
    named,
    of_categories,
    others,
)

MAX_PATTERN = 2000
_ANY = Repeat(Characters(others(())), 0, None)
_LINE_ENDS = (10, 10), (13, 13), (0x2028, 0x2029)
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11}
_HEX_DIGITS = {"x": 2, "u": 4}
_DIGITS = ((48, 57),)
_WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
_BLANKS = ((9, 13), (32, 32))
_PYTHON_BLANKS, _ECMA_BLANKS = ((0x1C, 0x1F),), ((0xFEFF, 0xFEFF),)


def parse_pattern(pattern: str) -> Node:
    """Read a pattern that occurs anywhere in a text, into the regex of the whole text.

    Raises:
        ValueError: it has an error, or a part that no automaton has, or that dialects disagree on.
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"A pattern must have at most {MAX_PATTERN:,} characters.")
    return _Pattern(pattern).parse()


@functools.cache
def _sure(letter: str) -> Ranges:
    """Return the characters that are of a class such as `\\d` in both dialects."""
    found = {"d": _DIGITS, "w": _WORD, "s": _BLANKS}
    return found[letter] if letter in found else others(_possible(letter.lower()))


@functools.cache
def _possible(letter: str) -> Ranges:
    """Return the characters that are of a class in one of the dialects."""
    if letter.isupper():
        return others(_sure(letter.lower()))
    also = {"d": (), "w": of_categories("N"), "s": (*_PYTHON_BLANKS, *_ECMA_BLANKS)}
    return joined((*named(letter), *also[letter]))


class _Pattern(Parser):
    def __init__(self, text: str):
        super().__init__(text)
        self._is_ended, self._is_in_negated_set = False, False

    def _sequence(self) -> Node:
        if self._depth:
            return super()._sequence()
        before = () if self._take("^") else (_ANY,)
        self._is_ended = False
        body = super()._sequence()
        return Sequence((*before, body, *(() if self._is_ended else (_ANY,))))

    def _repeated(self, part: Node) -> Node:
        counts = self._counts()
        if counts is None:
            return part
        self._take("?")
        if self._peek() and self._peek() in "*+?{":
            raise self._error("two quantifiers of one part")
        return Repeat(part, *counts)

    def _atom(self, is_first: bool) -> Node:
        if self._take("."):
            return Characters(others(_LINE_ENDS))
        if self._text.startswith(("[]", "[^]", "\\A", "\\z"), self._at):
            raise self._error("what other dialects read differently")
        return super()._atom(is_first)

    def _anchor(self, kind: str, is_first: bool) -> None:
        if kind != "$" or self._depth or self._peek() not in ("", "|"):
            raise self._error("an anchor inside of the text")
        self._is_ended = True

    def _opened(self) -> bool:
        if not self._take("?:"):
            raise self._error("an unknown kind of group")
        return False

    def _set(self) -> Ranges:
        self._is_in_negated_set = self._peek() == "^"
        found = super()._set()
        self._is_in_negated_set = False
        return found

    def _class(self, letter: str) -> Ranges:
        return _possible(letter) if self._is_in_negated_set else _sure(letter)

    def _escaped_point(self, char: str) -> int:
        known = char in _CONTROLS or (char in _HEX_DIGITS and self._peek() != "{")
        if char.isalnum() and not known:
            raise self._error(f"the escape \\{char}")
        return super()._escaped_point(char)
