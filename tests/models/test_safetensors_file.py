"""One file of weights: read as the library reads it, and not at all where its header is wrong.

`test_malformed.py` has some hundred damaged headers.
"""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.models.safetensors_file import DTYPES, SafetensorsFile

RANDOM = np.random.default_rng(0)


@pytest.fixture
def path(tmp_path):
    tensors = {
        "a": RANDOM.normal(size=(3, 5)).astype(np.float32),
        "b": RANDOM.normal(size=(2, 3, 4)).astype(jnp.bfloat16),
        "c": RANDOM.normal(size=7).astype(np.float16),
        "scalar": np.array(3, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "ids": np.arange(3),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "np"})
    return tmp_path / "x.safetensors"


def test_each_dtype_that_weights_have_is_read_bit_for_bit(path):
    file, held = SafetensorsFile(path), load_file(path)
    assert file.tensors.keys() == held.keys()
    assert (file.tensors["ids"].dtype, file.tensors["ids"].shape) == ("I64", (3,))
    for name in held.keys() - {"ids"}:
        tensor, whole = file.tensors[name], held[name].reshape(-1)
        assert (DTYPES[tensor.dtype], tensor.shape) == (held[name].dtype, held[name].shape)
        for first in {0, whole.size // 2, whole.size}:
            into = np.ones(whole.size - first, whole.dtype)
            file.read(name, first, into)
            np.testing.assert_array_equal(into, whole[first:])
    file.close()


def test_a_damaged_header_leaves_no_file_open(path):
    path.write_bytes(path.read_bytes() + b"x")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        ValueError, match=r"damaged \(\d+ bytes\): its tensors end at byte [\d,]+\. D"
    ):
        SafetensorsFile(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_change_since_the_file_was_opened_is_noticed(path):
    file = SafetensorsFile(path)
    file.check_unchanged()
    os.utime(path, ns=(0, 1))
    with pytest.raises(ValueError, match="x.safetensors must stay as it is .* it was changed"):
        file.check_unchanged()
    os.truncate(path, 10)
    with pytest.raises(ValueError, match="x.safetensors must stay as it is .* it was cut short"):
        file.read("a", 0, np.empty(15, np.float32))
    file.close()
