"""Frames between nodes: JSON fields, and one int32 array.

    uint32 size of the JSON text | uint32 number of int32 values | JSON text | values

All numbers are little-endian. A frame has a `kind` and no code: unlike a pickle it can be read
from a stranger.
"""

import dataclasses
import json
import socket
import struct
import time
from typing import Any

import numpy as np

_HEAD = struct.Struct("<II")
MAX_JSON_BYTES = 2**20
MAX_VALUES = 2**26


class FrameError(ValueError):
    """The bytes are not a frame."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """A message to another node."""

    kind: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    values: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))

    def to_bytes(self) -> bytes:
        """Return the encoded frame.

        Raises:
            FrameError: the frame is too large.
        """
        text = json.dumps({"kind": self.kind, **self.fields}).encode()
        _check_sizes(len(text), self.values.size)
        head = _HEAD.pack(len(text), self.values.size)
        return head + text + np.ascontiguousarray(self.values, "<i4").tobytes()


def receive(
    connection: socket.socket, max_values: int = MAX_VALUES, deadline: float | None = None
) -> Frame | None:
    """Receive a frame.

    Args:
        connection: A blocking socket; its timeout is that of each read.
        max_values: Largest number of values to accept.
        deadline: Time (`time.monotonic`) at which the whole frame must have arrived; it replaces
            the timeout of the socket.

    Returns:
        The frame; None if the other side has closed the connection after the last frame.

    Raises:
        FrameError: the bytes are not a frame, or the connection ended within one.
        OSError: the connection failed, or nothing arrived within its timeout.
        TimeoutError: the frame is not complete at the deadline.
    """
    head = _exactly(connection, _HEAD.size, deadline, may_end=True)
    if not head:
        return None
    num_bytes, num_values = _HEAD.unpack(head)
    _check_sizes(num_bytes, num_values, max_values)
    try:
        fields = json.loads(_exactly(connection, num_bytes, deadline))
        kind = fields.pop("kind")
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise FrameError(f"a frame must have JSON fields and a kind ({error!r:.100})") from error
    if not isinstance(kind, str):
        raise FrameError(f"the kind of a frame must be a text, got {kind!r:.50}")
    values = np.frombuffer(_exactly(connection, 4 * num_values, deadline), "<i4")
    return Frame(kind, fields, values.astype(np.int32, copy=False))


def _check_sizes(num_bytes: int, num_values: int, max_values: int = MAX_VALUES) -> None:
    if num_bytes > MAX_JSON_BYTES or num_values > max_values:
        raise FrameError(
            f"a frame must have at most {MAX_JSON_BYTES:,} bytes of JSON and {max_values:,} "
            f"values, got {num_bytes:,} and {num_values:,}"
        )


def _exactly(
    connection: socket.socket, count: int, deadline: float | None, *, may_end: bool = False
) -> bytearray:
    """Return `count` received bytes; none if the connection ends before the first and it may."""
    received = bytearray()
    while len(received) < count:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
        part = connection.recv(min(count - len(received), 2**20))
        if not part:
            if may_end and not received:
                return received
            raise FrameError("the connection ended within a frame")
        received += part
    return received
