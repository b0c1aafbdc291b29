"""Conversion: how to undo what llama.cpp's converter does to a tensor, beyond its name."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]
Order = Callable[[int], np.ndarray | None]
"""Maps a number of rows or columns on the hub to their indices in the file; None if invalid."""


class Change(NamedTuple):
    """The inverse of the converter's change of values."""

    words: str  # valid stored values; completes "must hold ..."
    back: Callable[[np.ndarray], np.ndarray]  # float32 to float32; not finite for invalid ones


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Differences between a tensor in the file and the one on the hub."""

    shape: Callable[[Shape], Shape] = lambda stored: stored  # returns the shape on the hub
    rows: Order | None = None  # None means the same order
    columns: Order | None = None
    change: Change | None = None
    behind: tuple[str, ...] = ()  # tensors of the block to append, as more rows


AS_IT_IS = Conversion()


def convolution(stored: Shape) -> Shape:
    """Return `[channels, 1, taps]` for `[channels, taps]`; other shapes are unchanged."""
    return (stored[0], 1, stored[1]) if len(stored) == 2 else stored


def column(stored: Shape) -> Shape:
    """Return `[size]` for `[size, 1]`; other shapes are unchanged."""
    return stored[:1] if stored[1:] == (1,) else stored


def row(stored: Shape) -> Shape:
    """Return `[1, size]` for `[size]`; llama.cpp drops leading axes of 1 when it quantises."""
    return (1, *stored) if len(stored) == 1 else stored


def grouped(groups: int) -> Callable[[Shape], Shape]:
    """Map `[groups, size]` to `[groups * size]`; other shapes are unchanged."""
    return lambda stored: (groups * stored[1],) if stored[1:] and stored[0] == groups else stored


def by_pairs(heads: int) -> Order:
    """Order of rows of heads whose rotated channel pairs are adjacent in the file.

    llama.cpp rotates channels 2i and 2i + 1 together, transformers i and i + half a head.
    """
    return functools.partial(_by_pairs, heads)


def tiled(key_heads: int, value_heads: int, before: int = 0) -> Order:
    """Order of the channels of value heads that the file interleaves over the key heads.

    With 2 key heads and 4 value heads, the hub's value heads 0, 1, 2, 3 (two per key head) are
    stored as 0, 2, 1, 3. The first `before` channels are in the hub's order.
    """
    return functools.partial(_tiled, key_heads, value_heads, before)


def by_key_head(key_heads: int, parts: tuple[int, ...]) -> Order:
    """Order of rows that the file stores part by part, and the hub key head by key head.

    `parts` are the rows of each part per key head.
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
"""For decay rates: -exp(A_log) is stored, A_log is on the hub."""
LESS_ONE = Change("finite numbers", lambda values: values - np.float32(1))
"""For weights of zero-centred norms: llama.cpp stores `1 + weight`."""
