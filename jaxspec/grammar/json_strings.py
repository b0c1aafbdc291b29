"""Regexes of the JSON spellings of strings: of a length, a pattern or a format."""

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxspec.grammar.formats import FORMATS
from jaxspec.grammar.pattern import parse_pattern
from jaxspec.grammar.regex import Characters, Choice, Node, Ranges, Repeat, Sequence, joined, others

MAX_CHARACTERS = 2**16  # of a regex
_HEX = "[0-9a-fA-F]"
_BASIC = (
    r'[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]'
    rf"|u(?:[0-9a-ce-fA-CE-F]{_HEX}|[dD][0-7]){_HEX}{{2}})"  # without surrogates
)
_PAIR = rf"\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_CONTROLS = (0, 0x1F), (0x7F, 0x7F)
_ESCAPED = joined(((ord('"'), ord('"')), (ord("\\"), ord("\\")), *_CONTROLS))
_LETTERS = {8: "b", 12: "f", 10: "n", 13: "r", 9: "t", ord('"'): '"', ord("\\"): r"\\"}


def string(schema: Mapping[str, Any]) -> str:
    """Return the regex of the strings of a schema, with their quotes.

    Raises:
        ValueError: it has none, or none of moderate size.
    """
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    is_counted = _is_count(least) and (most is None or _is_count(most))
    if not is_counted or (most is not None and least > most):
        raise ValueError(f"Lengths must be integers in order, got {least!r} and {most!r}.")
    if "pattern" in schema and "format" in schema:
        raise ValueError("A string must have a pattern or a format, got both.")
    for name in ("pattern", "format"):
        if not isinstance(schema.get(name, ""), str):
            raise ValueError(f"{name} must be a text, got {schema[name]!r}.")
    if "pattern" in schema:
        return f'"{_spelled(_of_length(parse_pattern(schema["pattern"]), least, most))}"'
    if "format" in schema:
        pattern = FORMATS.get(schema["format"])
        if pattern is None:
            raise ValueError(f"format must be a known one, got {schema['format']!r}.")
        return f'"{_spelled(_of_length(parse_pattern(f"^(?:{pattern})$"), least, most))}"'
    if most is None and not least:
        return f'"(?:{_BASIC}|{_PAIR})*"'
    return f'"(?:{_BASIC}){{{least},{"" if most is None else most}}}"'


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _of_length(node: Node, least: int, most: int | None) -> Node:
    """Return the part of a regex with texts of `least` to `most` characters."""
    shortest, longest = _lengths(node)
    if least <= shortest and _is_within(longest, most):
        return node
    if (most is not None and shortest > most) or not _is_within(least, longest):
        raise ValueError("No text of the pattern is of the lengths.")
    if isinstance(node, Choice):
        options = [each for each in node.options if _may_have(each, least, most)]
        if not options:
            raise ValueError("No text of the pattern is of the lengths.")
        return Choice(tuple(_of_length(each, least, most) for each in options))
    if isinstance(node, Sequence):
        return _sequence_of_length(node, least, most)
    if isinstance(node, Repeat) and len({*_lengths(node.part)}) == 1:
        return _repeat_of_length(node, least, most)
    raise _intersected()


def _sequence_of_length(node: Sequence, least: int, most: int | None) -> Node:
    lengths = [_lengths(part) for part in node.parts]
    elastic = [number for number, (short, long) in enumerate(lengths) if short != long]
    if len(elastic) != 1:
        raise _intersected()
    [at] = elastic
    beside = sum(short for number, (short, _) in enumerate(lengths) if number != at)
    rest = None if most is None else most - beside
    part = _of_length(node.parts[at], max(least - beside, 0), rest)
    return Sequence((*node.parts[:at], part, *node.parts[at + 1 :]))


def _repeat_of_length(node: Repeat, least: int, most: int | None) -> Node:
    size, _ = _lengths(node.part)
    first = max(node.least, -(-least // size))
    lasts = [
        each for each in (node.most, None if most is None else most // size) if each is not None
    ]
    last = min(lasts, default=None)
    if last is not None and first > last:
        raise ValueError("No text of the pattern is of the lengths.")
    return Repeat(node.part, first, last)


def _intersected() -> ValueError:
    return ValueError("A pattern must have one part of variable length beside lengths, got more.")


def _may_have(node: Node, least: int, most: int | None) -> bool:
    shortest, longest = _lengths(node)
    return _is_within(shortest, most) and _is_within(least, longest)


def _is_within(value: int | None, most: int | None) -> bool:
    return most is None or (value is not None and value <= most)


def _lengths(node: Node) -> tuple[int, int | None]:
    """Return the least and the most characters of the texts of a regex."""
    if isinstance(node, Characters):
        return 1, 1
    if isinstance(node, Repeat):
        short, long = _lengths(node.part)
        if long == 0 or node.most == 0:
            return 0, 0
        return short * node.least, None if long is None or node.most is None else long * node.most
    if isinstance(node, Sequence):
        found = [_lengths(part) for part in node.parts]
        return sum(short for short, _ in found), _total([long for _, long in found])
    found = [_lengths(part) for part in node.options]
    longest = [long for _, long in found if long is not None]
    is_bounded = len(longest) == len(found)
    return min(short for short, _ in found), max(longest) if is_bounded else None


def _total(lengths: list[int | None]) -> int | None:
    known = [each for each in lengths if each is not None]
    return sum(known) if len(known) == len(lengths) else None


def _spelled(node: Node) -> str:
    """Return the regex of the spellings of the texts of a regex, control characters escaped."""
    if isinstance(node, Characters):
        return _spelled_characters(node.ranges)
    if isinstance(node, Sequence):
        return "".join(_moderate(map(_spelled, node.parts)))
    if isinstance(node, Choice):
        return f"(?:{'|'.join(_moderate(map(_spelled, node.options)))})"
    return f"(?:{_spelled(node.part)}){{{node.least},{'' if node.most is None else node.most}}}"


def _moderate(parts: Iterable[str]) -> Iterator[str]:
    """Yield parts of a regex.

    Raises:
        ValueError: they have more characters than a regex of a string may have.
    """
    size = 0
    for part in parts:
        size += len(part)
        if size > MAX_CHARACTERS:
            raise ValueError(f"A pattern must be spelled by at most {MAX_CHARACTERS:,} characters.")
        yield part


@functools.lru_cache(256)
def _spelled_characters(ranges: Ranges) -> str:
    points = [
        point
        for low, high in _ESCAPED
        for point in range(low, high + 1)
        if any(first <= point <= last for first, last in ranges)
    ]
    options = [_escapes(points)] if points else []
    if plain := _without_escaped(ranges):
        options.append(_set(plain))
    if not options:
        raise ValueError("A set must have a character, got none.")
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _without_escaped(ranges: Ranges) -> Ranges:
    found = list(ranges)
    for low, high in _ESCAPED:
        sides = [((a, min(b, low - 1)), (max(a, high + 1), b)) for a, b in found]
        found = [side for pair in sides for side in pair if side[0] <= side[1]]
    return joined(found)


def _escapes(points: list[int]) -> str:
    letters = "".join(_LETTERS[point] for point in points if point in _LETTERS)
    codes = [f"{point:02x}" for point in points if point < 32 or point == 127]
    options = [f"[{letters}]"] if letters else []
    for first in sorted({code[0] for code in codes}):
        last = {code[1] for code in codes if code[0] == first}
        options.append(f"u00{first}[{''.join(sorted(last | {each.upper() for each in last}))}]")
    return rf"\\(?:{'|'.join(options)})"


def _set(ranges: Ranges) -> str:
    is_short = ranges[-1][1] < sys.maxunicode
    items = "".join(map(_item, ranges if is_short else others(ranges)))
    return f"[{'' if is_short else '^'}{items}]"


def _item(item: tuple[int, int]) -> str:
    low, high = map(_point, item)
    return low if low == high else f"{low}-{high}"


def _point(point: int) -> str:
    if point > 0xFFFF:
        return f"\\U{point:08x}"
    is_plain = point < 128 and chr(point).isalnum()
    return chr(point) if is_plain else f"\\u{point:04x}"
