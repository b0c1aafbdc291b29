"""Conversion: what llama.cpp's converter does to a tensor beside its name, and the way back."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]
Order = Callable[[int], np.ndarray | None]
"""The places in the file of so many published rows or columns; None: they can't be so many."""


class Change(NamedTuple):
    """How values are made published ones again."""

    words: str  # what the stored values must be, behind "must hold"
    back: Callable[[np.ndarray], np.ndarray]  # float32 to float32; not finite for any others


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What differs between a tensor in the file and the published one."""

    shape: Callable[[Shape], Shape] = lambda stored: stored  # the published one
    rows: Order | None = None  # None: they lie as they were published
    columns: Order | None = None
    change: Change | None = None
    behind: tuple[str, ...] = ()  # tensors of the block whose rows follow this one's


AS_IT_IS = Conversion()


def convolution(stored: Shape) -> Shape:
    """`[channels, taps]` as `[channels, 1, taps]`; another shape stays."""
    return (stored[0], 1, stored[1]) if len(stored) == 2 else stored


def column(stored: Shape) -> Shape:
    """`[size, 1]` as `[size]`; another shape stays."""
    return stored[:1] if stored[1:] == (1,) else stored


def row(stored: Shape) -> Shape:
    """`[size]` as `[1, size]`: llama.cpp leaves leading axes of 1 out when it quantises."""
    return (1, *stored) if len(stored) == 1 else stored


def grouped(groups: int) -> Callable[[Shape], Shape]:
    """`[groups, size]` as `[groups * size]`; another shape stays."""
    return lambda stored: (groups * stored[1],) if stored[1:] and stored[0] == groups else stored


def by_pairs(heads: int) -> Order:
    """Rows of heads in which the two channels that are rotated together lie side by side.

    llama.cpp rotates channels 2i and 2i + 1 together, transformers i and i + half a head.
    """
    return functools.partial(_by_pairs, heads)


def tiled(key_heads: int, value_heads: int, before: int = 0) -> Order:
    """Channels of value heads that lie in turns: one of each key head, then the next of each.

    They were published key head by key head. `before`: channels in front of them that lie as they
    were published.
    """
    return functools.partial(_tiled, key_heads, value_heads, before)


def by_key_head(key_heads: int, parts: tuple[int, ...]) -> Order:
    """Rows that lie part by part, each of all key heads, and were published key head by key head.

    `parts`: rows that each part has of a key head.
    """
    return functools.partial(_by_key_head, key_heads, parts)


@functools.lru_cache(64)
def _by_pairs(heads: int, count: int) -> np.ndarray | None:
    if count % (2 * heads):
        return None
    return np.arange(count).reshape(heads, count // (2 * heads), 2).swapaxes(1, 2).reshape(-1)


@functools.lru_cache(64)
def _tiled(key_heads: int, value_heads: int, before: int, count: int) -> np.ndarray | None:
    if count <= before or (count - before) % value_heads or value_heads % key_heads:
        return None
    sizes = value_heads // key_heads, key_heads, (count - before) // value_heads
    turns = np.arange(before, count).reshape(sizes)
    return np.concatenate([np.arange(before), turns.swapaxes(0, 1).reshape(-1)])


@functools.lru_cache(64)
def _by_key_head(key_heads: int, parts: tuple[int, ...], count: int) -> np.ndarray | None:
    if count != key_heads * sum(parts):
        return None
    ends = np.cumsum([key_heads * part for part in parts])[:-1]
    rows = np.split(np.arange(count), ends)
    heads = [of.reshape(key_heads, part) for of, part in zip(rows, parts, strict=True)]
    return np.concatenate(heads, axis=1).reshape(-1)


def _log_of_negated(values: np.ndarray) -> np.ndarray:
    return np.log(-values.astype(np.float64)).astype(np.float32)


LOG_OF_NEGATED = Change("negative numbers", _log_of_negated)
"""Rates of decay: A_log is published, and -exp(A_log) is stored."""
LESS_ONE = Change("finite numbers", lambda values: values - np.float32(1))
"""Weights of norms that are centred at zero: llama.cpp has them centred at one."""
