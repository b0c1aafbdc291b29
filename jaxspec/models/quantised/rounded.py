"""RoundedCheckpoint: a 16-bit checkpoint whose matrices are rounded to FP8 while they are read."""

import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.quantised.matrices import by_group
from jaxspec.models.quantised.tensors import Tensor
from jaxspec.models.safetensors_file import QUANTISED, StoredTensor

BLOCK = 128
"""Rows, and columns, with one scale; the last block along an axis may be partial."""

_E4M3 = QUANTISED["F8_E4M3"]
_LARGEST = np.float32(448)
_LEAST = np.finfo(np.float32).tiny  # of scales; smaller ones lose bits, or are 0
_ELEMENTS = 2**20  # whose scales are computed at once
_CAST = 2**17  # elements rounded at once: they stay in a core's cache


class RoundedCheckpoint:
    """A checkpoint some of whose matrices are rounded to FP8 (E4M3), 128 x 128 blocks a scale.

    A block's scale is its largest magnitude / 448, in float32, and 1 if the block is zero. A NaN
    stays one and does not count. Tensors are read twice, first for their scales. In a stack of
    experts, each has blocks of its own. A context manager.
    """

    def __init__(self, checkpoint: Checkpoint, rounded: Collection[str]):
        """Wrap an open checkpoint.

        Args:
            checkpoint: The weights, in 16 or 32 bits.
            rounded: Names of matrices, or of stacks of them, that are rounded.
        """
        self.inner = checkpoint
        self.path: Path = checkpoint.path
        self.asked_by, self.remedy = checkpoint.asked_by, checkpoint.remedy
        self.names = checkpoint.names
        self._matrices = {name: _Rounded(Tensor(checkpoint, name)) for name in rounded}

    def __enter__(self) -> "RoundedCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)

    def files_of(self, name: str) -> list[str]:
        return self.inner.files_of(name)

    def stored(self, name: str) -> StoredTensor:
        stored = self.inner.stored(name)
        if name not in self._matrices:
            return stored
        return StoredTensor("F32", stored.shape, stored.start, stored.num_bytes)

    def bytes_by_type(self) -> Mapping[str, int]:
        return self.inner.bytes_by_type()

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()

    def read(self, name: str, first: int, into: np.ndarray) -> None:
        """See `Checkpoint.read`.

        Raises:
            ValueError: The file was truncated after it was opened, or a number of a matrix that is
                rounded is infinite.
        """
        if (matrix := self._matrices.get(name)) is None:
            self.inner.read(name, first, into)
        else:
            matrix.read(first, into)


class _Extent(NamedTuple):
    """Elements of a matrix: columns of some rows."""

    start: int  # index among the elements that are read
    row: int
    count: int
    columns: slice


class _Rounded:
    """A matrix, or a stack of them, `[rows, columns]` in blocks of one scale."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        *self.outer, self.rows, self.columns = tensor.shape
        self._scales: np.ndarray | None = None
        self._lock = threading.Lock()

    @property
    def scales(self) -> np.ndarray:
        """The scales, float32 `[..., row blocks, column blocks]`; computed once."""
        with self._lock:
            if self._scales is None:
                self._scales = self._computed()
            return self._scales

    def read(self, first: int, into: np.ndarray) -> None:
        """Fill `into` with float32 elements after rounding, or with e4m3 numbers."""
        scales = self.scales.reshape(-1, self.scales.shape[-1])
        for begin in range(0, into.size, _CAST):
            numbers = self.tensor.part(first + begin, min(_CAST, into.size - begin))
            numbers = numbers.astype(np.float32, copy=False)
            place = into[begin : begin + numbers.size]
            for extent in self._extents(first + begin, numbers.size):
                size = extent.count * (extent.columns.stop - extent.columns.start)
                part = slice(extent.start, extent.start + size)
                matrix = numbers[part].reshape(extent.count, size // extent.count)
                scale = scales[self._block_rows(extent.row, extent.count)]
                self._round(matrix, scale, extent.columns.start, place[part])

    def _round(self, matrix: np.ndarray, scale: np.ndarray, column: int, into: np.ndarray) -> None:
        """Round rows, which begin at a column, with a row of scales for each."""
        width = matrix.shape[1]
        if column % BLOCK or column + width < self.columns:
            scale = np.repeat(scale, BLOCK, axis=1)[:, column : column + width]
            group = 1
        else:
            scale, group = scale[:, column // BLOCK :], BLOCK
        by_group(np.divide, matrix, scale, group)
        rounded = np.clip(matrix, -_LARGEST, _LARGEST, out=matrix).astype(_E4M3)
        if into.dtype == _E4M3:
            into[...] = rounded.ravel()
            return
        place = into.reshape(matrix.shape)
        place[...] = rounded
        by_group(np.multiply, place, scale, group)

    def _extents(self, first: int, size: int) -> Iterator[_Extent]:
        """Cut elements into parts of rows and whole rows."""
        done = 0
        while done < size:
            row, column = divmod(first + done, self.columns)
            count = (size - done) // self.columns if column == 0 else 0
            stop = self.columns if count else min(self.columns, column + size - done)
            yield _Extent(done, row, max(count, 1), slice(column, stop))
            done += max(count, 1) * (stop - column)

    def _block_rows(self, row: int, count: int) -> np.ndarray:
        matrix, within = np.divmod(np.arange(row, row + count), self.rows)
        return matrix * self._row_blocks + within // BLOCK

    @property
    def _row_blocks(self) -> int:
        return -(-self.rows // BLOCK)

    def _computed(self) -> np.ndarray:
        blocks = self._row_blocks, -(-self.columns // BLOCK)
        found = np.empty((*self.outer, *blocks), np.float32)
        together = max(1, _ELEMENTS // (BLOCK * self.columns)) * BLOCK
        for number, grid in enumerate(found.reshape(-1, *blocks)):
            for row in range(0, self.rows, together):
                count = min(together, self.rows - row)
                first = (number * self.rows + row) * self.columns
                numbers = self.tensor.part(first, count * self.columns)
                largest = _largest(numbers.astype(np.float32).reshape(count, self.columns))
                grid[row // BLOCK : row // BLOCK + len(largest)] = largest
        if np.isinf(found).any():
            checkpoint = self.tensor.checkpoint
            raise ValueError(
                f"{checkpoint.path}: weights must be finite to be rounded to FP8, and "
                f"{self.tensor.name} has an infinity. Leave out quantization='fp8', or download "
                "the weights again."
            )
        return np.where(found > 0, np.maximum(found / _LARGEST, _LEAST), np.float32(1))


def _largest(numbers: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each block, without NaN; 0 where all numbers are NaN."""
    magnitudes = np.abs(numbers, out=numbers)
    for axis, size in enumerate(numbers.shape):
        starts = range(0, size, BLOCK)
        magnitudes = np.fmax.reduceat(magnitudes, starts, axis=axis)
    return np.nan_to_num(magnitudes, nan=0.0, posinf=np.inf)
