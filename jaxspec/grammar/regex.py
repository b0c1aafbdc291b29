"""Regexes in Rust's syntax, read into trees of sets of characters.

Only what a finite automaton needs is read. The rest is refused by name.
"""

import functools
import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxspec.checks import shown

MAX_LENGTH = 65_536
_MAX_DEPTH = 50
_MAX_REPEATS = 1000
_MAX_QUANTIFIERS = 4  # of one part, as in `a{2}{3}`

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points from the first to the last of each range; sorted, apart, without surrogates."""


class Characters(NamedTuple):
    """One character of a set."""

    ranges: Ranges


class Sequence(NamedTuple):
    """Parts in order; none is the empty text."""

    parts: "tuple[Node, ...]"


class Choice(NamedTuple):
    """One of several options."""

    options: "tuple[Node, ...]"


class Repeat(NamedTuple):
    """A part from `least` to `most` times; None is unlimited."""

    part: "Node"
    least: int
    most: int | None


Node: TypeAlias = Characters | Sequence | Choice | Repeat

_LAST = 0x10FFFF
_EMPTY = Sequence(())
_SURROGATES = 0xD800, 0xDFFF
_SPACES = ((0x9, 0xD), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
           (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))  # fmt: skip
_CIRCLED_LETTERS = (0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189)
_JOINERS = (0x200C, 0x200D)
# Characters since Unicode 14, the version of the oldest Python: masks are those of llguidance,
# whose version is 16, with any Python.
_NEW_DIGITS = (
    (0x10D40, 0x10D49), (0x116D0, 0x116E3), (0x11BF0, 0x11BF9), (0x11F50, 0x11F59),
    (0x16130, 0x16139), (0x16D70, 0x16D79), (0x1CCF0, 0x1CCF9), (0x1E4F0, 0x1E4F9),
    (0x1E5F1, 0x1E5FA),
)  # fmt: skip
_NEW_LETTERS = (
    (0x897, 0x897), (0xCF3, 0xCF3), (0xECE, 0xECE), (0x1C89, 0x1C8A), (0xA7CB, 0xA7CD),
    (0xA7DA, 0xA7DC), (0x105C0, 0x105F3), (0x10D4A, 0x10D65), (0x10D69, 0x10D6D),
    (0x10D6F, 0x10D85), (0x10EC2, 0x10EC4), (0x10EFC, 0x10EFF), (0x1123F, 0x11241),
    (0x11380, 0x11389), (0x1138B, 0x1138B), (0x1138E, 0x1138E), (0x11390, 0x113B5),
    (0x113B7, 0x113C0), (0x113C2, 0x113C2), (0x113C5, 0x113C5), (0x113C7, 0x113CA),
    (0x113CC, 0x113D3), (0x113E1, 0x113E2), (0x11BC0, 0x11BE0), (0x11F00, 0x11F10),
    (0x11F12, 0x11F3A), (0x11F3E, 0x11F42), (0x11F5A, 0x11F5A), (0x1342F, 0x1342F),
    (0x13440, 0x13455), (0x13460, 0x143FA), (0x16100, 0x1612F), (0x16D40, 0x16D6C),
    (0x18CFF, 0x18CFF), (0x1B132, 0x1B132), (0x1B155, 0x1B155), (0x1DF25, 0x1DF2A),
    (0x1E030, 0x1E06D), (0x1E08F, 0x1E08F), (0x1E4D0, 0x1E4EF), (0x1E5D0, 0x1E5F0),
    (0x2B739, 0x2B739), (0x2EBF0, 0x2EE5D), (0x31350, 0x323AF),
)  # fmt: skip
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_FOLDED = {"k": 0x212A, "s": 0x17F}  # the only characters beyond ASCII equal to ASCII letters
_COUNTS = re.compile(r"\{([0-9]{1,9})(?:(,)([0-9]{1,9})?)?\}")
_GROUP = re.compile(r"\?(?:P?<[A-Za-z_][A-Za-z0-9_.\[\]]*>|([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)]))")
_OPENINGS = re.compile(r"(?:\((?:\?:)?)*")
_CLOSINGS = re.compile(r"\)*")


def parse(regex: str) -> Node:
    """Read a regex that a whole text must match.

    Raises:
        ValueError: it has an error, or a part that no automaton has.
    """
    if len(regex) > MAX_LENGTH:
        raise ValueError(
            f"The regex of an automaton must have at most {MAX_LENGTH:,} characters, got "
            f"{len(regex):,}. Shorten it."
        )
    return Parser(regex).parse()


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges, join those that overlap or touch, and remove surrogates."""
    found = list[tuple[int, int]]()
    first, last = _SURROGATES
    pieces = [
        piece
        for low, high in ranges
        for piece in ((low, min(high, first - 1)), (max(low, last + 1), high))
        if piece[0] <= piece[1]
    ]
    for low, high in sorted(pieces):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def others(ranges: Ranges) -> Ranges:
    """Return the characters outside of `ranges`."""
    starts = [0, *(high + 1 for _, high in ranges)]
    ends = [*(low - 1 for low, _ in ranges), _LAST]
    return joined((low, high) for low, high in zip(starts, ends, strict=True) if low <= high)


@functools.cache
def of_categories(*names: str) -> Ranges:
    """Return the characters whose general category starts with one of `names`."""
    categories = map(unicodedata.category, map(chr, range(_LAST + 1)))
    is_in = np.fromiter((each.startswith(names) for each in categories), bool, _LAST + 1)
    edges = np.flatnonzero(np.diff(is_in, prepend=False, append=False)).tolist()
    return joined((low, end - 1) for low, end in zip(edges[::2], edges[1::2], strict=True))


@functools.cache
def named(letter: str) -> Ranges:
    """Return the characters of `\\d`, `\\w`, `\\s` and their complements, of Unicode 16."""
    if letter.isupper():
        return others(named(letter.lower()))
    if letter == "d":
        return joined((*of_categories("Nd"), *_NEW_DIGITS))
    if letter == "s":
        return _SPACES
    letters = of_categories("L", "M", "Nl", "Nd", "Pc")
    return joined((*letters, *_CIRCLED_LETTERS, _JOINERS, *_NEW_LETTERS, *_NEW_DIGITS))


class _Flags(NamedTuple):
    ignores_case: bool = False
    dot_is_any: bool = False


class Parser:
    """Reads Rust's syntax; a subclass reads another dialect."""

    def __init__(self, text: str):
        self._text, self._at, self._depth, self._flags = text, 0, 0, _Flags()

    def parse(self) -> Node:
        found = self._choice()
        if self._at < len(self._text):
            raise self._error("a ) that closes nothing")
        return found

    def _error(self, what: str) -> ValueError:
        near = self._text[max(self._at - 20, 0) : self._at + 20]
        return ValueError(
            "The regex of an automaton must be of literals, sets, groups, alternatives and "
            f"repetitions, with anchors at its ends alone, got {what} near character "
            f"{self._at:,}, {shown(near)}. Leave it out."
        )

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        is_next = self._text.startswith(text, self._at)
        self._at += len(text) if is_next else 0
        return is_next

    def _next(self, what: str) -> str:
        char = self._peek()
        if not char:
            raise self._error(what)
        self._at += 1
        return char

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts = list[Node]()
        while self._peek() not in ("", "|", ")"):
            part = self._repeated(self._atom(is_first=not parts))
            if not (isinstance(part, Sequence) and part == _EMPTY):  # tuples of kinds may be equal
                parts.append(part)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        for _ in range(_MAX_QUANTIFIERS):
            counts = self._counts()
            if counts is None:
                return part
            self._take("?")  # which match is found first does not change which texts match
            part = Repeat(part, *counts)
        raise self._error("too many quantifiers of one part")

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        if self._peek() != "{":
            return None
        found = _COUNTS.match(self._text, self._at)
        if found is None:
            raise self._error("a { without {least,most} after it")
        least = int(found[1])
        most = None if found[2] and not found[3] else int(found[3] or least)
        if max(least, most or 0) > _MAX_REPEATS or (most is not None and most < least):
            raise self._error(f"repetitions that are not from 0 to {_MAX_REPEATS:,}")
        self._at = found.end()
        return least, most

    def _atom(self, is_first: bool) -> Node:
        char = self._next("its end")
        if char == "(":
            return self._group()
        if char == "[":
            return Characters(self._set())
        if char == ".":
            return Characters(others(() if self._flags.dot_is_any else ((10, 10),)))
        if char in "*+?{":
            self._at -= 1
            raise self._error(f"{char} with nothing to repeat")
        if char in "^$" or (char == "\\" and self._peek() in ("A", "z")):
            self._at += char == "\\"
            self._anchor("^" if char + self._text[self._at - 1] in ("^^", "\\A") else "$", is_first)
            return _EMPTY
        return Characters(self._escape() if char == "\\" else self._literal(ord(char)))

    def _anchor(self, kind: str, is_first: bool) -> None:
        """Check that an anchor is where it always holds."""
        start = self._at - (1 if self._text[self._at - 1] in "^$" else 2)
        if kind == "^":
            is_end = self._depth == 0 and is_first
            is_end = is_end or _OPENINGS.fullmatch(self._text, 0, start) is not None
        else:
            is_end = self._depth == 0 and self._peek() == "|"
            is_end = is_end or _CLOSINGS.fullmatch(self._text, self._at) is not None
        if not is_end:
            raise self._error("an anchor inside of the text")

    def _group(self) -> Node:
        outer = self._flags
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"more than {_MAX_DEPTH} nested groups")
        if self._peek() == "?" and self._opened():  # flags of the rest of the group around
            self._depth -= 1
            return _EMPTY
        found = self._choice()
        if not self._take(")"):
            raise self._error("a ( that is not closed")
        self._depth -= 1
        self._flags = outer
        return found

    def _opened(self) -> bool:
        """Read the start of a group; return True if it has flags alone."""
        if self._text.startswith(("?=", "?!", "?<=", "?<!"), self._at):
            raise self._error("lookaround")
        found = _GROUP.match(self._text, self._at)
        if found is None:
            raise self._error("an unknown kind of group")
        self._at = found.end()
        self._set_flags(found[1] or "", True)
        self._set_flags(found[2] or "", False)
        return found[3] == ")"

    def _set_flags(self, letters: str, is_set: bool) -> None:
        for letter in letters:
            if letter == "i":
                self._flags = self._flags._replace(ignores_case=is_set)
            elif letter == "s":
                self._flags = self._flags._replace(dot_is_any=is_set)
            elif letter != "U" and not (letter == "u" and is_set):
                raise self._error(f"the flag {letter}")

    def _literal(self, low: int, high: int | None = None) -> Ranges:
        high = low if high is None else high
        if not self._flags.ignores_case:
            return joined([(low, high)])
        if high > 127:
            raise self._error("characters beyond ASCII without regard to case")
        found = [(low, high)]
        for char in map(chr, range(low, high + 1)):
            if char.isalpha():
                others = ord(char.swapcase()), _FOLDED.get(char.lower(), ord(char))
                found += [(other, other) for other in others]
        return joined(found)

    def _escape(self) -> Ranges:
        """Return the characters of an escape, of which the backslash is read."""
        char = self._next("a \\ at its end")
        if char.isdigit():
            raise self._error("a backreference")
        if char in "bB<>":
            raise self._error("a word boundary, which is an anchor")
        if char in "dDwWsS":
            return self._class(char)
        if char in "pP":
            raise self._error("a property of characters")
        return self._literal(self._escaped_point(char))

    def _class(self, letter: str) -> Ranges:
        return named(letter)

    def _escaped_point(self, char: str) -> int:
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in _HEX_DIGITS:
            digits = re.compile(rf"\{{([0-9A-Fa-f]{{1,8}})\}}|([0-9A-Fa-f]{{{_HEX_DIGITS[char]}}})")
            found = digits.match(self._text, self._at)
            point = int(found[1] or found[2], 16) if found else _LAST + 1
            if found is None or point > _LAST or _SURROGATES[0] <= point <= _SURROGATES[1]:
                raise self._error("an escape of no character")
            self._at = found.end()
            return point
        if char.isalnum() or not char.isascii():
            raise self._error(f"the escape \\{char}")
        return ord(char)

    def _set(self) -> Ranges:
        is_negated = self._take("^")
        found, start = list[tuple[int, int]](), self._at
        while not (self._peek() == "]" and self._at > start):
            found += self._set_item()
        self._at += 1
        return others(joined(found)) if is_negated else joined(found)

    def _set_item(self) -> Ranges:
        if self._text.startswith(("&&", "--", "~~"), self._at):
            raise self._error("an operation of sets")
        low = self._set_point()
        is_range = self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]")
        if not is_range:
            return low if isinstance(low, tuple) else self._literal(low)
        if self._text.startswith("--", self._at):
            raise self._error("an operation of sets")
        self._at += 1
        high = self._set_point()
        if not isinstance(low, int) or not isinstance(high, int) or low > high:
            raise self._error("a range that is not from a character to a later one")
        return self._literal(low, high)

    def _set_point(self) -> int | Ranges:
        """Read one character, or an escape of several."""
        char = self._next("a [ that is not closed")
        if char == "[":
            raise self._error("a set in a set")
        if char != "\\":
            return ord(char)
        if self._peek() and self._peek() not in "dDwWsSpPbB<>" and not self._peek().isdigit():
            return self._escaped_point(self._next(""))
        return self._escape()
