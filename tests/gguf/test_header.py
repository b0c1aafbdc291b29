"""read_header: what another reader reads; and no number that lies is believed."""

import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf_bytes import ARRAY, BOOL, STRING, UINT32, entry, gguf_file, tensor, text
from gguf_files import write_gguf

from jaxspec.files import open_file
from jaxspec.gguf.header import read_header

MAX_CHARACTERS = 1000
MAX_BYTES = 2**20  # beyond the file's own size; errors and Python's objects take some


def header_of(path):
    with open_file(path) as file:
        return read_header(file, path.stat().st_size)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write_gguf("llama", tmp_path_factory.mktemp("gguf") / "sound.gguf", "Q8_0")


def test_a_header_is_what_the_package_reads(sound):
    found, reader = header_of(sound), gguf.GGUFReader(sound)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata.keys() == fields.keys()
    for name, field in fields.items():
        value, theirs = found.metadata[name], field.contents()
        if isinstance(value, float):  # the shortest decimal of a float32
            assert np.float32(value) == np.float32(theirs) and len(repr(value)) < 12
        else:
            assert list(value) == theirs if isinstance(theirs, list) else value == theirs
    assert len(found.tensors) == len(reader.tensors)
    for theirs in reader.tensors:
        own = found.tensors[theirs.name]
        assert own.type.name == theirs.tensor_type.name and own.start == theirs.data_offset
        assert own.shape == tuple(theirs.shape[::-1].tolist()) and own.num_bytes == theirs.n_bytes


def test_every_kind_of_entry_is_read(tmp_path):
    kinds = "BbHhIif?__Qqd"  # the numbers of the format, as struct has them
    scalars = {i: kind for i, kind in enumerate(kinds) if kind != "_"}
    entries = [entry(f"n{i}", i, struct.pack(f"<{kind}", 1)) for i, kind in scalars.items()]
    entries += [
        entry(f"a{i}", ARRAY, struct.pack(f"<IQ3{kind}", i, 3, 1, 0, 1))
        for i, kind in scalars.items()
    ]
    words = struct.pack("<IQ", STRING, 2) + text("é") + text("")
    (tmp_path / "x").write_bytes(gguf_file([*entries, entry("words", ARRAY, words)]))
    found = header_of(tmp_path / "x").metadata
    assert found["words"] == ["é", ""]
    for i in scalars:
        assert found[f"n{i}"] == 1 and found[f"a{i}"].tolist() == [1, 0, 1]
    assert found["n7"] is True and type(found["n6"]) is float and type(found["n4"]) is int


ONE = [tensor("x", (2,))]
BIG = 2**62
LIES = {
    "begins with b'GGML'": gguf_file(magic=b"GGML"),
    "is too short": b"GGUF",
    "got 1": gguf_file(version=1),
    "big-endian": gguf_file(version=0x03000000),
    f"{BIG:,} tensors": gguf_file(counts=(BIG, 0)),
    f"{BIG:,} entries": gguf_file(counts=(0, BIG)),
    "should follow byte 24": gguf_file(counts=(1, 0), alignment=1),
    "'k' twice": gguf_file([entry("k", UINT32, bytes(4))] * 2),
    "a text would have": gguf_file([struct.pack("<Q", BIG)]),
    "no UTF-8": gguf_file([entry("k", STRING, text(b"\xff"))]),
    "of the type 13": gguf_file([entry("k", 13, bytes(8))]),
    "'k' is an array of arrays, which is not read": gguf_file(
        [entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]
    ),
    f"{8 * BIG:,} bytes": gguf_file([entry("k", ARRAY, struct.pack("<IQ", STRING, BIG))]),
    f"{4 * BIG:,} bytes": gguf_file([entry("k", ARRAY, struct.pack("<IQ", UINT32, BIG))]),
    "general.alignment is 0": gguf_file([entry("general.alignment", UINT32, bytes(4))]),
    "general.alignment is 48": gguf_file([entry("general.alignment", UINT32, b"0\0\0\0")]),
    "'k' has the byte 2": gguf_file([entry("k", BOOL, b"\2")]),
    "general.alignment is of the type 8": gguf_file(
        [entry("general.alignment", STRING, text("x"))]
    ),
    "'x' twice": gguf_file(tensors=ONE * 2),
    "5 dimensions": gguf_file(tensors=[tensor("x", (1,) * 5)]),
    "0 dimensions": gguf_file(tensors=[tensor("x", ())]),
    "the shape (0,)": gguf_file(tensors=[tensor("x", (0,))]),
    f"the shape ({BIG}, {BIG})": gguf_file(tensors=[tensor("x", (BIG, BIG))]),
    "the shape (33,) in Q8_0": gguf_file(tensors=[tensor("x", (33,), 8)], data=bytes(100)),
    "ggml's type 99": gguf_file(tensors=[tensor("x", (1,), 99)]),
    f"begins at byte {BIG:,}": gguf_file(tensors=[tensor("x", (2,), offset=BIG)], data=bytes(8)),
    "begins at byte 0 of the data in place of 32": gguf_file(
        tensors=[*ONE, tensor("y", (2,))], data=bytes(40)
    ),
    "its tensors end at byte": gguf_file(tensors=ONE, data=bytes(7)),
    "tensors end at byte": gguf_file(tensors=ONE, data=bytes(40)),
}


@pytest.mark.parametrize("fault", LIES)
def test_a_lie_is_one_error_and_nothing_is_allocated_by_it(fault, tmp_path):
    (tmp_path / "x").write_bytes(LIES[fault])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            header_of(tmp_path / "x")
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert fault in message and str(tmp_path / "x") in message and len(message) < MAX_CHARACTERS
    assert "ownload" in message or "Update" in message


def test_every_file_cut_short_is_refused(sound, tmp_path):
    content, path = sound.read_bytes(), tmp_path / "x"
    begin = min(each.start for each in header_of(sound).tensors.values())
    for size in [*range(0, begin, 13), *range(begin, len(content) - 32, 4999)]:
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="must be a (whole )?GGUF file"):
            header_of(path)


@pytest.mark.soak
def test_a_byte_of_another_value_is_another_header_or_one_error(tmp_path):
    """Nothing hangs, allocates by the byte or raises anything else; 3 values for every byte."""
    path = write_gguf("llama", tmp_path / "x.gguf", tokens=False)
    content = bytearray(path.read_bytes())
    begin = min(each.start for each in header_of(path).tensors.values())
    outcomes = {"read": 0, "refused": 0}
    with path.open("r+b", buffering=0) as file:
        for place in range(begin):
            for change in (0x01, 0x80, 0xFF):
                file.seek(place)
                file.write(bytes([content[place] ^ change]))
                try:
                    header_of(path)
                    outcomes["read"] += 1
                except ValueError as error:
                    assert len(str(error)) < MAX_CHARACTERS
                    outcomes["refused"] += 1
            file.seek(place)
            file.write(content[place : place + 1])
    assert outcomes["read"] > 1000 and outcomes["refused"] > 1000
