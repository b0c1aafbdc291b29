"""Tensors of mapped files are those of the files, and share their memory."""

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from jaxspec.models.trees.shared_memory import mapped_tensors

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5, dtype=np.float16),
    "c": np.zeros((0, 3), np.int32),
    "d": np.arange(3, dtype=np.uint8),
}


def test_they_are_views_of_the_file(tmp_path):
    path = tmp_path / "segment"
    save_file(TENSORS, path)
    found = mapped_tensors(path)
    assert found.keys() == TENSORS.keys()
    for name, want in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(found[name], want)
        assert not found[name].flags.writeable
    place = path.read_bytes().index(TENSORS["a"].tobytes())
    with path.open("r+b") as file:
        file.seek(place)
        file.write(np.float32(7).tobytes())
    assert found["a"][0, 0] == 7
    path.unlink()
    assert found["a"][0, 0] == 7  # it stays mapped


def test_tensors_at_odd_places_are_copied(tmp_path):
    content = save({"a": TENSORS["a"]})
    size = int.from_bytes(content[:8], "little")
    path = tmp_path / "segment"
    path.write_bytes((size + 1).to_bytes(8, "little") + b" " + content[8:])
    np.testing.assert_array_equal(mapped_tensors(path)["a"], TENSORS["a"])


def test_other_dtypes_are_refused(tmp_path):
    path = tmp_path / "segment"
    save_file({"a": np.zeros(3)}, path)
    with pytest.raises(ValueError, match="F64"):
        mapped_tensors(path)
