"""Conversion of option values to Python types, validated against the type of their field."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from jaxspec import checks
from jaxspec.checks import shown
from jaxspec.options import SpeculativeConfig
from jaxspec.requests.logits_processors import MAX_PROCESSORS, AnyProcessor, check_entry

_MAX = 2**24  # numbers of rows, tokens or pages are array sizes
_MAX_BUCKETS = 1024


def read(field: dataclasses.Field, value: Any) -> Any:
    """Return `value` converted by the reader of the field's type in `_READERS`.

    Raises:
        TypeError: the field has a type without a reader.
        ValueError: `value` has the wrong type or is out of range.
    """
    kinds = _alternatives(field.type)
    if value is None and NoneType in kinds:
        return None
    if isinstance(value, str) and value in _words(field):
        return str(value)
    origins = {get_origin(kind) or kind for kind in kinds}
    for kind, reader in _READERS.items():
        if kind in origins:
            return reader(field, value)
    raise TypeError(f"The type of the option {field.name} needs a line in _READERS: {kinds}.")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union type, or `(kind,)` for another type."""
    is_whole = not get_args(kind) or get_origin(kind) in (Literal, Sequence, Mapping, tuple)
    return (kind,) if is_whole else get_args(kind)


def _speculation(field: dataclasses.Field, value: Any) -> Any:
    return SpeculativeConfig.read(value)


def _words(field: dataclasses.Field) -> list[str]:
    """Return the literals of the field's type: ["auto", "dummy"] for `Literal["auto", "dummy"]`."""
    kinds = _alternatives(field.type)
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def _no_word(field: dataclasses.Field, value: Any) -> NoReturn:
    *others, last = map(repr, _words(field))
    if NoneType in _alternatives(field.type):
        others, last = [*others, last], f"None, {field.metadata['none']}"
    raise ValueError(f"{field.name} must be {', '.join(others)} or {last}, got {shown(value)}.")


def _entries(field: dataclasses.Field, value: Any) -> dict[str, Any]:
    """Return a copy of a dict of JSON values, which may be given as JSON text."""
    try:
        read = json.loads(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise ValueError(
            f"{field.name} must be a dict of JSON values, or one as JSON text, got {shown(value)}."
        )
    return read


def _integer(field: dataclasses.Field, value: Any) -> int:
    least = field.metadata["least"]
    if least is None:
        return checks.seed_bits(field.name, value)
    hint = "".join(f", which is not {word!r} either" for word in _words(field))
    return checks.integer(field.name, value, least, _MAX, hint)


def _number(field: dataclasses.Field, value: Any) -> float:
    number = checks.real(value)
    if not math.isfinite(number):
        raise ValueError(f"{field.name} must be a finite number, got {shown(value)}.")
    return number


def _processors(field: dataclasses.Field, value: Any) -> tuple[AnyProcessor, ...] | None:
    found = [value] if isinstance(value, str) else checks.items(value, MAX_PROCESSORS)
    if found is None or len(found) > MAX_PROCESSORS:
        raise ValueError(
            f"{field.name} must be a list of at most {MAX_PROCESSORS} processors, got "
            f"{shown(value)}."
        )
    return tuple(map(check_entry, found)) or None


def _sizes(field: dataclasses.Field, value: Any) -> tuple[int, ...]:
    sizes = checks.items(value, _MAX_BUCKETS)
    if sizes is None or len(sizes) > _MAX_BUCKETS:
        raise ValueError(
            f"{field.name} must be a list of at most {_MAX_BUCKETS} sizes, got {shown(value)}."
        )
    return tuple(checks.integer(f"Each of {field.name}", size, 1, _MAX) for size in sizes)


# The first entry whose type is in the field's union reads the value.
_READERS: dict[Any, Callable[[dataclasses.Field, Any], Any]] = {
    SpeculativeConfig: _speculation,
    Mapping: _entries,
    Path: lambda field, value: checks.path(field.name, value),
    str: lambda field, value: checks.text(field.name, value),
    tuple: _processors,
    bool: lambda field, value: checks.boolean(field.name, value),
    int: _integer,
    float: _number,
    Sequence: _sizes,
    Literal: _no_word,
}
