"""Container: named arrays with a JSON header, as bytes, in a file, or through a socket.

    bytes           content
    0 to 7          "JAXSPEC" and a zero byte
    8 to 11         version of the format, 1
    12 to 15        H, size of the header in bytes
    16 to 23        N, size of the arrays in bytes
    24 to 55        SHA-256 of bytes 0 to 23 and of everything after byte 55
    56 to 55+H      the header, in UTF-8, padded with spaces so that 56+H is a multiple of 64
    56+H to 55+H+N  the arrays in C order, little-endian, each at a multiple of 64

Numbers are little-endian. The header is an object with `kind`, `about` and `arrays`; `arrays` maps
names to a `dtype`, a `shape` and an `offset` after the header.

Readers trust nothing: version and sizes are checked before memory is allocated, the checksum before
the header is parsed, and every array's entry before it becomes a view of the bytes.
"""

import dataclasses
import hashlib
import json
import math
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checks import shown
from jaxspec.files import MAX_JSON_BYTES, fill, open_file, parse_json

MAGIC, VERSION = b"JAXSPEC\0", 1
MAX_BYTES = 2**34
"""Default size limit of a container to read."""

_START = struct.Struct("<8sIIQ")  # magic, version, H, N
_PREFIX_BYTES = _START.size + hashlib.sha256().digest_size
_ALIGNMENT = 64
_MAX_ARRAYS, _MAX_DIMENSIONS = 2**16, 8
_PART_BYTES = 2**20  # received at once, so memory is only touched as data arrives

_Buffer = memoryview | bytes | bytearray
Fill = Callable[[memoryview], None]

DTYPES = {
    dtype.name: dtype
    for dtype in map(
        np.dtype,
        (
            *(np.bool_, np.int8, np.uint8, np.int32, np.uint32, np.int64),
            *(np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
        ),
    )
}
"""Supported dtypes of arrays, by their names in the header."""


@dataclasses.dataclass(frozen=True)
class Container:
    """A kind, JSON values in `about`, and named arrays."""

    kind: str
    about: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]

    def to_bytes(self) -> bytes:
        return b"".join(self._parts())

    @staticmethod
    def from_bytes(content: bytes | bytearray | memoryview, kind: str) -> "Container":
        """Parse a container of this kind; its arrays do not share memory with `content`.

        Raises:
            ValueError: It is incomplete, damaged, or of another kind or version.
        """
        given = memoryview(content).cast("B")
        source = _Bytes(given)
        return _read(source.fill, kind, "The bytes", len(given), whole=len(given))

    def save(self, path: Path) -> None:
        """Write the container to a file atomically, replacing an existing one.

        Only the user can read the file.

        Raises:
            OSError: Writing failed, for example because the disk is full. No partial file is left.
        """
        suffix = f"{path.suffix:.16}.part"  # shows the origin of a file left by a killed process
        handle, name = tempfile.mkstemp(prefix=".", suffix=suffix, dir=path.parent)  # mode 0600
        new = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(self._parts())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path, kind: str, max_bytes: int = MAX_BYTES) -> "Container":
        """Read a container of this kind from a file.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: It can't be read, is longer than `max_bytes`, or as in `from_bytes`.
        """
        with open_file(path) as file:
            size, place = os.fstat(file.fileno()).st_size, 0

            def next_bytes(buffer: memoryview) -> None:
                nonlocal place
                fill(file, buffer, place)
                place += len(buffer)

            return _read(next_bytes, kind, str(path), max_bytes, whole=size)

    @staticmethod
    def about_of(path: Path, kind: str) -> dict[str, Any]:
        """Return `about` of a file without reading its arrays or verifying its checksum.

        Raises:
            FileNotFoundError, ValueError: As `load`.
        """
        with open_file(path) as file:
            prefix = bytearray(_PREFIX_BYTES)
            fill(file, memoryview(prefix))
            *first, header_bytes, array_bytes = _START.unpack_from(prefix)
            is_whole = os.fstat(file.fileno()).st_size == _PREFIX_BYTES + header_bytes + array_bytes
            is_whole &= header_bytes <= MAX_JSON_BYTES
            if first != [MAGIC, VERSION] or not is_whole:
                raise _damaged(str(path), "its first bytes say something else")
            header = bytearray(header_bytes)
            fill(file, memoryview(header), _PREFIX_BYTES)
        told = parse_json(header, "its header")
        if told.get("kind") != kind or not isinstance(about := told.get("about"), dict):
            raise _damaged(str(path), "its header is of another kind")
        return about

    def send(self, sock: socket.socket) -> None:
        """Write the container to a connected socket.

        Raises:
            OSError: The connection was closed, or the socket timed out.
        """
        for part in self._parts():
            sock.sendall(part)

    @staticmethod
    def receive(sock: socket.socket, kind: str, max_bytes: int = MAX_BYTES) -> "Container":
        """Read the next container, which must be of this kind, from a connected socket.

        Raises:
            ConnectionError: The connection was closed before the container was complete.
            OSError: The socket timed out, or another system error.
            ValueError: It is longer than `max_bytes`, or as in `from_bytes`.
        """
        return _read(lambda buffer: _fill_from(sock, buffer), kind, "The peer's message", max_bytes)

    def _parts(self) -> list[_Buffer]:
        """Return the bytes in parts, without copying arrays."""
        entries, parts, end = {}, list[_Buffer](), 0
        for name, array in self.arrays.items():
            values = np.asarray(array, order="C")
            if values.dtype.name not in DTYPES:
                raise ValueError(
                    f"An array of a container must have a dtype of {', '.join(DTYPES)}, and "
                    f"{shown(name)} has {values.dtype}. Convert it."
                )
            entries[name] = {"dtype": values.dtype.name, "shape": values.shape, "offset": end}
            parts += [values.reshape(-1).view(np.uint8).data, bytes(-values.nbytes % _ALIGNMENT)]
            end += values.nbytes + -values.nbytes % _ALIGNMENT
        header = json.dumps({"kind": self.kind, "about": self.about, "arrays": entries}).encode()
        header += b" " * (-(_PREFIX_BYTES + len(header)) % _ALIGNMENT)
        if len(header) > MAX_JSON_BYTES:
            raise ValueError(
                f"A container's header may have {MAX_JSON_BYTES:,} bytes, and this one has "
                f"{len(header):,}. Put long values into arrays."
            )
        start = _START.pack(MAGIC, VERSION, len(header), end)
        return [start, _digest((start, header, *parts)), header, *parts]


class _Bytes:
    def __init__(self, content: memoryview):
        self._content, self._place = content, 0

    def fill(self, buffer: memoryview) -> None:
        """Fill `buffer` with the next bytes; the caller has checked that there are enough."""
        buffer[:] = self._content[self._place : self._place + len(buffer)]
        self._place += len(buffer)


def _fill_from(sock: socket.socket, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = sock.recv_into(buffer[done : done + _PART_BYTES])
        if not count:
            raise ConnectionError(
                f"A message must come whole, and the connection ended after {done:,} of its next "
                f"{len(buffer):,} bytes. Have the peer send it again."
            )
        done += count


def _digest(parts: Iterable[_Buffer]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _read(
    fill: Fill, kind: str, source: str, max_bytes: int, whole: int | None = None
) -> Container:
    """Read a container with `fill`; `whole` is its size in bytes if known."""
    if whole is not None and whole < _PREFIX_BYTES:
        raise _damaged(
            source, f"it has {whole} bytes, and its first {_PREFIX_BYTES} are no array's"
        )
    prefix = bytearray(_PREFIX_BYTES)
    fill(memoryview(prefix))
    magic, version, header_bytes, array_bytes = _START.unpack_from(prefix)
    if magic != MAGIC:
        raise _damaged(source, f"it begins with {shown(bytes(magic))}")
    if version != VERSION:
        raise ValueError(
            f"{source} must be of version {VERSION} of the format, which this jaxspec reads, and "
            f"is of version {version}. Use the same version of jaxspec on both sides."
        )
    total = _PREFIX_BYTES + header_bytes + array_bytes
    if whole is not None and total != whole:
        raise _damaged(source, f"it has {whole:,} bytes and says {total:,}")
    if header_bytes > MAX_JSON_BYTES or total > max_bytes:
        raise ValueError(
            f"{source} may have {max_bytes:,} bytes, of which its header {MAX_JSON_BYTES:,}, and "
            f"says that it has {total:,} and {header_bytes:,}. Raise max_bytes, if that is true."
        )
    # The system commits NumPy's memory page by page as it is filled, so a false length costs none.
    content = np.empty(header_bytes + array_bytes, np.uint8)
    fill(content.data)
    if _digest((prefix[: _START.size], content.data)) != prefix[_START.size :]:
        raise _damaged(source, "its checksum is another one")
    content.flags.writeable = False
    return _contents(content, header_bytes, kind, source)


def _contents(content: np.ndarray, header_bytes: int, kind: str, source: str) -> Container:
    """Parse content with a correct checksum, which does not make it trustworthy."""
    try:
        header = parse_json(content[:header_bytes].tobytes(), "its header")
    except ValueError as error:
        raise _damaged(source, "its header is no object in JSON") from error
    if header.get("kind") != kind:
        raise ValueError(
            f"{source} must be of the kind {kind!r}, and is of {shown(header.get('kind'))}. It was "
            "made for something else."
        )
    about, entries = header.get("about"), header.get("arrays")
    if not isinstance(about, dict) or not isinstance(entries, dict) or len(entries) > _MAX_ARRAYS:
        raise _damaged(source, "its header names no arrays")
    arrays, end = {}, 0
    for name, entry in entries.items():
        arrays[name], end = _array(content[header_bytes:], name, entry, end, source)
    return Container(kind, about, arrays)


def _array(
    content: np.ndarray, name: str, entry: Any, begin: int, source: str
) -> tuple[np.ndarray, int]:
    """Return the array of an entry, which must start at `begin` or later, and its end."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape = DTYPES.get(str(entry.get("dtype"))), entry.get("shape")
    offset = entry.get("offset")
    if dtype is None or not _are_sizes(shape) or not _are_sizes([offset]):
        raise _damaged(source, f"its header does not say of what dtype and shape {shown(name)} is")
    end = offset + math.prod(shape) * dtype.itemsize  # Python's integers don't overflow
    if offset < begin or offset % _ALIGNMENT or end > len(content):
        raise _damaged(
            source, f"{shown(name)} lies from byte {offset:,} to {end:,} of {len(content):,}"
        )
    return content[offset:end].view(dtype).reshape(shape), end


def _are_sizes(value: Any) -> bool:
    """Return whether `value` is a shape that NumPy accepts, even if one of its sizes is 0."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 2**62 for size in value)
        and math.prod(max(1, size) for size in value) < 2**59
    )


def _damaged(source: str, fault: str) -> ValueError:
    return ValueError(
        f"{source} must be a whole container as jaxspec writes one, and is cut short or damaged: "
        f"{fault}. Have it sent or copied again."
    )
