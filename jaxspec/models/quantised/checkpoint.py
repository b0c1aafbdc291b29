"""QuantisedCheckpoint: a folder of quantised weights, with the names and shapes of 16 bits."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.layers.weight_matrix import SCALES, VALUES, Grain, parts_of
from jaxspec.models.quantised.kv_scales import kv_scales_in
from jaxspec.models.quantised.matrices import Float8, Matrix
from jaxspec.models.quantised.modules import matrices_in
from jaxspec.models.quantised.scheme import Scheme
from jaxspec.models.safetensors_file import StoredTensor

_ELEMENTS = 2**17  # dequantised at once: they stay in a core's cache
_WINDOW = 2**20  # elements of whole rows that stay for the next part of a row


class StoredFormat(NamedTuple):
    """The weights of a folder in one format."""

    parameters: int
    num_bytes: int  # with scales and zero points

    @property
    def bits(self) -> float:
        """Bits per parameter."""
        return 8 * self.num_bytes / self.parameters


class QuantisedCheckpoint:
    """The `Checkpoint` in a folder of quantised weights. A context manager.

    Weights are dequantised to float32 while they are read, some rows at a time. The two parts of a
    weight in FP8 can be read as they are (`parts_of`).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        scheme: Scheme,
        is_read: Callable[[str], bool] = lambda name: True,
        *,
        scales_kv: bool = False,
    ):
        """Wrap an open checkpoint.

        Args:
            checkpoint: The folder as it is stored.
            scheme: The formats that it declares.
            is_read: Returns whether the model reads a tensor, by its name. Others stay as stored.
            scales_kv: Read the scales of keys and values, too (`kv_scales_in`).

        Raises:
            ValueError: As `matrices_in` and `kv_scales_in`.
        """
        self.inner, self.scheme = checkpoint, scheme
        self.path: Path = checkpoint.path
        self.asked_by, self.remedy = checkpoint.asked_by, checkpoint.remedy
        self.matrices, others, scales = matrices_in(checkpoint, scheme, is_read)
        names = others | frozenset(self.matrices)
        self.num_kv_scales = len(scales)  # in the folder
        self.kv_scales: Mapping[str, np.float32] = {}  # that are read, by name
        if scales_kv:
            self.kv_scales = kv_scales_in(checkpoint, scales, frozenset(filter(is_read, names)))
        self.names = names | frozenset(self.kv_scales)
        self._windows = threading.local()

    def __enter__(self) -> "QuantisedCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)

    def grain_of(self, name: str) -> Grain | None:
        """Return the grain in which a model can hold a weight in FP8."""
        matrix = self.matrices.get(name)
        return matrix.grain if isinstance(matrix, Float8) else None

    def files_of(self, name: str) -> list[str]:
        if name in self.kv_scales:
            return []  # of several tensors, or of none
        matrix = self.matrices.get(name)
        return self.inner.files_of(name if matrix is None else matrix.tensors[0].name)

    def stored(self, name: str) -> StoredTensor:
        if name in self.kv_scales:
            return StoredTensor("F32", (1,), 0, 4)
        weight, part = parts_of(name)
        if (matrix := self.matrices.get(weight)) is None:
            return self.inner.stored(name)
        values = self.inner.stored(matrix.tensors[0].name)
        if part == VALUES:
            return values
        shape = _float8(matrix).scales.shape if part == SCALES else matrix.shape
        return StoredTensor("F32", shape, values.start, _num_bytes(matrix))

    def bytes_by_type(self) -> Mapping[str, int]:
        return self.inner.bytes_by_type()

    def formats(self, without: Collection[str] = ()) -> dict[str, StoredFormat]:
        """Return the numbers of parameters and bytes of each quantised format.

        Weights whose names are in `without` are not counted.
        """
        parameters, num_bytes = Counter[str](), Counter[str]()
        for name in self.matrices.keys() - without:
            matrix = self.matrices[name]
            parameters[matrix.label] += int(np.prod(matrix.shape, dtype=np.int64))
            num_bytes[matrix.label] += _num_bytes(matrix)
        return {label: StoredFormat(parameters[label], num_bytes[label]) for label in parameters}

    def read(self, name: str, first: int, into: np.ndarray) -> None:
        """See `Checkpoint.read`.

        Raises:
            ValueError: The file was truncated after it was opened, or a scale is not finite.
        """
        if (scale := self.kv_scales.get(name)) is not None:
            into[...] = scale
            return
        weight, part = parts_of(name)
        if (matrix := self.matrices.get(weight)) is None:
            self.inner.read(name, first, into)
        elif part == VALUES:
            self.inner.read(matrix.tensors[0].name, first, into)
        elif part == SCALES:
            into[...] = _float8(matrix).scales.ravel()[first : first + into.size]
        else:
            self._dequantise(name, matrix, first, into)

    def _dequantise(self, name: str, matrix: Matrix, first: int, into: np.ndarray) -> None:
        width, done = matrix.shape[-1], 0
        while done < into.size:
            row, column = divmod(first + done, width)
            count = (into.size - done) // width
            if column == 0 and count:
                part = into[done : done + count * width]
                _fill(matrix, row, part.reshape(count, width))
            else:
                part = into[done : done + width - column]
                part[...] = self._row(name, matrix, row)[column : column + part.size]
            done += part.size

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()

    def _row(self, name: str, matrix: Matrix, row: int) -> np.ndarray:
        """Return a row; the window of rows that begins with it is kept for this thread."""
        held, begin, rows = getattr(self._windows, "last", ("", 0, ()))
        if held != name or not begin <= row < begin + len(rows):
            width = matrix.shape[-1]
            outer = int(np.prod(matrix.shape[:-1], dtype=np.int64))
            rows = np.empty((min(max(1, _WINDOW // width), outer - row), width), np.float32)
            _fill(matrix, row, rows)
            begin = row
            self._windows.last = name, begin, rows
        return rows[row - begin]


def _fill(matrix: Matrix, first: int, into: np.ndarray) -> None:
    """Fill `into`, `[rows, columns]`, with rows from `first` on, a few at a time."""
    most = max(1, _ELEMENTS // into.shape[1])
    for begin in range(0, len(into), most):
        matrix.dequantise(first + begin, into[begin : begin + most])


def _float8(matrix: Matrix) -> Float8:
    assert isinstance(matrix, Float8)
    return matrix


def _num_bytes(matrix: Matrix) -> int:
    return sum(tensor.num_bytes for tensor in matrix.tensors)
