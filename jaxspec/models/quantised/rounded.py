"""RoundedCheckpoint: a 16-bit checkpoint whose matrices are rounded to FP8 while they are read."""

import functools
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.layers.weight_form import SCALES, VALUES, Grain
from jaxspec.models.layers.weight_matrix import parts_of
from jaxspec.models.quantised.checkpoint import StoredFormat
from jaxspec.models.quantised.matrices import by_group
from jaxspec.models.quantised.scheme import Scheme
from jaxspec.models.quantised.tensors import Tensor
from jaxspec.models.safetensors_file import QUANTISED, StoredTensor
from jaxspec.weight import PUBLISHED_BLOCK as BLOCK

ROUNDED = Scheme("fp8", grains=frozenset([(BLOCK, BLOCK)]))
"""The scheme of matrices that are rounded while they are read."""

_LABEL = "FP8 by 128x128 blocks, rounded here"
_E4M3 = QUANTISED["F8_E4M3"]
_LARGEST = np.float32(448)
_LEAST = np.finfo(np.float32).tiny  # of scales; smaller ones lose bits, or are 0
_CAST = 2**17  # elements rounded at once: they stay in a core's cache


class RoundedCheckpoint:
    """A checkpoint some of whose matrices are rounded to FP8 (E4M3), 128 x 128 blocks a scale.

    A block's scale is its largest magnitude / 448, in float32, and 1 if the block is zero. A NaN
    stays one and does not count. Rows of blocks are read twice, first for their scales. In a stack
    of experts, each has blocks of its own. A context manager.
    """

    scheme = ROUNDED

    def __init__(self, checkpoint: Checkpoint, rounded: Iterable[str]):
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

    def grain_of(self, name: str) -> Grain | None:
        """Return the grain in which a model can hold a weight in FP8."""
        return Grain.BLOCKS if name in self._matrices else None

    def stored(self, name: str) -> StoredTensor:
        name, part = parts_of(name)
        stored = self.inner.stored(name)
        if (matrix := self._matrices.get(name)) is None:
            return stored
        shape = matrix.shape_of_scales if part == SCALES else stored.shape
        dtype = "F8_E4M3" if part == VALUES else "F32"
        return StoredTensor(dtype, shape, stored.start, stored.num_bytes)

    def formats(self, without: Collection[str] = ()) -> dict[str, StoredFormat]:
        """Return the number of rounded parameters, and their bytes in FP8.

        Matrices whose names are in `without` are not counted.
        """
        counted = [self._matrices[name] for name in self._matrices.keys() - without]
        parameters = sum(math.prod(matrix.tensor.shape) for matrix in counted)
        scales = sum(math.prod(matrix.blocks) for matrix in counted)
        return {_LABEL: StoredFormat(parameters, parameters + 4 * scales)} if counted else {}

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
        name, part = parts_of(name)
        if (matrix := self._matrices.get(name)) is None:
            self.inner.read(name, first, into)
        elif part == SCALES:
            into[...] = matrix.held_scales.ravel()[first : first + into.size]
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
        *others, wide = self.blocks
        self._scales = np.empty((math.prod(others), wide), np.float32)
        self._is_known = np.zeros(len(self._scales), bool)  # of each row of blocks
        self._windows = threading.local()

    @property
    def _num_rows(self) -> int:
        """Rows of all matrices."""
        return math.prod(self.outer) * self.rows

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of blocks along each axis."""
        return (*self.outer, -(-self.rows // BLOCK), -(-self.columns // BLOCK))

    @property
    def shape_of_scales(self) -> tuple[int, ...]:
        """The shape of `held_scales`."""
        return (*self.outer, *Grain.BLOCKS.scales((self.rows, self.columns)))

    @functools.cached_property
    def held_scales(self) -> np.ndarray:
        """The scales of `Grain.BLOCKS`, which are those of parts of blocks."""
        scales = self._known(0, len(self._scales)).reshape(self.blocks)
        times = BLOCK // Grain.BLOCKS.unit[0]
        return np.repeat(scales, times, axis=-2)[..., : self.shape_of_scales[-2], :]

    def read(self, first: int, into: np.ndarray) -> None:
        """Fill `into` with float32 elements after rounding, or with e4m3 numbers."""
        row, column = divmod(first, self.columns)
        if column + into.size <= self.columns and into.size < self.columns:
            into[...] = self._row(row, into.dtype)[column : column + into.size]
        else:
            self._fill(first, into)

    def _row(self, row: int, dtype: np.dtype) -> np.ndarray:
        """Return a row, of whose parts devices read one each; the rows after it are kept, too."""
        begin, rows = getattr(self._windows, dtype.name, (0, np.empty((0, self.columns), dtype)))
        if not begin <= row < begin + len(rows):
            count = min(max(1, _CAST // self.columns), self._num_rows - row)
            begin, rows = row, np.empty((count, self.columns), dtype)
            self._fill(row * self.columns, rows.reshape(rows.size))
            setattr(self._windows, dtype.name, (begin, rows))
        return rows[row - begin]

    def _fill(self, first: int, into: np.ndarray) -> None:
        for begin in range(0, into.size, _CAST):
            numbers = self.tensor.part(first + begin, min(_CAST, into.size - begin))
            numbers = numbers.astype(np.float32, copy=False)
            place = into[begin : begin + numbers.size]
            for extent in self._extents(first + begin, numbers.size):
                size = extent.count * (extent.columns.stop - extent.columns.start)
                part = slice(extent.start, extent.start + size)
                matrix = numbers[part].reshape(extent.count, size // extent.count)
                of_rows = self._block_rows(extent.row, extent.count)
                scale = self._known(of_rows[0], of_rows[-1] + 1)[of_rows]
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
        return matrix * self.blocks[-2] + within // BLOCK

    def _known(self, first: int, last: int) -> np.ndarray:
        """Return all scales after computing those of some rows of blocks.

        Threads that need the same ones at once compute them twice.
        """
        for number in first + np.flatnonzero(~self._is_known[first:last]):
            self._scales[number] = self._computed(int(number))
            self._is_known[number] = True
        return self._scales

    def _computed(self, number: int) -> np.ndarray:
        """Return the scales of a row of blocks."""
        matrix, block = divmod(number, self.blocks[-2])
        row, count = matrix * self.rows + block * BLOCK, min(BLOCK, self.rows - block * BLOCK)
        numbers = self.tensor.part(row * self.columns, count * self.columns)
        largest = _largest(numbers.astype(np.float32).reshape(count, self.columns))
        if np.isinf(largest).any():
            checkpoint = self.tensor.checkpoint
            raise ValueError(
                f"{checkpoint.path}: weights must be finite to be rounded to FP8, and "
                f"{self.tensor.name} has an infinity. Leave out quantization='fp8', or download "
                "the weights again."
            )
        return np.where(largest > 0, np.maximum(largest / _LARGEST, _LEAST), np.float32(1))


def _largest(numbers: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each block, without NaN; 0 where all numbers are NaN."""
    rows, columns = numbers.shape
    magnitudes = np.abs(numbers, out=numbers)
    if columns % BLOCK:
        magnitudes = np.pad(magnitudes, ((0, 0), (0, -columns % BLOCK)))
    blocks = magnitudes.reshape(rows, -(-columns // BLOCK), BLOCK)
    largest = blocks.max((0, 2))
    if np.isnan(largest).any():
        largest = np.fmax.reduce(np.fmax.reduce(blocks, 2), 0)
    return np.nan_to_num(largest, nan=0.0, posinf=np.inf)
