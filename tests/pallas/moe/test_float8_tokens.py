"""Activations of experts in FP8, against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from published_experts import block_experts, row_experts

from jaxspec.pallas.moe.float8_tokens import Float8Tokens, as_multiplied

F8 = ml_dtypes.float8_e4m3fn
ROWS, FEATURES, CHUNKS = 5, 300, 3


def rows_of_all_sizes():
    """Some of zeros, of numbers that differ by 2**40, with a NaN or an infinity."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)) * np.exp(3 * rng.normal(size=(ROWS, FEATURES)))
    x[1], x[2, 5], x[3, 200] = 0, np.nan, np.inf
    return jnp.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize("kind", [block_experts, row_experts])
def test_activations_in_two_terms_are_not_rounded(kind):
    x, (weight, _) = rows_of_all_sizes(), kind(1, 64, FEATURES)
    np.testing.assert_array_equal(as_multiplied(x, weight), np.asarray(x, np.float32))


@pytest.mark.parametrize(("kind", "axes"), [(block_experts, 2), (row_experts, (1, 2))])
def test_one_term_is_rounded_by_the_largest_of_its_block_or_row(kind, axes):
    x, (weight, _) = rows_of_all_sizes(), kind(1, 64, FEATURES)
    found = jax.jit(lambda x: as_multiplied(x, weight.replace(terms=1)))(x)
    wide = np.pad(np.asarray(x, np.float32), ((0, 0), (0, CHUNKS * 128 - FEATURES)))
    wide = np.nan_to_num(wide, nan=0, posinf=0).reshape(ROWS, CHUNKS, 128)
    largest = np.abs(wide).max(axis=axes, keepdims=True)
    factor = np.where(largest == 0, np.float32(1), largest / np.float32(448))
    expected = (wide / factor).astype(F8).astype(np.float32) * factor
    expected = expected.reshape(ROWS, CHUNKS * 128)[:, :FEATURES]
    for row in (0, 1, 4):
        np.testing.assert_allclose(found[row], expected[row], rtol=1e-6)
    assert np.isnan(found[2, 5]) and np.isnan(found[3, 200])


def test_tiles_have_the_numbers_and_factors_of_their_tokens():
    rng = np.random.default_rng(0)
    numbers = [jnp.asarray(rng.normal(size=(ROWS, 256)), jnp.float8_e4m3fn) for _ in range(2)]
    factors = jnp.asarray(rng.random((2, 8)), jnp.float32)
    tokens = Float8Tokens(tuple(numbers), factors, (0, 0))
    at = jnp.asarray([[0, 4], [4, 1], [1, 99]])  # no token has the last place
    tiled = tokens.in_tiles(tokens.joined[jnp.minimum(at, ROWS - 1)], at)
    assert tiled.factors.shape == (2, 6) and tiled.starts == (0, 256)
    for row, token in enumerate(at.reshape(6)[:5]):
        np.testing.assert_array_equal(tiled.factors[:, row], factors[:, token])
        for found, start, expected in zip(tiled.numbers, tiled.starts, numbers, strict=True):
            np.testing.assert_array_equal(
                *(
                    np.asarray(a, np.float32)
                    for a in (found[row, start : start + 256], expected[token])
                )
            )
