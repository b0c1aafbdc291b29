"""Regexes of the JSON spellings of numbers between bounds.

Bounds are compared with decimals, and validators compare binary numbers. An exclusive bound is thus
replaced by the next decimal of 15 digits, which float64 distinguishes from it.
"""

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, NamedTuple

_FRACTION = r"(?:\.[0-9]+)?"
_DIGITS = 15  # different decimals of up to 15 digits are different float64 values
_LARGEST = 10**19  # of integers; llguidance refuses larger ones
_EXACT = Context(prec=64)


class Bound(NamedTuple):
    """A bound of numbers."""

    value: int | float
    is_exclusive: bool


class Bounds(NamedTuple):
    """The bounds of a schema; None where there is none."""

    least: Bound | None
    most: Bound | None

    @staticmethod
    def of(schema: Mapping[str, Any]) -> "Bounds":
        """Read the bounds of a schema, of draft 4 too.

        Raises:
            ValueError: a bound is no number of moderate size.
        """
        lower = _bounds(schema, "minimum", "exclusiveMinimum")
        upper = _bounds(schema, "maximum", "exclusiveMaximum")
        return Bounds(
            max(lower, default=None),
            min(upper, key=lambda each: (each.value, not each.is_exclusive), default=None),
        )


def integer(bounds: Bounds, zeros: int = 0) -> str | None:
    """Return the regex of the integers within bounds that end in `zeros` zeros; None if none do."""
    step, least, most = 10**zeros, bounds.least, bounds.most
    first = None if least is None else -(-_lowest(least) // step)
    last = None if most is None else _highest(most) // step
    tail = f"0{{{zeros}}}" if zeros else ""
    options = [f"{each}{tail}" for each in _signed(first, last)]
    if (first is None or first <= 0) and (last is None or last >= 0):
        options.append("0")
    return f"(?:{'|'.join(options)})" if options else None


def number(bounds: Bounds) -> str | None:
    """Return the regex of the decimals within bounds, without exponents; None if there are none.

    Raises:
        ValueError: a bound has too many digits.
    """
    least = None if bounds.least is None else _decimal(bounds.least, 1)
    most = None if bounds.most is None else _decimal(bounds.most, -1)
    options = list[str]()
    if most is None or most >= 0:
        options += _decimals(max(least or Decimal(0), Decimal(0)), most)
    if least is None or least < 0:
        first = Decimal(0) if most is None or most > 0 else -most
        options += [f"-{each}" for each in _decimals(first, None if least is None else -least)]
    return f"(?:{'|'.join(options)})" if options else None


def _bounds(schema: Mapping[str, Any], name: str, exclusive_name: str) -> list[Bound]:
    value, exclusive = schema.get(name), schema.get(exclusive_name)
    found = list[Bound]()
    if value is not None:
        found.append(Bound(value, exclusive is True))
    if exclusive is not None and not isinstance(exclusive, bool):
        found.append(Bound(exclusive, True))
    for each in found:
        is_number = isinstance(each.value, int | float) and not isinstance(each.value, bool)
        if not is_number or not abs(each.value) < _LARGEST:
            raise ValueError(
                f"{name} and {exclusive_name} must be numbers below {_LARGEST:.0e}, got {each}."
            )
    return found


def _lowest(bound: Bound) -> int:
    return math.floor(bound.value) + 1 if bound.is_exclusive else math.ceil(bound.value)


def _highest(bound: Bound) -> int:
    return math.ceil(bound.value) - 1 if bound.is_exclusive else math.floor(bound.value)


def _signed(first: int | None, last: int | None) -> list[str]:
    """Return regexes of the integers from `first` to `last` but 0."""
    found = list[str]()
    if last is None or last > 0:
        found += _integers(max(first or 1, 1), last)
    if first is None or first < 0:
        most = None if first is None else -first
        found += [f"-{each}" for each in _integers(max(-(last or 0), 1), most)]
    return found


def _integers(first: int, last: int | None) -> list[str]:
    """Return regexes of the integers from `first`, which is not negative, to `last`."""
    if last is not None and first > last:
        return []
    if first == 0:
        return ["0", *_integers(1, last)]
    text, found = str(first), list[str]()
    if last is None:
        return [f"{_range(text, '9' * len(text))}", f"[1-9][0-9]{{{len(text)},}}"]
    for length in range(len(text), len(str(last)) + 1):
        low, high = max(first, 10 ** (length - 1)), min(last, 10**length - 1)
        found.append(_range(str(low), str(high)))
    return found


def _range(low: str, high: str) -> str:
    """Return the regex of the texts of digits from `low` to `high`, of the same length."""
    if not low:
        return ""
    rest = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return f"{_digit(low[0], high[0])}{_any_digits(rest)}"
    if low[0] == high[0]:
        return f"{low[0]}{_range(low[1:], high[1:])}"
    options = [f"{low[0]}{_range(low[1:], '9' * rest)}"]
    if int(high[0]) - int(low[0]) > 1:
        middle = _digit(str(int(low[0]) + 1), str(int(high[0]) - 1))
        options.append(f"{middle}{_any_digits(rest)}")
    options.append(f"{high[0]}{_range('0' * rest, high[1:])}")
    return f"(?:{'|'.join(options)})"


def _digit(low: str, high: str) -> str:
    return low if low == high else f"[{low}-{high}]"


def _any_digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _decimal(bound: Bound, direction: int) -> Decimal:
    """Return the bound, or the next decimal in `direction` if it is exclusive."""
    value = Decimal(repr(bound.value))
    whole = len(str(abs(int(value)))) if abs(value) >= 1 else 0
    if whole >= _DIGITS or value.adjusted() < -_DIGITS and value:
        raise ValueError(f"A bound must have at most {_DIGITS} digits, got {bound.value}.")
    if not bound.is_exclusive:
        return value
    unit = Decimal(1).scaleb(whole - _DIGITS)
    rounding = ROUND_FLOOR if direction > 0 else ROUND_CEILING
    on_grid = value.quantize(unit, rounding, _EXACT)
    return _EXACT.add(on_grid, direction * unit)


def _decimals(first: Decimal, last: Decimal | None) -> list[str]:
    """Return regexes of the decimals from `first`, which is not negative, to `last`."""
    if last is not None and first > last:
        return []
    low, low_digits = _parts(first)
    if last is None:
        later = [f"{each}{_FRACTION}" for each in _integers(low + 1, None)]
        return [f"{low}{_from(low_digits)}", *later]
    high, high_digits = _parts(last)
    if low == high:
        return [f"{low}{_between(low_digits, high_digits)}"]
    inside = [f"{each}{_FRACTION}" for each in _integers(low + 1, high - 1)]
    return [f"{low}{_from(low_digits)}", *inside, f"{high}{_up_to(high_digits)}"]


def _parts(value: Decimal) -> tuple[int, str]:
    """Return the integer and the digits of the fraction, without zeros at their end."""
    whole, _, digits = f"{value:f}".partition(".")
    return int(whole), digits.rstrip("0")


def _from(digits: str) -> str:
    """Return the regex of the fractions from `digits` on."""
    return rf"\.{_digits_from(digits)}" if digits else _FRACTION


def _digits_from(digits: str) -> str:
    if not digits:
        return "[0-9]*"
    first, rest = digits[0], _digits_from(digits[1:])
    if first == "9":
        return f"9{rest}"
    return f"(?:{first}{rest}|{_digit(str(int(first) + 1), '9')}[0-9]*)"


def _up_to(digits: str) -> str:
    """Return the regex of the fractions up to `digits`."""
    return rf"(?:\.{_digits_up_to(digits)})?"


def _digits_up_to(digits: str) -> str:
    """Return the regex of one or more digits up to `digits`."""
    if not digits:
        return "0+"
    first = digits[0]
    last = f"{first}(?:{_digits_up_to(digits[1:])})?"
    if first == "0":
        return last
    return f"(?:{last}|{_digit('0', str(int(first) - 1))}[0-9]*)"


def _between(low: str, high: str) -> str:
    """Return the regex of the fractions from `low` to `high`."""
    return rf"\.{_digits_between(low, high)}" if low else _up_to(high)


def _digits_between(low: str, high: str) -> str:
    """Return the regex of digits from `low`, which are some, to `high`."""
    first, last = low[0], high[0]
    if first == last:
        rest = _digits_between(low[1:], high[1:]) if low[1:] else f"(?:{_digits_up_to(high[1:])})?"
        return f"{first}{rest}"
    options = [f"{first}{_digits_from(low[1:])}", f"{last}(?:{_digits_up_to(high[1:])})?"]
    if int(last) - int(first) > 1:
        options.append(f"{_digit(str(int(first) + 1), str(int(last) - 1))}[0-9]*")
    return f"(?:{'|'.join(options)})"
