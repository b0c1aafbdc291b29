"""Frames: what is sent is received, and no other bytes are."""

import json
import socket
import struct
import threading

import numpy as np
import pytest

from jaxspec.nodes.wire import MAX_JSON_BYTES, MAX_VALUES, Frame, FrameError, receive
from jaxspec.plan.plan import MOVES, WITHOUT_STEPS, Program, entry_of, program_of
from jaxspec.requests.sampling_features import LADDER


@pytest.fixture
def pair():
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(20)
    yield ends
    for end in ends:
        end.close()


def frame_bytes(text: bytes, values: bytes = b"") -> bytes:
    return struct.pack("<II", len(text), len(values) // 4) + text + values


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_frames_arrive_in_order_and_equal(pair, size):
    own, other = pair
    values = np.arange(size, dtype=np.int32) - 7
    frames = [Frame("run", {"program": {"a": [1, None]}}, values), Frame("end")]
    data = b"".join(frame.to_bytes() for frame in frames)
    sending = threading.Thread(target=own.sendall, args=(data,))
    sending.start()
    for frame in frames:
        found = receive(other)
        assert (found.kind, found.fields) == (frame.kind, frame.fields)
        np.testing.assert_array_equal(found.values, frame.values, strict=True)
    sending.join()
    own.close()
    assert receive(other) is None


@pytest.mark.parametrize(
    "data",
    [
        frame_bytes(b"{"),
        frame_bytes(b"[]"),
        frame_bytes(b"7"),
        frame_bytes(b"{}"),
        frame_bytes(b'{"kind": 3}'),
        frame_bytes(b"[" * 100_000),
        frame_bytes(b"\xff\xfe"),
        frame_bytes(b'{"kind": "run"}', b"1234")[:-1],
        frame_bytes(b'{"kind": "run"}')[:3],
        struct.pack("<II", MAX_JSON_BYTES + 1, 0),
        struct.pack("<II", 2, MAX_VALUES + 1),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=range(12),
)
def test_other_bytes_are_refused(pair, data):
    own, other = pair
    own.sendall(data)
    own.close()
    with pytest.raises(FrameError):
        receive(other)


def test_strangers_may_send_no_values(pair):
    own, other = pair
    own.sendall(Frame("join", {}, np.zeros(1, np.int32)).to_bytes())
    with pytest.raises(FrameError):
        receive(other, max_values=0)


def test_a_frame_too_large_is_not_sent():
    with pytest.raises(FrameError):
        Frame("run", {"text": "x" * MAX_JSON_BYTES}).to_bytes()


@pytest.mark.parametrize(
    "program", [*WITHOUT_STEPS, *(Program(4, n, f, 1, 3) for f in LADDER for n in (0, 64))], ids=str
)
def test_programs_are_equal_after_json(program):
    assert program_of(json.loads(json.dumps(entry_of(program)))) == program


@pytest.mark.parametrize("change", [{"kind": "Other"}, {"decode_rows": "4"}, {"features": 3}])
def test_other_programs_are_refused(change):
    with pytest.raises((ValueError, TypeError)):
        program_of(entry_of(Program(4, 0, LADDER[0])) | change)
    with pytest.raises(ValueError):
        program_of(entry_of(MOVES) | {"more": 1})
