"""Tensors of a quantised folder as they are stored: rows and columns of matrices, packed integers.

    ct:    weight_packed [out, in/8]    weight_zero_point [out/8, groups]
    GPTQ:  qweight [in/8, out]          qzeros [groups, out/8]
    AWQ:   qweight [in, out/8]          qzeros [groups, out/8]

So a matrix is stored as published or transposed (`Rows`, `Transposed`), and words contain numbers
of one row or of one column (`PackedRows`, `PackedColumns`).
"""

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.safetensors_file import DTYPES, INTEGERS, QUANTISED

_KINDS = DTYPES | INTEGERS | QUANTISED
_WORD_BITS = 32
_SHORT = 2**14  # bytes
_SPAN = 2**18  # elements
_AHEAD = 2**22  # bytes
_KEPT = 3  # transposed tensors of a weight: its values, scales and zero points
# A lookup of two nibbles at once is one of two bytes.
_NIBBLES = np.stack([np.arange(256) & 15, np.arange(256) >> 4], 1).astype(np.uint8)
_PAIRS = _NIBBLES.view(np.uint16).reshape(256)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the folder."""

    checkpoint: Checkpoint
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.stored(self.name).shape

    @property
    def num_bytes(self) -> int:
        return self.checkpoint.stored(self.name).num_bytes

    @property
    def dtype(self) -> np.dtype:
        return _KINDS[self.checkpoint.stored(self.name).dtype]

    def read(self) -> np.ndarray:
        """Read the whole tensor, which must be small."""
        return self.part(0, math.prod(self.shape)).reshape(self.shape)

    def part(self, first: int, count: int) -> np.ndarray:
        """Read `count` elements, in C order."""
        held = np.empty(count, self.dtype)
        self.checkpoint.read(self.name, first, held)
        return held


class Matrix2D(Protocol):
    """The stored numbers of a matrix, `[outer, inner]`, of which rows are read."""

    def rows(self, first: int, count: int) -> np.ndarray:
        """Read `count` rows from `first` on."""
        ...


@dataclasses.dataclass(frozen=True)
class Rows:
    """A tensor whose last axis is a row; other axes are those of rows."""

    tensor: Tensor
    width: int

    def rows(self, first: int, count: int) -> np.ndarray:
        return self.tensor.part(first * self.width, count * self.width).reshape(count, self.width)


class ReadAhead:
    """Columns of matrices, which are far apart in a file: each thread reads many at a time.

    A thread keeps those of the last matrices, as many as a weight has.
    """

    def __init__(self):
        self._thread = threading.local()

    def columns(self, tensor: Tensor, shape: tuple[int, int], first: int, count: int) -> np.ndarray:
        """Return columns of a stack of matrices `[inner, outer]` as rows.

        Args:
            tensor: The matrices, one after the other.
            shape: Sizes of a matrix.
            first: Index of the first column, counted through all matrices.
            count: Number of columns, which must be in one matrix.
        """
        kept: dict[str, tuple[int, np.ndarray]] = vars(self._thread).setdefault("kept", {})
        begin, held = kept.get(tensor.name, (0, None))
        if held is None or not begin <= first <= first + count <= begin + len(held):
            kept.pop(tensor.name, None)
            while len(kept) >= _KEPT:
                del kept[next(iter(kept))]
            inner, outer = shape
            ahead = max(count, _AHEAD // (inner * tensor.dtype.itemsize))
            begin, ahead = first, min(outer - first % outer, ahead)
            held = np.ascontiguousarray(_columns(tensor, shape, first, ahead).T)
            kept[tensor.name] = begin, held
        return held[first - begin : first - begin + count]


def _columns(tensor: Tensor, shape: tuple[int, int], first: int, count: int) -> np.ndarray:
    """Read columns; if rows are short, reading whole ones is faster than a part of each."""
    inner, outer = shape
    stack, first = divmod(first, outer)
    start = stack * inner * outer
    held = np.empty((inner, count), tensor.dtype)
    together = max(1, _SPAN // outer)
    if outer * held.itemsize > _SHORT:
        for row in range(inner):
            tensor.checkpoint.read(tensor.name, start + row * outer + first, held[row])
        return held
    for begin in range(0, inner, together):
        end = min(inner, begin + together)
        span = tensor.part(start + begin * outer, (end - begin) * outer)
        held[begin:end] = span.reshape(end - begin, outer)[:, first : first + count]
    return held


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A stack of matrices `[inner, outer]`, of which columns are read as rows."""

    tensor: Tensor
    ahead: ReadAhead
    shape: tuple[int, int]  # of a matrix

    def rows(self, first: int, count: int) -> np.ndarray:
        outer, parts = self.shape[1], list[np.ndarray]()
        for begin in (first, *range(first - first % outer + outer, first + count, outer)):
            end = min(first + count, begin - begin % outer + outer)
            parts.append(self.ahead.columns(self.tensor, self.shape, begin, end - begin))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclasses.dataclass(frozen=True)
class Exponents:
    """Powers of two, stored as a byte with the exponent."""

    numbers: Matrix2D

    def rows(self, first: int, count: int) -> np.ndarray:
        return self.numbers.rows(first, count).view(QUANTISED["F8_E8M0"])


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Unsigned integers; a word has consecutive ones of a row, the first in the low bits."""

    words: Matrix2D
    bits: int
    width: int

    def rows(self, first: int, count: int) -> np.ndarray:
        words = self.words.rows(first, count)
        return unpacked(words.view(np.uint8), self.bits)[:, : self.width]


@dataclasses.dataclass(frozen=True)
class PackedColumns:
    """Unsigned integers; a word has consecutive ones of a column, in the order of `places`."""

    words: Matrix2D
    bits: int
    places: Sequence[int]  # place in the word of each of them

    def rows(self, first: int, count: int) -> np.ndarray:
        each = len(self.places)
        begin, end = first // each, -(-(first + count) // each)
        words = self.words.rows(begin, end - begin)
        words = words.view(np.dtype(f"u{words.itemsize}"))
        numbers = np.empty((end - begin, each, words.shape[1]), np.uint8)
        for number, place in enumerate(self.places):
            numbers[:, number] = (words >> self.bits * place) & (2**self.bits - 1)
        first -= begin * each
        return numbers.reshape((end - begin) * each, words.shape[1])[first : first + count]


@dataclasses.dataclass(frozen=True)
class Shifted:
    """Unsigned integers of some bits to which a number is added, modulo their range."""

    numbers: Matrix2D
    bits: int
    added: int

    def rows(self, first: int, count: int) -> np.ndarray:
        numbers = self.numbers.rows(first, count).astype(np.uint16) + np.uint16(self.added)
        return numbers & np.uint16(2**self.bits - 1)


def unpacked(content: np.ndarray, bits: int) -> np.ndarray:
    """Return the integers of 4 or 8 bits in each row of bytes, low bits first."""
    if bits == 8:
        return content
    pairs = np.empty(content.shape, np.uint16)
    np.take(_PAIRS, content, out=pairs, mode="clip")  # other modes copy
    return pairs.view(np.uint8)


def per_word(bits: int) -> int:
    """Return how many integers a word has."""
    return _WORD_BITS // bits
