"""GGUFFile: any stretch of any tensor is what the package dequantises; changes are noticed."""

import os
import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf_bytes import UINT32, entry, gguf_file, tensor

from jaxspec.gguf import file as module
from jaxspec.gguf import is_gguf, package
from jaxspec.gguf.file import GGUFFile

QUANTISED = [name for name in package.readable_types() if name not in ("F32", "F16", "BF16")]


@pytest.fixture
def written(tmp_path):
    """A file with one tensor of 3 rows, from its bytes."""

    def write(kind, content, columns):
        number = int(GGMLQuantizationType[kind])
        header = [tensor("x", (columns, 3), number)]
        (tmp_path / "x.gguf").write_bytes(gguf_file(tensors=header, data=content))
        return tmp_path / "x.gguf"

    return write


@pytest.mark.parametrize("kind", QUANTISED)
def test_stretches_are_dequantised_as_the_package_does_it(kind, written, monkeypatch):
    """Wherever they begin and end, whatever the number of blocks at once."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    columns = 2 * size
    blocks = np.random.default_rng(0).integers(0, 256, (6, num_bytes), np.uint8)
    with np.errstate(all="ignore"):
        whole = gguf.quants.dequantize(blocks, GGMLQuantizationType[kind]).reshape(-1)
    for at_once in (1, 2 * size, 2**18):
        monkeypatch.setattr(module, "_ELEMENTS", at_once)
        with GGUFFile(written(kind, blocks.tobytes(), columns)) as file:
            for first, end in ((0, 6 * size), (1, 2), (size - 1, size + 1), (5, 5 * size + 3)):
                into = np.full(end - first, 7, np.float32)
                file.read_quantised(file.tensors["x"], first, into)
                np.testing.assert_array_equal(into, whole[first:end])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_numbers_are_read_as_they_are(kind, written):
    dtypes = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    values = np.arange(12).astype(dtypes[kind])
    with GGUFFile(written(kind, values.tobytes(), 4)) as file:
        into = np.empty(5, values.dtype)
        file.read_raw(file.tensors["x"], 3, into)
        np.testing.assert_array_equal(into, values[3:8])


def test_a_file_that_changes_or_is_cut_short_while_it_is_read_is_refused(written):
    path = written("Q8_0", bytes(34 * 3), 32)
    with GGUFFile(path) as file:
        file.check_unchanged()
        os.truncate(path, path.stat().st_size - 40)
        with pytest.raises(ValueError, match="must stay as it is while it is read"):
            file.check_unchanged()
        with pytest.raises(ValueError, match="it was cut short"):
            file.read_quantised(file.tensors["x"], 0, np.empty(96, np.float32))


def test_types_without_values_are_refused_by_name(written):
    with (
        GGUFFile(written("Q8_1", bytes(40 * 3), 32)) as file,
        pytest.raises(ValueError, match="stores 'x' in Q8_1, which .* Use a file in one of F32,"),
    ):
        file.check_types()


def test_a_part_of_a_model_is_refused(tmp_path):
    path = tmp_path / "x-00001-of-00002.gguf"
    path.write_bytes(gguf_file([entry("split.count", UINT32, struct.pack("<I", 2))]))
    with pytest.raises(ValueError, match="one of 2 files .* Join them with `llama-gguf-split"):
        GGUFFile(path)


def test_a_gguf_file_is_told_by_its_name(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "x.gguf").touch()
    (tmp_path / "x.bin").touch()
    assert is_gguf(tmp_path / "x.gguf")
    assert not any(is_gguf(tmp_path / name) for name in ("folder.gguf", "x.bin", "none.gguf"))
    with pytest.raises(FileNotFoundError, match=r"none\.gguf must be a file"):
        GGUFFile(tmp_path / "none.gguf")
