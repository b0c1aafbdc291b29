"""GGUFCheckpoint: the tensors in a GGUF file, with the names and layout of the hub."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxspec.checks import shown
from jaxspec.gguf.file import GGUFFile
from jaxspec.gguf.header import Tensor
from jaxspec.models.gguf import REMEDY
from jaxspec.models.gguf.places import Place, places_in
from jaxspec.models.safetensors_file import DTYPES, StoredTensor

_ELEMENTS = 2**20  # elements reordered at once
_NEAR = 4  # rows at most this far apart are read together with those between them


class GGUFCheckpoint:
    """The `Checkpoint` in a GGUF file. A context manager.

    Quantised tensors are dequantised to float32 while they are read, a part at a time.
    """

    asked_by = "metadata"
    remedy = REMEDY

    def __init__(self, path: Path):
        """Open the file and validate its header.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: As `GGUFFile` and `places_in`, or a tensor's type can't be dequantised.
        """
        self.path = path
        self._file = GGUFFile(path)
        try:
            self._file.check_types()
            self._places = places_in(self._file)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "GGUFCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def names(self) -> frozenset[str]:
        """Hub names of all tensors; "gguf:" and the file's name for unknown ones."""
        return frozenset(self._places)

    def files_of(self, name: str) -> list[str]:
        return [self.path.name]

    def stored(self, name: str) -> StoredTensor:
        place = self._places[name]
        return StoredTensor(place.dtype, place.shape, place.tensors[0].start, place.num_bytes)

    def bytes_by_type(self) -> Mapping[str, int]:
        num_bytes: Counter[str] = Counter()
        for tensor in self._file.tensors.values():
            num_bytes[tensor.type.name] += tensor.num_bytes
        return num_bytes

    def read(self, name: str, first: int, into: np.ndarray) -> None:
        """See `Checkpoint.read`.

        Raises:
            ValueError: The file was truncated after it was opened, or has values that the converter
                can't have written.
        """
        place = self._places[name]
        order, columns = place.rows(), place.columns()
        if order is None and columns is None:
            self._read(place, place.first + first, into)
            return
        width = math.prod(place.shape[1:])
        begin, end, step = first // width, -(-(first + into.size) // width), _ELEMENTS // width + 1
        for start in range(begin, end, step):
            stop = min(start + step, end)
            low, high = max(first, start * width), min(first + into.size, stop * width)
            wanted = np.arange(start, stop) if order is None else order[start:stop]
            rows = self._rows(place, wanted, into.dtype)
            if columns is not None:
                rows = rows[:, columns]
            read = rows.reshape(-1)[low - start * width : high - start * width]
            into[low - first : high - first] = read

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def _rows(self, place: Place, wanted: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return the `wanted` rows of a tensor in the file, in this order."""
        width = math.prod(place.shape[1:])
        order = np.argsort(wanted)
        ends = np.flatnonzero(np.diff(wanted[order]) > _NEAR) + 1
        rows = np.empty((wanted.size, width), dtype)
        for near in np.split(order, ends):
            begin, end = wanted[near[0]], wanted[near[-1]] + 1
            held = np.empty((end - begin, width), dtype)
            self._read(place, int(begin) * width, held.reshape(-1))
            rows[near] = held[wanted[near] - begin]
        return rows

    def _read(self, place: Place, first: int, into: np.ndarray) -> None:
        """Fill `into` with consecutive elements of the place's tensors, from `first` on."""
        last, begin = first + into.size, 0
        for tensor in place.tensors:
            size = math.prod(tensor.shape)
            low, high = max(first, begin), min(last, begin + size)
            if low < high:
                self._read_tensor(tensor, low - begin, into[low - first : high - first])
            begin += size
        if (change := place.conversion.change) is not None:
            with np.errstate(all="ignore"):
                changed = change.back(into)
            if not np.isfinite(changed).all():
                wrong = into[~np.isfinite(changed)][0]
                raise ValueError(
                    f"{self.path}: `{place.own}` must hold {change.words}, got "
                    f"{shown(float(wrong))}. {self.remedy}"
                )
            into[...] = changed

    def _read_tensor(self, tensor: Tensor, first: int, into: np.ndarray) -> None:
        if not tensor.type.is_raw:
            self._file.read_quantised(tensor, first, into)
        elif (dtype := DTYPES[tensor.type.name]) == into.dtype:
            self._file.read_raw(tensor, first, into)
        else:
            held = np.empty(into.size, dtype)
            self._file.read_raw(tensor, first, held)
            into[...] = held
