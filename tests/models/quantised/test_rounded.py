"""RoundedCheckpoint: matrices in FP8 by 128 x 128 blocks, as NumPy states it."""

import numpy as np
import pytest
from quantised_folders import BF16, E4M3, write_safetensors

from jaxspec.models.checkpoint import SafetensorsCheckpoint
from jaxspec.models.quantised.rounded import RoundedCheckpoint

SHAPES = [(1, 1), (128, 128), (256, 384), (130, 257), (127, 1), (64, 640), (3, 130, 140)]


def opened(folder, rounded=("w",), **tensors):
    write_safetensors(folder / "model.safetensors", tensors)
    return RoundedCheckpoint(SafetensorsCheckpoint(folder), rounded)


def read(checkpoint, name="w", first=0, size=None, dtype=np.float32):
    shape = checkpoint.stored(name).shape
    into = np.full(int(np.prod(shape)) - first if size is None else size, 7).astype(dtype)
    checkpoint.read(name, first, into)
    return into if size is not None else into.reshape(shape)


def oracle(matrix):
    """Numbers and the scale of each element: block by block, from float32."""
    matrix = matrix.astype(np.float32)
    numbers, scales = np.empty(matrix.shape, E4M3), np.empty(matrix.shape, np.float32)
    for i in range(0, matrix.shape[0], 128):
        for j in range(0, matrix.shape[1], 128):
            place = slice(i, i + 128), slice(j, j + 128)
            block = matrix[place]
            finite = np.abs(block[~np.isnan(block)])
            largest = finite.max() if finite.size else np.float32(0)
            scale = largest / np.float32(448) if largest else np.float32(1)
            numbers[place] = np.clip(block / scale, -448, 448).astype(E4M3)
            scales[place] = scale
    return numbers, scales


def both(matrices):
    parts = [oracle(each) for each in matrices.reshape(-1, *matrices.shape[-2:])]
    numbers, scales = (np.stack(each).reshape(matrices.shape) for each in zip(*parts, strict=True))
    return numbers, numbers.astype(np.float32) * scales


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_are_rounded_block_by_block(shape, dtype, tmp_path):
    rng = np.random.default_rng(len(shape))
    weight = (rng.normal(size=shape) * np.exp(rng.normal(size=shape[-1]))).astype(dtype)
    numbers, expected = both(weight)
    with opened(tmp_path, w=weight, other=weight) as checkpoint:
        assert checkpoint.names == {"w", "other"}
        assert (checkpoint.stored("w").dtype, checkpoint.stored("w").shape) == ("F32", shape)
        np.testing.assert_array_equal(read(checkpoint), expected)
        found = read(checkpoint, dtype=E4M3)
        np.testing.assert_array_equal(found.view(np.uint8), numbers.view(np.uint8))
        np.testing.assert_array_equal(read(checkpoint, "other", dtype=dtype), weight)
        checkpoint.check_unchanged()


def test_any_range_of_elements_is_read(tmp_path, monkeypatch):
    """Parts of rows, whole rows and both; with any number of elements at a time."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(2, 131, 150)).astype(BF16)
    _, expected = both(weight)
    with opened(tmp_path, w=weight) as checkpoint:
        for at_once in (100, 1000, 2**17):
            monkeypatch.setattr("jaxspec.models.quantised.rounded._CAST", at_once)
            for _ in range(40):
                first = int(rng.integers(0, weight.size))
                size = int(rng.integers(1, min(5000, weight.size - first) + 1))
                part = expected.ravel()[first : first + size]
                np.testing.assert_array_equal(read(checkpoint, "w", first, size), part)


@pytest.mark.parametrize("at_once", [1, 128 * 200, 2**20])
def test_scales_do_not_depend_on_how_many_rows_are_read(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxspec.models.quantised.rounded._ELEMENTS", at_once)
    weight = np.random.default_rng(1).normal(size=(400, 200)).astype(BF16)
    with opened(tmp_path, w=weight) as checkpoint:
        np.testing.assert_array_equal(read(checkpoint), both(weight)[1])


def test_zeros_nan_and_least_numbers(tmp_path):
    weight = np.zeros((384, 256), np.float32)
    weight[130, 3], weight[131, 4] = np.nan, -2.0  # a NaN does not count
    weight[0, 130] = np.nan  # alone in its block
    weight[300, 5], weight[301, 6] = 1e-40, -1e-39  # less than the least scale
    with opened(tmp_path, w=weight) as checkpoint:
        found = read(checkpoint)
        numbers = read(checkpoint, dtype=E4M3).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(weight))
    assert found[131, 4] == -2 and numbers[131, 4] == -448
    assert not np.nan_to_num(found)[:128].any() and not found[:, 130:][128:].any()
    np.testing.assert_allclose(np.nan_to_num(found), np.nan_to_num(weight), atol=2.0**-126)


def test_infinite_numbers_are_refused(tmp_path):
    weight = np.ones((130, 3), BF16)
    weight[129, 2] = -np.inf
    refused = pytest.raises(ValueError, match=r"w has an infinity.*quantization='fp8'")
    with opened(tmp_path, w=weight) as checkpoint, refused:
        read(checkpoint)


def test_rounding_twice_changes_nothing(tmp_path):
    """Rounded numbers have the same largest one in each block, so the same scales."""
    weight = np.random.default_rng(2).normal(size=(200, 300)).astype(np.float32)
    with opened(tmp_path, w=weight) as checkpoint:
        once = read(checkpoint)
    with opened(tmp_path, w=once) as checkpoint:
        np.testing.assert_allclose(read(checkpoint), once, rtol=1e-6)
    error = np.abs(once - weight) / np.abs(weight).max()
    assert error.max() < 2**-4
