"""Container: named arrays behind a header in JSON, as bytes, as a file, or through a socket.

    bytes           what
    0 to 7          "JAXSPEC" and a zero byte
    8 to 11         version of the format, 1
    12 to 15        H, bytes of the header
    16 to 23        N, bytes of the arrays
    24 to 55        SHA-256 of bytes 0 to 23 and of all that follows byte 55
    56 to 55+H      the header, in UTF-8; spaces at its end, so that 56+H is a multiple of 64
    56+H to 55+H+N  the arrays in C order, little-endian, each from a multiple of 64 on

Numbers are little-endian. The header is an object with `kind`, `about` and `arrays`; the last has a
`dtype`, a `shape` and an `offset` behind the header for each name.

Whoever reads may trust nothing: the version and the lengths are checked before memory is taken, the
checksum before the header is read, and every array before it is a view of the bytes.
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
"""Bytes of a container that are read where the caller names no other bound."""

_START = struct.Struct("<8sIIQ")  # magic, version, bytes of the header, bytes of the arrays
_PREFIX_BYTES = _START.size + hashlib.sha256().digest_size
_ALIGNMENT = 64
_MAX_ARRAYS, _MAX_DIMENSIONS = 2**16, 8
_PART_BYTES = 2**20  # that a socket is asked for at once: memory is taken as bytes come

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
"""The dtypes that arrays may have, by their names in the header."""


@dataclasses.dataclass(frozen=True)
class Container:
    """What is in one: of which kind it is, remarks in JSON's values, and arrays by name."""

    kind: str
    about: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]

    def to_bytes(self) -> bytes:
        """The whole container."""
        return b"".join(self._parts())

    @staticmethod
    def from_bytes(content: bytes | bytearray | memoryview, kind: str) -> "Container":
        """The container of this kind in `content`, with which its arrays share no memory.

        Raises:
            ValueError: it is no whole container, of another kind, or of another version.
        """
        given = memoryview(content).cast("B")
        source = _Bytes(given)
        return _read(source.fill, kind, "The bytes", len(given), whole=len(given))

    def save(self, path: Path) -> None:
        """Write it to a file in one piece, which only the user can read; an older one is replaced.

        Raises:
            OSError: it can't be written, as where the disk is full. Nothing is left then.
        """
        suffix = f"{path.suffix:.16}.part"  # tells whose part it is, should the process be killed
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
        """The container of this kind in a file.

        Raises:
            FileNotFoundError: there is no file.
            ValueError: it can't be read, is longer than `max_bytes`, or as in `from_bytes`.
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
        """What `load` gives as `about`, and raises; but nobody looks at the checksum."""
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
        """Write it to a connected socket.

        Raises:
            OSError: the connection has ended, or the socket's timeout is over.
        """
        for part in self._parts():
            sock.sendall(part)

    @staticmethod
    def receive(sock: socket.socket, kind: str, max_bytes: int = MAX_BYTES) -> "Container":
        """The next container from a connected socket, of this kind. More may follow it.

        Raises:
            ConnectionError: the connection ended before the container did.
            OSError: the socket's timeout is over, or as the system says.
            ValueError: it is longer than `max_bytes`, or as in `from_bytes`.
        """
        return _read(lambda buffer: _fill_from(sock, buffer), kind, "The peer's message", max_bytes)

    def _parts(self) -> list[_Buffer]:
        """The bytes, part by part; arrays are not copied."""
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
    """Bytes that are read from the front."""

    def __init__(self, content: memoryview):
        self._content, self._place = content, 0

    def fill(self, buffer: memoryview) -> None:
        """The next bytes; it is known that there are as many."""
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
    """The container whose bytes `fill` gives; `whole`: how many it has, where that is known."""
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
    # Memory of NumPy's is taken page by page as it is filled, so a length that lies takes none.
    content = np.empty(header_bytes + array_bytes, np.uint8)
    fill(content.data)
    if _digest((prefix[: _START.size], content.data)) != prefix[_START.size :]:
        raise _damaged(source, "its checksum is another one")
    content.flags.writeable = False
    return _contents(content, header_bytes, kind, source)


def _contents(content: np.ndarray, header_bytes: int, kind: str, source: str) -> Container:
    """The container behind a checksum that is right; a stranger may have made it all the same."""
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
    """The array of an entry, which lies behind byte `begin`; and where the next one may begin."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape = DTYPES.get(str(entry.get("dtype"))), entry.get("shape")
    offset = entry.get("offset")
    if dtype is None or not _are_sizes(shape) or not _are_sizes([offset]):
        raise _damaged(source, f"its header does not say of what dtype and shape {shown(name)} is")
    end = offset + math.prod(shape) * dtype.itemsize  # of Python's integers, which have no end
    if offset < begin or offset % _ALIGNMENT or end > len(content):
        raise _damaged(
            source, f"{shown(name)} lies from byte {offset:,} to {end:,} of {len(content):,}"
        )
    return content[offset:end].view(dtype).reshape(shape), end


def _are_sizes(value: Any) -> bool:
    """Whether it is a shape that NumPy takes, even where one of its sizes is 0."""
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
