"""Containers come from anybody: what is written is read, and nothing else is."""

import hashlib
import json
import socket
import struct
import threading

import ml_dtypes
import numpy as np
import pytest

from jaxspec.transfer.container import DTYPES, Container

ARRAYS = {
    "pages": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "states": np.ones((3, 1), ml_dtypes.bfloat16),
    "keys": np.full((5,), 2, ml_dtypes.float8_e4m3fn),
    "nothing": np.zeros((2, 0, 3), np.int8),
    "number": np.array(7, np.int64),
}
ABOUT = {"name": "\ud800 \0 ü", "count": 3, "list": [1.5, None, True]}
WHOLE = Container("test", ABOUT, ARRAYS)
CONTENT = WHOLE.to_bytes()
HEADER_BYTES, ARRAY_BYTES = struct.unpack_from("<IQ", CONTENT, 12)


def sealed(header: bytes, arrays: bytes = b"", version=1, lengths=None) -> bytes:
    """A container of these bytes with a checksum that is right, as a stranger could make it."""
    lengths = lengths or (len(header), len(arrays))
    start = struct.pack("<8sIIQ", b"JAXSPEC\0", version, *lengths)
    return start + hashlib.sha256(start + header + arrays).digest() + header + arrays


def with_entry(**entry) -> bytes:
    entry = {"dtype": "int32", "shape": [4], "offset": 0, **entry}
    header = {"kind": "test", "about": {}, "arrays": {"x": entry}}
    return sealed(json.dumps(header).encode(), bytes(16))


def check_same(got):
    assert got.kind == "test" and got.about == ABOUT and got.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert got.arrays[name].dtype == array.dtype and got.arrays[name].shape == array.shape
        assert got.arrays[name].tobytes() == array.tobytes()
        assert not got.arrays[name].flags.writeable


def test_what_is_written_is_read(tmp_path):
    check_same(Container.from_bytes(CONTENT, "test"))
    check_same(Container.from_bytes(memoryview(bytearray(CONTENT)), "test"))
    WHOLE.save(tmp_path / "a")
    check_same(Container.load(tmp_path / "a", "test"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_arrays_lie_at_multiples_of_64_bytes_in_the_order_of_their_names():
    assert (56 + HEADER_BYTES) % 64 == 0 and len(CONTENT) == 56 + HEADER_BYTES + ARRAY_BYTES
    entries = json.loads(CONTENT[56 : 56 + HEADER_BYTES])["arrays"]
    assert [entry["offset"] for entry in entries.values()] == [0, 128, 192, 256, 256]


def test_every_dtype_travels():
    arrays = {name: np.zeros(3, dtype) for name, dtype in DTYPES.items()}
    got = Container.from_bytes(Container("test", {}, arrays).to_bytes(), "test").arrays
    assert {name: array.dtype for name, array in got.items()} == DTYPES


def test_values_in_another_order_are_written_in_cs():
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    got = Container.from_bytes(Container("test", {}, {"x": array}).to_bytes(), "test")
    np.testing.assert_array_equal(got.arrays["x"], array)


def test_what_no_container_holds_is_refused_before_a_byte_is_written(tmp_path):
    with pytest.raises(ValueError, match="'x' has complex64"):
        Container("test", {}, {"x": np.zeros(1, np.complex64)}).save(tmp_path / "a")
    with pytest.raises(ValueError, match="Put long values into arrays"):
        Container("test", {"x": "a" * 2**24}, {}).to_bytes()
    assert not list(tmp_path.iterdir())


def test_several_go_through_one_socket():
    one, other = socket.socketpair()
    with one, other:
        sender = threading.Thread(target=lambda: [WHOLE.send(one) for _ in range(3)])
        sender.start()
        for _ in range(3):
            check_same(Container.receive(other, "test"))
        sender.join()


@pytest.mark.parametrize("count", [0, 7, 56, len(CONTENT) - 1])
def test_a_peer_that_goes_away_is_told_from_damage(count):
    one, other = socket.socketpair()
    with other:
        with one:
            one.sendall(CONTENT[:count])
        with pytest.raises(ConnectionError, match="Have the peer send it again"):
            Container.receive(other, "test")


def test_a_socket_that_is_silent_runs_into_its_own_timeout():
    one, other = socket.socketpair()
    with one, other:
        other.settimeout(0.01)
        with pytest.raises(TimeoutError):
            Container.receive(other, "test")


def test_a_length_that_lies_takes_no_memory():
    one, other = socket.socketpair()
    with one, other:
        one.sendall(sealed(b"", lengths=(2, 2**40))[:56])
        with pytest.raises(ValueError, match=r"17,179,869,184 bytes.*1,099,511,627,834"):
            Container.receive(other, "test")
        one.sendall(sealed(b"", lengths=(2**31, 8))[:56])
        with pytest.raises(ValueError, match="its header 16,777,216"):
            Container.receive(other, "test")
        one.sendall(CONTENT)
        with pytest.raises(ValueError, match="Raise max_bytes"):
            Container.receive(other, "test", max_bytes=len(CONTENT) - 1)


def test_no_byte_can_be_changed_unseen(tmp_path):
    for place in range(len(CONTENT)):
        wrong = bytearray(CONTENT)
        wrong[place] ^= 1 << place % 8
        with pytest.raises(ValueError, match=r"container|version|may have"):
            Container.from_bytes(wrong, "test")


@pytest.mark.parametrize("end", [0, 55, 56, len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_container_is_whole_or_refused(end, tmp_path):
    content = (CONTENT + b"0")[:end]
    with pytest.raises(ValueError, match="cut short or damaged"):
        Container.from_bytes(content, "test")
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / 'a'} must be a whole container"):
        Container.load(tmp_path / "a", "test")


def test_the_bound_of_a_file_is_held(tmp_path):
    WHOLE.save(tmp_path / "a")
    with pytest.raises(ValueError, match="Raise max_bytes"):
        Container.load(tmp_path / "a", "test", max_bytes=100)
    with pytest.raises(FileNotFoundError):
        Container.load(tmp_path / "b", "test")


def test_other_versions_and_kinds_are_named():
    future = sealed(b"{}", version=2)
    with pytest.raises(ValueError, match="is of version 2. Use the same version of jaxspec"):
        Container.from_bytes(future, "test")
    with pytest.raises(ValueError, match="must be of the kind 'other', and is of 'test'"):
        Container.from_bytes(CONTENT, "other")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"kind": "test", "kind": "test"}',
        b'{"kind": "test"}',
        b'{"kind": "test", "about": 3, "arrays": {}}',
        b'{"kind": "test", "about": {}, "arrays": []}',
        b'{"kind": "test", "about": {}, "arrays": {"x": 7}}',
    ],
)
def test_a_header_that_makes_no_sense_is_refused_behind_a_right_checksum(header):
    with pytest.raises(ValueError, match="cut short or damaged"):
        Container.from_bytes(sealed(header), "test")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "complex64"},
        {"dtype": ["int32"]},
        {"dtype": "O"},
        {"shape": [5]},
        {"shape": [-4]},
        {"shape": [True]},
        {"shape": [4.0]},
        {"shape": 4},
        {"shape": [2**61, 8, 0]},
        {"shape": [2**40, 2**40]},
        {"shape": [1] * 9},
        {"offset": -64},
        {"offset": 8},
        {"offset": 64},
        {"offset": None},
        {"offset": 2**70},
    ],
)
def test_an_array_that_lies_about_its_place_is_refused(entry):
    Container.from_bytes(with_entry(), "test")
    with pytest.raises(ValueError, match="cut short or damaged"):
        Container.from_bytes(with_entry(**entry), "test")


def test_arrays_that_overlap_are_refused():
    entry = {"dtype": "int32", "shape": [4], "offset": 0}
    header = {"kind": "test", "about": {}, "arrays": {"x": entry, "y": entry}}
    with pytest.raises(ValueError, match="'y' lies from byte 0 to 16 of 16"):
        Container.from_bytes(sealed(json.dumps(header).encode(), bytes(16)), "test")


def test_remarks_are_read_without_the_arrays(tmp_path):
    """So a damaged array is not seen there, and whatever else is wrong is."""
    path = tmp_path / "a"
    WHOLE.save(path)
    assert Container.about_of(path, "test") == ABOUT
    path.write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    assert Container.about_of(path, "test") == ABOUT
    with pytest.raises(ValueError, match="another kind"):
        Container.about_of(path, "other")
    for content in (
        b"",
        CONTENT[:30],
        CONTENT[:-1],
        b"x" + CONTENT[1:],
        sealed(b"[]"),
        sealed(b"{}"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError):
            Container.about_of(path, "test")
