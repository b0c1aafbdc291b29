"""The package `gguf`: which types it knows, and what a user hears who lacks it."""

import sys

import gguf
import numpy as np
import pytest

from jaxspec.gguf import package


def test_types_are_those_of_the_package():
    for number, (block_size, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        found = package.find_type(int(number))
        assert found == (number.name, block_size, block_bytes)
    assert package.find_type(4) is None and package.find_type(2**32 - 1) is None


def test_readable_are_floats_and_what_the_package_dequantises():
    readable = package.readable_types()
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"} < set(readable)
    assert not {"F64", "I8", "I32", "Q8_1", "Q8_K"} & set(readable)
    for name in readable:
        kind = package.find_type(int(gguf.GGMLQuantizationType[name]))
        values = kind.dequantise(np.zeros((3, kind.block_bytes), np.uint8))
        assert values.dtype == np.float32 and values.shape == (3 * kind.block_size,)


def test_without_the_package_a_user_hears_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs the package `gguf`.*pip install -e \"\.\[gguf\]"):
        package.find_type(0)
