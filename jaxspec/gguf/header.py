"""Read and validate the header of a GGUF file: metadata and tensor descriptions.

The format, little-endian: magic, version, number of tensors, number of metadata entries; the
entries; name, shape, type and offset of each tensor; then the data of the tensors, each aligned
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The package `gguf` has a reader, too,
but it maps the file into memory and trusts its numbers, so a file truncated meanwhile would kill
the process. Here, no memory is allocated that is not backed by bytes in the file.
"""

import math
import struct
from collections.abc import Mapping
from io import FileIO
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checks import shown
from jaxspec.files import fill
from jaxspec.gguf import package
from jaxspec.gguf.package import TensorType

MAX_HEADER_BYTES = 2**28
"""Maximum header size: about twenty times that of the largest published files."""
_MAX_ENTRIES = 2**16
_MAX_TENSORS = 2**16
MAX_TEXTS = 2**21
"""Maximum strings in all lists of a header: three times the tokens and merges of the largest
published tokenizers."""
_MAX_NUMBERS = 2**22  # per array
_MAX_NAME_BYTES = 2**16
_MAX_DIMENSIONS = 4  # ggml's limit
_MAX_ALIGNMENT = 2**16
_WINDOW = 2**20  # bytes read at once
_VERSIONS = (2, 3)  # their fields are the same
_ALIGNMENT_KEY = "general.alignment"

# Type numbers of metadata.
_NUMBERS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_UINT32, _STRING, _ARRAY = 4, 8, 9


class Tensor(NamedTuple):
    """A tensor's description in the header."""

    type: TensorType
    shape: tuple[int, ...]  # in C order
    start: int  # offset in the file, in bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes


class Header(NamedTuple):
    """A file's metadata and tensor descriptions."""

    metadata: Mapping[str, Any]  # bool, int, float, str, list of str, or an array of numbers
    tensors: Mapping[str, Tensor]


def read_header(file: FileIO, size: int) -> Header:
    """Read the header of an open file of `size` bytes.

    Raises:
        ValueError: The file is not GGUF, is truncated or damaged, or has a tensor type that the
            package `gguf` does not know; or that package is not installed.
    """
    return _Reader(file, size).header()


class _Reader:
    """Sequential reader of a header."""

    def __init__(self, file: FileIO, size: int):
        self._file, self._size = file, size
        self._window, self._at = b"", 0  # buffered bytes, and the index of the next one
        self._next = 0  # file offset after the window
        self._part = "the header"  # what is being read, for errors
        self._texts_left = MAX_TEXTS

    def header(self) -> Header:
        self._check_beginning()
        num_tensors, num_entries = self._number("<u8"), self._number("<u8")
        if num_tensors > _MAX_TENSORS or num_entries > _MAX_ENTRIES:
            raise self._damaged(
                f"it would have {num_tensors:,} tensors and {num_entries:,} entries of metadata"
            )
        metadata: dict[str, Any] = {}
        for number in range(num_entries):
            key = self._name(f"metadata entry {number}")
            if key in metadata:
                raise self._damaged(f"its metadata has {shown(key)} twice")
            metadata[key] = self._value(key)
        tensors: dict[str, Tensor] = {}
        for number in range(num_tensors):
            name = self._name(f"tensor {number}")
            if name in tensors:
                raise self._damaged(f"it has the tensor {shown(name)} twice")
            tensors[name] = self._tensor(name)
        self._part = "the data"
        return Header(metadata, self._placed(tensors, self._alignment(metadata)))

    def _check_beginning(self) -> None:
        if self._size < 24 or (magic := self._take(4)) != b"GGUF":
            begins = "is too short" if self._size < 24 else f"begins with {shown(magic)}"
            raise ValueError(
                f"{self._file.name} must be a GGUF file, which begins with b'GGUF', and {begins}. "
                "Download it again, or give the folder of a Hugging Face checkpoint."
            )
        version = self._number("<u4")
        if version not in _VERSIONS:
            swapped = " (a file for big-endian machines)" * (version & 0xFFFF == 0)
            raise ValueError(
                f"{self._file.name} must be of GGUF's version 2 or 3, got {version}{swapped}. "
                "Convert it with a current llama.cpp, or download another one."
            )

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get(_ALIGNMENT_KEY, 32)
        if not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(
                f"{_ALIGNMENT_KEY} is {shown(alignment)} in place of a power of 2 up to "
                f"{_MAX_ALIGNMENT}"
            )
        return alignment

    def _value(self, key: str) -> Any:
        kind = self._number("<u4")
        if key == _ALIGNMENT_KEY and kind != _UINT32:  # as llama.cpp demands
            raise self._damaged(f"{key} is of the type {kind} in place of {_UINT32}, uint32")
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return _plain(self._numbers(kind, 1, key)[0])
        kind, count = self._number("<u4"), self._number("<u8")
        if kind == _ARRAY:
            raise self._damaged(f"{shown(key)} is an array of arrays, which is not read")
        if kind != _STRING:
            return self._numbers(kind, count, key)
        self._check_left(count * 8)  # every string has at least a length
        self._texts_left -= count
        if self._texts_left < 0:
            raise self._damaged(f"its lists would have more than {MAX_TEXTS:,} texts")
        return [self._string() for _ in range(count)]

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray:
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            raise self._damaged(f"{shown(key)} is of the type {kind}, which the format lacks")
        self._check_left(count * dtype.itemsize)
        if count > _MAX_NUMBERS:
            raise self._damaged(f"{shown(key)} would have {count:,} numbers")
        content = self._take(count * dtype.itemsize)
        if dtype.kind == "b" and (wrong := content.strip(b"\0\1")):
            raise self._damaged(f"{shown(key)} has the byte {wrong[0]} in place of 0 or 1")
        return np.frombuffer(content, dtype)

    def _tensor(self, name: str) -> Tensor:
        """Return the next tensor; its `start` is relative to the data of the first."""
        num_dimensions = self._number("<u4")
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"{shown(name)} would have {num_dimensions:,} dimensions")
        sizes = struct.unpack(f"<{num_dimensions}Q", self._take(8 * num_dimensions))
        number, start = self._number("<u4"), self._number("<u8")
        kind = package.find_type(number)
        if kind is None:
            raise ValueError(
                f"{self._file.name} stores {shown(name)} in ggml's type {number}, which the "
                f"package `gguf` {package.version()} does not know. Update it, or use a file in "
                f"one of {', '.join(package.readable_types())}."
            )
        if not all(sizes) or sizes[0] % kind.block_size or math.prod(sizes) > self._most(kind):
            raise self._damaged(f"{shown(name)} can't be of the shape {sizes[::-1]} in {kind.name}")
        return Tensor(kind, sizes[::-1], start)

    def _most(self, kind: TensorType) -> int:
        """Return the number of elements that fill the whole file."""
        return self._size // kind.block_bytes * kind.block_size

    def _placed(self, tensors: dict[str, Tensor], alignment: int) -> dict[str, Tensor]:
        """Make offsets absolute; raise ValueError unless tensors and zeros fill the file.

        Like llama.cpp, demand the tensors in the header's order, each padded to the alignment. The
        padding of the last one may be absent, as some writers put it before a tensor.
        """
        end = self._position
        begin = place = _padded(end, alignment)
        placed = {}
        for name, tensor in tensors.items():
            if tensor.start != place - begin:
                raise self._damaged(
                    f"{shown(name)} begins at byte {tensor.start:,} of the data in place of "
                    f"{place - begin:,}"
                )
            self._check_padding(end, place, name)
            placed[name] = tensor._replace(start=place)
            end = place + tensor.num_bytes
            place = _padded(end, alignment)
        if self._size not in (end, place):
            padded = f", or with padding at byte {place:,}" * (place > end)
            raise self._damaged(f"its tensors end at byte {end:,}{padded}")
        self._check_padding(end, self._size, "the end of the file")
        return placed

    def _check_padding(self, end: int, place: int, name: str) -> None:
        """Raise ValueError unless the bytes from `end` to `place` are zeros.

        Others would be part of a tensor whose size in the header is too small.
        """
        if end < place <= self._size:
            padding = bytearray(place - end)
            fill(self._file, memoryview(padding), end)
            if any(padding):
                raise self._damaged(
                    f"the {place - end:,} bytes of padding before {shown(name)} must be zeros, and "
                    f"are {shown(bytes(padding), 40)}"
                )

    def _name(self, part: str) -> str:
        """Return the name of the next entry or tensor, which errors name from here on."""
        self._part = part
        name = self._string(_MAX_NAME_BYTES)
        self._part = f"{part}, {shown(name)}"
        return name

    def _string(self, most: int = MAX_HEADER_BYTES) -> str:
        length = self._number("<u8")
        if length > most:
            raise self._damaged(f"a text would have {length:,} bytes")
        content = self._take(length)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"the text {shown(content)} is no UTF-8") from error

    def _number(self, dtype: str) -> int:
        return int.from_bytes(self._take(int(dtype[2:])), "little")

    @property
    def _position(self) -> int:
        return self._next - len(self._window) + self._at

    def _check_left(self, count: int) -> None:
        if count > min(self._size, MAX_HEADER_BYTES) - self._position:
            raise self._damaged(
                f"{count:,} bytes should follow byte {self._position:,} of its header"
            )

    def _take(self, count: int) -> bytes:
        if self._at + count > len(self._window):
            self._check_left(count)
            self._next = self._position
            window = bytearray(min(max(count, _WINDOW), self._size - self._next))
            fill(self._file, memoryview(window), self._next)
            self._next += len(window)
            self._window, self._at = bytes(window), 0
        self._at += count
        return self._window[self._at - count : self._at]

    def _damaged(self, fault: str) -> ValueError:
        return ValueError(
            f"{self._file.name} must be a whole GGUF file, but it is cut short or damaged "
            f"({self._size} bytes). In {self._part}: {fault}. Download it again."
        )


def _padded(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


def _plain(number: np.generic) -> bool | int | float:
    """Return a Python number; a float32 becomes the shortest decimal with the same value."""
    return float(str(number)) if number.dtype == np.float32 else number.tolist()
