"""Validation of values from users, and their short representation in error messages."""

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Set
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
_MAX_PATH_CHARACTERS = 4096


def shown(value: Any, length: int = 80) -> str:
    """Return the repr of `value`, cut to `length` characters; huge values cost little."""
    try:
        text = _written(value, length, depth=3)
    except Exception:  # the __repr__ of a user-defined type may raise anything
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _written(value: Any, length: int, depth: int) -> str:
    if isinstance(value, str | bytes | bytearray):
        return repr(value[:length])
    if isinstance(value, int) and value.bit_length() > 4 * length:
        return f"an integer of {value.bit_length():,} bits"
    if not isinstance(value, list | tuple | dict | set | frozenset) or not value:
        return repr(value)
    if not depth:
        return "..."
    if isinstance(value, dict):
        pairs = itertools.islice(value.items(), length)
        parts = [": ".join(_written(part, length, depth - 1) for part in pair) for pair in pairs]
    else:
        parts = [_written(part, length, depth - 1) for part in itertools.islice(value, length)]
    comma = "," if isinstance(value, tuple) and len(parts) == 1 else ""
    opening, closing = "()" if isinstance(value, tuple) else "{}"
    if isinstance(value, list):
        opening, closing = "[]"
    return f"{opening}{', '.join(parts)}{comma}{closing}"


def is_integer(value: Any) -> bool:
    """Return whether `value` is a Python or NumPy integer; booleans are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def are_integers(values: Iterable[Any]) -> bool:
    """Return whether all values satisfy `is_integer`; fast, because prompts may be long."""
    kinds = set(map(type, values))
    return all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in kinds)


def integer(name: str, value: Any, least: int, most: int = INT64_MAX, hint: str = "") -> int:
    """Return `value` as a Python int.

    Raises:
        ValueError: it is not an integer from `least` to `most`; the message ends with `hint`.
    """
    if not is_integer(value) or int(value) < least:
        raise ValueError(
            f"{name} must be an integer of at least {least}, got {shown(value)}{hint}."
        )
    if int(value) > most:
        raise ValueError(f"{name} must be at most {most:,}, got {shown(value)}{hint}.")
    return int(value)


def seed_bits(name: str, value: Any) -> int:
    """Return a seed as a Python int.

    Raises:
        ValueError: it is not an integer from -2**63 to 2**64 - 1.
    """
    if not is_integer(value) or not -(2**63) <= int(value) < 2**64:
        raise ValueError(f"{name} must be an integer that fits in 64 bits, got {shown(value)}.")
    return int(value)


def real(value: Any) -> float:
    """Return `value` as a Python float, or NaN, which is in no range, if it is not a number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf  # outside every range, so the sign does not matter


def boolean(name: str, value: Any) -> bool:
    """Return `value` as a Python bool.

    Raises:
        ValueError: it is neither a Python nor a NumPy bool.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {shown(value)}.")
    return bool(value)


def items(values: Any, most: int) -> list[Any] | None:
    """Return the first `most + 1` items of an ordered collection or a possibly endless iterator.

    Returns None for other values, including strings, mappings and sets.
    """
    if isinstance(values, str | bytes | bytearray | Mapping | Set):
        return None
    try:
        iterator = iter(values)
    except TypeError:
        return None
    return list(itertools.islice(iterator, most + 1))


def text(name: str, value: Any) -> str:
    """Return `value`; raise ValueError unless it is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text that is not empty, got {shown(value)}.")
    return value


def path(name: str, value: Any) -> str | Path:
    """Return `value` if it is a valid path; the file need not exist.

    Raises:
        ValueError: it is not a string or Path, is empty or too long, or has invalid characters.
    """
    if not isinstance(value, str | Path):
        raise ValueError(f"{name} must be a text or a Path, got {shown(value)}.")
    text = str(value)
    try:
        is_sound = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_sound = False
    if not text or not is_sound or len(text) > _MAX_PATH_CHARACTERS:
        raise ValueError(
            f"{name} must be a path of 1 to {_MAX_PATH_CHARACTERS:,} characters that a file "
            f"system knows, got {shown(value)}."
        )
    return value


class PromptTooLongError(ValueError):
    """A prompt does not fit the model's context; agents recognize the words and shorten it."""

    @classmethod
    def of(cls, reason: str, max_model_len: int) -> "PromptTooLongError":
        return cls(
            f"The prompt is too long: {reason}, and the maximum context length is max_model_len="
            f"{max_model_len} tokens, at least one of them for the output. Shorten it, set "
            "truncate_prompt_tokens, or raise max_model_len."
        )
