"""QuantisedCheckpoint: a folder of quantised weights, with the names and shapes of 16 bits."""

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.layers.weight_form import VALUES, Grain
from jaxspec.models.layers.weight_matrix import parts_of
from jaxspec.models.quantised.kv_scales import kv_scales_in
from jaxspec.models.quantised.matrices import Float8, Matrix
from jaxspec.models.quantised.modules import matrices_in
from jaxspec.models.quantised.scheme import Scheme
from jaxspec.models.safetensors_file import DTYPES, QUANTISED, StoredTensor

_NAMES = {dtype: name for name, dtype in (DTYPES | QUANTISED).items()}
_FLOAT32 = np.dtype(np.float32)
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

    Weights are dequantised to float32 while they are read, some rows at a time. Of a weight that a
    model can hold as published, the parts of its grain can be read instead (`parts_of`).
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
        self.matrices, others, scales, zero_biases = matrices_in(checkpoint, scheme, is_read)
        self.zero_biases = zero_biases  # names of tensors that a model need not have
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
        """Return the grain in which a model can hold a weight as it is published."""
        matrix = self.matrices.get(name)
        return None if matrix is None else matrix.grain

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
        start = self.inner.stored(matrix.tensors[0].name).start
        held = _part(matrix, part)
        return StoredTensor(_NAMES[held.dtype], held.shape, start, _num_bytes(matrix))

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
        elif part == VALUES and isinstance(matrix, Float8):  # as they are stored
            self.inner.read(matrix.tensors[0].name, first, into)
        else:
            self._read_rows(name, _part(matrix, part), first, into)

    def _read_rows(self, name: str, part: "_Part", first: int, into: np.ndarray) -> None:
        width, done = part.width, 0
        while done < into.size:
            row, column = divmod(first + done, width)
            count = (into.size - done) // width
            if column == 0 and count:
                place = into[done : done + count * width]
                part.fill(row, place.reshape(count, width))
            else:
                place = into[done : done + width - column]
                place[...] = self._row(name, part, row)[column : column + place.size]
            done += place.size

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()

    def _row(self, name: str, part: "_Part", row: int) -> np.ndarray:
        """Return a row; the window of rows that begins with it is kept for this thread."""
        held, begin, rows = getattr(self._windows, "last", ("", 0, ()))
        if held != name or not begin <= row < begin + len(rows):
            count = min(max(1, _WINDOW // part.width), math.prod(part.shape) // part.width - row)
            rows = np.empty((count, part.width), part.dtype)
            part.fill(row, rows)
            begin = row
            self._windows.last = name, begin, rows
        return rows[row - begin]


class _Part(NamedTuple):
    """Rows of a weight, or of a part of it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, np.ndarray], None]  # into rows from the first on

    @property
    def width(self) -> int:
        """Elements of a row; a part with one axis has one in each."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    def fill(self, first: int, into: np.ndarray) -> None:
        """Fill `into`, `[rows, width]`, with rows from `first` on, a few at a time."""
        most = max(1, _ELEMENTS // into.shape[1])
        for begin in range(0, len(into), most):
            self.read(first + begin, into[begin : begin + most])


def _part(matrix: Matrix, name: str) -> _Part:
    """Return a part of a weight, or for "" the weight after dequantisation."""
    if not name:
        return _Part(matrix.shape, _FLOAT32, matrix.dequantise)
    assert matrix.grain is not None
    part = matrix.grain.part(name)
    *experts, rows, columns = matrix.shape
    shape = (*experts, *part.shape(rows, columns))
    return _Part(shape, part.dtype, functools.partial(matrix.read_part, name))


def _num_bytes(matrix: Matrix) -> int:
    return sum(tensor.num_bytes for tensor in matrix.tensors)
