"""What the values of parameters that act on logits must be."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checks import are_integers, real, shown

MAX_REPETITION = 1e6  # and one over it at least: float32 logits could overflow beyond
MAX_LOGIT_BIAS = 1e6
"""Size of a logit's bias; -100 is enough to forbid an id, and +100 to force it."""
MAX_BAD_WORD_TEXTS = 128
"""Texts of `bad_words`."""
MAX_BAD_WORD_LENGTH = 1024
"""Characters of such a text."""


def in_range(name: str, value: Any, least: float, most: float, hint: str) -> float:
    """`value` as Python's float.

    Raises:
        ValueError: it is no number from `least` to `most`; the message ends with `hint`.
    """
    number = real(value)
    if not least <= number <= most:
        raise ValueError(
            f"{name} must be a number from {least:g} to {most:g}, got {shown(value)}; {hint}."
        )
    return number


def penalty(name: str, value: Any) -> float:
    """A presence or frequency penalty; a ValueError for what is none."""
    return in_range(name, value, -2.0, 2.0, "0 turns it off")


def repetition_penalty(value: Any) -> float:
    """A repetition penalty; a ValueError for what is none."""
    least = 1 / MAX_REPETITION
    return in_range("repetition_penalty", value, least, MAX_REPETITION, "1 turns it off")


def logit_bias(value: Any) -> dict[int, float] | None:
    """Biases by id, as Python's numbers; None and no entry are none.

    Raises:
        ValueError: it is no mapping of integers to finite numbers.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or not are_integers(value):
        raise ValueError(
            f"logit_bias must be a dict of token ids and biases, got {shown(value)}. Write it as "
            "in {42: -1.5}."
        )
    hint = f"-{MAX_LOGIT_BIAS:,g} forbids an id"
    biases = {
        int(token): in_range(f"logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, hint)
        for token, bias in value.items()
    }
    return biases or None


def allowed_token_ids(value: Any) -> list[int] | None:
    """The ids as Python's integers; None allows all.

    Raises:
        ValueError: it is no list of integers, or an empty one.
    """
    if value is None:
        return None
    is_list = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)
    if not is_list or not len(value) or not are_integers(value):
        raise ValueError(
            f"allowed_token_ids must be a list of at least one token id, got {shown(value)}. None "
            "allows all."
        )
    return list(map(int, value))


def bad_words(value: Any) -> list[str]:
    """The texts; None is none.

    Raises:
        ValueError: it is no list of texts, one is empty, or there are too many or too long ones.
    """
    if value is None:
        return []
    if not isinstance(value, list | tuple) or any(
        not isinstance(word, str) or not word.strip() for word in value
    ):
        raise ValueError(
            f"bad_words must be a list of texts that are not empty, got {shown(value)}. A single "
            "text goes in as a list of one."
        )
    if len(value) > MAX_BAD_WORD_TEXTS or any(len(word) > MAX_BAD_WORD_LENGTH for word in value):
        raise ValueError(
            f"bad_words must be at most {MAX_BAD_WORD_TEXTS} texts of at most "
            f"{MAX_BAD_WORD_LENGTH:,} characters, got {len(value):,} with up to "
            f"{max(map(len, value)):,}. Give fewer or shorter ones."
        )
    return list(value)
