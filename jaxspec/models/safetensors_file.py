"""SafetensorsFile: one file of weights, whose header is validated before any tensor is read.

The format: 8 bytes with the length of the header (little-endian), the header in JSON, and the bytes
of all tensors without gaps. Checkpoints are read with system calls, not through a memory map: if a
mapped file is truncated, a signal kills the process.
"""

import dataclasses
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.checks import shown
from jaxspec.files import MAX_JSON_BYTES, fill, open_file, parse_json

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
}
"""Supported dtypes of weights, by their names in the format."""

INTEGERS = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}
"""Supported dtypes of token ids, by their names in the format."""

QUANTISED = {
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
}
"""Supported dtypes of quantised values, stored or held, and of scales, by names in the format."""

_SIZES = {name: dtype.itemsize for name, dtype in (DTYPES | INTEGERS | QUANTISED).items()}

_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 8  # supported by NumPy and XLA
_MAX_SIZE = 2**63  # exclusive limit of a dimension or offset


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor's entry in the header."""

    dtype: str  # a key of `DTYPES`, `INTEGERS` or `QUANTISED`, or an unsupported dtype
    shape: tuple[int, ...]
    start: int  # offset in the file, in bytes
    num_bytes: int


class SafetensorsFile:
    """An open safetensors file. Close it after use."""

    def __init__(self, path: Path):
        """Open the file and validate its header.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: It can't be read, or is not a complete safetensors file.
        """
        self.path = path
        self._file = open_file(path)
        try:
            self._state = self._now()
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read(self, name: str, first: int, into: np.ndarray) -> None:
        """Fill `into`, `[elements]`, with a tensor's elements from `first` on, in C order.

        `into` must have the tensor's dtype, one of `DTYPES`, `INTEGERS` or `QUANTISED`. Threads may
        read concurrently.

        Raises:
            ValueError: The file was truncated after it was opened.
        """
        fill(self._file, into.view(np.uint8).data, self.tensors[name].start + first * into.itemsize)

    def map(self) -> mmap.mmap:
        """Return the file mapped for reading, which outlasts `close`."""
        size, _ = self._state
        return mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ)

    def check_unchanged(self) -> None:
        """Raise ValueError if the file was written to after it was opened."""
        if self._now() != self._state:
            raise ValueError(
                f"{self.path} must stay as it is while it is read, and it was changed. Load the "
                "model again when nothing writes to it, or download it again."
            )

    def _now(self) -> tuple[int, int]:
        """Return size in bytes and modification time in nanoseconds."""
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _read_header(self) -> dict[str, StoredTensor]:
        size, _ = self._state
        if size < _LENGTH_BYTES:
            raise self._damaged("it has no header")
        length = int.from_bytes(self._read_bytes(_LENGTH_BYTES, 0), "little")
        if length > min(size - _LENGTH_BYTES, MAX_JSON_BYTES):
            raise self._damaged(f"its header would have {length:,} bytes")
        header = parse_json(self._read_bytes(length, _LENGTH_BYTES), f"the header of {self.path}")
        header.pop("__metadata__", None)  # free-form metadata
        start = _LENGTH_BYTES + length
        tensors = {name: self._tensor(name, entry, start) for name, entry in header.items()}
        self._check_order(tensors, start)
        return tensors

    def _read_bytes(self, count: int, start: int) -> bytearray:
        content = bytearray(count)
        fill(self._file, memoryview(content), start)
        return content

    def _tensor(self, name: str, entry: Any, start: int) -> StoredTensor:
        """Return the tensor of a header's `entry`, whose offsets are relative to `start`."""
        entry = entry if isinstance(entry, Mapping) else {}
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not (
            isinstance(dtype, str)
            and _are_sizes(shape)
            and _are_sizes(offsets)
            and len(shape) <= _MAX_DIMENSIONS
            and len(offsets) == 2
            and offsets[0] <= offsets[1]
        ):
            raise self._damaged(f"its header does not say where {shown(name)} is and of what shape")
        begin, end = offsets
        if dtype in _SIZES and end - begin != math.prod(shape) * _SIZES[dtype]:
            raise self._damaged(
                f"{shown(name)} has {end - begin:,} bytes, which {dtype} {shape} does not fill"
            )
        return StoredTensor(dtype, tuple(shape), start + begin, end - begin)

    def _check_order(self, tensors: Mapping[str, StoredTensor], start: int) -> None:
        """Raise ValueError if tensors overlap, leave gaps, or do not end at the end of the file."""
        place, (size, _) = start, self._state
        for name, tensor in sorted(tensors.items(), key=lambda item: _span(item[1])):
            if tensor.start != place:
                raise self._damaged(
                    f"{shown(name)} begins at byte {tensor.start:,} in place of {place:,}"
                )
            place += tensor.num_bytes
        if place != size:
            raise self._damaged(f"its tensors end at byte {place:,}")

    def _damaged(self, fault: str) -> ValueError:
        size, _ = self._state
        return ValueError(
            f"{self.path} must be a whole safetensors file, but it is cut short or damaged "
            f"({size} bytes): {fault}. Download it again."
        )


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < _MAX_SIZE for size in value
    )


def _span(tensor: StoredTensor) -> tuple[int, int]:
    return tensor.start, tensor.num_bytes
